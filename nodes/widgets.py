"""What a widget may hold, by its node's own schema: asked by the page before a run, and by every node when it runs.

schema ─widgets_of─▶ name, field ─wrong_value(name, field, value)─▶ one sentence, "" when the value is allowed

The host looks at the limits of what stands in a widget alone: a number that comes over a wire passes it unseen, and so
does NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

WITH_OPTIONS = "COMFY_DYNAMICCOMBO_V3"  # a choice whose options stand below it, as NAME.OPTION
NUMBERS = ("INT", "FLOAT")


def widgets_of(fields, inputs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(name in the prompt, field) of each field, and of those below the choice that a choice with options holds."""
    for field in fields:
        yield field.id, field
        if field.get_io_type() == WITH_OPTIONS:
            chosen = [option for option in field.options if option.key == inputs.get(field.id)]
            for below in chosen[0].inputs if chosen else ():
                yield f"{field.id}.{below.id}", below


def wrong_value(name: str, field, value) -> str:
    """Why the widget ``name`` of a node cannot hold ``value``, "" when it can."""
    shown = f"{name} is {str(value)[:80]!r}"
    kind = field.get_io_type()
    if kind in ("COMBO", WITH_OPTIONS):
        known = [option.key for option in field.options] if kind == WITH_OPTIONS else field.options
        return "" if value in known else f"{shown}, which is not among its choices: press R and choose again"
    if kind == "BOOLEAN":
        return "" if isinstance(value, bool) else f"{shown}: it is on or off"
    if kind in NUMBERS:
        number = isinstance(value, int if kind == "INT" else (int, float)) and not isinstance(value, bool)
        low, high = field.min, field.max
        return "" if number and low <= value <= high else f"{shown}: give a number from {low} to {high}"
    if kind == "STRING":
        return "" if isinstance(value, str) else f"{shown}: it is a text"
    return f"{shown}: it is an input to connect"


def refuse_wrong_numbers(node, given: dict[str, Any]) -> None:
    """H3Error for the first number in ``given`` (the inputs of ``execute``) outside the limits of its widget."""
    from ..h3_runtime import H3Error

    schema = getattr(node, "SCHEMA", None) or node.define_schema()
    flat = dict(given)
    for name, value in given.items():
        if isinstance(value, dict) and isinstance(value.get(name), str):  # a choice with its options
            flat |= {name: value[name], **{f"{name}.{below}": one for below, one in value.items() if below != name}}
    for name, field in widgets_of(schema.inputs, flat):
        if field.get_io_type() in NUMBERS and name in flat:
            sentence = wrong_value(name, field, flat[name])
            if sentence:
                raise H3Error(sentence)
