"""The packed sequence: which row is what, and where it stands in the rotary grid.

    [ text | guide 0: video rows, sound rows | guide 1 ... | reference 0 ... | target sound | target video ]
      L      (keyframes are guides)            a reference's sound rows come BEFORE its video rows

    rotary time   text row i at (i, 0, 0); the media clock starts at L, references advance it one after another,
                  target (and guides) start where the references end; one pixel frame is 5/3 units, one audio latent 1
    rotary h, w   n = cells/2 points from (1 - r)/2 in steps of r/n, times 32, r = side / sqrt(h * w)

Structure is ints (``Segment``), data is tensors. Positions are float64 and summed in the reference's own order
(diffusers ``modular_pipelines/minimax_h3/before_denoise.py``), because bits of the angles depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .geometry import AUDIO_CHANNELS, FRAME_GROUP, LATENT_SPAN, pixel_frames
from .job import MODALITY_AUDIO, MODALITY_VIDEO, Guide, Reference
from .schedule import CONDITION_TIMESTEP

SPATIAL_SCALE = 32
IMAGE_SPAN = 1.0  # a picture reference advances the clock by one unit, not by a latent frame's 5/3
PATCH = 2

Shape3 = tuple[int, int, int]


@dataclass(frozen=True)
class Segment:
    """Rows start..stop of the packed sequence. ``kind``: text, guide_video, guide_audio, reference_video,
    reference_audio, audio or video; ``item`` is the index of its guide or reference; ``shape`` the latent (t, h, w)
    of picture rows or (a,) of sound rows; ``held`` is the timestep a weakened guide keeps, else None."""

    kind: str
    start: int
    stop: int
    item: int = 0
    shape: tuple[int, ...] = ()
    held: float | None = None

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def is_video(self) -> bool:
        return self.kind in ("guide_video", "reference_video", "video")

    @property
    def is_audio(self) -> bool:
        return self.kind in ("guide_audio", "reference_audio", "audio")

    @property
    def is_target(self) -> bool:
        return self.kind in ("audio", "video")


@dataclass(frozen=True)
class ConditionShape:
    """What the layout needs of a guide or reference: its latent sizes and, for a guide, its frame and strength."""

    video: Shape3 | None = None
    audio: int = 0
    frame_index: int = 0
    strength: float = 1.0
    kind: str = "guide"


@dataclass(frozen=True)
class PackedLayout:
    """``segments`` in packed order, ``positions`` float64 [S, 3] (t, h, w), ``text_tags`` int64 [L]."""

    segments: tuple[Segment, ...]
    positions: Tensor
    text_tags: Tensor

    @property
    def num_rows(self) -> int:
        return self.segments[-1].stop

    @property
    def text(self) -> Segment:
        return self.segments[0]

    @property
    def target_audio(self) -> Segment:
        return self.segments[-2]

    @property
    def target_video(self) -> Segment:
        return self.segments[-1]

    @property
    def conditions(self) -> tuple[Segment, ...]:
        return self.segments[1:-2]

    def video_rows(self) -> Tensor:
        """int64: packed row of every picture row, conditions first, then the target."""
        return _row_numbers(s for s in self.segments if s.is_video)

    def audio_rows(self) -> Tensor:
        """int64: packed row of every sound row, conditions first, then the target."""
        return _row_numbers(s for s in self.segments if s.is_audio)

    def row_tags(self) -> Tensor:
        """int64 [S]: the modality of every row (0 video, 1 text, 2 audio)."""
        tags = torch.empty(self.num_rows, dtype=torch.int64)
        for segment in self.segments:
            tag = self.text_tags if segment.kind == "text" else MODALITY_VIDEO if segment.is_video else MODALITY_AUDIO
            tags[segment.start : segment.stop] = tag
        return tags

    @staticmethod
    def of(text_tags: Tensor, canvas, guides: Sequence[Guide], references: Sequence[Reference]) -> PackedLayout:
        """The layout of a job's canvas, guides and references."""
        shapes = [ConditionShape(g.video_shape, g.audio_length, g.frame_index, g.strength) for g in guides]
        shapes += [ConditionShape(r.video_shape, r.audio_length, kind=r.kind) for r in references]
        return PackedLayout.build(
            text_tags, (canvas.latent_t, canvas.latent_h, canvas.latent_w), canvas.audio_t, shapes
        )

    @staticmethod
    def build(
        text_tags: Tensor, target: Shape3, audio_t: int, conditions: Sequence[ConditionShape] = ()
    ) -> PackedLayout:
        """Lay out text rows [L], guides, references and a target of ``target`` (T, h, w) and ``audio_t`` latents."""
        length = text_tags.shape[0]
        guides = [c for c in conditions if c.kind == "guide"]
        references = [c for c in conditions if c.kind != "guide"]
        _, width_grid = frame_grid(target[1], target[2])
        rows = _Rows(length)

        origin = float(length)
        placed_references = []
        for reference in references:  # the clock is walked first: guides stand on the TARGET's origin, after them
            placed_references.append((reference, origin))
            origin += reference_span(reference)
        for index, guide in enumerate(guides):
            at = guide_time(origin, guide.frame_index, target[0])
            if guide.video is not None:
                held = guide.strength * CONDITION_TIMESTEP if guide.strength < 1 else None
                rows.add_video("guide_video", index, guide.video, frame_times(guide.video[0], at), held)
            if guide.audio:
                held = guide.strength if guide.strength < 1 else None
                rows.add_audio("guide_audio", index, guide.audio, at, width_grid, held)
        for index, (reference, at) in enumerate(placed_references):
            if reference.audio:
                grid = width_grid if reference.video is None else frame_grid(*reference.video[1:])[1]
                rows.add_audio("reference_audio", index, reference.audio, at, grid)
            if reference.video is not None:
                rows.add_video("reference_video", index, reference.video, frame_times(reference.video[0], at))
        rows.add_audio("audio", 0, audio_t, origin, width_grid)
        rows.add_video("video", 0, target, frame_times(target[0], origin))
        return PackedLayout(tuple(rows.segments), torch.cat(rows.positions), text_tags)


