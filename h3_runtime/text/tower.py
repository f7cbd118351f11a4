"""Pictures and clips through the vision tower, a bounded number of patches at a time.

    pictures, then clips ──batches of up to 32,768 patches──▶ tower ─▶ rows for the words' places, and deepstack rows
       (a picture or frame pair is never cut)                           written into one buffer for each

The tower attends within a picture or a pair of frames only, so batches are free to choose; they are canonical, as the
bits of a matmul may depend on how many rows it has. Nine pictures in one go would take some 15 GB, one takes 1.6.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from .vision import MERGE, VisionInput

BATCH_PATCHES = 32_768  # canonical; a 2048 px 16:9 picture has 29,184


@dataclass(frozen=True)
class Look:
    """One picture or pair of frames: its patches float32 [h*w, 1536], its grid (h, w), and the first of the rows that
    hold its h*w/4 merged patches."""

    patches: Tensor
    grid: tuple[int, int]
    first: int

    @property
    def rows(self) -> int:
        return self.grid[0] * self.grid[1] // MERGE**2


@dataclass(frozen=True)
class Seen:
    """What pictures add after the first layers: ``deepstack[i]`` [n, D] after layer i, at rows ``spans`` in turn."""

    deepstack: tuple[Tensor, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()

    def add_(self, hidden: Tensor, layer: int) -> None:
        """Add what belongs after ``layer`` to hidden [S, D], in place."""
        if layer < len(self.deepstack):
            done = 0
            for start, stop in self.spans:
                hidden[start:stop] += self.deepstack[layer][done : done + stop - start]
                done += stop - start


def place(inputs: Sequence[VisionInput], is_pad: Tensor) -> list[Look]:
    """Each picture and pair of frames with its place; ``is_pad`` [S] marks the rows that pictures take."""
    runs = []
    for pad, group in groupby(range(len(is_pad)), is_pad.tolist().__getitem__):
        members = list(group)
        if pad:
            runs.append((members[0], len(members)))
    looks = []
    for value in inputs:
        t, h, w = value.grid
        for patches in value.patches.view(t, h * w, -1):
            first, length = runs[len(looks)]
            looks.append(Look(patches, (h, w), first))
            assert looks[-1].rows == length, "a picture's place and its grid differ"
    assert len(looks) == len(runs), "pictures and their places differ"
    return looks


def batches(looks: Sequence[Look], limit: int = BATCH_PATCHES) -> Iterator[list[int]]:
    """Indices of consecutive looks whose patches together stay within ``limit``; a larger one goes alone."""
    batch: list[int] = []
    patches = 0
    for index, look in enumerate(looks):
        if batch and patches + len(look.patches) > limit:
            yield batch
            batch, patches = [], 0
        batch.append(index)
        patches += len(look.patches)
    if batch:
        yield batch


def look_at(tower: nn.Module, looks: Sequence[Look], hidden: Tensor) -> Seen:
    """Write the pictures' rows into hidden [S, D], in place; returns what is to be added later.

    ``tower``: transformers' Qwen3-VL vision model, on hidden's device.
    """
    dtype = tower.patch_embed.proj.weight.dtype
    total = sum(look.rows for look in looks)
    starts = [sum(look.rows for look in looks[:index]) for index in range(len(looks))]
    deepstack = tuple(hidden.new_empty(total, hidden.shape[1]) for _ in tower.deepstack_merger_list)
    for batch in batches(looks):
        patches = torch.cat([looks[index].patches for index in batch]).to(device=hidden.device, dtype=dtype)
        grid = torch.tensor([(1, *looks[index].grid) for index in batch], device=hidden.device)  # [n, 3]
        rows, taps = _outputs(tower(patches, grid_thw=grid))  # [sum of rows, D] each
        del patches
        done = 0
        for index in batch:
            look, start = looks[index], starts[index]
            part = slice(done, done + look.rows)
            hidden[look.first : look.first + look.rows] = rows[part].to(hidden.dtype)
            for kept, tap in zip(deepstack, taps):
                kept[start : start + look.rows] = tap[part].to(kept.dtype)
            done += look.rows
        assert done == len(rows), (done, len(rows))
    return Seen(deepstack, tuple((look.first, look.first + look.rows) for look in looks))


def _outputs(made) -> tuple[Tensor, Sequence[Tensor]]:
    """(merged rows, deepstack rows) of the tower's answer: a tuple in transformers 4.57, named later."""
    if isinstance(made, tuple):
        return made[0], made[1]
    return made.pooler_output, made.deepstack_features
