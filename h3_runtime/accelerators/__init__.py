"""Accelerators: one file each, listed here. Being listed is being labelled, shown, reachable and tested.

"forecast:calls=0.4,window=4" ─parse─▶ spec (name, ((option, value), ...)) in request, job, manifest, fingerprint
specs ─build─▶ [Accelerator, ...]      options checked, what excludes each other refused with its reason
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from ..errors import H3Error
from .attention import KERNELS, AttentionKernel
from .base import Accelerator, Options, fold
from .block_cache import BlockCache
from .compiled import CompiledBlock
from .forecast import Forecast
from .sparse import SparseAttention

ACCELERATORS: tuple[type[Accelerator], ...] = (AttentionKernel, SparseAttention, BlockCache, Forecast, CompiledBlock)
BY_NAME = {accelerator.name: accelerator for accelerator in ACCELERATORS}

Spec = tuple[str, tuple[tuple[str, Any], ...]]


def spec_of(name: str, **options) -> Spec:
    """The spec of an accelerator with all its options spelled out, so that a changed default is a changed job.

    H3Error for an unknown name or option, or a value that is not allowed.
    """
    kind = BY_NAME.get(name)
    if kind is None:
        raise H3Error(f"accelerator {name!r} is not built: choose from {', '.join(BY_NAME)}")
    known = [field.name for field in fields(kind.Options)]
    for option in options:
        if option not in known:
            raise H3Error(f"accelerator {name} has no option {option!r}: it has {', '.join(known)}")
    try:
        return name, tuple(asdict(kind.Options(**options)).items())
    except H3Error as error:
        raise H3Error(f"accelerator {name}: {error}") from None


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """``NAME`` or ``NAME:option=value,option=value`` -> name and options, values read by their look."""
    name, colon, rest = text.strip().partition(":")
    options = {}
    for part in rest.split(",") if colon else ():
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise H3Error(f"accelerator {text!r} cannot be read at {part!r}: give NAME or NAME:option=value,...")
        options[key.strip().replace("-", "_")] = _value(value.strip())
    return name, options


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def checked(specs: Sequence[Spec]) -> tuple[Spec, ...]:
    """The specs with options spelled out. H3Error for what cannot be used, or cannot be used together."""
    made = tuple(spec_of(name, **dict(options)) for name, options in specs)
    names = [name for name, _ in made]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise H3Error(f"accelerator {name} was given twice: leave one of them out")
        for other in names[:index]:
            reason = BY_NAME[name].excludes.get(other) or BY_NAME[other].excludes.get(name)
            if reason:
                raise H3Error(f"accelerators {other} and {name} exclude each other ({reason}): leave one of them out")
    return made


def build(specs: Sequence[Spec]) -> list[Accelerator]:
    """One fresh object per spec, in their order. H3Error as ``checked``, and for a kernel that is missing here."""
    return [BY_NAME[name](BY_NAME[name].Options(**dict(options))) for name, options in checked(specs)]


__all__ = [
    "ACCELERATORS",
    "BY_NAME",
    "KERNELS",
    "Accelerator",
    "Options",
    "Spec",
    "build",
    "checked",
    "fold",
    "parse",
    "spec_of",
]
