"""One small layer of every number type, packed by the format's definition, with the weight it has to decode to.

    example("nvfp4") -> Example(weight float32 [N, K], bias [N], tensors, marker)

The packing here is written value by value, apart from the runtime's decoders: both have to agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from h3_runtime.quant.convrot import hadamard
from h3_runtime.quant.linear import QuantisedLinear, linear_from_stored

ROWS, COLUMNS = 40, 256  # neither 128 rows nor a whole number of row tiles
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 + seed))


def integers(low: int, high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Example:
    weight: torch.Tensor
    bias: torch.Tensor
    tensors: dict[str, torch.Tensor]
    marker: dict

    def linear(self, dtype: torch.dtype) -> QuantisedLinear:
        tensors = {**self.tensors, "bias": self.bias}
        return linear_from_stored(tensors, self.marker, dtype, tuple(self.weight.shape))


def unrotated(weight: torch.Tensor, group: int) -> torch.Tensor:
    return (weight.double().view(-1, group) @ hadamard(group).double()).view(weight.shape).float()


def pack(even: torch.Tensor, odd: torch.Tensor, even_is_low: bool) -> torch.Tensor:
    low, high = (even, odd) if even_is_low else (odd, even)
    return (low & 15 | (high & 15) << 4).to(torch.uint8)


def tiled(scales: torch.Tensor) -> torch.Tensor:
    """[rows, blocks] uint8 -> padded, in cuBLAS's order: within a tile of 128 x 4, row r and column c stand at
    16 * (r % 32) + 4 * (r // 32) + c."""
    rows, columns = -(-scales.shape[0] // 128) * 128, -(-scales.shape[1] // 4) * 4
    out = torch.zeros(rows * columns, dtype=torch.uint8)
    for r in range(scales.shape[0]):
        for c in range(scales.shape[1]):
            tile = r // 128 * (columns // 4) + c // 4
            inner = r % 128
            out[512 * tile + 16 * (inner % 32) + 4 * (inner // 32) + c % 4] = scales[r, c]
    return out.view(rows, columns)


def int8_tensorwise(group: int | None, scalar: bool) -> Example:
    values = integers(-127, 128, ROWS, COLUMNS).to(torch.int8)
    scale = torch.tensor(0.01) if scalar else draw(ROWS, 1).abs() * 0.01 + 0.001
    weight = values.float() * scale
    rotation = {} if group is None else {"convrot": True, "convrot_groupsize": group}
    return Example(
        weight if group is None else unrotated(weight, group),
        draw(ROWS, seed=9),
        {"weight": values, "weight_scale": scale},
        {"format": "int8_tensorwise", **rotation},
    )


def float8(format_name: str) -> Example:
    values = draw(ROWS, COLUMNS).to(getattr(torch, format_name))
    scale = torch.tensor(0.03)
    tensors = {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(0.5)}
    return Example(values.float() * scale, draw(ROWS, seed=9), tensors, {"format": format_name})


def nvfp4(rows: int, columns: int, smooth: bool) -> Example:
    """Rows and columns padded to 16, as the files are."""
    held = (-(-rows // 16) * 16, -(-columns // 16) * 16)
    codes = integers(0, 16, *held)
    blocks = (draw(held[0], held[1] // 16).abs() + 0.1).to(torch.float8_e4m3fn)
    top = torch.tensor(0.02)
    levels = torch.tensor(E2M1 + [-level for level in E2M1])
    weight = levels[codes] * (blocks.float() * top).repeat_interleave(16, 1)
    tensors = {
        "weight": pack(codes[:, 0::2], codes[:, 1::2], even_is_low=False),
        "weight_scale": tiled(blocks.view(torch.uint8)).view(torch.float8_e4m3fn),
        "weight_scale_2": top,
    }
    if smooth:
        tensors["pre_quant_scale"] = draw(columns, seed=3).abs() + 0.5
    return Example(weight[:rows, :columns].contiguous(), draw(rows, seed=9), tensors, {"format": "nvfp4"})


def mxfp8() -> Example:
    values = draw(ROWS, COLUMNS).to(torch.float8_e4m3fn)
    exponents = integers(115, 130, ROWS, COLUMNS // 32).to(torch.uint8)
    weight = values.float() * (2.0 ** (exponents.float() - 127)).repeat_interleave(32, 1)
    tensors = {"weight": values, "weight_scale": tiled(exponents)}
    return Example(weight, draw(ROWS, seed=9), tensors, {"format": "mxfp8"})


def convrot_w4a4() -> Example:
    codes = integers(-8, 8, ROWS, COLUMNS)
    scale = draw(ROWS).abs() * 0.01 + 0.001
    packed = pack(codes[:, 0::2], codes[:, 1::2], even_is_low=True).view(torch.int8)
    return Example(
        unrotated(codes.float() * scale[:, None], 64),
        draw(ROWS, seed=9),
        {"weight": packed, "weight_scale": scale},
        {"format": "convrot_w4a4", "convrot_groupsize": 64, "linear_dtype": "int8"},
    )


def asym_w4a8_int8(codebook: bool) -> Example:
    codes = integers(0, 16, ROWS, COLUMNS)
    levels = draw(16, seed=4).sort().values if codebook else torch.arange(16) - 8.0
    relative = (draw(ROWS, COLUMNS // 16, seed=5).abs() * 40 / levels.abs().max() + 1).to(torch.float8_e4m3fn)
    channel = draw(ROWS, seed=6).abs() * 0.01 + 0.001
    decoded = (levels[codes] * relative.float().repeat_interleave(16, 1)).round().clamp(-127, 127)
    tensors = {
        "weight": pack(codes[:, 0::2], codes[:, 1::2], even_is_low=True).view(torch.int8),
        "weight_s_rel": relative,
        "weight_s_channel": channel,
        **({"weight_codebook": levels} if codebook else {}),
    }
    marker = {"format": "asym_w4a8_int8", "group_size": 16, "convrot_groupsize": 256}
    return Example(unrotated(decoded * channel[:, None], 256), draw(ROWS, seed=9), tensors, marker)


def gguf_q8_0() -> Example:
    values = integers(-128, 128, ROWS, COLUMNS // 32, 32).to(torch.int8)
    scale = (draw(ROWS, COLUMNS // 32, 1).abs() * 0.01).half()
    blocks = torch.cat((scale.view(torch.uint8), values.view(torch.uint8)), dim=-1)
    weight = (values.float() * scale.float()).flatten(1)
    return Example(weight, draw(ROWS, seed=9), {"weight": blocks.flatten(1)}, {"format": "gguf", "type": "Q8_0"})


EXAMPLES = {
    "int8_tensorwise": lambda: int8_tensorwise(256, False),
    "int8_tensorwise group 16": lambda: int8_tensorwise(16, False),
    "int8_tensorwise one scale": lambda: int8_tensorwise(None, True),
    "float8_e4m3fn": lambda: float8("float8_e4m3fn"),
    "float8_e5m2": lambda: float8("float8_e5m2"),
    "nvfp4": lambda: nvfp4(160, 96, False),
    "nvfp4 padded": lambda: nvfp4(37, 72, True),
    "mxfp8": mxfp8,
    "convrot_w4a4": convrot_w4a4,
    "asym_w4a8_int8": lambda: asym_w4a8_int8(True),
    "asym_w4a8_int8 no codebook": lambda: asym_w4a8_int8(False),
    "gguf": gguf_q8_0,
}


@cache
def example(name: str) -> Example:
    return EXAMPLES[name]()
