"""Which layers of a file are quantised, and how: read layer by layer, never file by file.

    X.comfy_quant  (JSON in bytes, ComfyUI)                    ─┐
    header: _quantization_metadata {"layers": {X: {...}}}       ├─▶ StoredLayer(X, format, marker, role -> stored name)
    scaled_fp8, X.scale_weight, X.scale_input (older)           │
    a GGUF type of X.weight; F8_E4M3 without any marker        ─┘

What is left of the stored names are plain tensors. Every role a format needs is checked by name, number type and shape
against the layer's true size before anything is read; only the markers themselves (a few bytes each) are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError
from .gguf_file import is_quantised_type
from .reader import TensorSource

METADATA_KEY = "_quantization_metadata"
LEGACY_MARK = "scaled_fp8"
LEGACY_ROLES = {"scale_weight": "weight_scale", "scale_input": "input_scale"}
MARKER = "comfy_quant"
ROLES = (
    "weight",
    "weight_scale",
    "weight_scale_2",
    "input_scale",
    "pre_quant_scale",
    "weight_s_rel",
    "weight_s_channel",
    "weight_codebook",
)
FP8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
GGUF = "gguf"
MAX_MARKER_BYTES = 1 << 16
DEFAULT_GROUP = 256


@dataclass(frozen=True)
class StoredLayer:
    """One quantised layer. ``format`` is ComfyUI's word (int8_tensorwise, float8_e4m3fn, nvfp4, mxfp8, convrot_w4a4,
    asym_w4a8_int8), or gguf. ``marker`` is its JSON; ``roles`` maps weight, weight_scale ... to the stored names, bias
    not among them (it is a plain tensor). ``size`` [out, in] is what the weight's bytes hold, padding included."""

    name: str
    format: str
    marker: Mapping[str, Any]
    roles: Mapping[str, str]
    size: tuple[int, ...]

    @property
    def title(self) -> str:
        """The format as people write it: int8_convrot g256, fp8_e4m3 scaled, nvfp4 awq, Q4_K ..."""
        if self.format == GGUF:
            return self.marker["type"]
        group = convrot_group(self.marker)
        if self.format == "int8_tensorwise":
            return f"int8_convrot g{group}" if group else "int8"
        if self.format in FP8.values():
            return self.format.removesuffix("fn").replace("float8", "fp8") + (
                " scaled" if "weight_scale" in self.roles else " unscaled"
            )
        return self.format + (" awq" if "pre_quant_scale" in self.roles else "")


def convrot_group(marker: Mapping[str, Any]) -> int | None:
    """The ConvRot group of a marker, None when the layer is not rotated; settings may stand one level down."""
    inner = marker.get("params")
    settings = {**(inner if isinstance(inner, Mapping) else {}), **marker}
    if settings.get("convrot") or "convrot_groupsize" in settings:
        group = settings.get("convrot_groupsize", DEFAULT_GROUP)
        return group if type(group) is int and group > 0 else -1
    return None


def find_layers(source: TensorSource, prefix: str) -> tuple[dict[str, StoredLayer], set[str], list[str]]:
    """The quantised layers by name (prefix taken off), the stored names that belong to them (markers included), and
    what does not work out, in words. Reads the markers of the layers, no weights."""
    names = [name for name in source.shapes if name.startswith(prefix)]
    markers, taken, problems = _markers(source, prefix, names)
    roles: dict[str, dict[str, str]] = {}
    for name in names:
        layer, _, leaf = name[len(prefix) :].rpartition(".")
        leaf = LEGACY_ROLES.get(leaf, leaf)
        kind = source.dtypes[name]
        if leaf in ROLES and (leaf != "weight" or layer in markers or kind in FP8 or is_quantised_type(kind)):
            roles.setdefault(layer, {})[leaf] = name
    layers: dict[str, StoredLayer] = {}
    for layer, marker in markers.items():
        if "weight" not in roles.get(layer, {}):
            problems.append(f"missing {prefix}{layer}.weight (its {MARKER} says {marker.get('format')})")
    for layer, found in roles.items():
        if "weight" not in found:
            continue  # stays among the plain names and is named as extra there
        taken.update(found.values())
        made = _layer(source, layer, markers.get(layer), found)
        if isinstance(made, StoredLayer):
            layers[layer] = made
        else:
            problems.append(made)
    return layers, taken, problems


