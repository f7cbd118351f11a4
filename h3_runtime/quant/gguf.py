"""GGUF block types: bytes of a block -> float32 values, on whatever device the bytes are.

    Q4_K, 144 bytes, 256 values:   d | dmin | 8 scales and minima of 6 bits | 128 bytes of two 4-bit codes
                                   value = d * scale[j] * code - dmin * minimum[j],   32 values share j

The classic and the K types are decoded here in torch, so a model on a card stays on the card; the rarer types (IQ*,
TQ*, MXFP4, NVFP4) go through the package ``gguf``, on the CPU. Layouts: ggml's block structures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import CheckpointError, MissingDependency


class BlockType(NamedTuple):
    """``nbytes`` bytes hold ``values`` numbers."""

    name: str
    values: int
    nbytes: int


# Type number in the file -> block type. Numbers, names and sizes are ggml's.
BLOCK_TYPES: dict[int, BlockType] = {
    number: BlockType(name, values, nbytes)
    for number, name, values, nbytes in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (9, "Q8_1", 32, 40),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1),
        (25, "I16", 1, 2),
        (26, "I32", 1, 4),
        (27, "I64", 1, 8),
        (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36),
        (41, "Q1_0", 128, 18),
    )
}
BY_NAME = {block.name: block for block in BLOCK_TYPES.values()}


def block_type(name: str) -> BlockType:
    """CheckpointError for a type that GGUF does not know."""
    if name not in BY_NAME:
        raise CheckpointError(f"GGUF type {name} is unknown; known are {', '.join(BY_NAME)}")
    return BY_NAME[name]


def decode(rows: Tensor, name: str) -> Tensor:
    """uint8 [N, bytes of a row] -> float32 [N, K]. MissingDependency where the type needs ``gguf``."""
    block = block_type(name)
    if rows.shape[-1] % block.nbytes:
        raise CheckpointError(
            f"a row of {rows.shape[-1]} bytes is not made of {block.name} blocks of {block.nbytes} bytes"
        )
    if block.name in DECODERS:
        return DECODERS[block.name](rows.reshape(rows.shape[0], -1, block.nbytes)).reshape(rows.shape[0], -1)
    return _decode_with_package(rows, block)


def _decode_with_package(rows: Tensor, block: BlockType) -> Tensor:
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        raise MissingDependency(
            f"a tensor of GGUF type {block.name} needs the package gguf, which cannot be imported ({error}); "
            "install it with: pip install gguf"
        ) from error
    values = dequantize(rows.cpu().contiguous().numpy(), GGMLQuantizationType[block.name])
    return torch.from_numpy(values).to(rows.device)


# ---- decoders: uint8 [N, blocks, bytes] -> float32 [N, blocks, values]


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte ``at`` of every block -> float32 [N, blocks, 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(codes: Tensor) -> Tensor:
    """[.., n] -> [.., 2 n]: all low nibbles, then all high ones."""
    return torch.cat((codes & 15, codes >> 4), dim=-1)


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """Bit i of the 4 bytes at ``at`` -> value i's fifth bit, in place 16; [N, blocks, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    bits = blocks[..., at : at + 4, None] >> shifts & 1  # [N, blocks, 4, 8]
    return bits.flatten(-2) << 4


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[..., 2:]).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _nibbles(blocks[..., 4:]).float() + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks, 2)
    return _half(blocks, 0) * (codes.float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * codes.float() + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * blocks[..., 2:].view(torch.int8).float()


def _planes(codes: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """[.., n] -> [.., len(shifts), n]: (codes >> shift) & mask."""
    return torch.stack([codes >> shift & mask for shift in shifts], dim=-2)


def _q2_k(blocks: Tensor) -> Tensor:
    packed, d, dmin = blocks[..., :16], _half(blocks, 80), _half(blocks, 82)
    scale = (d * (packed & 15).float())[..., None]  # [N, blocks, 16, 1]
    minimum = (dmin * (packed >> 4).float())[..., None]
    codes = _planes(blocks[..., 16:80].unflatten(-1, (2, 32)), (0, 2, 4, 6), 3)  # [N, blocks, 2, 4, 32]
    return (scale * codes.flatten(-3).unflatten(-1, (16, 16)).float() - minimum).flatten(-2)


def _q3_k(blocks: Tensor) -> Tensor:
    packed, d = blocks[..., 96:108], _half(blocks, 108)
    low = _nibbles(packed[..., :8])  # [N, blocks, 16]
    high = _planes(packed[..., 8:], (0, 2, 4, 6), 3).flatten(-2)
    scale = (d * ((low | high << 4).to(torch.int8) - 32).float())[..., None]
    codes = _planes(blocks[..., 32:96].unflatten(-1, (2, 32)), (0, 2, 4, 6), 3).flatten(-3)  # [N, blocks, 256]
    absent = _planes(blocks[..., :32], tuple(range(8)), 1).flatten(-2) ^ 1  # a clear bit takes 4 away
    values = codes.to(torch.int8) - (absent << 2).to(torch.int8)
    return (scale * values.unflatten(-1, (16, 16)).float()).flatten(-2)


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of Q4_K and Q5_K: d * scale and dmin * minimum, float32 [N, blocks, 8, 1] each."""
    a, b, c = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scale = torch.cat((a & 63, c & 15 | (a >> 6) << 4), dim=-1)
    minimum = torch.cat((b & 63, c >> 4 | (b >> 6) << 4), dim=-1)
    return (_half(blocks, 0) * scale.float())[..., None], (_half(blocks, 2) * minimum.float())[..., None]


def _q4_k(blocks: Tensor) -> Tensor:
    scale, minimum = _scales_and_minima(blocks)
    codes = _planes(blocks[..., 16:].unflatten(-1, (4, 32)), (0, 4), 15).flatten(-3, -2)  # [N, blocks, 8, 32]
    return (scale * codes.float() - minimum).flatten(-2)


def _q5_k(blocks: Tensor) -> Tensor:
    scale, minimum = _scales_and_minima(blocks)
    low = _planes(blocks[..., 48:].unflatten(-1, (4, 32)), (0, 4), 15).flatten(-3, -2)  # [N, blocks, 8, 32]
    high = _planes(blocks[..., 16:48], tuple(range(8)), 1)
    return (scale * (low | high << 4).float() - minimum).flatten(-2)


def _q6_k(blocks: Tensor) -> Tensor:
    d = _half(blocks, 208)
    scale = (d * blocks[..., 192:208].view(torch.int8).float())[..., None]  # [N, blocks, 16, 1]
    low = _planes(blocks[..., :128].unflatten(-1, (2, 64)), (0, 4), 15).flatten(-2)  # [N, blocks, 2, 128]
    high = _planes(blocks[..., 128:192].unflatten(-1, (2, 32)), (0, 2, 4, 6), 3).flatten(-2)
    values = (low | high << 4).to(torch.int8) - 32
    return (scale * values.flatten(-2).unflatten(-1, (16, 16)).float()).flatten(-2)


DECODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
