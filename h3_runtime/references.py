"""References: the user's ordered pictures, clips and sounds, brought to the sizes and rates the model was taught on.

                 recipe reference (diffusers)                       recipe comfy (ComfyUI)
    picture      short edge 2048, enlarged too                      shrunk to the render's area, never enlarged
    clip         24 fps, the canvas of its own ratio                the same, small ones keep their size
      ├ VAE      cut to the render's frames, then down to 17k + 5   the same
      └ encoder  2 frames a second of what the render's length cut  of what the VAE gets
    sound        32 kHz stereo, cut to the render's length          not cut
    latents      posterior sampled (seed 42), rounded to fp16       posterior mean

    ReferenceRequest ──place_references──▶ PlacedReference ──┬─ shown ──▶ text encoder (label, pixels)
                     every check, no weights                 └─ frames, audio ──▶ VAEs ──▶ job.Reference

Order is meaning twice over: it numbers the labels of the prompt and lays the references out on the rotary clock.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import media
from .errors import H3Error, NonFiniteError
from .geometry import (
    AUDIO_CHANNELS,
    FPS,
    MIN_FRAMES,
    PIXELS_PER_TOKEN,
    RATIO_LIMITS,
    SAMPLE_RATE,
    TRAINED_FRAMES,
    Canvas,
    floor_frames,
)
from .request import Media, ReferenceRequest
from .text.presentation import sample_clip
from .text.shown import Shown, labels, lint_names

IMAGE_SHORT_EDGE = 2048
CLIP_SECONDS = (2, 15)
LONGEST = TRAINED_FRAMES[1]  # 15 s as the model itself renders them: 362 frames
SEEN_EVERY = FPS // 2  # the encoder sees two frames a second


@dataclass(frozen=True)
class PlacedReference:
    """One reference ready for the VAEs: ``frames`` uint8 [f, H, W, 3], ``audio`` float32 [2, L] at 32 kHz, or None."""

    kind: str  # image, video, video_audio or audio, as in job.Reference
    name: str
    frames: np.ndarray | None
    audio: Tensor | None
    shown: Shown


def place_references(
    requests: Sequence[ReferenceRequest], canvas: Canvas, recipe: str, notes: list[str]
) -> tuple[PlacedReference, ...]:
    """Read the references and cut them to ``canvas``; sentences about every change go to ``notes``.

    H3Error for what cannot be used: another kind of file, a ratio outside 1:4..4:1, clips outside 2 to 15 s or of more
    than 15 s together.
    """
    placed, seconds = [], []
    for request in requests:
        if request.kind == "image":
            placed.append(_place_image(request.media, canvas, recipe, notes))
        elif request.kind == "audio":
            placed.append(_place_audio(request.media, canvas, recipe, notes))
        else:
            reference, count = _place_video(request, canvas, recipe, notes)
            placed.append(reference)
            seconds.append(count)
    check_clips_together(seconds)
    return tuple(placed)


def check_clip_length(name: str, count: int) -> None:
    """H3Error for a reference clip of ``count`` frames at 24 fps that is shorter or longer than what was taught."""
    shortest, longest = CLIP_SECONDS
    if not shortest * FPS <= count <= LONGEST:
        length = f"{count / FPS:.2f} s" if count <= LONGEST else f"longer than {longest} s"
        raise H3Error(f"reference clip {name} is {length}: clips of {shortest} to {longest} s are possible, cut it")


def check_clips_together(counts: Sequence[int]) -> None:
    """The same for all reference clips together."""
    if sum(counts) > LONGEST:
        each = " + ".join(f"{count / FPS:.2f}" for count in counts)
        raise H3Error(f"the reference clips last {each} s: {CLIP_SECONDS[1]} s together are possible, cut some shorter")


def describe_names(prompt: str, shown: Sequence[Shown]) -> list[str]:
    """Which label stands for which file, and where the prompt and the labels do not meet."""
    notes = []
    if any(not thing.keyframe for thing in shown):
        pairs = (f"{' '.join(names)} = {thing.name}" for thing, names in zip(shown, labels(shown)))
        notes.append("in the prompt: " + ", ".join(pairs))
    return notes + lint_names(prompt, shown)


class Encoder(NamedTuple):
    """One place to encode pixels: ``load()`` gives the video VAE there; ``name`` for the report."""

    name: str
    load: Callable[[], Any]


class PixelEncoder:
    """Encodes with the first of ``ways`` that has the memory; ``tell`` is given a sentence about each that has not.
    ``fell_back``: it was not the first that made the last latent."""

    def __init__(self, ways: Sequence[Encoder], tell: Callable[[str], None] = lambda sentence: None):
        self.ways, self.tell = list(ways), tell
        self.fell_back = False

    def __call__(self, frames: np.ndarray, recipe: str = "reference", mean: bool = False) -> Tensor:
        """uint8 [f, H, W, 3] -> normalised [1, 24, T, H/16, W/16] on the CPU: sampled and rounded, or (``mean``, comfy)
        the mean. H3Error when the last way has not the memory either."""
        pixels = torch.from_numpy(np.ascontiguousarray(frames))
        while True:
            way = self.ways[0]
            try:
                vae = way.load()
                encode = vae.encode_mean if mean or recipe == "comfy" else vae.encode_condition
                return encode(pixels).cpu()
            except torch.OutOfMemoryError as error:
                reason = str(error).splitlines()[0]
            vae = encode = None  # outside the except block: the traceback holds what did not fit
            what = f"{pixels.shape[2]}x{pixels.shape[1]} pixels could not be encoded {way.name}"
            if len(self.ways) == 1:
                raise H3Error(f"{what} ({reason}): free memory, or give smaller pictures")
            del self.ways[0]
            self.fell_back = True
            self.tell(f"{what}, its memory is not enough: encoded {self.ways[0].name}")


def read_memory(medium: Media) -> tuple[np.ndarray | None, Tensor | None]:
    """(uint8 [f, H, W, 3], float32 [2, L]) of a medium in memory, checked; None for what it has not."""
    frames, audio = medium.frames, medium.audio
    if frames is not None:
        frames = frames.cpu().numpy() if isinstance(frames, Tensor) else np.asarray(frames)
        if frames.ndim == 4 and 0 in frames.shape:
            raise H3Error(f"{medium.name} has no picture ({list(frames.shape)}): give at least one, or connect nothing")
        if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3:
            raise H3Error(f"{medium.name} has pixels {list(frames.shape)} {frames.dtype}: give uint8 [f, h, w, 3]")
    if audio is not None:
        audio = torch.as_tensor(audio).float().cpu()
        if audio.ndim == 2 and not audio.shape[1]:
            raise H3Error(f"{medium.name} has a sound of 0 samples: give one that has some, or connect none")
        if audio.ndim != 2 or audio.shape[0] != AUDIO_CHANNELS:
            raise H3Error(f"{medium.name} has sound {list(audio.shape)}: give [2, samples] at {SAMPLE_RATE} Hz")
        if not bool(torch.isfinite(audio).all()):
            raise NonFiniteError(f"the sound of {medium.name} holds NaN or infinity: make it again")
    return frames, audio


# --- pictures --------------------------------------------------------------------------------------------------------


def _place_image(medium: Media, canvas: Canvas, recipe: str, notes: list[str]) -> PlacedReference:
    name, picture = medium.name, read_reference_picture(medium, notes)
    height, width = picture.shape[:2]
    if recipe == "comfy":
        scale = min(1.0, math.sqrt(canvas.width * canvas.height / (width * height)))
    else:
        _check_ratio(name, width, height)
        scale = IMAGE_SHORT_EDGE / min(width, height)
    size = _round_edge(width * scale), _round_edge(height * scale)
    if size != (width, height):
        notes.append(f"{name} ({width}x{height}) was resized to {size[0]}x{size[1]} as a reference picture")
    pixels = media.resize_stretch(picture, *size)[None]
    return PlacedReference("image", name, pixels, None, Shown("picture", name, pixels))


def read_reference_picture(medium: Media, notes: list[str]) -> np.ndarray:
    """uint8 [H, W, 3], upright, at its own size; changes go to ``notes``. H3Error for what is no single picture."""
    if medium.path is None:
        frames, _ = read_memory(medium)
        count = 0 if frames is None else len(frames)
        if count != 1:
            what = f"a clip of {count} frames" if count else "sound"
            raise H3Error(
                f"reference picture {medium.name} is {what}: give one picture, or the other kind of reference"
            )
        return frames[0]
    kind = media.kind_of(medium.path)
    if kind != "image":
        option = "--ref-audio" if kind == "audio" else "--ref-video"
        raise H3Error(f"reference picture {medium.name} is a file of {_kind_words(kind)}: give it as {option}")
    changes: list[str] = []
    pixels = media.read_image(medium.path, changes)
    notes += [f"{medium.name}: {change}" for change in changes]
    return pixels


def _check_ratio(name: str, width: int, height: int) -> None:
    low, high = RATIO_LIMITS
    if not low <= width / height <= high:
        raise H3Error(f"reference {name} is {width}x{height}: pictures and clips must be within 1:4 and 4:1, crop it")


def _round_edge(edge: float) -> int:
    return max(PIXELS_PER_TOKEN, round(edge / PIXELS_PER_TOKEN) * PIXELS_PER_TOKEN)


def _kind_words(kind: str) -> str:
    return {"image": "a picture", "audio": "sound", "video": "a clip"}.get(kind, kind)


# --- clips -----------------------------------------------------------------------------------------------------------


def _place_video(
    request: ReferenceRequest, canvas: Canvas, recipe: str, notes: list[str]
) -> tuple[PlacedReference, int]:
    """The placed clip, and how many frames at 24 fps it had before it was cut."""
    name = request.media.name
    frames, size = read_reference_clip(request, recipe, notes)
    count = len(frames)
    check_clip_length(name, count)
    if size != frames.shape[2:0:-1]:
        notes.append(f"{name} ({size[0]}x{size[1]}) was resized to {frames.shape[2]}x{frames.shape[1]} as a clip")
    frames = frames[: canvas.num_frames]
    kept = floor_frames(len(frames))
    if recipe == "comfy":
        frames = frames[:kept]
        indices = range(0, kept, SEEN_EVERY)
        times = [index / 2 for index in range(len(indices))]
        times += times[-1:] * (len(times) % 2)
        timestamps = tuple((first + second) / 2 for first, second in zip(times[::2], times[1::2]))
    else:
        if len(frames) <= SEEN_EVERY:
            raise H3Error(
                f"a render of {canvas.num_frames} frames cuts reference clip {name} to as many, and the text encoder "
                f"looks at it every {SEEN_EVERY} frames and needs two: render at least {MIN_FRAMES + 17} frames"
            )
        indices, timestamps = sample_clip(len(frames))
    if kept < count:
        notes.append(
            f"{name}: {kept} of {count} frames are used ({kept / FPS:.3f} of {count / FPS:.3f} s; the render has "
            f"{canvas.num_frames} and clips are 17k + 5)"
        )
    audio = read_soundtrack(request, canvas, recipe, notes)
    sound = "" if audio is None else hashlib.sha256(audio.contiguous().numpy().tobytes()).hexdigest()
    kind = "clip" if audio is None else "clip with sound"
    shown = Shown(kind, name, frames[list(indices)], timestamps, sound)
    return PlacedReference("video" if audio is None else "video_audio", name, frames[:kept], audio, shown), count


def read_reference_clip(request: ReferenceRequest, recipe: str, notes: list[str]) -> tuple[np.ndarray, tuple[int, int]]:
    """(uint8 [f, H, W, 3] at 24 fps on the clip's own canvas, at most one frame more than possible; its own size).

    H3Error for what is no clip.
    """
    medium = request.media
    size: list[tuple[int, int]] = []

    def fit(picture: np.ndarray) -> np.ndarray:
        if not size:
            size.append((picture.shape[1], picture.shape[0]))
        return media.resize_stretch(picture, *clip_canvas(medium.name, *size[0], recipe))

    if medium.path is not None:
        kind = media.kind_of(medium.path)
        if kind != "video":
            option = "--ref-audio" if kind == "audio" else "--ref-image"
            raise H3Error(f"reference clip {medium.name} is a file of {_kind_words(kind)}: give it as {option}")
        clip = media.read_clip(medium.path, max_frames=LONGEST + 1, sound=False, fit=fit)
        notes += [f"{medium.name}: {note}" for note in clip.notes]
        return clip.frames, size[0]
    frames, _ = read_memory(medium)
    if frames is None:
        raise H3Error(f"reference clip {medium.name} is sound: give it as a sound reference")
    slots = resample_slots(len(frames), FPS if request.fps is None else request.fps)[: LONGEST + 1]
    if len(slots) != len(frames):
        notes.append(
            f"{medium.name}: {request.fps:g} fps clip of {len(frames)} frames put on {len(slots)} at {FPS} fps"
        )
    fitted = {index: fit(frames[index]) for index in dict.fromkeys(slots)}
    return np.stack([fitted[index] for index in slots]), size[0]


def resample_slots(count: int, fps: float) -> list[int]:
    """Which of ``count`` frames at ``fps`` stands in each slot at 24 fps.

    Frame i takes slot floor(24 i / fps + 1/2) and stays until the next one's; the last until the slot of the end (the
    reference's ``_normalize_video_condition``).
    """
    scale = FPS / fps
    starts = [math.floor(index * scale + 0.5) for index in range(count + 1)]
    return [index for index in range(count) for _ in range(starts[index], starts[index + 1])]


def clip_canvas(name: str, width: int, height: int, recipe: str) -> tuple[int, int]:
    """(width, height) of a reference clip: the trained canvas of its ratio; by ``comfy`` its own size when smaller."""
    _check_ratio(name, width, height)
    canvas = Canvas.fit(MIN_FRAMES, ratio=(width, height))
    if recipe == "comfy" and width * height < canvas.width * canvas.height:
        return _round_edge(width), _round_edge(height)
    return canvas.width, canvas.height


# --- sound -----------------------------------------------------------------------------------------------------------


def _place_audio(medium: Media, canvas: Canvas, recipe: str, notes: list[str]) -> PlacedReference:
    audio = read_reference_sound(medium, canvas, recipe, notes)
    return PlacedReference("audio", medium.name, None, audio, Shown("sound", medium.name, sound_sha256=medium.sha256))


def read_reference_sound(medium: Media, canvas: Canvas, recipe: str, notes: list[str]) -> Tensor:
    """float32 [2, L] at 32 kHz, cut to the render's length. H3Error for what holds no sound."""
    name = medium.name
    if medium.path is not None and media.kind_of(medium.path) == "image":
        raise H3Error(f"reference sound {name} is a picture: give it as --ref-image")
    audio = _read_sound(medium, canvas, recipe, notes)
    if audio is None:
        raise H3Error(f"reference sound {name} holds no sound: give a sound file, or a clip with a soundtrack")
    if medium.path is not None and media.kind_of(medium.path) == "video":
        notes.append(f"{name}: only its sound is used, its picture is not")
    return audio


def read_soundtrack(request: ReferenceRequest, canvas: Canvas, recipe: str, notes: list[str]) -> Tensor | None:
    """The sound of a reference clip, float32 [2, L] at 32 kHz, cut to the render's length; None where it has none, or
    none is wanted."""
    name = request.media.name
    if request.media.path is not None:
        has_sound = media.sound_seconds(request.media.path) is not None
    else:
        has_sound = request.media.audio is not None
    if has_sound and not request.sound:
        notes.append(f"{name}: its sound is left out, as asked")
        return None
    audio = _read_sound(request.media, canvas, recipe, notes) if has_sound else None
    if audio is None:
        notes.append(f"{name} has no sound: the clip is a reference for its picture alone")
    return audio


def _read_sound(medium: Media, canvas: Canvas, recipe: str, notes: list[str]) -> Tensor | None:
    """float32 [2, L] at 32 kHz, by the recipe ``reference`` cut to the render's length; None where there is none."""
    seconds = None if recipe == "comfy" else canvas.num_frames / FPS
    if medium.path is None:
        _, audio = read_memory(medium)
        if audio is None:
            return None
        length = audio.shape[1] / SAMPLE_RATE
        audio = audio if seconds is None else audio[:, : int(seconds * SAMPLE_RATE)]
    else:
        length = media.sound_seconds(medium.path)
        audio, sound_notes = media.decode_sound(medium.path, None, Fraction(0), seconds)
        notes += [f"{medium.name}: {note}" for note in sound_notes]
    full = seconds is not None and audio.shape[1] >= int(seconds * SAMPLE_RATE)
    if full and (not length or length > seconds + 1 / SAMPLE_RATE):
        source = f"from {length:.3f} s " if length else ""  # not every file tells the length of its sound
        notes.append(f"{medium.name}: sound cut {source}to the render's {seconds:.3f} s")
    return audio.contiguous() if audio.shape[1] else None