def _layer(source: TensorSource, layer: str, marker: Mapping | None, roles: dict[str, str]) -> StoredLayer | str:
    stored = roles["weight"]
    dtype, shape = source.dtypes[stored], source.shapes[stored]
    if marker is None and is_quantised_type(dtype):
        return StoredLayer(layer, GGUF, {"format": GGUF, "type": dtype}, roles, shape)
    if marker is None and dtype in FP8:
        marker = {"format": FP8[dtype]}
    if marker is None:
        return f"{source.where(stored)} is stored as {dtype} and nothing says in which quantised format"
    word = marker.get("format")
    if word not in FORMATS:
        known = ", ".join(FORMATS)
        return f"{source.where(stored)} is in the quantised format {word!r}, which this version does not know ({known})"
    if len(shape) == 2 and FORMATS[word].packed:
        shape = (shape[0], 2 * shape[1])
    return StoredLayer(layer, word, marker, roles, shape)


def _markers(source: TensorSource, prefix: str, names: list[str]) -> tuple[dict[str, dict], set[str], list[str]]:
    """Layer name -> marker, the stored names that only mark, problems."""
    markers: dict[str, dict] = {}
    taken: set[str] = set()
    problems: list[str] = []
    if METADATA_KEY in source.metadata:
        told = _parsed(source.metadata[METADATA_KEY], f"{source.path}: the metadata {METADATA_KEY}")
        entries = told.get("layers")
        if not isinstance(entries, dict) or not all(isinstance(marker, dict) for marker in entries.values()):
            raise CheckpointError(f"{source.path}: the metadata {METADATA_KEY} names no layers; download it again.")
        markers.update({layer.removeprefix(prefix): marker for layer, marker in entries.items()})
    if prefix + LEGACY_MARK in source.shapes:
        mark = prefix + LEGACY_MARK
        taken.add(mark)
        word = FP8.get(source.dtypes[mark], FP8["F8_E4M3"])
        marker = {"format": word}
        if source.shapes[mark] == (2,):  # two values: the file asks for matmuls in full precision
            marker["full_precision_matrix_mult"] = True
        scaled = (name[len(prefix) : -len(".scale_weight")] for name in names if name.endswith(".scale_weight"))
        markers.update(dict.fromkeys(scaled, marker))
    for name in names:
        if name.endswith(f".{MARKER}"):
            taken.add(name)
            if source.dtypes[name] != "U8" or source.nbytes(name) > MAX_MARKER_BYTES:
                problems.append(f"{source.where(name)} is no JSON in bytes")
                continue
            text = bytes(source.read(name).numpy()).decode("utf-8", "replace")
            markers[name[len(prefix) : -len(MARKER) - 1]] = _parsed(text, source.where(name))
    return markers, taken, problems


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is no JSON ({error}); download the file again.") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{where} is no JSON table; download the file again.")
    return found


# ---- what each format stores for a layer of [out, in]


@dataclass(frozen=True)
class Stored:
    """One format: number types of each role, and its possible shapes for a layer of n = [out, in]. ``packed``: two
    values a byte. Roles without an entry in ``optional`` must be there."""

    types: Mapping[str, tuple[str, ...]]
    shapes: Any  # (out, in, group of the marker) -> {role: shapes it may have}
    optional: tuple[str, ...] = ()
    packed: bool = False


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def _one(n: int, k: int) -> tuple[tuple[int, ...], ...]:
    return ((), (1,), (1, 1))


def _int8(n, k, marker):
    return {"weight": ((n, k),), "weight_scale": (*_one(n, k), (n, 1), (n,))}


def _fp8(n, k, marker):
    return {"weight": ((n, k),), "weight_scale": (*_one(n, k), (n, 1), (n,)), "input_scale": _one(n, k)}


