"""What a render is: everything that decides the output, frozen and checked once.

    RenderRequest  what a person asked (prompt, files, size, masks ...)            -> render.py encodes it
    RenderJob      what the sampler needs (canvas, text rows, latents, masks, seed, schedule ...)
      ├─ Canvas          size in pixels and latents
      ├─ TextCondition   hidden rows and modality tags
      ├─ Guide           latents held at a frame of the target (keyframes are guides at the first and last frame)
      ├─ Reference       latents that stand before the target in the rotary clock
      ├─ Masks           per latent cell, 1 regenerates, 0 keeps
      └─ AVLatent        source (clean) and state (noisy)

Latents are normalised float32: video [1, 24, T, H/16, W/16], audio [1, 32, 2, A] (left, right).
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import H3Error, NonFiniteError
from .geometry import (
    AUDIO_CHANNELS,
    AUDIO_HOP,
    AUDIO_LATENT_RATE,
    FPS,
    Canvas,
    audio_samples,
    frame_groups,
    is_number,
    is_whole,
)
from .schedule import AUDIO_SHIFT, DEFAULT_FORWARDS, VIDEO_SHIFT, Schedule, check_seed, plan_schedule
from .solvers import SOLVERS

VIDEO_CHANNELS = 24
AUDIO_LATENT_CHANNELS = 32
MASK_LEVELS = 256
MODALITY_VIDEO, MODALITY_TEXT, MODALITY_AUDIO = 0, 1, 2
TASKS = ("t2va", "fl2va", "ref2va")
REFERENCE_KINDS = ("image", "video", "video_audio", "audio")


@dataclass(frozen=True)
class TextCondition:
    """The prompt as the DiT takes it: ``hidden`` [L, text_dim], ``tags`` int64 [L] (1 text, 0 vision-block row).

    ``source`` says which encoder made it; ``notes`` are sentences for the report.
    """

    hidden: Tensor
    tags: Tensor
    notes: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self):
        if self.hidden.ndim != 2 or self.hidden.shape[0] < 1 or not self.hidden.is_floating_point():
            raise H3Error(
                f"the text condition is {list(self.hidden.shape)} {self.hidden.dtype}: "
                "it must be [rows, text_dim] of a floating type"
            )
        if self.tags.shape != self.hidden.shape[:1] or self.tags.dtype != torch.int64:
            raise H3Error(f"text tags {list(self.tags.shape)} {self.tags.dtype}: one int64 tag per text row is needed")
        if not bool(((self.tags >= 0) & (self.tags <= MODALITY_AUDIO)).all()):
            raise H3Error("a text tag is outside 0..2: 0 video, 1 text, 2 audio")
        _require_finite("the text condition", self.hidden)


@dataclass(frozen=True)
class AVLatent:
    """One clip in latent space: ``video`` [1, 24, T, h, w] and ``audio`` [1, 32, 2, A], normalised float32."""

    video: Tensor
    audio: Tensor

    def __post_init__(self):
        check_video_latent("video latent", self.video)
        check_audio_latent("audio latent", self.audio)

    def fits(self, canvas: Canvas) -> bool:
        return tuple(self.video.shape[2:]) == (canvas.latent_t, canvas.latent_h, canvas.latent_w) and (
            self.audio.shape[3] == canvas.audio_t
        )


@dataclass(frozen=True)
class Guide:
    """Latents held at pixel frame ``frame_index`` of the target: a picture or clip, sound, or both.

    ``strength`` s in (0, 1]: for s < 1 the rows are mixed with noise to t = s * 0.999 (sound: s) and labelled so at
    every forward. ``keyframe`` marks the first and last frame, which also stand in the prompt.
    """

    frame_index: int
    video: Tensor | None = None
    audio: Tensor | None = None
    strength: float = 1.0
    keyframe: bool = False
    name: str = "guide"

    def __post_init__(self):
        if self.video is None and self.audio is None:
            raise H3Error(f"{self.name} holds neither a picture nor sound: give at least one")
        if self.video is not None:
            check_video_latent(self.name, self.video)
        if self.audio is not None:
            check_audio_latent(self.name, self.audio)
        if not (is_number(self.strength) and 0 < self.strength <= 1):
            raise H3Error(f"{self.name} has strength {self.strength!r}: give more than 0 and at most 1")
        if not is_whole(self.frame_index):
            raise H3Error(f"{self.name} stands at frame {self.frame_index!r}: give a whole number from 0 on")

    @property
    def video_shape(self) -> tuple[int, int, int] | None:
        return None if self.video is None else tuple(self.video.shape[2:])

    @property
    def audio_length(self) -> int:
        return 0 if self.audio is None else self.audio.shape[3]

    @property
    def held(self) -> Held:
        picture = 0 if self.video is None else frame_groups(self.video_shape[0])[-1].stop
        return Held(self.name, self.frame_index, picture, filled_frames(self.audio_length, AUDIO_LATENT_RATE))


@dataclass(frozen=True)
class Held:
    """What a guide takes of the clip: frames of the picture from ``frame_index`` on, and of the sound."""

    name: str
    frame_index: int
    picture: int = 0
    sound: int = 0


def filled_frames(count: int, rate: int) -> int:
    """Frames that ``count`` sound latents or samples at ``rate`` a second fill; what is there holds one at least."""
    return max(1, count * FPS // rate) if count else 0


def overlaps(held: Sequence[Held]) -> list[str]:
    """Sentences about guides that hold the same frames, or sound at the same time: the model is shown both."""
    said = []
    for one, other in itertools.combinations(sorted(held, key=lambda guide: guide.frame_index), 2):
        for what, first, second in (
            ("frames", one.picture, other.picture),
            ("sound at frames", one.sound, other.sound),
        ):
            begin = other.frame_index
            end = min(one.frame_index + first, begin + second)
            if begin < end:
                place = f"{what} {begin} to {end - 1}" if end - begin > 1 else f"{what.removesuffix('s')} {begin}"
                said.append(f"{one.name} and {other.name} both hold {place}: the model is shown both")
    return said


@dataclass(frozen=True)
class Reference:
    """Latents of one reference: ``kind`` image, video, video_audio (a video and its soundtrack) or audio."""

    kind: str
    video: Tensor | None = None
    audio: Tensor | None = None
    name: str = "reference"

    def __post_init__(self):
        if self.kind not in REFERENCE_KINDS:
            raise H3Error(f"{self.name} has kind {self.kind!r}: one of {', '.join(REFERENCE_KINDS)}")
        if (self.video is None) != (self.kind == "audio"):
            raise H3Error(f"{self.name} of kind {self.kind} {'has' if self.video is not None else 'lacks'} a picture")
        if (self.audio is None) != (self.kind in ("image", "video")):
            raise H3Error(f"{self.name} of kind {self.kind} {'has' if self.audio is not None else 'lacks'} sound")
        if self.video is not None:
            check_video_latent(self.name, self.video)
            if self.kind == "image" and self.video.shape[2] != 1:
                raise H3Error(f"{self.name} is an image with {self.video.shape[2]} latent frames: an image has one")
        if self.audio is not None:
            check_audio_latent(self.name, self.audio)

    @property
    def video_shape(self) -> tuple[int, int, int] | None:
        return None if self.video is None else tuple(self.video.shape[2:])

    @property
    def audio_length(self) -> int:
        return 0 if self.audio is None else self.audio.shape[3]


@dataclass(frozen=True)
class Masks:
    """Noise masks of the target, 1 regenerates and 0 keeps: ``video`` [T, h, w] per latent cell, ``audio`` [2, A].

    Values stand on the grid k / 256, rounded up. A stream whose mask is all ones has none (None).
    """

    video: Tensor | None = None
    audio: Tensor | None = None

    @staticmethod
    def make(video: Tensor | None = None, audio: Tensor | None = None) -> Masks | None:
        """Round latent-cell masks up to k / 256 and drop the ones that regenerate everything; None when both do."""
        kept = [None if m is None else _round_up(m) for m in (video, audio)]
        kept = [None if m is None or bool((m == 1).all()) else m for m in kept]
        return None if kept == [None, None] else Masks(*kept)

    @property
    def video_tokens(self) -> Tensor | None:
        """[T * ceil(h/2) * ceil(w/2)] the largest cell of each 2x2 token, in row order."""
        return None if self.video is None else pool_tokens(self.video).flatten()

    @property
    def audio_tokens(self) -> Tensor | None:
        """[2 * A] in row order: left, then right."""
        return None if self.audio is None else self.audio.flatten()

    def check(self, canvas: Canvas) -> None:
        video = (canvas.latent_t, canvas.latent_h, canvas.latent_w)
        if self.video is not None and tuple(self.video.shape) != video:
            raise H3Error(f"the video mask covers {list(self.video.shape)} latent cells: the clip has {list(video)}")
        audio = (AUDIO_CHANNELS, canvas.audio_t)
        if self.audio is not None and tuple(self.audio.shape) != audio:
            raise H3Error(f"the sound mask covers {list(self.audio.shape)} latents: the clip has {list(audio)}")
        for name, mask in (("video mask", self.video), ("sound mask", self.audio)):
            if mask is not None:
                _check_levels(name, mask)


def pool_pixels(mask: Tensor, latent_t: int) -> Tensor:
    """Pixel mask [F, H, W] (F = 1 or the clip's frames) -> latent cells [T, H/16, W/16] by max.

    Frames group into latents 1,4,4,4,4 repeating every 17 frames, pixels into 16x16 cells.
    """
    cells = F.max_pool2d(mask[:, None].float(), 16, ceil_mode=True)[:, 0]  # [F, h, w]
    if mask.shape[0] == 1:
        return cells.expand(latent_t, -1, -1).contiguous()
    groups = frame_groups(latent_t)
    assert groups[-1].stop == mask.shape[0], (groups[-1].stop, mask.shape)
    return torch.stack([cells[group.start : group.stop].amax(0) for group in groups])


def pool_tokens(cells: Tensor) -> Tensor:
    """Latent cells [T, h, w] -> tokens [T, ceil(h/2), ceil(w/2)] by max; odd sizes repeat their edge."""
    pad = (0, cells.shape[2] % 2, 0, cells.shape[1] % 2)
    if any(pad):
        cells = F.pad(cells[:, None], pad, mode="replicate")[:, 0]
    return F.max_pool2d(cells[:, None], 2)[:, 0]


def _round_up(mask: Tensor) -> Tensor:
    mask = mask.float().cpu()  # labels are planned, and kept cells restored, on the CPU
    _check_levels("mask", mask)
    return torch.ceil(mask * MASK_LEVELS) / MASK_LEVELS


def _check_levels(name: str, mask: Tensor) -> None:
    if mask.dtype != torch.float32:
        raise H3Error(f"the {name} is {mask.dtype}: masks are float32, 0 (keep) to 1 (regenerate)")
    if not bool(torch.isfinite(mask).all()):
        raise NonFiniteError(f"the {name} holds NaN or infinity: give values from 0 (keep) to 1 (regenerate)")
    if bool((mask < 0).any()) or bool((mask > 1).any()):
        low, high = mask.min().item(), mask.max().item()
        raise H3Error(f"the {name} runs from {low:g} to {high:g}: give 0 (keep) to 1 (regenerate)")


@dataclass(frozen=True, eq=False)  # tensors have no one truth value: jobs are compared by fingerprint
class RenderJob:
    """All that decides the output of one render. Frozen; ``dataclasses.replace`` makes side B."""

    canvas: Canvas
    text: TextCondition
    guides: tuple[Guide, ...] = ()
    references: tuple[Reference, ...] = ()
    masks: Masks | None = None
    source: AVLatent | None = None
    state: AVLatent | None = None
    seed: int = 0
    num_forwards: int = DEFAULT_FORWARDS
    start: int = 0
    stop: int | None = None
    denoise: float = 1.0
    solver: str = "euler"
    video_shift: float = VIDEO_SHIFT
    audio_shift: float = AUDIO_SHIFT
    accelerators: tuple[tuple[str, Any], ...] = ()
    request: Any = field(default=None, compare=False)

    def __post_init__(self):
        self.schedule  # noqa: B018  (checks the counts, strength and range)
        check_seed(self.seed)
        if self.solver not in SOLVERS:
            raise H3Error(f"solver {self.solver!r} is not built: choose one of {', '.join(SOLVERS)}")
        for guide in self.guides:
            self._check_guide(guide)
        if self.masks is not None:
            self.masks.check(self.canvas)
        for name, latent in (("source", self.source), ("state", self.state)):
            if latent is not None and not latent.fits(self.canvas):
                raise H3Error(
                    f"the {name} clip has latents {list(latent.video.shape[2:])} and {latent.audio.shape[3]} of sound: "
                    f"this render needs [{self.canvas.latent_t}, {self.canvas.latent_h}, {self.canvas.latent_w}] "
                    f"and {self.canvas.audio_t}; encode it at {self.canvas.width}x{self.canvas.height}, "
                    f"{self.canvas.num_frames} frames"
                )
        needs = self._needs_source()
        if needs and self.source is None:
            raise H3Error(f"{needs} needs a source clip to start from: give one, or leave it out")
        if self.state is not None and self.start == 0:
            raise H3Error("a noisy state was given with start 0: a state continues a run, so start must be above 0")

    @property
    def task(self) -> str:
        """ref2va with references, fl2va with guides, else t2va."""
        return "ref2va" if self.references else "fl2va" if self.guides else "t2va"

    @property
    def schedule(self) -> Schedule:
        return plan_schedule(self.num_forwards, self.denoise, self.start, self.stop, self.video_shift, self.audio_shift)

    def _needs_source(self) -> str | None:
        if self.masks is not None:
            return "a mask"
        if self.state is None and self.schedule.skipped:
            return f"denoise {self.denoise}"
        if self.state is None and self.start > 0:
            return f"start {self.start} without a saved state"
        return None

    def _check_guide(self, guide: Guide) -> None:
        frames = self.canvas.num_frames
        if not 0 <= guide.frame_index < frames:
            raise H3Error(
                f"{guide.name} stands at frame {guide.frame_index}: the clip has frames 0 to {frames - 1} "
                f"({self.canvas.seconds:.3f} s)"
            )
        if guide.video is not None and guide.video_shape[1:] != (self.canvas.latent_h, self.canvas.latent_w):
            h, w = guide.video_shape[1:]
            raise H3Error(
                f"{guide.name} was encoded for {w * 16}x{h * 16}: this render is {self.canvas.width}x"
                f"{self.canvas.height}; encode the guide again at that size"
            )
        held = 0 if guide.video is None else frame_groups(guide.video_shape[0])[-1].stop
        if held > frames - guide.frame_index:
            raise H3Error(
                f"{guide.name} holds {held} frames from frame {guide.frame_index}: {frames - guide.frame_index} are "
                "left in the clip; cut the guide or move it forward"
            )
        room = -(-(self.canvas.audio_samples - audio_samples(guide.frame_index)) // AUDIO_HOP)
        if guide.audio_length > room:
            raise H3Error(
                f"{guide.name} holds {guide.audio_length} latents of sound from frame {guide.frame_index}: {room} are "
                "left in the clip; cut its sound or move it forward"
            )

    def fingerprint(self, *extra: str) -> str:
        """SHA-256 over all fields (tensors by content) and ``extra`` (checkpoint fingerprints, versions)."""
        digest = hashlib.sha256()
        for spec in fields(self):
            if spec.name != "request":
                digest.update(spec.name.encode())
                _digest(digest, getattr(self, spec.name))
        digest.update(json.dumps(extra).encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class StagePlan:
    """One stage of a render before it runs: where its layers come from, what it takes, how long a pass lasts.

    ``rung``: resident, ram or disk; on the latter two the first ``resident`` of ``layers`` stay on the card and the
    rest come through a ring that copies ``ahead`` layers in advance. Bytes: ``vram`` and ``host`` are predicted peaks,
    ``parts`` (what, bytes) of the card's at its largest moment ``peak_at``; ``moved`` goes to the card in each of
    ``passes`` passes of ``seconds``, bound by compute, copy or disk (``times``: seconds of each). ``how``: chunk
    sizes or tile order.
    """

    name: str
    rung: str
    layers: int
    resident: int
    ahead: int
    vram: int
    host: int
    peak_at: str
    parts: tuple[tuple[str, int], ...]
    passes: int
    moved: int
    seconds: float
    bound: str
    times: tuple[tuple[str, float], ...]
    how: str = ""
    pinned: bool = False
    adaln: str = ""

    @property
    def resident_bytes(self) -> int:
        """Bytes of layers that stay on the card."""
        return dict(self.parts).get("resident blocks", dict(self.parts).get("resident layers", 0))


@dataclass(frozen=True)
class Plan:
    """A render before it runs. ``refusal`` says in one sentence what does not fit and what would ("" when all fits).

    ``rows`` (segment, rows) of the packed sequence; ``tables`` bytes of the modulation tables on the host, 0 when they
    are made forward by forward; ``chunks`` (heads, rows) of a block; ``reserve`` bytes of the card that are left alone;
    ``paths`` names of the fidelity registry that the plan chose.
    """

    stages: tuple[StagePlan, ...]
    rows: tuple[tuple[str, int], ...]
    tables: int
    chunks: tuple[int, int]
    card: str
    free_vram: int
    free_host: int
    reserve: int
    refusal: str = ""
    notes: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return not self.refusal

    @property
    def num_rows(self) -> int:
        return sum(count for _, count in self.rows)

    @property
    def vram(self) -> int:
        """The largest predicted peak on the card."""
        return max(stage.vram for stage in self.stages)

    @property
    def host(self) -> int:
        """The largest predicted peak of host memory."""
        return max(stage.host for stage in self.stages)

    @property
    def seconds(self) -> float:
        """Expected length of the render, loading left out."""
        return sum(stage.passes * stage.seconds for stage in self.stages)

    def stage(self, name: str) -> StagePlan:
        return next(stage for stage in self.stages if stage.name == name)


# fields that say something and decide nothing
WORDS = {Canvas: ("notes",), TextCondition: ("notes", "source"), Guide: ("name",), Reference: ("name",)}


def _digest(digest, value) -> None:
    if isinstance(value, Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    elif is_dataclass(value):
        words = WORDS.get(type(value), ())
        for spec in fields(value):
            if spec.name not in words:
                digest.update(spec.name.encode())
                _digest(digest, getattr(value, spec.name))
    elif isinstance(value, (tuple, list)):
        digest.update(f"[{len(value)}]".encode())
        for item in value:
            _digest(digest, item)
    elif is_number(value):  # 1, 1.0 and numpy's 1 are one value
        digest.update(f"{int(value) if value == int(value) else float(value)!r};".encode())
    else:
        digest.update(f"{value!r};".encode())


def check_video_latent(name: str, latent: Tensor) -> None:
    """[1, 24, t, h, w] float32 finite, even h and w."""
    if latent.ndim != 5 or latent.shape[:2] != (1, VIDEO_CHANNELS) or min(latent.shape[2:]) < 1:
        hint = " (32 channels is a sound latent)" if latent.ndim > 1 and latent.shape[1] == 32 else ""
        raise H3Error(f"{name} has shape {list(latent.shape)}: a video latent is [1, 24, t, h, w]{hint}")
    if latent.shape[3] % 2 or latent.shape[4] % 2:
        raise H3Error(f"{name} is {latent.shape[3]}x{latent.shape[4]} latent cells: both must be even (32 px steps)")
    _require_float32(name, latent)


def check_audio_latent(name: str, latent: Tensor) -> None:
    """[1, 32, 2, a] float32 finite."""
    if latent.ndim != 4 or latent.shape[:3] != (1, AUDIO_LATENT_CHANNELS, AUDIO_CHANNELS) or latent.shape[3] < 1:
        hint = " (24 channels is a video latent)" if latent.ndim > 1 and latent.shape[1] == 24 else ""
        raise H3Error(f"{name} has shape {list(latent.shape)}: a sound latent is [1, 32, 2, a]{hint}")
    _require_float32(name, latent)


def _require_float32(name: str, latent: Tensor) -> None:
    if latent.dtype != torch.float32:
        raise H3Error(f"{name} is {latent.dtype}: latents are float32; convert it with .float()")
    _require_finite(name, latent)


def _require_finite(name: str, value: Tensor) -> None:
    if value.device.type != "meta" and not bool(torch.isfinite(value).all()):
        raise NonFiniteError(f"{name} holds NaN or infinity: it cannot be rendered; make it again")
