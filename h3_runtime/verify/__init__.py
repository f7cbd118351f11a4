"""Runs every case of a folder of reference vectors against the runtime and says how far apart they are.

    index.json ──case──▶ RUNNERS[group] ──▶ the runtime's own functions ──▶ Value(name, got)
                                                                                 │
                                 stored output, tolerance ──▶ compare ◀──────────┘ ──▶ CaseResult

Nothing here knows a size: layouts, weights and schedules come from the index, so any folder of the form can be run. A
group without a runner is "not built" and counts as failing. See ``folder`` for the form, ``cases`` for the runners.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.reader import listed
from ..errors import H3Error
from .cases import RUNNERS
from .folder import Case, Golden, OutputResult, compare

SHOWN_OUTPUTS = 6  # failing outputs named under one case
HALF = "_bf16"  # outputs that end so were computed in bfloat16

__all__ = ["CaseResult", "OutputResult", "format_lines", "to_results", "verify_folder"]


@dataclass(frozen=True)
class CaseResult:
    """One case. ``status``: pass, fail, not built (its group has no runner) or error (it could not be run).

    ``outputs`` has every compared value; ``note`` says why there is none.
    """

    id: str
    group: str
    status: str
    outputs: tuple[OutputResult, ...] = ()
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.status == "pass"

    @property
    def max_abs(self) -> float:
        """Largest absolute error of all outputs; NaN when nothing, or something not finite, was compared."""
        return _worst(output.max_abs for output in self.outputs)

    @property
    def rel_l2(self) -> float:
        """Largest relative L2 error of all outputs; NaN likewise."""
        return _worst(output.rel_l2 for output in self.outputs)


def _worst(errors: Iterable[float]) -> float:
    errors = list(errors)
    return math.nan if not errors or any(math.isnan(error) for error in errors) else max(errors)


def verify_folder(
    folder: str | Path,
    only: str | Sequence[str] | None = None,
    progress: Callable[[CaseResult], None] | None = None,
) -> list[CaseResult]:
    """Run the cases of ``folder``, or ``only`` those whose id contains this text (or one of these).

    ``progress`` is called with each result. A case that cannot be run is an error of its own, with the reason in its
    note; H3Error when the folder has no usable index or ``only`` matches nothing.
    """
    golden = Golden(folder)
    parts = [""] if only is None else [only] if isinstance(only, str) else list(only)
    chosen = [case for case in golden.cases if any(part in case["id"] for part in parts)]
    if not chosen:
        groups = ", ".join(dict.fromkeys(case["group"] for case in golden.cases))
        raise H3Error(f"no case of {golden.folder} has {only!r} in its id: the groups are {groups}")
    results = []
    for case in chosen:
        results.append(run_case(golden, case))
        if progress is not None:
            progress(results[-1])
    return results


@torch.no_grad()
def run_case(golden: Golden, case: Case) -> CaseResult:
    """One case; whatever stops it becomes its note."""
    name, group = case["id"], case["group"]
    if group not in RUNNERS:
        return CaseResult(name, group, "not built", note=f"group {group} is not built yet")
    outputs: list[OutputResult] = []
    try:
        given = golden.tensors(case)
        for value in RUNNERS[group](golden, case, given):
            stored = value.want is None
            if stored and value.name not in case["outputs"]:
                continue
            want = given[value.name] if stored else value.want
            tolerance = case["tolerance"][value.name] if stored else value.tolerance
            outputs.append(compare(value.label, value.got, want, tolerance))
    except Exception as problem:  # one broken case must not hide the others
        words = str(problem) if isinstance(problem, H3Error) else f"{type(problem).__name__}: {problem}"
        return CaseResult(name, group, "error", tuple(outputs), words)
    made = {output.name.partition(" [")[0] for output in outputs}
    absent = [output for output in case["outputs"] if output not in made]
    if absent or not outputs:
        words = f"this version does not compute {listed(absent)}" if absent else "nothing was compared"
        return CaseResult(name, group, "error", tuple(outputs), words)
    passed = all(output.passed for output in outputs)
    return CaseResult(name, group, "pass" if passed else "fail", tuple(outputs))


def format_lines(results: Sequence[CaseResult]) -> list[str]:
    """One line a case, what is wrong with it under it, and the counts at the end."""
    width = max((len(result.id) for result in results), default=0)
    lines = []
    for result in results:
        word = result.status if result.passed else result.status.upper()
        errors = _figures(result.outputs) if result.outputs else result.note
        lines.append(f"{word:9}  {result.id:{width}}  {errors}".rstrip())
        if result.outputs and result.note:
            lines.append(f"{'':11}{result.note}")
        failing = [output for output in result.outputs if not output.passed]
        for output in failing[:SHOWN_OUTPUTS]:
            lines.append(f"{'':11}{output.name}: {output.note or _figures([output])}")
        if len(failing) > SHOWN_OUTPUTS:
            lines.append(f"{'':11}and {len(failing) - SHOWN_OUTPUTS} more")
    return [*lines, _summary(results)]


def _figures(outputs: Sequence[OutputResult]) -> str:
    """The largest errors; those of the float32 outputs as well where a case has both kinds."""

    def largest(chosen: Sequence[OutputResult]) -> str:
        return f"max abs {_worst(o.max_abs for o in chosen):.1e}  rel L2 {_worst(o.rel_l2 for o in chosen):.1e}"

    full = [output for output in outputs if HALF not in output.name]
    text = largest(outputs)
    return f"{text}  (float32 alone: {largest(full)})" if 0 < len(full) < len(outputs) else text


def _summary(results: Sequence[CaseResult]) -> str:
    counts = Counter(result.status for result in results)
    words = (("fail", "fail"), ("error", "could not be run"))
    parts = [f"{counts['pass']} of {len(results)} cases pass"]
    parts += [f"{counts[status]} {said}" for status, said in words]
    unbuilt = Counter(result.group for result in results if result.status == "not built")
    if unbuilt:
        parts.append(f"{unbuilt.total()} not built ({', '.join(f'{g} {n}' for g, n in unbuilt.items())})")
    return "; ".join(parts)


def to_results(results: Sequence[CaseResult]) -> list[dict[str, Any]]:
    """The entries of ``--json``. ``value`` is the largest absolute error; what is no finite number is null."""

    def number(x: float) -> float | None:
        return x if math.isfinite(x) else None

    return [
        {
            "name": f"verify/{result.id}",
            "value": number(result.max_abs),
            "unit": "largest absolute error",
            "id": result.id,
            "group": result.group,
            "pass": result.passed,
            "status": result.status,
            "max_abs": number(result.max_abs),
            "rel_l2": number(result.rel_l2),
            "note": result.note,
        }
        for result in results
    ]
