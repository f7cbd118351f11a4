"""ConvRot: rotate each group of inputs, then quantise. One outlier is spread over its group, so 8 bits go further.

    weight [N, K] ──groups of g──▶ @ H ──▶ row scale = absmax / 127 ──▶ int8 [N, K], float32 [N, 1]     (once, stored)
    x      [M, K] ──groups of g──▶ @ H ──▶ row scale = absmax / 127 ──▶ int8 [M, K], float32 [M, 1]     (every call)

    H = kron(H4, H4, ...) / sqrt(g),  H4 = [1  1  1 -1]      symmetric and its own inverse: (x H)(w H)' = x w'
                                           [1  1 -1  1]
                                           [1 -1  1  1]
                                           [-1 1  1  1]

Weights are quantised in their own dtype, rounding where comfy-kitchen's eager quantiser rounds, so a file made here
holds the same bytes. Activations are quantised in float32, whatever they come in.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..errors import H3Error

GROUP = 256  # the group of the public files, where it divides the inputs
INT8_MAX = 127.0
FLOAT8_MAX = 448.0  # of float8_e4m3fn
SMALLEST_SCALE = 1e-30  # of an all-zero row
RIGHT = 16  # inner factor of the two-step rotation: H[g] = kron(H[g / 16], H[16])
ONE_STEP = 64  # largest group rotated in one matmul: the left factor of two steps would be 4 x 4, which no kernel likes
WEIGHT_CHUNK = 1 << 24  # elements of a weight that are quantised at a time
CPU_CHUNK = 1 << 20  # elements of activations at a time: their float32 copy stays in the cache
DEVICE_CHUNK = 1 << 25


@lru_cache(maxsize=32)
def hadamard(size: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
    """[size, size], entries +-1 / sqrt(size), exact in every float dtype. H3Error unless size is a power of four."""
    if size < 4 or 4 ** ((size.bit_length() - 1) // 2) != size:
        raise H3Error(f"ConvRot group {size} is not allowed: the group is a power of four, such as 16, 64 or 256")
    base = 1.0 - 2.0 * torch.eye(4).flip(0)
    matrix = base
    while matrix.shape[0] < size:
        matrix = torch.kron(matrix, base)
    return (matrix / size**0.5).to(device=device, dtype=dtype)


def choose_group(features: int, largest: int = GROUP) -> int | None:
    """The largest power of four up to ``largest`` that divides ``features``; None when 4 does not."""
    group = largest
    while group >= 4 and features % group:
        group //= 4
    return group if group >= 4 else None


def check_group(features: int, group: int) -> None:
    """H3Error unless ``group`` is a power of four that divides ``features``."""
    hadamard(group)
    if features % group:
        raise H3Error(
            f"ConvRot group {group} does not divide the layer's {features} inputs; take a smaller group or none"
        )


def rotate(x: Tensor, group: int) -> Tensor:
    """x [..., K] with every group of the last axis times H, in x's dtype by one matmul. Twice gives x back."""
    return (x.reshape(-1, group) @ hadamard(group, x.dtype, x.device)).view(x.shape)


