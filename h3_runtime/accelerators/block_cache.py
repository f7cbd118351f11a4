"""First-block cache: when the first block changes its input as it did before, the other blocks' change is reused.

    h ──block 0──▶ h + d          d, compared with the d of the last computed forward:
                                    picture rows: |d - d'| / |d'|  <  video threshold  ┐ both
                                    sound rows:   |d - d'| / |d'|  <  audio threshold  ┘
    both below ──▶ h + d + r      r: what blocks 1..n-1 added in that forward; they do not run and are not loaded
    else       ──▶ blocks 1..n-1 run, d and r are taken anew

The rule is ParaAttention's first-block cache (github.com/chengzeyi/ParaAttention, after TeaCache, arXiv 2411.19108),
with three differences: the sound decides too, on its own rows and threshold, because a change that is small in the
picture can be all of the sound; rows that a mask keeps have no say; and d is compared with the last COMPUTED forward's,
so that small changes cannot add up unseen. Warm-up and tail forwards and every forward after ``most`` reused ones in a
row are computed. Distances are sums of absolute values in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..models.attention import row_chunks
from .base import AT_FORWARD, TAIL, WARMUP, Accelerator, Options, Streams, Window, option

STREAMS = ("video", "audio")


@dataclass(frozen=True)
class BlockCacheOptions(Options):
    video: float = option(0.08, "Largest relative change of the picture at which blocks are left out.", 0.0, 10.0)
    audio: float = option(0.05, "Largest relative change of the sound at which blocks are left out.", 0.0, 10.0)
    warmup: int = option(4, WARMUP, 1, 100)
    tail: int = option(2, TAIL, 0, 100)
    most: int = option(3, "Forwards in a row that may reuse; the next one is computed.", 1, 100)


class BlockCache(Accelerator):
    """See the module's picture."""

    name = "block-cache"
    words = "Leaves out all blocks but the first where it changes picture and sound as it did before."
    fidelity = "accelerator/block-cache"
    Options = BlockCacheOptions
    excludes = {  # noqa: RUF012
        "forecast": "both leave out forwards, and each would judge by the other's guesses",
        "compile": "a step cache beside compiled blocks is unsafe: a failed recording may end the process",
    }
    keeps_state = True

    def prepare(self, dit, job, layout, steps) -> None:
        self.device, self.streams = dit.device, Streams.of(job, layout, dit.device)
        self.window = Window.of(job, steps, self.options.warmup, self.options.tail)
        self.first: dict[str, Tensor] = {}  # d of the last computed forward
        self.rest: dict[str, Tensor] = {}  # r of the same
        self.computed = self.reused = self.row = self.at = 0  # at: the last computed forward
        self.nearest = {stream: float("inf") for stream in STREAMS}

    def wrap_blocks(self, call: Callable) -> Callable:
        def blocks(h: Tensor, step, start: int, stop: int) -> Tensor:
            if start or stop < 2:
                return call(h, step, start, stop)
            first = {stream: self._rows(h, stream).clone() for stream in STREAMS}
            h = call(h, step, 0, 1)
            for stream in STREAMS:
                torch.sub(self._rows(h, stream), first[stream], out=first[stream])
            if self._may_reuse(first, step.index):
                self.reused, self.row = self.reused + 1, self.row + 1
                for stream in STREAMS:
                    self._rows(h, stream).add_(self.rest[stream])
                return h
            self.computed, self.row, self.first, self.at = self.computed + 1, 0, first, step.index
            if not self.rest:
                self.rest = {stream: torch.empty_like(first[stream]) for stream in STREAMS}
            for stream in STREAMS:
                self.rest[stream].copy_(self._rows(h, stream))
            h = call(h, step, 1, stop)
            for stream in STREAMS:
                torch.sub(self._rows(h, stream), self.rest[stream], out=self.rest[stream])
            return h

        return blocks

    def _rows(self, h: Tensor, stream: str) -> Tensor:
        segment = getattr(self.streams, stream)
        return h[segment.start : segment.stop]

    def _may_reuse(self, first: dict[str, Tensor], index: int) -> bool:
        if self.window.full(index) or not self.first or self.row >= self.options.most:
            return False
        changes = {stream: self._change(first[stream], stream) for stream in STREAMS}
        for stream, change in changes.items():
            self.nearest[stream] = min(self.nearest[stream], change)
        return all(changes[stream] < getattr(self.options, stream) for stream in STREAMS)

    def _change(self, new: Tensor, stream: str) -> float:
        """sum |new - old| / sum |old| over the rows that move; 0 where none does."""
        moves = getattr(self.streams, f"{stream}_moves")
        apart, whole = torch.zeros(2, device=new.device)
        for start, stop in row_chunks(0, new.shape[0]):
            old = self.first[stream][start:stop].float()
            difference = (new[start:stop].float() - old).abs_()
            if moves is not None:
                difference, old = difference[moves[start:stop]], old[moves[start:stop]]
            apart, whole = apart + difference.sum(), whole + old.abs_().sum()
        apart, whole = self.read(apart), self.read(whole)
        return apart / whole if whole else float("inf") if apart else 0.0

    def bytes(self, layout, config, item: int = 2) -> int:
        rows = len(layout.target_video) + len(layout.target_audio)
        return 3 * rows * config.hidden * item + 4 * min(2048, rows) * config.hidden * 4

    def state(self) -> dict[str, Tensor]:
        counts = torch.tensor([self.computed, self.reused, self.row, self.at])
        nearest = torch.tensor([self.nearest[stream] for stream in STREAMS], dtype=torch.float64)
        parts = {"first": self.first, "rest": self.rest}
        held = {f"{part}.{s}{AT_FORWARD}{self.at}": t for part, rows in parts.items() for s, t in rows.items()}
        return {"counts": counts, "nearest": nearest, **held}

    def restore(self, state: dict[str, Tensor]) -> None:
        if "counts" not in state:  # nothing was kept: the next forward is computed
            return
        self.computed, self.reused, self.row, self.at = state["counts"].tolist()
        self.nearest = dict(zip(STREAMS, state["nearest"].tolist()))
        name = "{}.{}" + f"{AT_FORWARD}{self.at}"
        held = [stream for stream in STREAMS if name.format("first", stream) in state]
        self.first = {stream: state[name.format("first", stream)].to(self.device) for stream in held}
        self.rest = {stream: state[name.format("rest", stream)].to(self.device) for stream in held}

    def stats(self) -> dict:
        nearest = {f"smallest_change_{s}": v if v != float("inf") else None for s, v in self.nearest.items()}
        return {"computed": self.computed, "reused": self.reused, **nearest}

    def notes(self) -> list[str]:
        total = self.computed + self.reused
        if self.reused:
            return [f"block-cache: {self.reused} of {total} forwards ran the first block only"]
        picture, sound = (self.nearest[stream] for stream in STREAMS)
        why = (
            f"the smallest change was {picture:.3g} of the picture (limit {self.options.video:g}) and {sound:.3g} of "
            f"the sound (limit {self.options.audio:g})"
            if picture != float("inf")
            else "warm-up and tail cover all of them"
        )
        return [f"block-cache did not engage: all {total} forwards were computed; {why}"]
