"""A measured value, or the words that stand in its place. A number is never invented.

28.4            measured
"identical"     both sides are the same to the bit, where a formula would give infinity
"not measured: ..."   why there is no number
"""

from __future__ import annotations

import math

Measured = float | int | str

IDENTICAL = "identical"
NOT_MEASURED = "not measured"


def not_measured(why: str) -> str:
    return f"{NOT_MEASURED}: {why}"


def is_number(value: Measured | None) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def decibels(value: float) -> Measured:
    """``value`` in dB; infinity means that nothing differs, NaN that there was nothing to measure."""
    if math.isnan(value):
        return not_measured("it is not a number")
    return IDENTICAL if value == math.inf else value


def shown(value: Measured | None, unit: str = "") -> str:
    """The value in words, with its unit: 28.41 dB, identical, not measured: why."""
    if value is None:
        return NOT_MEASURED
    if not is_number(value):
        return str(value)
    size = abs(value)
    if isinstance(value, int):
        text = f"{value}"
    elif size and size < 0.001:
        text = f"{value:.2e}"
    else:
        text = f"{value:.4f}" if size < 0.1 or (size < 2 and not unit) else f"{value:.2f}"
    return f"{text} {unit}".rstrip()
