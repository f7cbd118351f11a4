"""Block-sparse attention for picture rows: each block of them reads the blocks of the picture that matter to it.

              keys   text | conditions | sound |  picture blocks  0  1  2  3  4  5
    queries   text .. sound                    dense: all keys, by the kernel below
              picture block i  dense ──────────┘  own block, and the best of the rest by mean(q) . mean(k)

The blocks are chosen per head from block means, as the coarse stage of VSA (arXiv 2505.13389) and SpargeAttn
(arXiv 2502.18137) do; what is not picture stays dense on both sides, and the first and last forwards, which lay out the
scene and its finest detail, are dense altogether. A block is ``block`` rows in packed order (rows of one frame, line by
line); rows behind the last full block stay dense too. The softmax runs over the chosen keys only.

The chosen keys of some query blocks at a time are gathered and handed to SDPA, so it runs wherever SDPA does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.attention import HEAD_GROUP, Where
from .base import TAIL, WARMUP, Accelerator, Options, Window, option

GATHERED = 256 << 20  # bytes of gathered keys and values at one time


@dataclass(frozen=True)
class SparseOptions(Options):
    keep: float = option(0.3, "Share of the picture's blocks that each block reads.", 0.02, 1.0)
    block: int = option(128, "Rows of a block.", 4, 1024)
    warmup: int = option(8, WARMUP, 0, 100)
    tail: int = option(2, TAIL, 0, 100)


class SparseAttention(Accelerator):
    """See the module's picture."""

    name = "sparse"
    words = "Picture rows attend to the blocks of the picture that matter; text, conditions and sound stay dense."
    fidelity = "accelerator/sparse"
    Options = SparseOptions
    excludes = {"attention": "both replace the attention kernel, and only one can"}  # noqa: RUF012
    leaves_out_blocks = False

    def prepare(self, dit, job, layout, steps) -> None:
        self.start, own = layout.target_video.start, self.options
        self.window = Window.of(job, steps, own.warmup, own.tail)
        self.blocks = len(layout.target_video) // own.block
        self.chosen = chosen_blocks(self.blocks, own.keep)
        self.sparse = self.dense = 0

    def wrap_attention(self, call: Callable) -> Callable:
        def attention(q: Tensor, k: Tensor, v: Tensor, where: Where) -> Tensor:
            if self.window.full(where.forward) or self.chosen == self.blocks:
                self.dense += 1
                return call(q, k, v, where)
            self.sparse += 1
            end = self.start + self.blocks * self.options.block
            out = torch.empty_like(v)
            for first, last in ((0, self.start), (end, q.shape[0])):
                if first < last:
                    out[first:last] = call(q[first:last], k, v, where)
            sparse_attention(q, k, v, (self.start, end), self.options.block, self.chosen, out)
            return out

        return attention

    def bytes(self, layout, config, item: int = 2) -> int:
        """The gathered keys and values, half as much while they are gathered, and a second output: a group of heads."""
        heads = min(HEAD_GROUP, config.heads)
        one = layout.num_rows * heads * config.head_dim * item
        blocks = len(layout.target_video) // self.options.block
        keys = layout.num_rows - (blocks - chosen_blocks(blocks, self.options.keep)) * self.options.block
        least = 3 * keys * heads * config.head_dim * item  # of one block of queries
        return one + max(least, min(GATHERED * 3 // 2, blocks * least))

    def state(self) -> dict[str, Tensor]:
        return {"counts": torch.tensor([self.sparse, self.dense])}

    def restore(self, state: dict[str, Tensor]) -> None:
        if "counts" in state:
            self.sparse, self.dense = state["counts"].tolist()

    def stats(self) -> dict:
        return {
            "sparse_calls": self.sparse,
            "dense_calls": self.dense,
            "blocks": self.blocks,
            "blocks_read": self.chosen,
        }

    def notes(self) -> list[str]:
        if self.sparse:
            return [
                f"sparse: {self.sparse} of {self.sparse + self.dense} attention calls read {self.chosen} of "
                f"{self.blocks} picture blocks"
            ]
        why = "warm-up and tail cover all forwards"
        if self.chosen == self.blocks:
            why = f"the picture has {self.blocks} blocks of {self.options.block} rows and all of them are kept"
        return [f"sparse did not engage: {why}"]


def chosen_blocks(blocks: int, keep: float) -> int:
    """How many of ``blocks`` each block reads, its own included."""
    return min(blocks, max(1, round(blocks * keep)))


def choose(q: Tensor, k: Tensor, count: int) -> Tensor:
    """Block means q, k [G, n, D] -> int64 [G, n, count]: each block's own, then the best by dot product, ascending."""
    scores = q.float() @ k.float().transpose(1, 2)
    scores.diagonal(dim1=1, dim2=2).fill_(float("inf"))
    return scores.topk(count, dim=-1).indices.sort(dim=-1).values


def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, span: tuple[int, int], block: int, count: int, out: Tensor
) -> None:
    """out[span] <- attention of the rows ``span`` (whole blocks) to all rows outside it and to ``count`` of its blocks.

    q, k, v, out [S, G, D].
    """
    start, end = span
    heads, width = q.shape[1], q.shape[2]
    blocks = (end - start) // block

    def cut(x: Tensor) -> Tensor:  # [S, G, D] -> [G, blocks, block, D]
        return x[start:end].view(blocks, block, heads, width).permute(2, 0, 1, 3)

    queries, keys, values = cut(q), cut(k), cut(v)
    chosen = choose(queries.mean(2), keys.mean(2), count)  # [G, blocks, count]
    rest = [torch.cat((x[:start], x[end:])).transpose(0, 1)[None] for x in (k, v)]  # [1, G, rows, D]
    length = count * block + rest[0].shape[2]
    at_once = max(1, GATHERED // (2 * length * heads * width * q.element_size()))
    group = torch.arange(heads, device=q.device)[:, None, None]
    for first in range(0, blocks, at_once):
        last = min(first + at_once, blocks)
        which = chosen[:, first:last]
        gathered = []
        for x, dense in zip((keys, values), rest):
            picked = torch.empty(last - first, heads, length, width, dtype=x.dtype, device=x.device)
            near = picked[:, :, : count * block].unflatten(2, (count, block))  # [n, G, count, block, D]
            near.copy_(x[group, which].transpose(0, 1))
            picked[:, :, count * block :] = dense
            gathered.append(picked)
        done = F.scaled_dot_product_attention(queries[:, first:last].transpose(0, 1), *gathered)  # [n, G, block, D]
        rows = slice(start + first * block, start + last * block)
        out[rows] = done.transpose(1, 2).reshape(-1, heads, width)
