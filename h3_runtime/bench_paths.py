"""python -m h3_runtime bench paths: prompts and seeds rendered through chosen paths, each against the lossless clip.

    prompt x seed ─▶ lossless ─────────────▶ clip + its frames before encoding ─┐
                  └▶ every other path ─────▶ clip + its frames ─ compare ───────┴▶ OUT/cells/<key>.json, one per cell
    all cells ─▶ paths_table.py ─▶ OUT/paths.html, paths.md, paths.json             (written anew after every cell)

A cell is named by all that decides it: the request, the weights, the device, the versions, and the lossless clip that
it is measured against. So a run that was killed goes on with the first cell that is missing, and a changed setting
makes the cell new. A path that fails is kept with its sentence, and the others go on. A cell during which the process
died twice counts as failed too: a path that takes the machine down must not hold up the rest of the night.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from . import __version__
from .compare.report import compare_files, forget_kept
from .errors import H3Error
from .media import kept_path
from .pressure import free_memory
from .render import environment
from .request import RenderRequest
from .save import Saved, machine
from .unfinished import write_whole
from .ways import LOSSLESS, Bed, Taken, Way, figures_of

VERSION = 1
NEEDED = {"key", "way", "prompt", "seed", "failed", "figures"}  # what a cell's file must hold to count
RENDERED = {"label", "title", "dit_calls", "seconds", "clip"}  # and one that has not failed
DEATHS = 2  # of the process during one cell, after which the cell counts as failed
PATHS = (
    LOSSLESS, "extra-high", "int8_convrot", "int8", "fp8",
    "forecast:calls=0.75", "forecast:calls=0.5", "forecast:calls=0.25", "block-cache", "sparse",
    "steps=24", "steps=12", "second-order+steps=24", "few-step", "steps=4", "lora+steps=4",
    "high", "fast", "draft", "int8_convrot+forecast:calls=0.5",
)  # fmt: skip

Say = Callable[[str], None]
Progress = Callable[[str, int, int], None]
Write = Callable[["Bench", list[dict[str, Any]]], Any]


@dataclass(frozen=True)
class Bench:
    """What is measured: every prompt with every seed through every way. ``request`` holds what all renders share.
    ``pages``: write a full comparison of each cell. ``again``: failed cells are tried once more."""

    bed: Bed
    out: Path
    ways: tuple[Way, ...]
    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    request: RenderRequest
    pages: bool = True
    again: bool = False

    @property
    def takes(self) -> list[tuple[str, int]]:
        return [(prompt, seed) for prompt in self.prompts for seed in self.seeds]

    def ask(self, prompt: str, seed: int) -> RenderRequest:
        return replace(self.request, prompt=prompt, seed=seed)


def read_ways(names: Sequence[str]) -> tuple[Way, ...]:
    """The ways by their names, lossless first whether it was named or not. H3Error for one that is unknown."""
    return tuple(Way.read(name) for name in dict.fromkeys([LOSSLESS, *(name.strip() for name in names)]))


def run_paths(bench: Bench, write: Write, say: Say, progress: Progress) -> list[dict[str, Any]]:
    """Measure every cell that is missing; returns all, in the order of the ways. ``write`` is given them after each, so
    that a run that is stopped leaves a table. H3Error before any work for a folder that cannot be written."""
    cells = Cells(bench)
    took = 0
    for prompt, seed in bench.takes:
        took += _take_one(bench, cells, (prompt, seed), write, say, progress)
    say(f"{len(bench.takes) * len(bench.ways)} cells, {took} of them measured now")
    write(bench, cells.all())
    return cells.all()


def _take_one(bench: Bench, cells: Cells, take: tuple[str, int], write: Write, say: Say, progress: Progress) -> int:
    """Every way of one prompt and seed; returns how many were measured now. The lossless clip is rendered anew where
    another way needs it and its frames are gone."""
    prompt, seed = take
    wanted = [way for way in bench.ways if cells.wanted(way, prompt, seed)]
    lossless, base, count = bench.ways[0], None, 0
    if not wanted:
        return 0
    kept = cells.clip(lossless, prompt, seed)
    if lossless not in wanted and (kept_path(kept).exists() and kept.exists()):
        base = Saved(kept, None, None, kept.with_suffix(".report.json"), (), kept_path(kept))
    else:
        wanted = [lossless, *(way for way in wanted if way is not lossless)]
    for way in wanted:
        say(f"{way.name}: {prompt!r}, seed {seed}")
        cell, taken = measure_cell(bench, cells, way, take, base, progress)
        cells.put(cell)
        count += 1
        if way is lossless and taken is not None:
            base = taken.saved
        say(f"  failed: {cell['failed']}" if cell["failed"] else f"  {cell['label']}, {_words(cell)}")
        write(bench, cells.all())
    if base is not None and base.kept is not None:
        base.kept.unlink(missing_ok=True)
    return count


def _words(cell: dict[str, Any]) -> str:
    psnr = cell["figures"].get("psnr")
    said = f", PSNR {psnr:.1f} dB" if isinstance(psnr, float) else f", {psnr}" if psnr else ""
    return f"{cell['dit_calls']} DiT calls, {cell['seconds']['denoise']:.1f} s of denoising{said}"


def measure_cell(
    bench: Bench, cells: Cells, way: Way, take: tuple[str, int], base: Saved | None, progress: Progress
) -> tuple[dict[str, Any], Taken | None]:
    """(the cell, the clip). Whatever goes wrong is a sentence in the cell; only Ctrl-C and the like pass."""
    prompt, seed = take
    cell: dict[str, Any] = {
        "key": cells.key(way, prompt, seed), "way": way.name, "prompt": prompt, "seed": seed, "failed": None,
        "figures": {}, "environment": environment(str(bench.bed.device)), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    if (deaths := cells.deaths(cell["key"])) >= DEATHS:
        sentence = f"the process ended {deaths} times while this was measured; --again tries once more"
        cells.forget_deaths(cell["key"])
        return {**cell, "failed": sentence}, None
    free_memory()
    try:
        with cells.begun(cell["key"]), Watched(bench.bed.device) as watched:
            taken = bench.bed.take(way, bench.ask(prompt, seed), cells.clip(way, prompt, seed), progress)
        cell |= {**_of_render(taken), **watched.found()}
        if way.name != LOSSLESS:
            cell |= _compared(bench, cells, way, take, base, taken)
        return cell, taken
    except Exception as error:  # one path that fails must not stop the others
        words = str(error).strip().partition("\n")[0] or "no reason was given"
        named = "" if isinstance(error, H3Error) else f"{type(error).__name__}: "
        return {**cell, "failed": named + words}, None
    finally:
        free_memory()


def _of_render(taken: Taken) -> dict[str, Any]:
    result = taken.result
    return {
        "label": str(result.fidelity.label),
        "title": result.fidelity.title,
        "dit_calls": result.dit_calls,
        "seconds": dict(result.seconds),
        "cpu_seconds": dict(result.spent.cpu_seconds),
        "gpu_seconds": dict(result.spent.gpu_seconds) or None,
        "bytes_streamed": sum(result.spent.bytes_streamed.values()),
        "notes": list(taken.saved.notes),
        "clip": taken.saved.video.name,
    }


def _compared(
    bench: Bench, cells: Cells, way: Way, take: tuple[str, int], base: Saved | None, taken: Taken
) -> dict[str, Any]:
    """The figures of this clip against the lossless one; the kept frames of this one go."""
    if base is None:
        taken.saved.kept.unlink(missing_ok=True)
        return {"basis": "not measured: the lossless render failed"}
    folder = cells.page(way, *take) if bench.pages else None
    made = compare_files(base.video, taken.saved.video, folder, (base.report, taken.saved.report))
    forget_kept(replace(made, sides=made.sides[1:]))
    flags = [f"{flag['kind']}: {flag['text']}" for flag in made.data["flags"]]
    found = {"figures": figures_of(made), "basis": made.data["basis"], "flags": flags}
    return found if folder is None else {**found, "page": (folder / "report.html").relative_to(bench.out).as_posix()}


class Cells:
    """The finished cells in ``OUT/cells``, one JSON file each, written in one step."""

    def __init__(self, bench: Bench):
        self.bench, self.folder = bench, bench.out / "cells"
        try:
            for folder in (self.folder, bench.out / "clips"):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise H3Error(f"--out {bench.out} cannot be made ({error.strerror}): choose another folder") from None
        self.weights = describe_weights(bench.bed)
        self.tried: set[str] = set()  # cells that ``again`` has tried in this run

    def key(self, way: Way, prompt: str, seed: int) -> str:
        """A name of all that decides the cell."""
        request = self.bench.ask(prompt, seed)
        decides = {
            "version": VERSION,
            "way": way.name,
            "lossless": asdict(request),
            "parts": asdict(way.asked),
            "weights": self.weights,
            "lora": _stamp(self.bench.bed.lora) if way.needs_lora else None,
            "environment": environment(str(self.bench.bed.device)),
            "dtype": str(self.bench.bed.dtype),
            "runtime": __version__,
        }
        return hashlib.sha256(json.dumps(decides, sort_keys=True, default=str).encode()).hexdigest()[:24]

    def get(self, way: Way, prompt: str, seed: int) -> dict[str, Any] | None:
        """A finished cell, or None; one that cannot be read counts as missing."""
        key = self.key(way, prompt, seed)
        try:
            cell = json.loads(self._path(key).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        whole = isinstance(cell, dict) and cell.get("key") == key and NEEDED <= set(cell)
        return cell if whole and (cell["failed"] or RENDERED <= set(cell)) else None

    def wanted(self, way: Way, prompt: str, seed: int) -> bool:
        cell = self.get(way, prompt, seed)
        return cell is None or bool(cell["failed"] and self.bench.again and cell["key"] not in self.tried)

    def put(self, cell: dict[str, Any]) -> None:
        self.tried.add(cell["key"])
        write_text(self._path(cell["key"]), json.dumps(cell, indent=1, ensure_ascii=False))

    def all(self) -> list[dict[str, Any]]:
        """What is finished, way by way."""
        found = [self.get(way, *take) for way in self.bench.ways for take in self.bench.takes]
        return [cell for cell in found if cell is not None]

    def clip(self, way: Way, prompt: str, seed: int) -> Path:
        return self.bench.out / "clips" / f"{self._take(prompt, seed)}_{way.file_name}.mp4"

    def page(self, way: Way, prompt: str, seed: int) -> Path:
        return self.bench.out / "pages" / f"{self._take(prompt, seed)}_{way.file_name}"

    def _take(self, prompt: str, seed: int) -> str:
        return f"{hashlib.sha256(prompt.encode()).hexdigest()[:8]}_{seed}"

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    # --- cells during which the process died

    def deaths(self, key: str) -> int:
        try:
            return len((self.folder / f"{key}.begun").read_bytes())
        except OSError:
            return 0

    def forget_deaths(self, key: str) -> None:
        (self.folder / f"{key}.begun").unlink(missing_ok=True)

    @contextmanager
    def begun(self, key: str) -> Iterator[None]:
        """A mark that stays only where the process dies inside: an error or Ctrl-C takes it away."""
        write_text(self.folder / f"{key}.begun", "x" * (self.deaths(key) + 1))
        try:
            yield
        finally:
            self.forget_deaths(key)


def write_text(path: Path, text: str) -> None:
    """In one step. H3Error where it cannot be written."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise H3Error(f"{path} could not be written ({error.strerror}): check the free space") from None