class _Rows:
    """Collects segments and positions in packed order."""

    def __init__(self, length: int):
        text = torch.zeros(length, 3, dtype=torch.float64)
        text[:, 0] = torch.arange(length, dtype=torch.float64)
        self.segments = [Segment("text", 0, length)]
        self.positions = [text]

    def _append(self, kind: str, item: int, shape: tuple[int, ...], positions: Tensor, held: float | None) -> None:
        start = self.segments[-1].stop
        self.segments.append(Segment(kind, start, start + positions.shape[0], item, shape, held))
        self.positions.append(positions)

    def add_video(self, kind: str, item: int, shape: Shape3, times: Tensor, held: float | None = None) -> None:
        grid, _ = frame_grid(shape[1], shape[2])  # [n, 2]
        positions = torch.empty(shape[0], grid.shape[0], 3, dtype=torch.float64)
        positions[:, :, 0] = times[:, None]
        positions[:, :, 1:] = grid
        self._append(kind, item, shape, positions.reshape(-1, 3), held)

    def add_audio(
        self, kind: str, item: int, length: int, origin: float, width_grid: Tensor, held: float | None = None
    ) -> None:
        positions = torch.zeros(AUDIO_CHANNELS, length, 3, dtype=torch.float64)
        positions[:, :, 0] = origin + torch.arange(length, dtype=torch.float64)
        positions[0, :, 2] = width_grid[0]
        positions[1, :, 2] = width_grid[-1]
        self._append(kind, item, (length,), positions.reshape(-1, 3), held)


def latent_spans(latent_t: int) -> list[float]:
    """Rotary time of each latent frame: 5/3 * (1, 4, 4, 4, 4), repeating."""
    return [LATENT_SPAN * FRAME_GROUP[k % len(FRAME_GROUP)] for k in range(latent_t)]


