"""What came of a bench of paths, as one table: Markdown, JSON, and a page with plots and the way to each comparison.

cells (way x prompt x seed) ─ median per way ─▶ PathRow ─▶ paths.md, paths.json, paths.html
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .bench_paths import Bench, write_text
from .compare.measured import IDENTICAL, Measured, is_number, not_measured, shown
from .compare.plots import Scatter, scatter_svg
from .compare.report import SAYS
from .compare.table import Link, TablePage
from .ways import FIGURES, LOSSLESS

STAGES = ("load", "encode", "denoise", "decode")
BUSY = 0.05  # share of the cores that other programs took, above which a time is marked
MARK = "*"
FILES = ("paths.html", "paths.md", "paths.json")
HEAD = (
    "path", "label", "DiT calls", *(f"{stage} s" for stage in STAGES), "times as fast", "CPU time of denoise s",
    "peak VRAM GiB", "peak RAM GiB",
    "PSNR dB", "PSNR worst frame dB", "SSIM", "sound: STFT distance", "sound: log-spectral dB", "sound: SNR dB",
)  # fmt: skip


@dataclass(frozen=True)
class PathRow:
    """One way over all its cells: medians, of memory the highest. ``measured`` of ``asked`` cells; ``failed``: the
    first one's sentence. ``faster``: how often its denoising fits into the lossless one's; ``cpu``:
    processor seconds of denoising, which other programs hardly change."""

    way: str
    asked: int
    measured: int
    failed: str | None
    label: str
    dit_calls: Measured
    seconds: dict[str, Measured]
    faster: Measured
    cpu: Measured
    vram: Measured
    host: Measured
    figures: dict[str, Measured]
    busy: bool
    notes: tuple[str, ...]


def middle(values: Iterable[Measured]) -> Measured:
    """The median; ``identical`` counts as infinite, and what was not measured stands for all."""
    values = list(values)
    words = [value for value in values if not is_number(value) and value != IDENTICAL]
    if not values or words:
        return words[0] if words else not_measured("no render was finished")
    found = statistics.median(math.inf if value == IDENTICAL else value for value in values)
    return IDENTICAL if found == math.inf else found


def rows_of(bench: Bench, cells: Sequence[dict[str, Any]]) -> list[PathRow]:
    """One row per way that has a finished or a failed cell."""
    made, base = [], None
    for way in bench.ways:
        own = [cell for cell in cells if cell["way"] == way.name]
        good = [cell for cell in own if not cell["failed"]]
        if not own:
            continue
        seconds = {stage: middle(c["seconds"].get(stage, 0.0) for c in good) for stage in STAGES}
        base = seconds["denoise"] if way.name == LOSSLESS else base
        both = is_number(base) and is_number(seconds["denoise"]) and seconds["denoise"] > 0
        figures = {name: "-" for name, _, _ in FIGURES}
        if way.name != LOSSLESS:
            figures = {n: middle(c["figures"].get(n, c.get("basis", "")) for c in good) for n in figures}
        made.append(
            PathRow(
                way=way.name,
                asked=len(bench.takes),
                measured=len(good),
                failed=next((cell["failed"] for cell in own if cell["failed"]), None),
                label=", ".join(dict.fromkeys(cell["label"] for cell in good)) or "-",
                dit_calls=middle(cell["dit_calls"] for cell in good),
                seconds=seconds,
                faster=base / seconds["denoise"] if both else not_measured("no lossless time"),
                cpu=middle(cell["cpu_seconds"]["denoise"] for cell in good),
                vram=_highest(cell["device_bytes_peak"] for cell in good),
                host=_highest(cell["host_bytes_peak"] for cell in good),
                figures=figures,
                busy=any(cell["busy_with_others"] > BUSY for cell in good),
                notes=_telling(good),
            )
        )
    return made


def _telling(cells: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Sentences about what a way did or left out, and flags; not those about the size, the prompt or kept frames."""
    words = (
        "preset",
        "left out",
        "forecast",
        "block-cache",
        "block cache",
        "sparse",
        "attention",
        "few-step",
        "did not",
    )
    notes = [
        note for cell in cells for note in cell["notes"] if any(w in note for w in words) and "keeps frames" not in note
    ]
    flags = [f"flag {flag}" for cell in cells for flag in cell.get("flags", ())]
    return tuple(dict.fromkeys(notes + flags))


def _highest(values: Iterable[int | None]) -> Measured:
    found = [value for value in values if value is not None]
    return max(found) / 2**30 if found else not_measured("there is no card")


def cells_of(row: PathRow) -> list[str]:
    """A row in words, in the order of HEAD."""
    if not row.measured:
        return [row.way, "failed", *[""] * (len(HEAD) - 2)]
    mark = MARK if row.busy else ""
    part = "" if row.measured == row.asked else f" ({row.measured} of {row.asked})"
    return [
        f"{row.way}{part}",
        row.label,
        f"{row.dit_calls:g}",
        *(f"{row.seconds[stage]:.2f}{mark}" for stage in STAGES),
        f"{row.faster:.2f}{mark}" if is_number(row.faster) else "-",
        f"{row.cpu:.2f}" if is_number(row.cpu) else "-",
        f"{row.vram:.2f}" if is_number(row.vram) else "-",
        f"{row.host:.2f}" if is_number(row.host) else "-",
        *(_figure(value) for value in row.figures.values()),
    ]


def _figure(value: Measured) -> str:
    return shown(value) if is_number(value) or value in (IDENTICAL, "-") else "not measured"