def describe_weights(bed: Bed) -> dict[str, Any]:
    """Size and date of every file of the model: what is replaced makes all cells new."""
    parts = {f.name: getattr(bed.parts, f.name) for f in fields(bed.parts)}
    found = {name: _stamp(value) for name, value in parts.items() if isinstance(value, Path)}
    return {**found, "dits": [_stamp(dit.path) for dit in bed.parts.dits]}


def _stamp(path: str | Path | None) -> list | None:
    if path is None:
        return None
    path = Path(path)
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files if file.exists()]


class Watched:
    """What a cell takes that no report tells: the highest memory while it ran, and how busy others kept the cores."""

    EVERY = 0.02  # seconds

    def __init__(self, device: str | torch.device):
        self.device, self.process, self.over = torch.device(device), psutil.Process(), threading.Event()
        self.host = 0

    def __enter__(self) -> Watched:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.began, self.busy = time.perf_counter(), self._busy()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def _busy(self) -> float:
        """Seconds that cores were busy with anything but this process, since the machine began."""
        times, own = psutil.cpu_times(), self.process.cpu_times()
        return sum(times) - times.idle - getattr(times, "iowait", 0) - own.user - own.system

    def _watch(self) -> None:
        while True:
            self.host = max(self.host, self.process.memory_info().rss)
            if self.over.wait(self.EVERY):
                return

    def __exit__(self, *error) -> None:
        self.over.set()
        self.thread.join()
        seconds = max(time.perf_counter() - self.began, 1e-9)
        self.others = max(0.0, (self._busy() - self.busy) / (seconds * (psutil.cpu_count() or 1)))

    def found(self) -> dict[str, Any]:
        card = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        return {"device_bytes_peak": card, "host_bytes_peak": self.host, "busy_with_others": self.others,
                "machine": machine()}  # fmt: skip