def frame_times(latent_t: int, origin: float) -> Tensor:
    """float64 [latent_t]: origin + cumulative sum of the spans before each latent frame."""
    spans = torch.tensor(latent_spans(latent_t), dtype=torch.float64)
    return origin + torch.cat([torch.zeros(1, dtype=torch.float64), spans[:-1].cumsum(0)])


def guide_time(origin: float, frame_index: int, latent_t: int) -> float:
    """Rotary time of pixel frame ``frame_index`` of a target that starts at ``origin``.

    The last frame is summed by numpy over the latent spans, as the reference does: the pairwise order, and adding
    the origin before the last span is taken off, give other last bits than origin + 5/3 * frame.
    """
    if latent_t >= 2 and frame_index == pixel_frames(latent_t) - 1:
        return origin + float(np.array(latent_spans(latent_t), dtype=np.float64).sum()) - LATENT_SPAN
    return origin + LATENT_SPAN * frame_index


def reference_span(reference: ConditionShape) -> float:
    """How far a reference advances the clock: image 1, sound its latents, video max(soundtrack, its span)."""
    if reference.kind == "image":
        return IMAGE_SPAN
    if reference.kind == "audio":
        return float(reference.audio)
    return max(float(reference.audio), sum(latent_spans(reference.video[0])))


def axis_grid(cells: int, sqrt_area: float) -> np.ndarray:
    """float64 [cells / 2] points of one spatial axis, centred on 16, from the aspect-normalised unit interval."""
    ratio = cells / sqrt_area
    left = (1.0 - ratio) / 2.0
    return np.linspace(left, left + ratio, cells // PATCH, endpoint=False) * SPATIAL_SCALE


def frame_grid(height: int, width: int) -> tuple[Tensor, Tensor]:
    """float64 (h, w) of the rows of one latent frame [n, 2], and its width axis [w / 2]."""
    sqrt_area = math.sqrt(height * width)
    rows = torch.from_numpy(axis_grid(height, sqrt_area))
    columns = torch.from_numpy(axis_grid(width, sqrt_area))
    grid = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1).reshape(-1, 2)
    return grid, columns


def _row_numbers(segments) -> Tensor:
    return torch.cat([torch.arange(s.start, s.stop) for s in segments])


# --- latents <-> rows ------------------------------------------------------------------------------------------------


def patchify_video(latent: Tensor) -> Tensor:
    """[1, C, T, h, w] -> rows [T * h/2 * w/2, C * 4]: frame-major, row-major; in a row channel-major, then 2x2."""
    _, channels, frames, height, width = latent.shape
    x = latent.reshape(channels, frames, height // PATCH, PATCH, width // PATCH, PATCH)
    x = x.permute(1, 2, 4, 0, 3, 5)  # [T, h/2, w/2, C, 2, 2]
    return x.reshape(-1, channels * PATCH * PATCH).contiguous()


def unpatchify_video(rows: Tensor, shape: Shape3) -> Tensor:
    """Rows [T * h/2 * w/2, C * 4] -> [1, C, T, h, w]."""
    frames, height, width = shape
    channels = rows.shape[1] // (PATCH * PATCH)
    x = rows.reshape(frames, height // PATCH, width // PATCH, channels, PATCH, PATCH)
    x = x.permute(3, 0, 1, 4, 2, 5)  # [C, T, h/2, 2, w/2, 2]
    return x.reshape(1, channels, frames, height, width).contiguous()


def audio_to_rows(latent: Tensor) -> Tensor:
    """[1, C, 2, A] -> rows [2 * A, C]: all of left, then right."""
    return latent[0].permute(1, 2, 0).reshape(-1, latent.shape[1]).contiguous()


def rows_to_audio(rows: Tensor) -> Tensor:
    """Rows [2 * A, C] -> [1, C, 2, A]."""
    return rows.reshape(AUDIO_CHANNELS, -1, rows.shape[1]).permute(2, 0, 1)[None].contiguous()