def sentences(bench: Bench, cells: Sequence[dict[str, Any]], rows: Sequence[PathRow]) -> list[str]:
    """What was measured on what, what failed, and how the figures are to be read."""
    good = [cell for cell in cells if not cell["failed"]]
    size, frames = bench.request.size, bench.request.frames
    size = f"{size[0]}x{size[1]}" if size else "the trained canvas"
    said = [
        f"{_count(bench.prompts, 'prompt')}, {_count(bench.seeds, 'seed')}, {size}, {frames or 124} frames, "
        f"{bench.request.num_forwards} forwards; {len(good)} of {len(bench.takes) * len(bench.ways)} cells measured"
    ]
    machines = dict.fromkeys(_machine(cell) for cell in good)
    said += [f"machine: {words}" for words in machines]
    basis = dict.fromkeys(cell["basis"] for cell in good if "basis" in cell)
    said += [f"figures are medians, measured {' and '.join(basis)}; of memory the highest"] if basis else []
    if any(row.busy for row in rows):
        said.append(
            f"{MARK} other programs took more than {BUSY:.0%} of the cores meanwhile: the times are longer than the "
            "path needs, and not to be compared with another day's"
        )
    said += [f"{row.way} failed: {row.failed}" for row in rows if row.failed]
    return [*said, SAYS]


def _count(things: Sequence, word: str) -> str:
    return f"{len(things)} {word}{'' if len(things) == 1 else 's'}"


def _machine(cell: dict[str, Any]) -> str:
    here = cell["machine"]
    device = "CPU only" if here["device"] == "cpu" else f"{here['device']}, driver {here['driver']}"
    return (
        f"{here['threads']} of {here['cores']} cores of {here['processor']}, {here['memory_gib']:g} GiB, {device}, "
        f"torch {here['torch']}, {cell['date']}"
    )


def markdown(bench: Bench, cells: Sequence[dict[str, Any]]) -> str:
    rows = rows_of(bench, cells)
    lines = [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in cells_of(row))} |" for row in rows]
    said = [*sentences(bench, cells, rows), *(f"{row.way}: {note}" for row in rows for note in row.notes)]
    return "\n".join([*lines, "", *(f"- {sentence}" for sentence in said), ""])


def page_of(bench: Bench, cells: Sequence[dict[str, Any]]) -> TablePage:
    rows = rows_of(bench, cells)
    pages = {way.name: [c["page"] for c in cells if c["way"] == way.name and c.get("page")] for way in bench.ways}
    table = []
    for row in rows:
        links = tuple(Link(str(number), to) for number, to in enumerate(pages[row.way], start=1))
        table.append([*cells_of(row), links or ""])
    said, rest = sentences(bench, cells, rows), [f"{row.way}: {note}" for row in rows for note in row.notes]
    return TablePage(
        title="Paths: what each costs and changes",
        said=said[:1],
        head=[*HEAD, "comparisons"],
        rows=table,
        after=[*said[1:], *rest],
        wide=True,
        figures=[scatter_svg(plot) for plot in plots_of(rows)],
    )


def plots_of(rows: Sequence[PathRow]) -> list[Scatter]:
    """Distance of the picture and of the sound over the time of denoising; the dashed line joins what nothing beats."""
    made = []
    for name, title in (("psnr", "Picture: PSNR in dB against lossless"), ("snr", "Sound: SNR in dB against lossless")):
        points = []
        for row in rows:
            up = math.inf if row.way == LOSSLESS or row.figures[name] == IDENTICAL else row.figures[name]
            if is_number(row.seconds["denoise"]) and (up == math.inf or is_number(up)):
                points.append((row.way, float(row.seconds["denoise"]), float(up)))
        made.append(Scatter(title, "seconds of denoising, median", tuple(points)))
    return made


def write_tables(bench: Bench, cells: Sequence[dict[str, Any]]) -> list[Path]:
    """paths.html, paths.md and paths.json in the bench's folder."""
    rows = [asdict(row) for row in rows_of(bench, cells)]
    told = {"h3_paths": 1, "rows": rows, "said": sentences(bench, cells, rows_of(bench, cells)), "cells": list(cells)}
    page, text, data = (bench.out / name for name in FILES)
    page_of(bench, cells).write(page)
    write_text(text, markdown(bench, cells))
    write_text(data, json.dumps(told, indent=1, ensure_ascii=False))
    return [page, text, data]


def results(bench: Bench, cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results block: one row per way and figure, and where the table lies."""
    made: list[dict[str, Any]] = []
    for row in rows_of(bench, cells):
        made.append({"name": f"paths/{row.way}/label", "value": row.label, "unit": "", "failed": row.failed})
        made.append({"name": f"paths/{row.way}/dit_calls", "value": row.dit_calls, "unit": "forwards"})
        made += [{"name": f"paths/{row.way}/seconds/{s}", "value": v, "unit": "s"} for s, v in row.seconds.items()]
        made.append({"name": f"paths/{row.way}/cpu_seconds/denoise", "value": row.cpu, "unit": "s"})
        made.append({"name": f"paths/{row.way}/peak_vram", "value": row.vram, "unit": "GiB"})
        made.append({"name": f"paths/{row.way}/peak_host", "value": row.host, "unit": "GiB"})
        units = {name: unit for name, _, unit in FIGURES}
        made += [{"name": f"paths/{row.way}/{n}", "value": v, "unit": units[n]} for n, v in row.figures.items()]
    return made + [{"name": name, "value": str((bench.out / name).resolve()), "unit": "path"} for name in FILES]