def rotate_rows(x: Tensor, group: int, out: Tensor) -> Tensor:
    """out float32 [M, K] <- x [M, K] rotated. On CPU a large group in two small steps, twice as fast as in one.

    The first step rounds to x's dtype, as one matmul in that dtype would.
    """
    if x.device.type != "cpu":
        return out.copy_(rotate(x, group))
    flat = x if x.is_contiguous() else scratch("gathered", x.shape, x.dtype).copy_(x)
    if group <= ONE_STEP:
        turned = out if x.dtype == torch.float32 else scratch("inner", x.shape, x.dtype)
        torch.mm(flat.view(-1, group), hadamard(group, x.dtype), out=turned.view(-1, group))
        return out if turned is out else out.copy_(turned)
    left = group // RIGHT
    inner = scratch("inner", x.shape, x.dtype).view(-1, RIGHT)
    torch.mm(flat.view(-1, RIGHT), hadamard(RIGHT, x.dtype), out=inner)
    if x.dtype != torch.float32:
        inner = scratch("widened", x.shape, torch.float32).view(-1, RIGHT).copy_(inner)
    outer = hadamard(left).expand(inner.shape[0] // left, left, left)
    torch.bmm(outer, inner.view(-1, left, RIGHT), out=out.view(-1, left, RIGHT))
    return out


_HELD = threading.local()


def scratch(name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Uninitialised working memory. On CPU it is kept per thread and name, and grows to the largest asked for.

    The C library returns large blocks to the system, which then hands out zeroed pages one fault at a time: fresh
    memory in every call costs as much as the int8 matmul itself.
    """
    if torch.device(device).type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    held = _HELD.__dict__
    size = math.prod(shape)
    if (name, dtype) not in held or held[name, dtype].numel() < size:
        with torch.inference_mode(False):  # may be written outside inference mode later
            held[name, dtype] = torch.empty(size, dtype=dtype)
    return held[name, dtype][:size].view(shape)


def _chunks(rows: int, columns: int, elements: int) -> Iterator[slice]:
    """About equal parts of at most ``elements`` where a row allows: a short last one could take another matmul kernel,
    which sums in another order."""
    parts = max(1, -(-rows * columns // elements))
    step = max(1, -(-rows // parts))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def quantise_rows(x: Tensor, group: int | None) -> tuple[Tensor, Tensor]:
    """Activations [M, K] -> int8 [M, K] and float32 scales [M, 1]; rotated in groups first unless ``group`` is None.

    A row with NaN or infinity gets a scale that is not finite, so that the product shows it.
    """
    values = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    for rows in _chunks(*x.shape, CPU_CHUNK if x.device.type == "cpu" else DEVICE_CHUNK):
        part = x[rows]
        y = scratch("rows", part.shape, torch.float32, x.device)
        y = y.copy_(part) if group is None else rotate_rows(part, group, y)
        scale = torch.maximum(y.amax(-1, keepdim=True), y.amin(-1, keepdim=True).neg_())
        scale = scale.div_(INT8_MAX).clamp_(min=SMALLEST_SCALE)
        values[rows] = y.div_(scale).round_()
        scales[rows] = scale
    return values, scales


def quantise_rows_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Activations [M, K] -> float8_e4m3fn [M, K] and float32 scales [M, 1]."""
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    for rows in _chunks(*x.shape, CPU_CHUNK if x.device.type == "cpu" else DEVICE_CHUNK):
        y = x[rows].to(torch.float32, copy=True)
        scale = y.abs().amax(-1, keepdim=True).div_(FLOAT8_MAX).clamp_(min=SMALLEST_SCALE)
        values[rows] = y.div_(scale).clamp_(-FLOAT8_MAX, FLOAT8_MAX)
        scales[rows] = scale
    return values, scales


def quantise_int8(weight: Tensor, group: int | None) -> tuple[Tensor, Tensor]:
    """A weight [N, K] as public INT8 files store it -> int8 [N, K], float32 [N, 1]; ``group`` None: not rotated."""
    if group is not None:
        check_group(weight.shape[1], group)
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(weight.shape[0], 1, dtype=torch.float32, device=weight.device)
    for rows in _chunks(*weight.shape, WEIGHT_CHUNK):
        part = weight[rows] if group is None else rotate(weight[rows], group)
        scale = part.abs().amax(dim=-1, keepdim=True).float().div_(INT8_MAX).clamp_(min=SMALLEST_SCALE)
        divisor = scale.to(part.dtype)
        divisor = torch.where(divisor == 0, torch.finfo(part.dtype).tiny, divisor)  # float16 cannot hold 1e-30
        values[rows] = (part / divisor).round_().clamp_(-128.0, INT8_MAX)
        scales[rows] = scale
    return values, scales


def quantise_float8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight [N, K] as public FP8 files store it -> float8_e4m3fn [N, K], one float32 scale [] (absmax / 448)."""
    scale = weight.abs().amax().float().div(FLOAT8_MAX).clamp(min=SMALLEST_SCALE)
    factor = (1.0 / scale).to(weight.dtype)
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    for rows in _chunks(*weight.shape, WEIGHT_CHUNK):
        values[rows] = (weight[rows] * factor).clamp_(-FLOAT8_MAX, FLOAT8_MAX)
    return values, scale
