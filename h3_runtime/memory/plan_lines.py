"""A plan in words and as results.

stage          weights                               on the card   host      time                        bound
denoise        7 of 50 resident, rest disk, 2 ahead     10.3 GiB    7.1 GiB   45.0 s a forward x 49       compute
...
what the largest peak is made of, notes, and the refusal when there is one
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..job import Plan, StagePlan

GIB = 1 << 30
PASS_WORDS = {"denoise": "forward", "video decode": "clip"}
PARTS_SHOWN = 6


def plan_lines(plan: Plan) -> list[str]:
    """Sentences and a table for people."""
    rows = ", ".join(f"{count:,} {kind}" for kind, count in plan.rows if count)
    lines = [f"rows: {plan.num_rows:,} ({rows})", f"card: {plan.card}, {gib(plan.free_vram)} free"]
    table = [("stage", "weights", "card", "host", "time", "bound")]
    for stage in plan.stages:
        times = f"{seconds(stage.seconds)} a {PASS_WORDS.get(stage.name, 'pass')}"
        if stage.passes > 1:
            times += f" x {stage.passes}"
        table.append((stage.name, _weights(stage), gib(stage.vram), gib(stage.host), times, stage.bound))
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table]
    lines += _denoise_lines(plan)
    lines += [f"note: {note}" for note in plan.notes]
    if plan.fits:
        lines.append(f"fits: about {seconds(plan.seconds)} in all, loading left out")
    else:
        lines.append(f"does not fit: {plan.refusal}")
    return lines


def _denoise_lines(plan: Plan) -> list[str]:
    stage = plan.stage("denoise")
    parts = sorted(stage.parts, key=lambda part: -part[1])[:PARTS_SHOWN]
    made_of = ", ".join(f"{gib(size)} {what}" for what, size in parts if size)
    moved = f"{stage.moved / 1e9:.1f} GB" if stage.moved else "nothing"
    alone = ", ".join(f"{what} {seconds(value)}" for what, value in stage.times if value)
    return [
        f"denoise peak ({stage.peak_at}): {made_of}; {gib(plan.reserve)} of the card are left alone",
        f"denoise: {stage.how}; {gib(stage.resident_bytes)} of blocks stay on the card, {moved} is copied to it in "
        f"each forward ({alone})",
        f"modulation tables on the host: {gib(plan.tables)}" if plan.tables else "modulation tables: none are kept",
    ]


def _weights(stage: StagePlan) -> str:
    if stage.rung == "resident":
        return "resident"
    where = "RAM" if stage.rung == "ram" else stage.rung
    if not stage.resident:
        return f"streamed from {where}, {stage.ahead} ahead"
    return f"{stage.resident} of {stage.layers} resident, rest from {where}, {stage.ahead} ahead"


def plan_results(plan: Plan) -> list[dict[str, Any]]:
    """The same as name, value, unit."""
    found: list[dict[str, Any]] = [
        _row("fits", plan.fits, ""),
        _row("refusal", plan.refusal, ""),
        _row("rows", plan.num_rows, "rows"),
        *(_row(f"rows/{kind.replace(' ', '_')}", count, "rows") for kind, count in plan.rows),
        _row("peak/card", plan.vram / GIB, "GiB"),
        _row("peak/host", plan.host / GIB, "GiB"),
        _row("free/card", plan.free_vram / GIB, "GiB"),
        _row("free/host", plan.free_host / GIB, "GiB"),
        _row("reserve", plan.reserve / GIB, "GiB"),
        _row("tables", plan.tables / GIB, "GiB"),
        _row("chunk_heads", plan.chunks[0], "heads"),
        _row("chunk_rows", plan.chunks[1], "rows"),
        _row("seconds", plan.seconds, "s"),
    ]
    for stage in plan.stages:
        name = stage.name.replace(" ", "_")
        found += [
            _row(f"{name}/rung", stage.rung, ""),
            _row(f"{name}/resident", stage.resident, "layers"),
            _row(f"{name}/layers", stage.layers, "layers"),
            _row(f"{name}/ahead", stage.ahead, "layers"),
            _row(f"{name}/card", stage.vram / GIB, "GiB", parts=_parts(stage.parts), at=stage.peak_at),
            _row(f"{name}/host", stage.host / GIB, "GiB"),
            _row(f"{name}/moved", stage.moved / 1e9, "GB a pass"),
            _row(f"{name}/passes", stage.passes, ""),
            _row(f"{name}/seconds", stage.seconds, "s a pass", **dict(stage.times)),
            _row(f"{name}/bound", stage.bound, ""),
            _row(f"{name}/how", stage.how, ""),
        ]
    found += [_row("path", path, "") for path in plan.paths]
    return found + [_row("note", note, "") for note in plan.notes]


def _row(name: str, value: Any, unit: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, **more}


def _parts(parts: Sequence[tuple[str, int]]) -> dict[str, float]:
    return {what: round(size / GIB, 4) for what, size in parts if size}


def gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes < GIB else f"{nbytes / GIB:.1f} GiB"


def seconds(value: float) -> str:
    """Seconds as a person reads them."""
    if value < 10:
        return f"{value:.1f} s"
    if value < 120:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"
