"""One nn.Module per number type: the stored tensors stay as they are, the matmul runs in the best arithmetic here.

    stored tensors + marker ──NUMBER_TYPES──▶ Int8Linear | Float8Linear | Nvfp4Linear | ...   (per layer, not per file)
    prepare(x) ─▶ Prepared: rotated and quantised once ──rows(prepared, a, b)──▶ outputs a..b   (the DiT's head groups)
    forward(x) = rows(prepare(x), 0, out_features)

Attribute names are ComfyUI's tensor names, so ``stored()`` is what goes into a file. Casting a module that holds these
(``dit.to(torch.float16)``) moves them and leaves their number types alone. Storage forms: spec of ComfyUI's
``comfy_quant`` layers and, for nvfp4 and mxfp8, cuBLAS's 128 x 4 tiles of block scales.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import CheckpointError
from . import kernels
from .convrot import quantise_rows, quantise_rows_float8, rotate
from .gguf import block_type, decode
from .marker import Marker, group_of, option, read_marker, whole, write_marker

DECODED = 1 << 24  # weights decoded at a time by a dequantised matmul: 64 MiB as float32
NVFP4_BLOCK, MXFP8_BLOCK, W4A8_GROUP = 16, 32, 16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the magnitudes of 4-bit floats; bit 3 is the sign


class Prepared(NamedTuple):
    """An input made ready for any number of ``rows`` calls."""

    values: Tensor  # [M, K]: integers or float8 with ``scale``, or the input itself
    scale: Tensor | None  # float32 [M, 1]
    dtype: torch.dtype  # of the input, and of the output
    lead: torch.Size  # the input's axes before the last


# ---- what all have in common


class QuantisedLinear(nn.Module):
    """Base. Buffers: ``weight`` and its scales as stored, ``bias`` or None. ``ran`` counts matmuls by arithmetic."""

    number_type: ClassVar[str]
    NEEDS: ClassVar[tuple[str, ...]] = ("weight", "weight_scale")
    MAY: ClassVar[tuple[str, ...]] = ("bias", "input_scale")

    def __init__(self, shape: tuple[int, int], tensors: Mapping[str, Tensor], compute_dtype: torch.dtype):
        super().__init__()
        self.out_features, self.in_features = shape
        self.compute_dtype = compute_dtype
        self.ran: Counter[str] = Counter()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        if "bias" not in tensors:
            self.register_buffer("bias", None)

    @classmethod
    def from_stored(
        cls,
        tensors: Mapping[str, Tensor],
        marker: Marker,
        compute_dtype: torch.dtype,
        shape: tuple[int, int] | None = None,
        where: str = "a quantised layer",
    ) -> QuantisedLinear:
        """From a layer's tensors under their last names (``weight``, ``weight_scale``, ``bias`` ...).

        ``shape`` [out, in] is needed where the stored weight is padded. CheckpointError names ``where`` and what is
        missing, unknown or of the wrong shape.
        """
        tensors = {name: tensor for name, tensor in tensors.items() if name != "comfy_quant"}
        missing = [name for name in cls.NEEDS if name not in tensors]
        unknown = sorted(set(tensors) - {*cls.NEEDS, *cls.MAY})
        if missing or unknown:
            fault = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(unknown)}, which is unknown here"
            raise CheckpointError(f"{where} is {cls.number_type} and {fault}; it needs {', '.join(cls.NEEDS)}")
        if tensors["weight"].dim() != 2:
            raise CheckpointError(f"{where}: weight has shape {list(tensors['weight'].shape)}; a matrix is needed")
        return cls._build(tensors, marker, compute_dtype, shape, where)

    @classmethod
    def _build(
        cls, tensors: dict[str, Tensor], marker: Marker, compute_dtype: torch.dtype, shape: Any, where: str
    ) -> QuantisedLinear:
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantisedLinear:
        # A cast of the surrounding model reaches here as fn: follow it to the device, keep the number types.
        def keep(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep, recurse)

    def marker(self) -> dict[str, Any]:
        """What the layer's ``comfy_quant`` says."""
        return {"format": self.number_type}

    def stored(self) -> dict[str, Tensor]:
        """The layer's tensors as ComfyUI stores them, under their last names, marker included."""
        return {**dict(self.named_buffers()), "comfy_quant": write_marker(self.marker())}

    @property
    def bytes(self) -> int:
        """Bytes of all tensors held."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.number_type}"

    def dequantised(self, start: int = 0, stop: int | None = None) -> Tensor:
        """The weight's rows start..stop as float32 [stop - start, in_features], in the original basis."""
        raise NotImplementedError

    def prepare(self, x: Tensor) -> Prepared:
        """x [.., in_features] -> what ``rows`` takes."""
        return Prepared(x.reshape(-1, x.shape[-1]), None, x.dtype, x.shape[:-1])

    @torch.no_grad()
    def rows(self, x: Tensor | Prepared, start: int, stop: int) -> Tensor:
        """Outputs start..stop [.., stop - start] in the input's dtype; x is an input or what ``prepare`` made of it."""
        prepared = x if isinstance(x, Prepared) else self.prepare(x)
        y, arithmetic = self._multiply(prepared, start, stop)
        self.ran[arithmetic] += 1
        kernels.COUNTS.add(self.number_type, arithmetic)
        return y.view(*prepared.lead, stop - start)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """[.., in_features] -> [.., out_features] in x's dtype."""
        return self.rows(self.prepare(x), 0, self.out_features)

    def _multiply(self, prepared: Prepared, start: int, stop: int) -> tuple[Tensor, str]:
        """(outputs [M, stop - start], arithmetic used)."""
        return self._dequantised_rows(prepared, start, stop), kernels.DEQUANTISED

    def _bias(self, start: int, stop: int) -> Tensor | None:
        return None if self.bias is None else self.bias[start:stop]

    def _dequantised_rows(self, prepared: Prepared, start: int, stop: int) -> Tensor:
        """The matmul in the input's dtype; only some rows of the weight are decoded at a time."""
        x, dtype = prepared.values, prepared.dtype
        step = max(1, DECODED // self.in_features)
        parts = []
        for first in range(start, stop, step):
            last = min(first + step, stop)
            bias = self._bias(first, last)
            parts.append(F.linear(x, self.dequantised(first, last).to(dtype), None if bias is None else bias.to(dtype)))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _scale_of(tensors: dict[str, Tensor], rows: int, where: str) -> Tensor:
    """weight_scale as float32 [rows, 1], or [1, 1] for one scale; the stored tensor stays as it is."""
    scale = tensors["weight_scale"]
    if scale.numel() not in (1, rows):
        raise CheckpointError(f"{where}: weight_scale has shape {list(scale.shape)}; one value or {rows} are allowed")
    return scale.float().reshape(-1, 1)


def _part(scale: Tensor, start: int, stop: int) -> Tensor:
    return scale if scale.numel() == 1 else scale.reshape(-1)[start:stop]


# ---- integers


class IntegerLinear(QuantisedLinear):
    """Weights that decode to int8 with a scale per output, rotated in groups of ``group`` or not (None)."""

    group: int | None

    def integers(self, start: int, stop: int) -> Tensor:
        """int8 [stop - start, in_features]."""
        raise NotImplementedError

    def scales(self, start: int, stop: int) -> Tensor:
        """float32 [stop - start, 1] or [1, 1]."""
        return _part(self.weight_scale.float(), start, stop).reshape(-1, 1)

    def dequantised(self, start: int = 0, stop: int | None = None) -> Tensor:
        stop = self.out_features if stop is None else stop
        weight = self.integers(start, stop).float().mul_(self.scales(start, stop))
        return weight if self.group is None else rotate(weight, self.group)

    def prepare(self, x: Tensor) -> Prepared:
        prepared = super().prepare(x)
        if kernels.choice(kernels.OPS[0], x.device).backend != kernels.INT_MM:
            return prepared
        return self._quantised(prepared)

    def _quantised(self, prepared: Prepared) -> Prepared:
        values, scale = quantise_rows(prepared.values, self.group)
        return Prepared(values, scale, prepared.dtype, prepared.lead)

    def _multiply(self, prepared: Prepared, start: int, stop: int) -> tuple[Tensor, str]:
        bias = self._bias(start, stop)
        if prepared.scale is None:
            backend = kernels.choice(kernels.OPS[0], prepared.values.device).backend
            if backend == kernels.DEQUANTISED:
                return self._dequantised_rows(prepared, start, stop), kernels.DEQUANTISED
            weight, scale = self.integers(start, stop), self.scales(start, stop)
            y = kernels.kitchen_int8(prepared.values, weight, scale, bias, self.group, backend.partition("/")[2])
            if y is not None:
                return y, kernels.INT8
            prepared = self._quantised(prepared)
        weight, scale = self.integers(start, stop), self.scales(start, stop).T
        y = kernels.int8_linear(prepared.values, prepared.scale, weight, scale, bias, prepared.dtype)
        return y, kernels.INT8


class Int8Linear(IntegerLinear):
    """``int8_tensorwise``: int8 [N, K], float32 scale [N, 1] or one; ConvRot groups of 256, 64, 16, or none."""

    number_type = "int8_tensorwise"

    @classmethod
    def _build(cls, tensors, marker, compute_dtype, shape, where):
        weight = tensors["weight"]
        _dtype_is(weight, (torch.int8,), where)
        _shape_is(weight, shape, where)
        _scale_of(tensors, weight.shape[0], where)
        linear = cls(tuple(weight.shape), tensors, compute_dtype)
        linear.group = group_of(marker, weight.shape[1], where) if option(marker, "convrot", False) else None
        return linear

    def marker(self) -> dict[str, Any]:
        rotation = {} if self.group is None else {"convrot": True, "convrot_groupsize": self.group}
        return {**super().marker(), **rotation}

    def integers(self, start: int, stop: int) -> Tensor:
        return self.weight[start:stop]


class RotatedInt4Linear(IntegerLinear):
    """``convrot_w4a4``: two signed 4-bit values a byte (even column low), float32 scale [N].

    Activations are taken at 8 bits here, not at 4: no torch device multiplies int4, and the result is nearer.
    """

    number_type = "convrot_w4a4"

    @classmethod
    def _build(cls, tensors, marker, compute_dtype, shape, where):
        weight = tensors["weight"]
        _dtype_is(weight, (torch.int8, torch.uint8), where)
        full = (weight.shape[0], 2 * weight.shape[1])
        _shape_is(weight, shape, where, full)
        _scale_of(tensors, full[0], where)
        linear = cls(full, {**tensors, "weight": weight.view(torch.int8)}, compute_dtype)
        linear.group = group_of(marker, full[1], where)
        linear.linear_dtype = option(marker, "linear_dtype", "int4")
        return linear

    def marker(self) -> dict[str, Any]:
        other = {} if self.linear_dtype == "int4" else {"linear_dtype": self.linear_dtype}
        return {**super().marker(), "convrot_groupsize": self.group, **other}

    def integers(self, start: int, stop: int) -> Tensor:
        packed = self.weight[start:stop]
        # Shifting left first drops the high nibble; the shift right brings the sign along.
        return torch.stack((packed << 4 >> 4, packed >> 4), dim=-1).flatten(1)


class CodebookInt4Linear(IntegerLinear):
    """``asym_w4a8_int8``: 4-bit codes (even column low) into a codebook [16], times a scale per 16 inputs, to int8.

    integers = round(codebook[code] * weight_s_rel) within +-127; weight = integers * weight_s_channel, rotated.
    Without a codebook the levels are code - 8.
    """

    number_type = "asym_w4a8_int8"
    NEEDS = ("weight", "weight_s_rel", "weight_s_channel")
    MAY = ("bias", "input_scale", "weight_codebook")

    @classmethod
    def _build(cls, tensors, marker, compute_dtype, shape, where):
        weight, relative = tensors["weight"], tensors["weight_s_rel"]
        _dtype_is(weight, (torch.int8, torch.uint8), where)
        full = (weight.shape[0], 2 * weight.shape[1])
        _shape_is(weight, shape, where, full)
        if relative.dtype == torch.uint8:
            relative = relative.view(torch.float8_e4m3fn)
        linear = cls(full, {**tensors, "weight": weight.view(torch.int8), "weight_s_rel": relative}, compute_dtype)
        linear.group = group_of(marker, full[1], where)
        linear.scale_group = whole(marker, "group_size", W4A8_GROUP, where)
        if relative.shape != (full[0], full[1] // linear.scale_group):
            raise CheckpointError(
                f"{where}: weight_s_rel has shape {list(relative.shape)}; {full[0]} rows of one scale per "
                f"{linear.scale_group} of {full[1]} inputs are needed (6-bit codes are not read)"
            )
        if tensors["weight_s_channel"].numel() != full[0]:
            raise CheckpointError(f"{where}: weight_s_channel has {tensors['weight_s_channel'].numel()} of {full[0]}")
        if "weight_codebook" in tensors and tensors["weight_codebook"].numel() != 16:
            raise CheckpointError(f"{where}: weight_codebook has {tensors['weight_codebook'].numel()} of 16 levels")
        return linear

    def marker(self) -> dict[str, Any]:
        return {**super().marker(), "group_size": self.scale_group, "convrot_groupsize": self.group}

    def integers(self, start: int, stop: int) -> Tensor:
        packed = self.weight[start:stop].view(torch.uint8)
        codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)  # [n, K]
        codebook = getattr(self, "weight_codebook", None)
        levels = (
            codes.float() - 8.0 if codebook is None else F.embedding(codes.int(), codebook.float()[:, None])[..., 0]
        )
        levels = levels.unflatten(1, (-1, self.scale_group)) * self.weight_s_rel[start:stop].float()[..., None]
        return levels.flatten(1).round_().clamp_(-127, 127).to(torch.int8)

    def scales(self, start: int, stop: int) -> Tensor:
        return self.weight_s_channel[start:stop].float().reshape(-1, 1)


# ---- floats


class Float8Linear(QuantisedLinear):
    """``float8_e4m3fn``: float8 [N, K], one float32 scale, one per row, or none (a plain cast).

    On cards with float8 tensor cores the input is quantised per row too, unless the marker asks for
    ``full_precision_matrix_mult``. A stored ``input_scale`` is kept, not used: a scale per row fits every input.
    """

    number_type = "float8_e4m3fn"
    dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn
    NEEDS = ("weight",)
    MAY = ("weight_scale", "bias", "input_scale")
    OLD_NAMES: ClassVar[dict[str, str]] = {"scale_weight": "weight_scale", "scale_input": "input_scale"}

    @classmethod
    def from_stored(cls, tensors, marker, compute_dtype, shape=None, where="a quantised layer"):
        renamed = {cls.OLD_NAMES.get(name, name): tensor for name, tensor in tensors.items() if name != "scaled_fp8"}
        return super().from_stored(renamed, marker, compute_dtype, shape, where)

    @classmethod
    def _build(cls, tensors, marker, compute_dtype, shape, where):
        weight = tensors["weight"]
        if weight.dtype == torch.uint8:
            weight = weight.view(cls.dtype)
        _dtype_is(weight, (cls.dtype,), where)
        _shape_is(weight, shape, where)
        if "weight_scale" not in tensors:
            tensors = {**tensors, "weight_scale": torch.ones((), dtype=torch.float32, device=weight.device)}
        _scale_of(tensors, weight.shape[0], where)
        linear = cls(tuple(weight.shape), {**tensors, "weight": weight}, compute_dtype)
        linear.full_precision = bool(option(marker, "full_precision_matrix_mult", False))
        return linear

    def marker(self) -> dict[str, Any]:
        return {**super().marker(), **({"full_precision_matrix_mult": True} if self.full_precision else {})}

    def dequantised(self, start: int = 0, stop: int | None = None) -> Tensor:
        stop = self.out_features if stop is None else stop
        scale = _part(self.weight_scale.float(), start, stop).reshape(-1, 1)
        return self.weight[start:stop].float().mul_(scale)

    def _native(self, device: torch.device) -> bool:
        if self.full_precision or self.dtype != torch.float8_e4m3fn or self.in_features % 16 or self.out_features % 16:
            return False
        return kernels.choice(kernels.OPS[1], device).backend == kernels.SCALED_MM

    def prepare(self, x: Tensor) -> Prepared:
        prepared = super().prepare(x)
        if not self._native(x.device):
            return prepared
        values, scale = quantise_rows_float8(prepared.values)
        return Prepared(values, scale, prepared.dtype, prepared.lead)

    def _multiply(self, prepared: Prepared, start: int, stop: int) -> tuple[Tensor, str]:
        if prepared.scale is None:
            return super()._multiply(prepared, start, stop)
        if (stop - start) % 16:  # the kernel takes multiples of 16: compute the rows around and cut
            first, last = start // 16 * 16, min(-(-stop // 16) * 16, self.out_features)
            y, arithmetic = self._multiply(prepared, first, last)
            return y[:, start - first : stop - first].contiguous(), arithmetic
        scale = _part(self.weight_scale.float(), start, stop).reshape(1, -1)
        weight, bias = self.weight[start:stop], self._bias(start, stop)
        y = kernels.float8_linear(prepared.values, prepared.scale, weight, scale, bias, prepared.dtype)
        return y, kernels.FLOAT8


class WideFloat8Linear(Float8Linear):
    """``float8_e5m2``: as float8_e4m3fn with two bits of mantissa; the matmul is always dequantised."""

    number_type = "float8_e5m2"
    dtype = torch.float8_e5m2


def _untiled(scales: Tensor, start: int, stop: int, columns: int) -> Tensor:
    """Rows start..stop and ``columns`` columns of block scales stored in cuBLAS's 128 x 4 tiles.

    A tile holds row r, column c (r = 32 q + p) at byte 16 p + 4 q + c; tiles stand row by row.
    """
    across = -(-columns // 4)
    tiles = scales.reshape(-1, across, 32, 4, 4)[start // 128 : -(-stop // 128)]  # [tile row, tile, p, q, c]
    plain = tiles.permute(0, 3, 2, 1, 4).reshape(-1, 4 * across)  # [rows of those tiles, columns, padded]
    return plain[start % 128 : start % 128 + stop - start, :columns]


class BlockFloatLinear(QuantisedLinear):
    """Floats with a shared scale per block of inputs, scales in tiles; rows and columns may be padded."""

    NEEDS = ("weight", "weight_scale")
    BLOCK: ClassVar[int]
    PER_ITEM: ClassVar[int] = 1  # values per stored item

    @classmethod
    def _build(cls, tensors, marker, compute_dtype, shape, where):
        weight = tensors["weight"]
        held = (weight.shape[0], weight.shape[1] * cls.PER_ITEM)
        full = held if shape is None else shape
        if not (full[0] <= held[0] < full[0] + 128 and full[1] <= held[1] < full[1] + 128) or held[1] % cls.BLOCK:
            raise CheckpointError(
                f"{where}: weight holds {held[0]} x {held[1]} values; {full[0]} x {full[1]} are needed"
            )
        blocks = held[1] // cls.BLOCK
        expected = -(-held[0] // 128) * 128 * (-(-blocks // 4) * 4)
        if tensors["weight_scale"].numel() != expected:
            raise CheckpointError(
                f"{where}: weight_scale has {tensors['weight_scale'].numel()} values; {expected} are needed, "
                "in tiles of 128 x 4"
            )
        return cls(full, cls._viewed(tensors, where), compute_dtype)

    @classmethod
    def _viewed(cls, tensors: dict[str, Tensor], where: str) -> dict[str, Tensor]:
        raise NotImplementedError

    def _block_scales(self, start: int, stop: int) -> Tensor:
        """float32 [stop - start, blocks, 1]."""
        raise NotImplementedError

    def _values(self, start: int, stop: int) -> Tensor:
        """float32 [stop - start, padded K], without the scales."""
        raise NotImplementedError

    def dequantised(self, start: int = 0, stop: int | None = None) -> Tensor:
        stop = self.out_features if stop is None else stop
        values = self._values(start, stop).unflatten(1, (-1, self.BLOCK)).mul_(self._block_scales(start, stop))
        return values.flatten(1)[:, : self.in_features].contiguous()


class Nvfp4Linear(BlockFloatLinear):
    """``nvfp4``: two E2M1 values a byte (even column high), an e4m3 scale per 16 inputs, a float32 ``weight_scale_2``.

    ``pre_quant_scale`` [K], where stored (AWQ), multiplies the input.
    """

    number_type = "nvfp4"
    BLOCK, PER_ITEM = NVFP4_BLOCK, 2
    NEEDS = ("weight", "weight_scale", "weight_scale_2")
    MAY = ("bias", "input_scale", "pre_quant_scale")

    @classmethod
    def _viewed(cls, tensors, where):
        _dtype_is(tensors["weight"], (torch.uint8, torch.int8), where)
        if tensors["weight_scale_2"].numel() != 1:
            raise CheckpointError(
                f"{where}: weight_scale_2 has {tensors['weight_scale_2'].numel()} values; one is needed"
            )
        return {
            **tensors,
            "weight": tensors["weight"].view(torch.uint8),
            "weight_scale": tensors["weight_scale"].view(torch.float8_e4m3fn),
        }

    @classmethod
    def _build(cls, tensors, marker, compute_dtype, shape, where):
        linear = super()._build(tensors, marker, compute_dtype, shape, where)
        smooth = tensors.get("pre_quant_scale")
        if smooth is not None and smooth.numel() != linear.in_features:
            raise CheckpointError(f"{where}: pre_quant_scale has {smooth.numel()} of {linear.in_features} values")
        return linear

    def prepare(self, x: Tensor) -> Prepared:
        smooth = getattr(self, "pre_quant_scale", None)
        return super().prepare(x if smooth is None else x * smooth.to(x.dtype))

    def _block_scales(self, start: int, stop: int) -> Tensor:
        blocks = self.weight.shape[1] * 2 // NVFP4_BLOCK
        scales = _untiled(self.weight_scale, start, stop, blocks).float()
        return (self.weight_scale_2.float() * scales)[..., None]

    def _values(self, start: int, stop: int) -> Tensor:
        levels = torch.tensor((*E2M1, *(-level for level in E2M1)), device=self.weight.device)
        pairs = torch.stack((levels.repeat_interleave(16), levels.repeat(16)), dim=-1)  # [256, 2]: high nibble first
        return F.embedding(self.weight[start:stop].int(), pairs).flatten(1)


class Mxfp8Linear(BlockFloatLinear):
    """``mxfp8``: float8_e4m3fn with a power-of-two scale (E8M0) per 32 inputs."""

    number_type = "mxfp8"
    BLOCK = MXFP8_BLOCK

    @classmethod
    def _viewed(cls, tensors, where):
        weight = tensors["weight"]
        weight = weight.view(torch.float8_e4m3fn) if weight.dtype == torch.uint8 else weight
        _dtype_is(weight, (torch.float8_e4m3fn,), where)
        return {**tensors, "weight": weight, "weight_scale": tensors["weight_scale"].view(torch.uint8)}

    def stored(self) -> dict[str, Tensor]:
        exponents = getattr(torch, "float8_e8m0fnu", torch.uint8)  # younger than the oldest torch that runs this
        return {**super().stored(), "weight_scale": self.weight_scale.view(exponents)}

    def _block_scales(self, start: int, stop: int) -> Tensor:
        exponents = _untiled(self.weight_scale, start, stop, self.weight.shape[1] // MXFP8_BLOCK)
        return (exponents.int() << 23).view(torch.float32)[..., None]  # the exponent field of a float32; 0 stays 0

    def _values(self, start: int, stop: int) -> Tensor:
        return self.weight[start:stop].float()


class GgufLinear(QuantisedLinear):
    """A GGUF block type: ``weight`` uint8 [N, bytes of a row], kept so and decoded on use. Marker: format, type."""

    number_type = "gguf"
    NEEDS = ("weight",)
    MAY = ("bias",)

    @classmethod
    def _build(cls, tensors, marker, compute_dtype, shape, where):
        weight = tensors["weight"]
        _dtype_is(weight, (torch.uint8,), where)
        block = block_type(str(marker.get("type")))
        if weight.shape[1] % block.nbytes:
            raise CheckpointError(
                f"{where}: rows of {weight.shape[1]} bytes are not {block.name} blocks of {block.nbytes}"
            )
        full = (weight.shape[0], weight.shape[1] // block.nbytes * block.values)
        _shape_is(weight, shape, where, full)
        linear = cls(full, tensors, compute_dtype)
        linear.block_type = block.name
        decode(weight[:1], block.name)  # a missing library shows now, not in the middle of a render
        return linear

    def marker(self) -> dict[str, Any]:
        return {**super().marker(), "type": self.block_type}

    def dequantised(self, start: int = 0, stop: int | None = None) -> Tensor:
        return decode(self.weight[start : self.out_features if stop is None else stop], self.block_type)


def _dtype_is(tensor: Tensor, allowed: tuple[torch.dtype, ...], where: str) -> None:
    if tensor.dtype not in allowed:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise CheckpointError(f"{where}: weight is {str(tensor.dtype).removeprefix('torch.')}; {names} is needed")


def _shape_is(weight: Tensor, wanted: tuple[int, int] | None, where: str, held: Any = None) -> None:
    held = tuple(weight.shape) if held is None else held
    if wanted is not None and held != tuple(wanted):
        raise CheckpointError(f"{where}: weight is {held[0]} x {held[1]}; the model needs {wanted[0]} x {wanted[1]}")


# ---- the table: a number type is one class and one line here

Dtypes = Mapping[str, torch.dtype]


class NumberType(NamedTuple):
    """``detect(marker or None, {tensor's last name: dtype})`` says whether a layer is of this type."""

    name: str
    linear: type[QuantisedLinear]
    detect: Callable[[Marker | None, Dtypes], bool]


def _marked(name: str) -> Callable[[Marker | None, Dtypes], bool]:
    return lambda marker, dtypes: marker is not None and marker.get("format") == name


def _marked_or_float8(name: str, dtype: torch.dtype) -> Callable[[Marker | None, Dtypes], bool]:
    # Older files mark float8 layers with scale_weight alone, or not at all.
    return lambda marker, dtypes: marker.get("format") == name if marker is not None else dtypes.get("weight") == dtype


NUMBER_TYPES: dict[str, NumberType] = {
    entry.name: entry
    for entry in (
        NumberType("int8_tensorwise", Int8Linear, _marked("int8_tensorwise")),
        NumberType("float8_e4m3fn", Float8Linear, _marked_or_float8("float8_e4m3fn", torch.float8_e4m3fn)),
        NumberType("float8_e5m2", WideFloat8Linear, _marked_or_float8("float8_e5m2", torch.float8_e5m2)),
        NumberType("nvfp4", Nvfp4Linear, _marked("nvfp4")),
        NumberType("mxfp8", Mxfp8Linear, _marked("mxfp8")),
        NumberType("convrot_w4a4", RotatedInt4Linear, _marked("convrot_w4a4")),
        NumberType("asym_w4a8_int8", CodebookInt4Linear, _marked("asym_w4a8_int8")),
        NumberType("gguf", GgufLinear, _marked("gguf")),
    )
}


def number_type_of(marker: Marker | None, dtypes: Dtypes, where: str = "a layer") -> NumberType | None:
    """The layer's number type; None for an ordinary float layer. CheckpointError for an unknown quantised one."""
    found = [entry for entry in NUMBER_TYPES.values() if entry.detect(marker, dtypes)]
    if found:
        return found[0]
    if marker is not None:
        raise CheckpointError(
            f"{where} is stored as {marker.get('format')!r}; read are {', '.join(NUMBER_TYPES)}. Take another file."
        )
    weight = dtypes.get("weight")
    if weight is not None and not weight.is_floating_point:
        raise CheckpointError(
            f"{where} holds {str(weight).removeprefix('torch.')} without a comfy_quant marker, which does not tell how "
            "it was made; take a file with markers."
        )
    return None


def linear_from_stored(
    tensors: Mapping[str, Tensor],
    marker: Marker | None,
    compute_dtype: torch.dtype,
    shape: tuple[int, int] | None = None,
    where: str = "a quantised layer",
) -> QuantisedLinear | None:
    """The module of one layer's stored tensors, None where they are plain; the marker may be among them."""
    if marker is None and "comfy_quant" in tensors:
        marker = read_marker(tensors["comfy_quant"])
    entry = number_type_of(marker, {name: tensor.dtype for name, tensor in tensors.items()}, where)
    return None if entry is None else entry.linear.from_stored(tensors, marker or {}, compute_dtype, shape, where)


def what_ran(module: nn.Module) -> dict[str, dict[str, int]]:
    """{name of each quantised linear in ``module``: {arithmetic: matmuls}}; an empty inner dict has not run."""
    named = module.named_modules()
    return {name: dict(linear.ran) for name, linear in named if isinstance(linear, QuantisedLinear)}
