"""What a person asked for, before anything is loaded: prompt, media, size, masks, schedule.

    CLI arguments or node widgets ─▶ RenderRequest ─▶ guides.py, render.py: RenderJob
                                         └─▶ manifest (names and hashes), plan, a server engine

Media stand as ``Media``: a file, or pixels and samples in memory; either way with a SHA-256 of what it holds.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import H3Error
from .geometry import AUDIO_CHANNELS, AUDIO_LATENT_RATE, FPS, is_number, is_whole
from .quant.online import by_part
from .schedule import AUDIO_SHIFT, DEFAULT_FORWARDS, VIDEO_SHIFT, check_seed

WORD_MASKS = ("keep", "all")
RECIPES = ("reference", "comfy")
REFERENCE_LIMITS = {"image": 9, "video": 3, "audio": 3}
MAX_REFERENCES = 12
MAX_TILE_BATCH = 64


@dataclass(frozen=True)
class Media:
    """A picture, clip or sound. ``path``, or ``frames`` uint8 [F, H, W, 3] and / or ``audio`` float32 [2, L] at 32 kHz.

    ``name`` is its base name, for reports and manifests.
    """

    path: str | None = None
    frames: Any = field(default=None, compare=False)
    audio: Any = field(default=None, compare=False)
    name: str = ""

    def __post_init__(self):
        if self.path is None and self.frames is None and self.audio is None:
            raise H3Error("an empty picture, clip or sound was given: give a file, pixels or samples")
        name = self.name or (Path(self.path).name if self.path else "in memory")
        # a name that is no valid text (Linux allows it) must not make a manifest unwritable after the work
        object.__setattr__(self, "name", name.encode("utf-8", "backslashreplace").decode("utf-8"))

    @cached_property
    def sha256(self) -> str:
        """Of the file's bytes; of shapes and values for media in memory. A folder of pictures hashes its files.

        Taken once: a file that changes while its render runs must not change the render's manifest.
        """
        digest = hashlib.sha256()
        if self.path is not None:
            path = Path(self.path)
            try:
                for file in sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]:
                    with open(file, "rb") as stream:
                        while block := stream.read(1 << 20):
                            digest.update(block)
            except OSError as error:
                raise H3Error(f"{path} cannot be read ({error.strerror}): check the name and the rights") from None
            return digest.hexdigest()
        for value in (self.frames, self.audio):
            if value is not None:
                array = np.ascontiguousarray(value.cpu().numpy() if isinstance(value, Tensor) else value)
                digest.update(f"{array.dtype}{array.shape}".encode())
                digest.update(array.tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class GuideRequest:
    """Hold ``media`` at ``frame`` (negative: from the end) or ``seconds`` of the clip, with ``strength`` in (0, 1]."""

    media: Media
    frame: int | None = None
    seconds: float | None = None
    strength: float = 1.0

    def __post_init__(self):
        if (self.frame is None) == (self.seconds is None):
            raise H3Error(f"guide {self.media.name} needs one place: a frame (@12) or a time (@2.5s)")
        if not (is_number(self.strength) and 0 < self.strength <= 1):
            raise H3Error(f"guide {self.media.name} has strength {self.strength}: give more than 0 and at most 1")
        if not (is_whole(self.frame) if self.seconds is None else is_number(self.seconds)):
            raise H3Error(f"guide {self.media.name} stands at {self.frame or self.seconds!r}: give a frame or a time")

    def frame_index(self, num_frames: int) -> int:
        """The pixel frame it stands at. H3Error outside the clip."""
        if self.seconds is not None:
            at = self.seconds * FPS
            # nearest frame; the second half of the last one lies in the clip as well
            index = min(round(at), num_frames - 1) if 0 <= at < num_frames else num_frames
            place = f"{self.seconds} s"
        else:
            index = int(self.frame + num_frames if self.frame < 0 else self.frame)
            place = f"frame {self.frame}"
        if not 0 <= index < num_frames:
            raise H3Error(
                f"guide {self.media.name} stands at {place}: the clip has frames 0 to {num_frames - 1} "
                f"and ends at {num_frames / FPS:.3f} s"
            )
        return index

    @staticmethod
    def parse(text: str) -> GuideRequest:
        """``FILE@12``, ``FILE@2.5s`` or ``FILE@12:0.6`` (strength); split at the last @."""
        path, at, place = text.rpartition("@")
        match = re.fullmatch(r"(-?\d+|\d*\.?\d+s)(?::(\d*\.?\d+))?", place)
        if not at or not path or match is None:
            raise H3Error(f"guide {text!r} is not FILE@FRAME or FILE@SECONDSs, e.g. cat.png@12, cat.png@2.5s:0.8")
        strength = 1.0 if match[2] is None else float(match[2])
        if match[1].endswith("s"):
            return GuideRequest(Media(path), seconds=float(match[1][:-1]), strength=strength)
        return GuideRequest(Media(path), frame=int(match[1]), strength=strength)


@dataclass(frozen=True)
class ReferenceRequest:
    """One reference in the user's order: ``kind`` image, video (with its soundtrack, unless ``sound`` is off) or audio.

    ``fps``: the rate of frames in memory, where it is not 24; a file tells its own.
    """

    kind: str
    media: Media
    sound: bool = True
    fps: float | None = None

    def __post_init__(self):
        if self.kind not in REFERENCE_LIMITS:
            raise H3Error(f"reference {self.media.name} is of kind {self.kind!r}: give image, video or audio")
        if self.fps is not None and (self.kind != "video" or self.media.path is not None):
            raise H3Error(f"reference {self.media.name} was given a rate: only frames in memory need one")
        if self.fps is not None and not (is_number(self.fps) and 1 <= self.fps <= 1000):
            raise H3Error(f"reference {self.media.name} has {self.fps!r} frames a second: give 1 to 1000")


def check_references(references: tuple[ReferenceRequest, ...]) -> None:
    """H3Error for more references than the model was taught, or for sounds alone."""
    check_reference_kinds([reference.kind for reference in references])


def check_reference_kinds(references: Sequence[str]) -> None:
    """The same for their kinds: image, video, audio."""
    for kind, limit in REFERENCE_LIMITS.items():
        count = references.count(kind)
        if count > limit:
            raise H3Error(f"{count} {kind} references were given: at most {limit} are possible, leave some out")
    if len(references) > MAX_REFERENCES:
        raise H3Error(f"{len(references)} references were given: at most {MAX_REFERENCES} in all, leave some out")
    if references and all(kind == "audio" for kind in references):
        raise H3Error("a sound cannot be the only reference: add a picture or a clip that it belongs to")


@dataclass(frozen=True)
class SoundMask:
    """Where the sound is made anew: time ranges (value 1), or a curve of (seconds, value) points; else it is kept.

    ``feather`` seconds ramp linearly from each range's edge down to 0 outside it.
    """

    ranges: tuple[tuple[float, float], ...] = ()
    curve: tuple[tuple[float, float], ...] = ()
    feather: float = 0.0

    def __post_init__(self):
        if bool(self.ranges) == bool(self.curve):
            raise H3Error("a sound mask needs either time ranges or a curve: e.g. 1-2.5 or 0=0,1=1,2=0.5")
        for start, end in self.ranges:
            if not (0 <= start < end < math.inf):
                raise H3Error(f"sound mask range {start:g}-{end:g}: the start must be 0 or more and before the end")
        times = [t for t, _ in self.curve]
        if any(not math.isfinite(t) or t < 0 for t in times) or any(b <= a for a, b in itertools.pairwise(times)):
            raise H3Error(f"sound mask curve has times {times}: give rising seconds from 0 on")
        for _, value in self.curve:
            if not 0 <= value <= 1:
                raise H3Error(f"sound mask value {value}: give 0 (keep) to 1 (make anew)")
        if not 0 <= self.feather < math.inf:
            raise H3Error(f"sound mask feather {self.feather}: give 0 or more seconds")
        if self.curve and self.feather:
            raise H3Error(f"sound mask feather {self.feather}: a curve has no edges to feather; give it with ranges")

    @staticmethod
    def parse(text: str, feather: float = 0.0) -> SoundMask:
        """``1-2.5,3-4`` (ranges in seconds) or ``0=0,1=1,2=0.5`` (curve: second=value)."""
        number = r"\d*\.?\d+"
        parts = [part.strip() for part in text.split(",")]
        if all(re.fullmatch(f"{number}-{number}", part) for part in parts):
            return SoundMask(ranges=tuple(tuple(map(float, p.split("-"))) for p in parts), feather=feather)
        if all(re.fullmatch(f"{number}={number}", part) for part in parts):
            return SoundMask(curve=tuple(tuple(map(float, p.split("="))) for p in parts), feather=feather)
        raise H3Error(f"sound mask {text!r}: give ranges in seconds (1-2.5,3-4), a curve (0=0,1=1), keep or all")

    def past_end(self, seconds: float) -> list[str]:
        """Sentences about ranges that reach past a clip of ``seconds``; H3Error for one that lies outside it."""
        begins = [start for start, _ in self.ranges] + [t for t, _ in self.curve[:1]]
        for start in begins:
            if start >= seconds:
                raise H3Error(f"the sound mask begins at {start:g} s: the clip ends at {seconds:.3f} s")
        return [
            f"sound mask range {start:g}-{end:g}: the clip ends at {seconds:.3f} s"
            for start, end in self.ranges
            if end > seconds
        ]

    def value(self, seconds: np.ndarray) -> np.ndarray:
        """The mask at points in time [n] -> [n]."""
        if self.curve:
            times, values = zip(*self.curve)
            return np.interp(seconds, times, values)
        out = np.zeros_like(seconds)
        for start, end in self.ranges:
            outside = np.maximum(np.maximum(start - seconds, seconds - end), 0.0)
            ramp = 1.0 - outside / self.feather if self.feather > 0 else np.where(outside > 0, 0.0, 1.0)
            out = np.maximum(out, np.clip(ramp, 0.0, 1.0))
        return out

    def latents(self, audio_t: int) -> Tensor:
        """float32 [2, audio_t]: the largest value inside each 1/40 s latent (touching an edge does not count)."""
        inside = 1e-6
        edges = np.arange(audio_t, dtype=np.float64)
        corners = [t for t, _ in self.curve]
        for start, end in self.ranges:
            corners += [start, end]
        points = [(edges + inside) / AUDIO_LATENT_RATE, (edges + 1 - inside) / AUDIO_LATENT_RATE]
        largest = np.maximum(*(self.value(p) for p in points))
        for corner in corners:
            place = corner * AUDIO_LATENT_RATE
            index = math.floor(place)
            if inside < place - index < 1 - inside and index < audio_t:
                largest[index] = max(largest[index], float(self.value(np.array([corner]))[0]))
        return torch.from_numpy(largest.astype(np.float32)).expand(AUDIO_CHANNELS, -1).contiguous()


@dataclass(frozen=True)
class LoraRequest:
    """A LoRA file at a strength; several are stacked in the order given."""

    media: Media
    strength: float = 1.0

    def __post_init__(self):
        if not is_number(self.strength):
            raise H3Error(f"LoRA {self.media.name} has strength {self.strength!r}: give a number, 1 is the usual one")

    @staticmethod
    def parse(text: str) -> LoraRequest:
        """``FILE`` or ``FILE@0.8``; split at the last @ when a number follows it."""
        path, at, strength = text.rpartition("@")
        if at and re.fullmatch(r"-?\d*\.?\d+", strength):
            return LoraRequest(Media(path), float(strength))
        return LoraRequest(Media(text))


@dataclass(frozen=True)
class RenderRequest:
    """One render as asked. ``frames`` None: 124, or the source clip's length. Sizes and counts are fitted later.

    ``mask`` is a picture, one per frame, or the words keep / all; ``sound_mask`` a SoundMask or the same words;
    ``source`` is the clip that masks keep and denoise starts from; ``state`` a saved partial latent to continue.
    ``references`` stand in the user's order; ``embeds`` is a saved condition of this prompt, which spares the encoder.
    ``quantise`` names a way to quantise the DiT's block linears while loading, or parts with theirs
    (``dit=int8_convrot,text=fp8,video_vae=int8``), all but those ``exclude`` names (``text:PATTERN``).
    ``tile_batch`` tiles of the picture are decoded at once.
    ``accelerators`` are specs, (name, ((option, value), ...)); ``few_step`` names the few-step LoRA's preset that set
    forwards and shifts, where one did.
    """

    prompt: str
    size: tuple[int, int] | None = None
    ratio: tuple[int, int] | float | None = None
    megapixels: float | None = None
    frames: int | None = None
    first_frame: Media | None = None
    last_frame: Media | None = None
    guides: tuple[GuideRequest, ...] = ()
    references: tuple[ReferenceRequest, ...] = ()
    embeds: Media | None = None
    mask: Media | str | None = None
    sound_mask: SoundMask | str | None = None
    source: Media | None = None
    state: Media | None = None
    seed: int = 0
    num_forwards: int = DEFAULT_FORWARDS
    start: int = 0
    stop: int | None = None
    denoise: float = 1.0
    video_shift: float = VIDEO_SHIFT
    audio_shift: float = AUDIO_SHIFT
    dtype: str | None = None
    recipe: str = "reference"
    loras: tuple[LoraRequest, ...] = ()
    quantise: str | None = None
    exclude: tuple[str, ...] = ()
    tile_batch: int = 1
    accelerators: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()
    solver: str = "euler"
    few_step: str | None = None

    def __post_init__(self):
        if not (is_whole(self.tile_batch) and 1 <= self.tile_batch <= MAX_TILE_BATCH):
            raise H3Error(f"tile batch {self.tile_batch!r}: give 1 (the default) to {MAX_TILE_BATCH} tiles at once")
        if not isinstance(self.prompt, str):
            raise H3Error(f"the prompt is {type(self.prompt).__name__}: give text")
        try:
            self.prompt.encode()
        except UnicodeEncodeError as error:
            place = f"character {error.start + 1}"
            raise H3Error(f"the prompt is no valid text at {place}, which is half a character: retype it") from None
        for name, mask in (("mask", self.mask), ("sound mask", self.sound_mask)):
            if isinstance(mask, str) and mask not in WORD_MASKS:
                raise H3Error(f"{name} {mask!r}: give a file, keep or all")
        check_seed(self.seed)
        if self.recipe not in RECIPES:
            raise H3Error(f"recipe {self.recipe!r} is unknown: choose {' or '.join(RECIPES)}")
        check_references(self.references)
        if self.embeds is not None and self.embeds.path is None:
            raise H3Error("a saved condition must be a file: make one with embed save")
        by_part(self.quantise, self.exclude)
        if self.dtype not in (None, "float32"):
            raise H3Error(f"dtype {self.dtype!r}: leave it out (as stored) or give float32")
        if (self.mask is not None or self.sound_mask is not None) and self.source is None and self.state is None:
            raise H3Error("a mask keeps parts of a clip, and no clip was given: add --source FILE")

    @property
    def media(self) -> dict[str, Media]:
        """All media of the request by input name, in a fixed order."""
        named = {"first frame": self.first_frame, "last frame": self.last_frame, "source": self.source}
        named |= {f"guide {i}": guide.media for i, guide in enumerate(self.guides, 1)}
        named |= {f"reference {i}": reference.media for i, reference in enumerate(self.references, 1)}
        named |= {"embeds": self.embeds, **{f"LoRA {i}": lora.media for i, lora in enumerate(self.loras, 1)}}
        named |= {"mask": self.mask if isinstance(self.mask, Media) else None, "state": self.state}
        return {name: media for name, media in named.items() if media is not None}
