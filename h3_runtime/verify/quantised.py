"""Runners for quantised weights: whole forwards of quantised checkpoints, single linears, the rotation.

quant/weights:F     the file's quantised layers as loaded: tensors, markers, groups
quant/dequant:F     their weights decoded
quant/F/request     a forward on the file as it is, on its weights decoded, and with float8 inputs
quant_linear        one linear from its stored tensors; ``hadamard``: the signs of the rotation
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import H3Error
from ..models.attention import Linear
from ..models.dit import DiT
from ..quant.convrot import FLOAT8_MAX, hadamard
from ..quant.linear import QuantisedLinear, linear_from_stored
from .folder import EXACT, Case, Golden, Tensors, Value

STORED = "stored."
DECODED_FILE = "_dequant"


class RoundedInputs(nn.Module):
    """A float8 linear whose inputs are rounded to e4m3 as they are (ComfyUI's rule for layers without input_scale; our
    own kernel on a card rounds with a scale per row)."""

    def __init__(self, base: QuantisedLinear):
        super().__init__()
        self.base = base

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def prepare(self, x: Tensor) -> Tensor:
        return x

    def rows(self, x: Tensor, start: int, stop: int) -> Tensor:
        rounded = x.clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn).float()
        y = F.linear(rounded, self.base.dequantised(start, stop))
        y = y if self.base.bias is None else y + self.base.bias[start:stop].float()
        return y.to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(x, 0, self.base.out_features)


def decoded_linear(base: QuantisedLinear) -> Linear:
    """An ordinary float32 linear with ``base``'s weights decoded."""
    linear = Linear(base.in_features, base.out_features, base.bias is not None)
    linear.weight = nn.Parameter(base.dequantised(), requires_grad=False)
    if base.bias is not None:
        linear.bias = nn.Parameter(base.bias.float(), requires_grad=False)
    return linear


def replaced(dit: DiT, make) -> DiT:
    """A copy of ``dit`` with ``make(linear)`` in place of every quantised linear."""
    found = copy.deepcopy(dit)
    for name, linear in list(found.named_modules()):
        if isinstance(linear, QuantisedLinear):
            found.set_submodule(name, make(linear))
    return found


def quantised_layers(dit: DiT) -> dict[str, QuantisedLinear]:
    return {name: module for name, module in dit.named_modules() if isinstance(module, QuantisedLinear)}


def check_markers(golden: Golden, case: Case, dit: DiT) -> Iterator[Value]:
    """The quantised layers that the index names, their rotation groups, and the markers as the file has them."""
    layers, file = quantised_layers(dit), golden.file(case["file"])
    stated = case["config"].get("layers", {})
    if set(layers) != set(stated):
        raise H3Error(f"{case['file']} was loaded with the quantised layers {sorted(layers)}, not {sorted(stated)}")
    for name, told in stated.items():  # a rotation group, or the format in a word
        if isinstance(told, int):
            yield Value(f"{name}.group", torch.tensor(layers[name].group), "", torch.tensor(told), EXACT)
        marker = f"{name}.comfy_quant"
        if marker in file.shapes:
            yield Value(marker, layers[name].stored()["comfy_quant"], "", file.read(marker), EXACT)


def run_decoded(golden: Golden, case: Case, given: Tensors) -> Iterator[Value]:
    """Decoded weights of the file that ``case``'s file was decoded from."""
    layers = quantised_layers(golden.model(case["file"].replace(DECODED_FILE, ""))[0])
    for name in case["outputs"]:
        layer = layers.get(name.removesuffix(".weight"))
        if layer is not None:
            yield Value(name, layer.dequantised())


def run_linear(golden: Golden, case: Case, given: Tensors) -> Iterator[Value]:
    if case["id"].endswith("/hadamard"):
        for name in case["outputs"]:
            size = int(name.rpartition("_")[2])
            yield Value(name, (hadamard(size) * size**0.5).round().to(torch.int8))
        return
    stored = {name.removeprefix(STORED): given[name] for name in case["inputs"] if name.startswith(STORED)}
    linear = linear_from_stored(stored, None, torch.float32, tuple(given["weight_original"].shape), case["id"])
    yield Value("weight_dequantised", linear.dequantised())
    yield Value("out_comfy", linear(given["x"]))
    x = linear.prepare(given["x"]).values if "pre_quant_scale" in stored else given["x"]
    yield Value("out_dequant", F.linear(x, linear.dequantised(), linear.bias))
