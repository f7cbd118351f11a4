"""docs/reported-elsewhere.md names a test for every row, and it exists; small cases that no other file holds.

| no. | reported elsewhere | here | file::test, ... |
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from h3_runtime.geometry import Canvas
from h3_runtime.media import Mp4Writer
from h3_runtime.media import join as joining
from h3_runtime.media.join import Take, join_files

from .small_jobs import job, one_thread, render  # noqa: F401  (one_thread is a fixture)

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "reported-elsewhere.md"
MERGED = {2, 16, 28, 34, 36, 37, 48, 51, 57, 67, 73, 81, 93, 97, 105}  # numbers of the log that went into others
NUMBERS = set(range(1, 109)) - MERGED
NOT_TRIED = "Not tried here:"


def rows() -> list[list[str]]:
    lines = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if re.match(r"\| \d", line)]
    return [[cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in lines]


def named_tests(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_number_has_its_row_and_every_row_a_test_that_exists():
    table = rows()
    assert [int(row[0]) for row in table] == sorted(NUMBERS)
    known: dict[str, set[str]] = {}
    for number, reported, here, held in table:
        assert len(reported) > 15 and len(here) > 15, number
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", held)
        assert named and not re.sub(r"`test_\w+\.py::test_\w+`|,|\s", "", held), f"{number}: {held}"
        for file, test in named:
            if file not in known:
                known[file] = named_tests(ROOT / "tests" / file)
            assert test in known[file], f"row {number} names {file}::{test}, which does not exist"


def test_the_count_of_what_was_not_tried_is_the_tables():
    text = TABLE.read_text(encoding="utf-8")
    counted = sum(NOT_TRIED in row[2] for row in rows())
    assert f"{len(rows())} rows, {counted} of them" in text and counted > 10


# ---- small cases


def test_joining_holds_a_few_frames_however_many_clips(tmp_path, monkeypatch):
    """The frames that are alive at once while six clips are joined, counted where they are read."""
    clip = tmp_path / "clip.mp4"
    with Mp4Writer(clip, 64, 32, 22, torch.zeros(2, 29333)) as writer:
        writer.write(np.zeros((22, 32, 64, 3), np.uint8))
    alive = peak = 0

    class Frame(np.ndarray):
        def __del__(self):
            nonlocal alive
            alive -= self.base is None

    def counted(*given):
        nonlocal alive, peak
        for picture in read(*given):
            frame = np.ndarray.__new__(Frame, picture.shape, np.uint8)
            frame[:] = picture
            alive += 1
            peak = max(peak, alive)
            yield frame
            del frame

    read = joining.stream_frames
    monkeypatch.setattr(joining, "stream_frames", counted)
    path, frames, _ = join_files([Take(clip)] * 6, tmp_path / "joined.mp4")
    assert path.is_file() and frames == 132 and 1 <= peak <= 4


@pytest.mark.parametrize("frames", [379, 481, 1093])
def test_longer_than_fifteen_seconds_renders(frames):
    canvas = Canvas.fit(frames, (32, 32))
    assert canvas.num_frames >= frames and "outside the trained range" in " ".join(canvas.notes)
    latent = render(job(canvas=canvas, num_forwards=1))
    assert latent.fits(canvas) and bool(torch.isfinite(latent.video).all() and torch.isfinite(latent.audio).all())


NEWER = {
    "batched": 3.12,
    "recurse_symlinks": 3.13,
    "walk_up": 3.12,
    "tomllib": 3.11,
    "TaskGroup": 3.11,
    "StrEnum": 3.11,
}


def test_nothing_needs_more_than_python_310():
    """The oldest Python that the package promises reads every file, and no later name of its library is used."""
    for file in [*(ROOT / "h3_runtime").rglob("*.py"), *(ROOT / "nodes").rglob("*.py"), ROOT / "__init__.py"]:
        tree = ast.parse(file.read_text(encoding="utf-8"), filename=str(file), feature_version=(3, 10))
        used = {getattr(node, "attr", getattr(node, "arg", None)) for node in ast.walk(tree)}
        used |= {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        assert not used & set(NEWER), f"{file.name}: {used & set(NEWER)}"
