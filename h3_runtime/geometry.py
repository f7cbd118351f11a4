"""Counts and sizes: frames, latents, audio samples, canvas. Integers only; no tensors but index tables.

    frames   0 | 1 2 3 4 | 5 6 7 8 | 9 .. 12 | 13 .. 16 | 17 | 18 .. 21 | ...      N = 17k + 5
    latents  0 |    1    |    2    |    3    |    4     | 5  |    6     | ...      T = 5k + 2
    sound    40 latents a second per channel, 800 samples each at 32 kHz            A = round(N / 24 * 40)

Source of every formula: the reference pipeline (diffusers ``modular_pipelines/minimax_h3``) as summed up in the
package's documentation; the canvas rules are its ``short edge 768, area <= 768 x 1344`` rule.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

from .errors import H3Error

FPS = 24
SAMPLE_RATE = 32000
AUDIO_HOP = 800
AUDIO_LATENT_RATE = SAMPLE_RATE // AUDIO_HOP  # 40 audio latents a second and channel
AUDIO_CHANNELS = 2

PIXELS_PER_LATENT = 16
PIXELS_PER_TOKEN = 32  # one DiT row covers 2x2 latents
CLIP_FRAMES = 17  # frames that one encoder clip turns into 5 latents
CLIP_LATENTS = 5
FRAME_GROUP = (1, 4, 4, 4, 4)  # pixel frames behind latents 0..4 of every clip
LATENT_SPAN = 5 / 3  # rotary time units of one pixel frame

MIN_FRAMES = 5
TRAINED_FRAMES = (124, 362)
DEFAULT_FRAMES = 124
DEFAULT_RATIO = (16, 9)
SHORT_EDGE = 768
MAX_AREA = 768 * 1344
RATIO_LIMITS = (1 / 4, 4)


def is_whole(value: object) -> bool:
    """Whether ``value`` counts something: an integer, numpy's included, and not a bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether ``value`` measures something: a real number, numpy's included, neither a bool nor NaN nor infinite."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def snap_frames(frames: int) -> int:
    """The smallest N = 17k + 5 that is >= ``frames`` (at least 5). Below 1 frame: H3Error."""
    if not is_whole(frames):
        raise H3Error(f"frames is {frames!r}: give a whole number of at least 1")
    if frames < 1:
        raise H3Error(f"frames is {frames}: give at least 1 (it is raised to the next 17k + 5; the shortest clip is 5)")
    return max(0, -(-(int(frames) - MIN_FRAMES) // CLIP_FRAMES)) * CLIP_FRAMES + MIN_FRAMES


def floor_frames(frames: int) -> int:
    """The largest encodable clip length 17k + 5 that is <= ``frames``; 1 when fewer than 5 frames are left."""
    if frames < MIN_FRAMES:
        return 1
    return (frames - MIN_FRAMES) // CLIP_FRAMES * CLIP_FRAMES + MIN_FRAMES


def latent_frames(num_frames: int) -> int:
    """Video latent frames of a clip of 17k + 5 pixel frames: 5k + 2. One single frame has one latent."""
    if num_frames == 1:
        return 1
    assert num_frames >= MIN_FRAMES and (num_frames - MIN_FRAMES) % CLIP_FRAMES == 0, num_frames
    return (num_frames - MIN_FRAMES) // CLIP_FRAMES * CLIP_LATENTS + 2


def pixel_frames(latent_t: int) -> int:
    """Pixel frames of ``latent_t`` latents (5k + 2 -> 17k + 5; 1 -> 1)."""
    if latent_t == 1:
        return 1
    assert latent_t >= 2 and (latent_t - 2) % CLIP_LATENTS == 0, latent_t
    return (latent_t - 2) // CLIP_LATENTS * CLIP_FRAMES + MIN_FRAMES


def audio_latents(num_frames: int) -> int:
    """Audio latents per channel of ``num_frames`` pixel frames: round(N / 24 * 40)."""
    return round(num_frames / FPS * AUDIO_LATENT_RATE)


def audio_samples(num_frames: int) -> int:
    """Sound samples per channel that a saved clip of ``num_frames`` frames holds: round(N / 24 * 32000)."""
    return round(num_frames / FPS * SAMPLE_RATE)


def frame_groups(latent_t: int) -> list[range]:
    """Pixel frames behind each video latent: group sizes 1,4,4,4,4 repeating every 17 frames."""
    groups, start = [], 0
    for index in range(latent_t):
        size = FRAME_GROUP[index % CLIP_LATENTS]
        groups.append(range(start, start + size))
        start += size
    return groups


@dataclass(frozen=True)
class Canvas:
    """The size of a render in pixels and latents. Made by ``Canvas.fit``; nothing else snaps sizes.

    ``notes`` are the sentences about what was rounded or raised, for the report.
    """

    width: int
    height: int
    num_frames: int
    notes: tuple[str, ...] = ()

    @property
    def latent_t(self) -> int:
        return latent_frames(self.num_frames)

    @property
    def latent_h(self) -> int:
        return self.height // PIXELS_PER_LATENT

    @property
    def latent_w(self) -> int:
        return self.width // PIXELS_PER_LATENT

    @property
    def audio_t(self) -> int:
        return audio_latents(self.num_frames)

    @property
    def audio_samples(self) -> int:
        return audio_samples(self.num_frames)

    @property
    def seconds(self) -> float:
        return self.num_frames / FPS

    @property
    def rows_video(self) -> int:
        return self.latent_t * (self.latent_h // 2) * (self.latent_w // 2)

    @property
    def rows_audio(self) -> int:
        return AUDIO_CHANNELS * self.audio_t

    @staticmethod
    def fit(
        frames: int = DEFAULT_FRAMES,
        size: tuple[int, int] | None = None,
        ratio: float | tuple[int, int] | None = None,
        megapixels: float | None = None,
    ) -> Canvas:
        """Make a canvas from an explicit ``size`` (width, height), or from a ``ratio`` and ``megapixels``.

        An explicit size must be multiples of 32. A ratio gives the trained canvas: short edge 768, scaled down where
        the area passes 768 x 1344, each axis rounded to 32; ``megapixels`` (10^6 pixels) replaces that area rule.
        Raises H3Error for what cannot be used.
        """
        notes = []
        num_frames = snap_frames(frames)
        if num_frames != frames:
            notes.append(f"frames raised from {frames} to {num_frames} (clips are 17k + 5 frames long)")
        if size is not None:
            width, height = _checked_size(size)
            if ratio is not None or megapixels is not None:
                raise H3Error(f"size {width}x{height} was given together with a ratio or megapixels: give one of them")
        else:
            width, height = _fit_ratio(DEFAULT_RATIO if ratio is None else ratio, megapixels)
            if ratio is not None or megapixels is not None:
                notes.append(f"canvas fitted to {width}x{height}")
        if not TRAINED_FRAMES[0] <= num_frames <= TRAINED_FRAMES[1]:
            low, high = TRAINED_FRAMES
            notes.append(f"{num_frames} frames is outside the trained range {low}..{high}")
        return Canvas(width, height, num_frames, tuple(notes))


def _checked_size(size: tuple[int, int]) -> tuple[int, int]:
    if not isinstance(size, (tuple, list)) or len(size) != 2:
        raise H3Error(f"size is {size!r}: give width and height in pixels, e.g. (1344, 768)")
    return _checked_edge("width", size[0]), _checked_edge("height", size[1])


def _checked_edge(name: str, edge: int) -> int:
    if not is_whole(edge) or edge < PIXELS_PER_TOKEN:
        raise H3Error(f"{name} is {edge!r}: give a multiple of {PIXELS_PER_TOKEN} of at least {PIXELS_PER_TOKEN}")
    if edge % PIXELS_PER_TOKEN:
        below = edge // PIXELS_PER_TOKEN * PIXELS_PER_TOKEN
        raise H3Error(
            f"{name} {edge} is not a multiple of {PIXELS_PER_TOKEN}: "
            f"the nearest are {below} and {below + PIXELS_PER_TOKEN}"
        )
    return int(edge)


def ratio_value(ratio: float | tuple[int, int]) -> float:
    """A ratio as width / height, checked against 1:4..4:1."""
    sides = ratio if isinstance(ratio, (tuple, list)) else (ratio, 1)
    usable = len(sides) == 2 and all(is_number(side) and side > 0 for side in sides)
    value = sides[0] / sides[1] if usable else math.nan
    low, high = RATIO_LIMITS
    if not low <= value <= high:
        raise H3Error(f"ratio {ratio} is outside 1:4..4:1: choose one inside, or give an explicit size")
    return value


def _fit_ratio(ratio: float | tuple[int, int], megapixels: float | None) -> tuple[int, int]:
    value = ratio_value(ratio)
    if megapixels is not None:
        if not (is_number(megapixels) and 0.001 <= megapixels <= 64):
            raise H3Error(f"megapixels is {megapixels!r}: give 0.001 to 64")
        width = math.sqrt(megapixels * 1e6 * value)
        height = width / value
    else:
        width, height = (SHORT_EDGE * value, SHORT_EDGE) if value >= 1 else (SHORT_EDGE, SHORT_EDGE / value)
        if width * height > MAX_AREA:
            scale = math.sqrt(MAX_AREA / (width * height))
            width, height = width * scale, height * scale
    return _round_edge(width), _round_edge(height)


def _round_edge(edge: float) -> int:
    return max(PIXELS_PER_TOKEN, round(edge / PIXELS_PER_TOKEN) * PIXELS_PER_TOKEN)