def _nvfp4(n, k, marker):
    rows, columns = _up(n, 16), _up(k, 16)
    scales = ((_up(rows, 128), _up(columns // 16, 4)),)
    shapes = {"weight": ((rows, columns // 2),), "weight_scale": scales, "weight_scale_2": _one(n, k)}
    return {**shapes, "input_scale": _one(n, k), "pre_quant_scale": ((k,), (1, k))}


def _mxfp8(n, k, marker):
    rows, columns = _up(n, 32), _up(k, 32)
    scales = ((_up(rows, 128), _up(columns // 32, 4)),)
    return {"weight": ((rows, columns),), "weight_scale": scales, "input_scale": _one(n, k)}


def _w4a4(n, k, marker):
    return {"weight": ((n, k // 2),), "weight_scale": ((n,), (n, 1))}


def _w4a8(n, k, marker):
    size = marker.get("group_size", 16)
    groups = k // size if type(size) is int and size > 0 else 0
    shapes = {"weight": ((n, k // 2),), "weight_s_rel": ((n, groups),), "weight_s_channel": ((n,), (n, 1))}
    return {**shapes, "weight_codebook": ((16,),)}


_FLOAT = ("F32", "F16", "BF16")
_BYTES_E4M3 = ("F8_E4M3", "U8")
FORMATS: dict[str, Stored] = {
    "int8_tensorwise": Stored({"weight": ("I8",), "weight_scale": _FLOAT}, _int8),
    "float8_e4m3fn": Stored(
        {"weight": _BYTES_E4M3, "weight_scale": _FLOAT, "input_scale": _FLOAT}, _fp8, ("weight_scale", "input_scale")
    ),
    "float8_e5m2": Stored(
        {"weight": ("F8_E5M2", "U8"), "weight_scale": _FLOAT, "input_scale": _FLOAT},
        _fp8,
        ("weight_scale", "input_scale"),
    ),
    "nvfp4": Stored(
        {
            "weight": ("U8",),
            "weight_scale": _BYTES_E4M3,
            "weight_scale_2": _FLOAT,
            "input_scale": _FLOAT,
            "pre_quant_scale": _FLOAT,
        },
        _nvfp4,
        ("input_scale", "pre_quant_scale"),
        packed=True,
    ),
    "mxfp8": Stored(
        {"weight": _BYTES_E4M3, "weight_scale": ("F8_E8M0", "U8"), "input_scale": _FLOAT}, _mxfp8, ("input_scale",)
    ),
    "convrot_w4a4": Stored({"weight": ("I8", "U8"), "weight_scale": _FLOAT}, _w4a4, packed=True),
    "asym_w4a8_int8": Stored(
        {
            "weight": ("I8", "U8"),
            "weight_s_rel": (*_BYTES_E4M3, *_FLOAT),
            "weight_s_channel": _FLOAT,
            "weight_codebook": _FLOAT,
        },
        _w4a8,
        ("weight_codebook",),
        packed=True,
    ),
}


def misfits(layer: StoredLayer, source: TensorSource, wanted: tuple[int, ...]) -> list[str]:
    """What of ``layer`` does not fit a weight of shape ``wanted``, in words; [] when everything does."""
    if layer.format == GGUF:
        found = source.shapes[layer.roles["weight"]]
        where = source.where(layer.roles["weight"])
        return [] if found == wanted else [f"misshapen {where} {list(found)}, needed {list(wanted)}"]
    if len(wanted) != 2:
        found = source.shapes[layer.roles["weight"]]
        if layer.format in FP8.values() and found == wanted:
            return []  # a cast or a scale: any shape has it
        return [f"{source.where(layer.roles['weight'])} is quantised ({layer.format}), but is no matrix"]
    stored = FORMATS[layer.format]
    group = convrot_group(layer.marker)
    if group is not None and (group < 4 or group & (group - 1) or group.bit_length() % 2 == 0 or wanted[1] % group):
        return [f"{source.where(layer.name)}: a ConvRot group of {group} does not divide {wanted[1]} inputs"]
    allowed = stored.shapes(*wanted, layer.marker)
    problems = []
    for role, types in stored.types.items():
        name = layer.roles.get(role)
        if name is None:
            if role not in stored.optional:
                problems.append(f"missing {layer.name}.{role} ({layer.format})")
            continue
        if source.dtypes[name] not in types:
            problems.append(f"{source.where(name)} is stored as {source.dtypes[name]}, not as {' or '.join(types)}")
        elif source.shapes[name] not in allowed[role]:
            needed = " or ".join(str(list(shape)) for shape in allowed[role])
            problems.append(f"misshapen {source.where(name)} {list(source.shapes[name])}, needed {needed}")
    problems += [f"extra {source.where(name)}" for role, name in layer.roles.items() if role not in stored.types]
    return problems
