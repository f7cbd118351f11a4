"""Where the video VAE cuts a clip, in space and in time, and how the pieces are put together again.

    space   |<---- tile ---->|              tiles of 16 latents (256 px) that overlap by at least 4 (64 px);
                        |<---- tile ---->|  what is too much is spread over the overlaps one latent at a time
    seam     left tile fades out, right tile fades in, linearly over the whole overlap

    time    latents  0 1 2 3 4 5 6                  each clip is 7 latents = 28 frames, its first 3 are dropped
                               5 6 7 8 9 10 11      and so are the 3 after frame 20:
    frames  clip 0   ...[17 frames]...[5]           17 are kept, 5 more fade into the next clip's first 5
            clip 1                    [17 frames]...[5]

Both plans are part of the reference (the decoder was trained on 256 px tiles); numbers come from diffusers'
``AutoencoderKLMiniMaxH3``. Nothing here knows of networks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import H3Error
from ..geometry import CLIP_FRAMES, CLIP_LATENTS, PIXELS_PER_LATENT

FRAMES_PER_LATENT = 4
TILE = 256  # pixels; other sizes are APPROXIMATE
TILE_OVERLAP = 64  # pixels, at least
SMALLEST_TILE = 2 * TILE_OVERLAP
DROPPED_LATENTS = 3  # at the end of every encoded clip longer than one frame

LEAD_FRAMES = -CLIP_FRAMES % FRAMES_PER_LATENT  # 3: decoded in front of a group of 5 latents, never shown
OVERLAP_LATENTS = -DROPPED_LATENTS % CLIP_LATENTS  # 2
OVERLAP_FRAMES = OVERLAP_LATENTS * FRAMES_PER_LATENT - LEAD_FRAMES  # 5


@dataclass(frozen=True)
class Axis:
    """Tiles along one edge: where each starts, how long all are, and the overlap of each with the next."""

    starts: tuple[int, ...]
    size: int
    overlaps: tuple[int, ...]

    @staticmethod
    def split(length: int, tile: int, overlap: int) -> Axis:
        """The fewest tiles that cover ``length`` with at least ``overlap`` between neighbours, exactly to the end."""
        if length <= tile:
            return Axis((0,), length, ())
        count = -((overlap - length) // (tile - overlap))  # ceil((length - overlap) / (tile - overlap))
        each, more = divmod(tile * count - overlap * (count - 1) - length, count - 1)
        overlaps = tuple(overlap + each + (index < more) for index in range(count - 1))
        starts = [0]
        for shared in overlaps:
            starts.append(starts[-1] + tile - shared)
        return Axis(tuple(starts), tile, overlaps)

    def scaled(self, factor: int) -> Axis:
        return Axis(
            tuple(start * factor for start in self.starts),
            self.size * factor,
            tuple(overlap * factor for overlap in self.overlaps),
        )

    @property
    def length(self) -> int:
        return self.starts[-1] + self.size

    def slice(self, index: int) -> slice:
        return slice(self.starts[index], self.starts[index] + self.size)


@dataclass(frozen=True)
class TilePlan:
    """The tiles of one canvas, row by row. ``latents`` counts in latents, ``scaled(16)`` the same in pixels."""

    rows: Axis
    columns: Axis

    @staticmethod
    def latents(height: int, width: int, tile: int = TILE) -> TilePlan:
        """The plan of a canvas of ``height`` x ``width`` latents; ``tile`` in pixels. H3Error for an unusable tile."""
        if tile % PIXELS_PER_LATENT or tile < SMALLEST_TILE:
            raise H3Error(
                f"tile {tile} cannot be used: give a multiple of {PIXELS_PER_LATENT} of at least {SMALLEST_TILE} "
                f"({TILE} is what the decoder was trained on)"
            )
        size, overlap = tile // PIXELS_PER_LATENT, TILE_OVERLAP // PIXELS_PER_LATENT
        return TilePlan(Axis.split(height, size, overlap), Axis.split(width, size, overlap))

    def scaled(self, factor: int) -> TilePlan:
        return TilePlan(self.rows.scaled(factor), self.columns.scaled(factor))

    def __len__(self) -> int:
        return len(self.rows.starts) * len(self.columns.starts)

    def windows(self) -> list[tuple[slice, slice]]:
        """(vertical, horizontal) slices of every tile, row by row: the order ``Stitcher.add`` expects."""
        return [
            (self.rows.slice(row), self.columns.slice(column))
            for row in range(len(self.rows.starts))
            for column in range(len(self.columns.starts))
        ]


class Stitcher:
    """Blends tiles into one canvas as they come, row by row, holding only the canvas and the seams to come.

    A tile fades in over the UNBLENDED end of its upper neighbour, then over that of its left one (the reference's
    order; it decides the corners). ``add`` overwrites the tile it is given.
    """

    def __init__(self, plan: TilePlan):
        self._plan = plan
        self._count = 0
        self._canvas: torch.Tensor | None = None
        self._lower: list[torch.Tensor] = []  # per column, the lower end of the row above
        self._right: torch.Tensor | None = None

    def add(self, tile: torch.Tensor) -> None:
        """Take the next tile [..., rows.size, columns.size]."""
        plan = self._plan
        row, column = divmod(self._count, len(plan.columns.starts))
        assert row < len(plan.rows.starts) and tile.shape[-2:] == (plan.rows.size, plan.columns.size), tile.shape
        self._count += 1
        if self._canvas is None:
            self._canvas = tile.new_empty(*tile.shape[:-2], plan.rows.length, plan.columns.length)
        height, width = plan.rows.size, plan.columns.size
        lower = right = None
        if row < len(plan.rows.overlaps):
            height -= plan.rows.overlaps[row]
            lower = tile[..., height:, :].clone()
        if column < len(plan.columns.overlaps):
            width -= plan.columns.overlaps[column]
            right = tile[..., width:].clone()
        if row:
            blend_in(tile, self._lower[column], dim=-2)
        if column:
            blend_in(tile, self._right, dim=-1)
        if lower is not None:
            self._lower[column : column + 1] = [lower]
        self._right = right
        top, left = plan.rows.starts[row], plan.columns.starts[column]
        self._canvas[..., top : top + height, left : left + width] = tile[..., :height, :width]

    def finish(self) -> torch.Tensor:
        """The whole canvas [..., rows.length, columns.length]; every tile must have come."""
        assert self._count == len(self._plan) and self._canvas is not None, self._count
        self._lower, self._right = [], None
        return self._canvas


def blend_in(new: torch.Tensor, old_end: torch.Tensor, dim: int) -> None:
    """Fade ``old_end`` out and the start of ``new`` in along ``dim``, in place in ``new``; ``old_end`` is used up.

    Weight of the new at position i of n is i / n, so the first position is all old.
    """
    extent = old_end.shape[dim]
    shape = [1] * new.ndim
    shape[dim] = extent
    rising = (torch.arange(extent, device=new.device, dtype=new.dtype) / extent).view(shape)
    new.narrow(dim, 0, extent).mul_(rising).add_(old_end.mul_(1 - rising))


@dataclass(frozen=True)
class DecodeClip:
    """One run of the decoder: the latents that go in and the decoded frames that are kept, in order.

    ``head`` frames become part of the clip (the first 5 blended with the tail before); ``tail`` frames are blended
    into the next clip or, after the last one, end the video.
    """

    latents: tuple[int, ...]
    head: slice
    tail: slice | None

    @property
    def head_frames(self) -> int:
        return self.head.stop - self.head.start


def decode_clips(latent_t: int) -> list[DecodeClip]:
    """The decoder runs of ``latent_t`` = 1 or 5k + 2 latents, as drawn above.

    One latent is decoded alone and the last of its 4 frames is kept; two are padded to seven by repeating the last,
    and 5 frames are kept. Any other count: H3Error.
    """
    if latent_t == 1:
        return [DecodeClip((0,), slice(LEAD_FRAMES, FRAMES_PER_LATENT), None)]
    shown = CLIP_LATENTS * FRAMES_PER_LATENT
    window = CLIP_LATENTS + OVERLAP_LATENTS
    if latent_t == OVERLAP_LATENTS:
        latents = tuple(min(index, latent_t - 1) for index in range(window))
        return [DecodeClip(latents, slice(LEAD_FRAMES, LEAD_FRAMES + OVERLAP_FRAMES), None)]
    clips, rest = divmod(latent_t - OVERLAP_LATENTS, CLIP_LATENTS)
    if latent_t < 1 or rest:
        below = max(1, latent_t - rest) if latent_t > OVERLAP_LATENTS else 1
        above = latent_t - rest + CLIP_LATENTS if latent_t > OVERLAP_LATENTS else OVERLAP_LATENTS
        raise H3Error(
            f"the video latent has {latent_t} frames: it must have 1 or 5k + 2, the nearest are {below} and {above}"
        )
    head = slice(LEAD_FRAMES, shown)
    tail = slice(shown + LEAD_FRAMES, shown + LEAD_FRAMES + OVERLAP_FRAMES)
    return [
        DecodeClip(tuple(range(index * CLIP_LATENTS, index * CLIP_LATENTS + window)), head, tail)
        for index in range(clips)
    ]


def encode_clips(frames: int) -> list[tuple[int, ...]]:
    """The frames of every encoder run: one frame alone, else 17 at a time, the last filled with the last frame."""
    if frames == 1:
        return [(0,)]
    return [
        tuple(min(index, frames - 1) for index in range(start, start + CLIP_FRAMES))
        for start in range(0, frames, CLIP_FRAMES)
    ]
