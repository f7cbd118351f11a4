"""Full self-attention over the packed sequence, in canonical head groups, with partial rotary embedding.

    x [S, H] ──per group of 8 heads──▶ q, k, v [S, G, D] ─norm─rotate─▶ attention ─▶ out[:, group] ──▶ out_proj by rows
                                                                                   [S, heads * D]

Only one group's q, k, v exist at a time; they are written into one output buffer. The group size is fixed: it is part
of the baseline, so a render has the same bits whatever the card holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEAD_GROUP = 8  # heads whose q, k, v exist at one time (canonical: the baseline's bits depend on it)
ROW_CHUNK = 2048  # rows of a feed-forward, projection or head chunk (canonical likewise)
ROTARY_BASE = 10000.0


class ChunkSizes(NamedTuple):
    """Heads whose q, k, v exist at one time, and rows of a chunk inside a block.

    The defaults are the canonical ones. Smaller ones take less memory and change the order of sums: EXACT MATH.
    """

    heads: int = HEAD_GROUP
    rows: int = ROW_CHUNK


CANONICAL = ChunkSizes()


class Where(NamedTuple):
    """Which attention call this is: block index (-1 - i for refiner block i), forward index, first and last head."""

    block: int
    forward: int
    head_start: int
    head_stop: int


AttentionCall = Callable[[Tensor, Tensor, Tensor, Where], Tensor]


class Linear(nn.Linear):
    """nn.Linear that can also compute a range of its outputs, ``rows(prepare(x), start, stop)``: [..., in] -> [..., n].

    ``prepare`` holds what is done once however many ranges follow: nothing here, quantising x in a quantised linear.
    """

    def prepare(self, x: Tensor) -> Tensor:
        return x

    def rows(self, x: Tensor, start: int, stop: int) -> Tensor:
        return F.linear(x, self.weight[start:stop], None if self.bias is None else self.bias[start:stop])


def row_chunks(start: int, stop: int, size: int = ROW_CHUNK) -> Iterator[tuple[int, int]]:
    """Canonical chunks of the rows start..stop: cut at start + k * size."""
    for first in range(start, stop, size):
        yield first, min(first + size, stop)


def inverse_frequencies(count: int) -> Tensor:
    """float32 [count]: 1 / 10000^(2i / (2 * count)), shared by the three axes."""
    return 1.0 / (ROTARY_BASE ** (torch.arange(0, 2 * count, 2, dtype=torch.float32) / (2 * count)))


def rotary_table(positions: Tensor, inv_freq: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [S, 3 * F] of ``positions`` float64 [S, 3], in the compute dtype; angles t | h | w in float32."""
    angles = positions.to(device=inv_freq.device, dtype=torch.float32)[:, :, None] * inv_freq  # [S, 3, F]
    angles = angles.flatten(1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2 * 3F channels of x [S, G, D] in place, half-split: pairs (c, c + 3F)."""
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).add_(turned)
    return x


def norm_rotate(x: Tensor, norm: nn.RMSNorm, rotary: tuple[Tensor, Tensor] | None, size: int) -> Tensor:
    """norm(x), rotated: [S, G, D] -> [S, G, D] with each head's rows side by side in memory.

    In chunks of ``size`` rows, so that the temporaries stay small. The last pass has to write somewhere: head by head
    costs nothing here, and attention reads whole heads.
    """
    out = x.new_empty(x.shape[1], x.shape[0], x.shape[2]).transpose(0, 1)
    for start, stop in row_chunks(0, x.shape[0], size):
        y = norm(x[start:stop])
        if rotary is not None:
            rotate_(y, *(table[start:stop] for table in rotary))
        out[start:stop] = y
    return out


def dense_attention(q: Tensor, k: Tensor, v: Tensor, where: Where) -> Tensor:
    """softmax(q k^T / sqrt(D)) v over all rows, by PyTorch's SDPA. q, k, v [S, G, D] -> [S, G, D]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, G, S, D]
    if v.device.type == "cpu" and v.itemsize < 4:  # its kernel walks k and v once per few queries
        v = v.contiguous()
    return F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1)


class Attention(nn.Module):
    """q/k/v and output projections with per-head q/k RMSNorm. qkv rows are stacked Q; K; V (ComfyUI layout)."""

    def __init__(self, hidden: int, heads: int, head_dim: int, eps: float):
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.qkv_proj = Linear(hidden, 3 * heads * head_dim, bias=False)
        self.out_proj = Linear(heads * head_dim, hidden, bias=False)
        self.q_norm = nn.RMSNorm(head_dim, eps=eps)
        self.k_norm = nn.RMSNorm(head_dim, eps=eps)

    def attend(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        call: AttentionCall,
        block: int,
        forward: int,
        chunks: ChunkSizes = CANONICAL,
    ) -> Tensor:
        """x [S, hidden], normed and modulated -> [S, heads * head_dim], before the output projection."""
        rows, inner = x.shape[0], self.heads * self.head_dim
        out = x.new_empty(rows, self.heads, self.head_dim)
        prepared = self.qkv_proj.prepare(x)
        for start in range(0, self.heads, chunks.heads):
            stop = min(start + chunks.heads, self.heads)
            q, k, v = (
                self.qkv_proj.rows(prepared, part + start * self.head_dim, part + stop * self.head_dim).view(
                    rows, stop - start, self.head_dim
                )
                for part in (0, inner, 2 * inner)
            )
            q = norm_rotate(q, self.q_norm, rotary, chunks.rows)
            k = norm_rotate(k, self.k_norm, rotary, chunks.rows)
            out[:, start:stop] = call(q, k, v, Where(block, forward, start, stop))
            del q, k, v
        return out.view(rows, inner)


class FeedForward(nn.Module):
    """fc2(silu(gate) * value) with fc1 rows gate; value (ComfyUI layout)."""

    def __init__(self, hidden: int, ffn: int):
        super().__init__()
        self.fc1 = Linear(hidden, 2 * ffn, bias=False)
        self.fc2 = Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[n, hidden] -> [n, hidden]; canonical row chunks by the caller; fc2 reads a view of fc1's output."""
        gate, value = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(F.silu(gate, inplace=True).mul_(value))
