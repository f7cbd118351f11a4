"""Quantising float weights while loading: one linear at a time, the chosen GEMMs only, nothing else changes.

    nn.Linear (bf16) ──int8_convrot | int8 | fp8──▶ stored tensors + marker ──▶ the module that reads such a file
    "dit=int8_convrot,text=fp8" + patterns left out ──by_part──▶ {part: (scheme, its patterns)}

The stored tensors are the public layout, so what is computed from bf16 here equals what is computed from the file that
``quantize`` writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from ..errors import H3Error
from .convrot import choose_group, quantise_float8, quantise_int8
from .linear import NUMBER_TYPES, QuantisedLinear

SCHEMES = ("int8_convrot", "int8", "fp8")
PARTS = {"dit": "dit", "text": "text_encoder", "video_vae": "video_vae"}  # the word a person gives -> the part

# The linears that are quantised, by their ComfyUI names.
DIT_GEMMS = re.compile(r"^blocks\.\d+\.(attn\.(qkv_proj|out_proj)|mlp\.fc[12])$")
TEXT_GEMMS = re.compile(r"(^|\.)layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)$")
VIDEO_VAE_GEMMS = re.compile(r"^decoder\.transformer_blocks\.\d+\.(attn\.to_(qkv|out)|ff\.w[12])$")

Include = re.Pattern[str] | Callable[[str], bool]


def check_scheme(scheme: str) -> None:
    """H3Error unless ``scheme`` is one of ``SCHEMES``."""
    if scheme not in SCHEMES:
        raise H3Error(f"quantisation {scheme!r} is unknown; take one of {', '.join(SCHEMES)}")


def by_part(quantise: str | None, exclude: Iterable[str] = ()) -> dict[str, tuple[str, tuple[str, ...]]]:
    """What a person asks for -> {part: (scheme, patterns left as they are)}.

    ``quantise``: a scheme, which is the DiT's, or parts with theirs: ``dit=int8_convrot,text=fp8``. A pattern of
    ``exclude`` is the DiT's too, unless it names its part: ``text:language_model.layers.0.*``. H3Error for what cannot
    be read, and for a pattern of a part that is not quantised.
    """
    schemes: dict[str, str] = {}
    for item in () if quantise is None else quantise.split(","):
        word, names_part, scheme = map(str.strip, item.rpartition("="))
        word = word if names_part else "dit"
        if not scheme:
            raise H3Error(f"quantisation {quantise!r} leaves a part without its way: take one of {', '.join(SCHEMES)}")
        if word not in PARTS:
            raise H3Error(f"quantisation {quantise!r}: the part {word!r} is unknown; take one of {', '.join(PARTS)}")
        if PARTS[word] in schemes:
            raise H3Error(f"quantisation {quantise!r} names {word} twice: give it once")
        check_scheme(scheme)
        schemes[PARTS[word]] = scheme
    patterns: dict[str, list[str]] = {}
    for text in exclude:
        word, names_part, pattern = text.partition(":")
        word, pattern = (word, pattern) if names_part else ("dit", text)
        if PARTS.get(word) not in schemes:
            known = f"not among {', '.join(PARTS)}" if word not in PARTS else "not quantised"
            raise H3Error(
                f"exclude {text!r} leaves layers of {word!r} out of a quantisation, and that is {known}: give quantise "
                "for that part as well, or leave it out"
            )
        if not pattern:
            raise H3Error(f"exclude {text!r} names no layer: give a name or a pattern, such as blocks.0.*")
        patterns.setdefault(PARTS[word], []).append(pattern)
    return {part: (scheme, tuple(patterns.get(part, ()))) for part, scheme in schemes.items()}


def quantise_weight(weight: Tensor, scheme: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A float weight [N, K] -> (tensors by their last names, marker), as public files hold them."""
    check_scheme(scheme)
    if scheme == "fp8":
        values, scale = quantise_float8(weight)
        return {"weight": values, "weight_scale": scale}, {"format": "float8_e4m3fn"}
    group = choose_group(weight.shape[1]) if scheme == "int8_convrot" else None
    values, scale = quantise_int8(weight, group)
    rotation = {} if group is None else {"convrot": True, "convrot_groupsize": group}
    return {"weight": values, "weight_scale": scale}, {"format": "int8_tensorwise", **rotation}


def quantise_linear(linear: nn.Linear, scheme: str, where: str = "a layer") -> QuantisedLinear:
    """The quantised module in place of ``linear``; its bias is taken as it is."""
    tensors, marker = quantise_weight(linear.weight.detach(), scheme)
    if linear.bias is not None:
        tensors["bias"] = linear.bias.detach()
    number_type = NUMBER_TYPES[marker["format"]]
    return number_type.linear.from_stored(tensors, marker, linear.weight.dtype, tuple(linear.weight.shape), where)


def chosen(names: Iterable[str], include: Include = DIT_GEMMS, exclude: Iterable[str] = ()) -> Iterator[str]:
    """The names to quantise: those of ``include`` that no pattern of ``exclude`` matches.

    A pattern is a name with * for any part; a prefix such as ``blocks.0`` takes all below it. H3Error names a pattern
    that matches nothing.
    """
    patterns = list(exclude)
    used: set[str] = set()
    wanted = include.search if isinstance(include, re.Pattern) else include
    for name in names:
        if not wanted(name):
            continue
        hits = [p for p in patterns if fnmatchcase(name, p) or fnmatchcase(name, p.rstrip(".") + ".*")]
        used.update(hits)
        if not hits:
            yield name
    unused = [pattern for pattern in patterns if pattern not in used]
    if unused:
        raise H3Error(f"the exclusion {unused[0]!r} matches no linear that would be quantised; remove or correct it")


def quantise_module(
    module: nn.Module, scheme: str, include: Include = DIT_GEMMS, exclude: Iterable[str] = ()
) -> list[str]:
    """Replace the chosen nn.Linear of ``module`` in place, one at a time; the names replaced. H3Error when none is."""
    check_scheme(scheme)
    linears = [name for name, inner in module.named_modules() if isinstance(inner, nn.Linear)]
    names = list(chosen(linears, include, exclude))
    if not names:
        raise H3Error("no linear is left to quantise: the model has none of the known names, or all are excluded")
    for name in names:
        owner, _, leaf = name.rpartition(".")
        parent = module.get_submodule(owner)
        setattr(parent, leaf, quantise_linear(getattr(parent, leaf), scheme, name))
    return names
