"""The JSON that says how a layer is stored: a ``comfy_quant`` tensor beside it, or an entry of the file's metadata.

blocks.0.attn.qkv_proj.comfy_quant = uint8 of {"format": "int8_tensorwise", "convrot": true, "convrot_groupsize": 256}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .convrot import GROUP, check_group

Marker = Mapping[str, Any]


def read_marker(tensor: Tensor, where: str = "a layer") -> dict[str, Any]:
    """The JSON object in a ``comfy_quant`` tensor (uint8). CheckpointError where it is none."""
    try:
        marker = json.loads(bytes(tensor.cpu().contiguous().view(torch.uint8).flatten().tolist()).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the comfy_quant marker of {where} is not JSON ({error}): damaged file") from None
    return checked_marker(marker, where)


def checked_marker(marker: object, where: str = "a layer") -> dict[str, Any]:
    """``marker`` when it is an object that names a format, else CheckpointError."""
    if not isinstance(marker, dict) or not isinstance(marker.get("format"), str):
        raise CheckpointError(f"the marker of {where} reads {str(marker)[:80]!r}; an object with a format is needed")
    return marker


def write_marker(marker: Marker) -> Tensor:
    """uint8, as ComfyUI writes it."""
    return torch.tensor(list(json.dumps(dict(marker)).encode("utf-8")), dtype=torch.uint8)


def option(marker: Marker, name: str, otherwise: Any) -> Any:
    """A marker's option, which may stand under ``params``."""
    inner = marker.get("params")
    return marker.get(name, inner.get(name, otherwise) if isinstance(inner, Mapping) else otherwise)


def whole(marker: Marker, name: str, otherwise: int, where: str) -> int:
    """An option that is a whole number above zero."""
    value = option(marker, name, otherwise)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{where}: {name} {value!r} is not a whole number above zero")
    return value


def group_of(marker: Marker, features: int, where: str) -> int:
    """The ConvRot group, checked against the layer's inputs."""
    group = whole(marker, "convrot_groupsize", GROUP, where)
    try:
        check_group(features, group)
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from None
    return group
