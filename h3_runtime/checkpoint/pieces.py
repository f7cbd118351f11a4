"""A part of a model piece by piece: plain tensors as they are needed, quantised linears as modules.

    Checkpoint ─▶ tensor   read, transformed, checked, cast ───────────────▶ Tensor
               ─▶ linear   stored quantised: its tensors as they are ──────▶ quantised nn.Module (bias inside)
                           to be quantised: its one weight, then ──────────▶ quantised nn.Module
               ─▶ what no linear computes from (float32 islands, convolutions) is decoded to a tensor

``read`` hands out the pieces under a prefix one at a time and keeps none: host memory is what the caller keeps plus
one tensor and its transform. ``fill`` puts them into a module by name; a streamer asks for one block.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..errors import H3Error
from ..quant.convrot import choose_group, quantise_float8, quantise_int8
from ..quant.gguf import decode as decode_blocks
from ..quant.linear import NUMBER_TYPES, QuantisedLinear
from ..quant.online import SCHEMES, by_part
from .opening import Checkpoint
from .quantised import GGUF, StoredLayer
from .reader import listed

IN_TILES = ("nvfp4", "mxfp8")  # formats whose scales stand in tiles of many rows
STORED_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}

VAE_BLOCK = "decoder.transformer_blocks.*"
BLOCK_LINEARS = {
    "dit": ("blocks.*.attn.qkv_proj", "blocks.*.attn.out_proj", "blocks.*.mlp.fc1", "blocks.*.mlp.fc2"),
    "video_vae": tuple(f"{VAE_BLOCK}.{leaf}" for leaf in ("attn.to_qkv", "attn.to_out", "ff.w1", "ff.w2")),
    "text_encoder": ("language_model.layers.*.self_attn.?_proj", "language_model.layers.*.mlp.*_proj"),
}
ADALN_LINEARS = ("blocks.*.adaln_proj.linear",)


@dataclass(frozen=True)
class Online:
    """Quantise while loading: ``method`` (int8_convrot, int8, fp8), layers to leave out (names or patterns with *),
    and whether the DiT's AdaLN projections come with the four linears of each block, as in the public full file."""

    method: str
    exclude: tuple[str, ...] = ()
    adaln: bool = False

    def __post_init__(self):
        if self.method not in SCHEMES:
            raise H3Error(f"quantise is {self.method!r}; choose one of {', '.join(SCHEMES)}.")

    @staticmethod
    def of(part: str, quantise: str | None, exclude: Sequence[str] = ()) -> Online | None:
        """How ``part`` is quantised while it loads, of what a person asked for (``by_part``); None: it is not."""
        asked = by_part(quantise, exclude).get(part)
        return None if asked is None else Online(*asked)

    def linears(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """The linears of this part that are quantised, in file order; H3Error for a pattern that excludes nothing,
        and for a checkpoint whose linears are quantised already."""
        part = checkpoint.format.part
        if part not in BLOCK_LINEARS:
            raise H3Error(f"the {part.replace('_', ' ')} computes in float32 only and is not quantised: leave it out.")
        patterns = BLOCK_LINEARS[part] + (ADALN_LINEARS if self.adaln and part == "dit" else ())
        names = [name.removesuffix(".weight") for name in checkpoint.recipes if name.endswith(".weight")]
        chosen = [name for name in names if _matches(name, patterns)]
        done = [name for name in chosen if name in checkpoint.layers]
        if done:
            kinds = listed(dict.fromkeys(checkpoint.layers[name].title for name in done))
            raise H3Error(
                f"{checkpoint.source.path} is quantised already ({len(done)} linears in {kinds}): load it as it is, or "
                "take the bf16 file to quantise it."
            )
        idle = [pattern for pattern in self.exclude if not any(_matches(name, (pattern,)) for name in chosen)]
        if idle:
            raise H3Error(
                f"exclude {listed(map(repr, idle))} matches none of the {len(chosen)} linears that would be quantised "
                f"({listed(chosen[:4])} ...): give names like these, * for any part."
            )
        left = tuple(name for name in chosen if not _matches(name, self.exclude))
        if chosen and not left:
            raise H3Error(
                f"exclude {listed(map(repr, self.exclude))} leaves none of the {len(chosen)} linears of "
                f"{checkpoint.source.path.name} to quantise: leave out quantise too, or exclude fewer."
            )
        return left


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.") for pattern in patterns)


@dataclass(frozen=True)
class Pieces:
    """How each piece of a part is made.

    ``dtypes``: our tensor name -> number type in memory; ``shapes``: the shape the module wants of it. ``stored`` and
    ``online`` are the linears that become quantised modules, by our name without ``.weight``; both compute in
    ``compute``.
    """

    checkpoint: Checkpoint
    dtypes: Mapping[str, torch.dtype]
    shapes: Mapping[str, tuple[int, ...]]
    compute: torch.dtype
    stored: frozenset[str] = frozenset()
    online: Mapping[str, str] = field(default_factory=dict)  # linear -> method

    def names(self, prefix: str = "") -> list[str]:
        """What ``read`` gives: tensors by name, linears without ``.weight``; in the order of the file."""
        found = []
        for name in self.checkpoint.recipes:
            if name.startswith(prefix):
                owner, _, leaf = name.rpartition(".")
                if not self._is_linear(owner):
                    found.append(name)
                elif leaf == "weight":
                    found.append(owner)
        return found

    def read(self, prefix: str = "", device: str | torch.device = "cpu") -> Iterator[tuple[str, Tensor | nn.Module]]:
        """(our name, piece) for everything under ``prefix``, one at a time."""
        for name in self.names(prefix):
            yield name, self.piece(name, device)

    def transforms(self, prefixes: Sequence[str] = ("",), skip: str = "") -> dict[str, str]:
        """What makes bytes in memory other than those in the file, for the pieces under ``prefixes`` but those under
        ``skip`` there: kind -> sentence. Kinds: reorder, cast, and the methods of online quantisation."""

        def meant(name: str) -> bool:
            return name.startswith(tuple(prefixes)) and not (skip and f".{skip}" in name)

        checkpoint, found = self.checkpoint, {}
        names = [name for name in checkpoint.recipes if meant(name)]
        if any(checkpoint.recipes[name].combine for name in names):
            found["reorder"] = f"rows of the {checkpoint.format.name} layout are put in our order"
        for method in dict.fromkeys(method for name, method in self.online.items() if meant(name)):
            found[method] = f"linears are quantised ({method})"
        quantised = {f"{layer}.weight" for layer in checkpoint.layers}
        for name in names:
            dtype = self.dtypes[name]
            if name not in quantised and STORED_TYPES.get(checkpoint.stored_as(name), dtype) != dtype:
                found["cast"] = f"weights are cast to {str(dtype).removeprefix('torch.')}"
        return found

    def piece(self, name: str, device: str | torch.device = "cpu") -> Tensor | nn.Module:
        """One piece by a name that ``names`` gives."""
        if name in self.stored:
            return self._stored_linear(name).to(device)
        if name in self.online:
            weight, bias = self.checkpoint.build(f"{name}.weight").to(device), self._bias(name, device)
            return quantise_linear(weight, bias, self.online[name], self.compute, name)
        return self.tensor(name, device)

    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        """A tensor by our name, decoded if it is stored quantised, in its number type."""
        layer = name.removesuffix(".weight")
        if layer in self.checkpoint.layers and name.endswith(".weight"):
            tensors, shape = self.checkpoint.read_layer(layer), self.shapes[name]
            return decode_layer(self.checkpoint.layers[layer], tensors, shape).to(device, self.dtypes[name])
        return self.checkpoint.build(name).to(device=device, dtype=self.dtypes[name])

    def fill(self, module: nn.Module, prefix: str = "", device: str | torch.device = "cpu") -> list[str]:
        """Put every piece under ``prefix`` into ``module`` by name. Returns the names of weights that are all zeros."""
        zeros = []
        for name, piece in self.read(prefix, device):
            if isinstance(piece, nn.Module):
                module.set_submodule(name, piece)
                if not piece.weight[0].view(torch.uint8).any() and not piece.weight.view(torch.uint8).any():
                    zeros.append(f"{name}.weight")
                continue
            if piece.dim() > 1 and name.endswith(".weight") and not piece[0].any() and not piece.any():
                zeros.append(name)
            assign(module, name, piece)
        return zeros

    def _is_linear(self, name: str) -> bool:
        return name in self.stored or name in self.online

    def _bias(self, name: str, device: str | torch.device = "cpu") -> Tensor | None:
        name = f"{name}.bias"
        return self.tensor(name, device) if name in self.checkpoint.recipes else None

    def _stored_linear(self, name: str) -> nn.Module:
        layer, tensors = self.checkpoint.layers[name], self.checkpoint.read_layer(name)
        return stored_linear(layer, tensors, self._bias(name), self.shapes[f"{name}.weight"], self.compute)


def stored_linear(
    layer: StoredLayer, tensors: dict[str, Tensor], bias: Tensor | None, shape: tuple[int, int], compute: torch.dtype
) -> QuantisedLinear:
    """The quantised module of a layer whose weight is [out, in] = ``shape``."""
    given = {**tensors, **({} if bias is None else {"bias": bias})}
    return NUMBER_TYPES[layer.format].linear.from_stored(given, layer.marker, compute, shape, layer.name)


def decode_layer(layer: StoredLayer, tensors: dict[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    """The values of a quantised layer's weight, float32 in ``shape``."""
    if layer.format == GGUF:
        return decode_blocks(tensors["weight"], layer.marker["type"]).view(shape)
    if len(shape) != 2:  # only float8 has these: a cast, with or without one scale
        return tensors["weight"].float() * tensors.get("weight_scale", torch.ones(())).float()
    return stored_linear(layer, tensors, None, shape, torch.float32).dequantised()


def quantise_linear(
    weight: Tensor, bias: Tensor | None, method: str, compute: torch.dtype, where: str = "a linear"
) -> QuantisedLinear:
    """A weight [out, in] as the public files of ``method`` store it, in a module. The weight's own dtype is rounded."""
    shape = tuple(weight.shape)
    if method == "fp8":
        values, scale = quantise_float8(weight)
        marker = {"format": "float8_e4m3fn"}
    else:
        group = choose_group(shape[1]) if method == "int8_convrot" else None
        values, scale = quantise_int8(weight, group)
        marker = {"format": "int8_tensorwise"}
        marker |= {} if group is None else {"convrot": True, "convrot_groupsize": group}
    layer = StoredLayer(where, marker["format"], marker, {}, shape)
    return stored_linear(layer, {"weight": values, "weight_scale": scale}, bias, shape, compute)


class StoredEmbedding(nn.Module):
    """Word embeddings kept as stored; rows are decoded when they are looked up. ids [...] -> [..., hidden]."""

    def __init__(self, layer: StoredLayer, tensors: dict[str, Tensor], shape: tuple[int, int], dtype: torch.dtype):
        super().__init__()
        self.layer, self.shape, self.dtype = layer, shape, dtype
        self.roles = tuple(tensors)
        for role, tensor in tensors.items():
            if role == "weight" and layer.format == GGUF:
                tensor = tensor.view(shape[0], -1)  # blocks of a table that the file has folded
            self.register_buffer(role, tensor)

    def forward(self, ids: Tensor) -> Tensor:
        kept, inverse = ids.reshape(-1).unique(return_inverse=True)
        tensors = {role: getattr(self, role) for role in self.roles}
        if self.layer.format in IN_TILES:
            whole = stored_linear(self.layer, tensors, None, self.shape, self.dtype)
            rows = torch.cat([whole.dequantised(row, row + 1) for row in kept.tolist()])
        else:
            chosen = {role: t[kept] if t.dim() and t.shape[0] == self.shape[0] else t for role, t in tensors.items()}
            rows = decode_layer(self.layer, chosen, (len(kept), self.shape[1]))
        return rows.to(self.dtype)[inverse].view(*ids.shape, self.shape[1])


def assign(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Set the parameter or buffer ``name`` of ``module``, whatever was there."""
    owner_name, _, leaf = name.rpartition(".")
    owner = module.get_submodule(owner_name)
    is_buffer = leaf in dict(owner.named_buffers(recurse=False))
    setattr(owner, leaf, tensor if is_buffer else nn.Parameter(tensor, requires_grad=False))
