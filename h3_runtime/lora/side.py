"""A linear with low-rank updates beside it: the base is never touched.

    x ──▶ base ───────────────────────────▶ + ──▶ y
    └───▶ A [R, in] ──▶ low [.., R] ──▶ B ──┘        one A and B per range of rows (all, or q, k, v); the pairs of all
                                                     LoRAs stacked to R ranks; scale and strength are inside B

``rows`` computes a range of the outputs as the DiT's own ``Linear`` does, and ``prepare`` does once what every range
needs (the base's own preparation and the low-rank inputs), so that q, k and v of all head groups share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .opening import LowRank


class Prepared(NamedTuple):
    """An input made ready once: the base's prepared input, and [.., R] for each of the branches."""

    base: object
    low: tuple[Tensor, ...]


class Branch(nn.Module):
    """The updates of rows start..stop: a [R, in], b [stop - start, R], offset [R] or None, in the compute dtype."""

    def __init__(self, updates: Sequence[LowRank], dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.start, self.stop = updates[0].start, updates[0].stop
        place = {"device": device, "dtype": dtype}
        a = [low.a.float() for low in updates]
        b = [low.b.to(torch.float32) * low.scale for low in updates]
        # not in the state dict: that stays the checkpoint's, while .to() and buffers() see them
        self.register_buffer("a", torch.cat(a).to(**place), persistent=False)
        self.register_buffer("b", torch.cat(b, dim=1).to(**place), persistent=False)
        offset = None
        if any(low.offset is not None for low in updates):
            parts = [low.a.new_zeros(low.a.shape[0]) if low.offset is None else low.offset for low in updates]
            offset = torch.cat([part.float() for part in parts]).to(**place)
        self.register_buffer("offset", offset, persistent=False)

    def low(self, x: Tensor) -> Tensor:
        """x [.., in] -> [.., R]."""
        return F.linear(x.to(self.a.dtype), self.a, self.offset)

    def add_(self, y: Tensor, low: Tensor, start: int, stop: int) -> None:
        """y [.., stop - start], outputs start..stop of the linear, += what this branch has for them."""
        first, last = max(start, self.start), min(stop, self.stop)
        if first >= last:
            return
        b = self.b[first - self.start : last - self.start]
        part = y.view(-1, y.shape[-1])[:, first - start : last - start]  # [n, rows of both]
        low = low.view(-1, low.shape[-1])
        if part.dtype == b.dtype:
            part.addmm_(low, b.T)  # added inside the matmul: no copy of y's size
        else:
            part.add_((low @ b.T).to(part.dtype))


class LoraLinear(nn.Module):
    """``base`` with ``updates`` beside it, under the same calls: forward, rows, prepare. ``remove`` puts base back."""

    def __init__(self, base: nn.Module, updates: Sequence[LowRank], dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.base = base
        groups: dict[tuple[int, int], list[LowRank]] = {}
        for low in updates:
            groups.setdefault((low.start, low.stop), []).append(low)
        self.branches = nn.ModuleList(Branch(group, dtype, device) for group in groups.values())

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    @property
    def in_features(self) -> int:
        return self.base.in_features

    @property
    def out_features(self) -> int:
        return self.base.out_features

    def prepare(self, x: Tensor) -> Prepared:
        """x [.., in] -> what ``rows`` takes in its place."""
        ready = self.base.prepare(x) if hasattr(self.base, "prepare") else x
        return Prepared(ready, tuple(branch.low(x) for branch in self.branches))

    def forward(self, x: Tensor) -> Tensor:
        """[.., in] -> [.., out]."""
        y = self.base(x).contiguous()
        for branch in self.branches:
            branch.add_(y, branch.low(x), 0, self.out_features)
        return y

    def rows(self, x: Tensor | Prepared, start: int, stop: int) -> Tensor:
        """[.., in], or what ``prepare`` made of it, -> outputs start..stop [.., stop - start]."""
        ready = x if isinstance(x, Prepared) else None
        y = self.base.rows(x if ready is None else ready.base, start, stop).contiguous()
        for index, branch in enumerate(self.branches):
            if branch.start < stop and start < branch.stop:
                branch.add_(y, branch.low(x) if ready is None else ready.low[index], start, stop)
        return y
