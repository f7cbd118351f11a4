"""bench paths: what it measures, how it goes on after a kill, and that one failing path stops no other."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from h3_runtime.bench_command import CARRIED_PROMPTS
from h3_runtime.bench_paths import Bench, Cells, Watched, read_ways, run_paths
from h3_runtime.checkpoint.parts import find_parts
from h3_runtime.cli import main
from h3_runtime.demo.carried import CARRIED_MODEL
from h3_runtime.errors import H3Error
from h3_runtime.paths_table import FILES, markdown, middle, results, rows_of, write_tables
from h3_runtime.request import RenderRequest
from h3_runtime.ways import Bed

WAYS = ("int8_convrot", "lora", "steps=1")  # the second cannot be: there is no LoRA
REQUEST = RenderRequest("", (64, 64), frames=22, num_forwards=2, dtype="float32")
DIES = """
import os, sys
from tests.test_bench_paths import bench_in
from h3_runtime.bench_paths import run_paths
from h3_runtime.paths_table import write_tables
from pathlib import Path

def progress(stage, done, total):
    if stage == "denoise" and len(list((out / "cells").glob("*.json"))) == 1:
        os._exit(9)  # as a kill does: nothing is tidied up

out = Path(sys.argv[1])
run_paths(bench_in(out), write_tables, print, progress)
"""


def bench_in(out, **changes) -> Bench:
    bed = Bed(find_parts(CARRIED_MODEL), torch.float32)
    return replace(Bench(bed, out, read_ways(WAYS), CARRIED_PROMPTS[:1], (0,), REQUEST, pages=False), **changes)


def run(bench: Bench, said: list[str] | None = None) -> list[dict]:
    said = [] if said is None else said
    return run_paths(bench, write_tables, said.append, lambda stage, done, total: None)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """(folder, its cells right after the kill): the process died while the second path was rendered."""
    out = tmp_path_factory.mktemp("bench")
    done = subprocess.run([sys.executable, "-c", DIES, str(out)], capture_output=True, text=True)
    assert done.returncode == 9, done.stderr[-2000:]
    return out, sorted(path.name for path in (out / "cells").iterdir())


@pytest.fixture(scope="module")
def finished(killed):
    """(bench, cells, what was said) of the run that went on."""
    bench, said = bench_in(killed[0]), []
    before = (killed[0] / "clips").glob("*_lossless.mp4")
    stamps = [path.stat().st_mtime_ns for path in before]
    cells = run(bench, said)
    assert stamps == [path.stat().st_mtime_ns for path in (killed[0] / "clips").glob("*_lossless.mp4")]
    return bench, cells, said


def test_a_killed_run_leaves_its_finished_cells(killed):
    out, names = killed
    assert sorted(name.rpartition(".")[2] for name in names) == ["begun", "json"]
    cell = json.loads(next((out / "cells").glob("*.json")).read_text("utf-8"))
    assert (cell["way"], cell["failed"], cell["dit_calls"]) == ("lossless", None, 2)


def test_it_goes_on_where_it_stood(finished, killed):
    bench, cells, said = finished
    assert [cell["way"] for cell in cells] == ["lossless", *WAYS]
    assert not any(line.startswith("lossless") for line in said), "the lossless clip was there"
    assert "4 cells, 3 of them measured now" in said
    assert not list(killed[0].rglob("*.begun")) and not list(killed[0].rglob("*.kept.mkv"))
    again = []
    run(bench, again)
    assert again == ["4 cells, 0 of them measured now"]


def test_each_path_is_measured_before_encoding(finished):
    cells = {cell["way"]: cell for cell in finished[1]}
    for way in ("int8_convrot", "steps=1"):
        assert cells[way]["basis"] == "before encoding" and cells[way]["figures"]["psnr"] > 5
    assert cells["steps=1"]["dit_calls"] == 1 and cells["int8_convrot"]["label"] == "APPROXIMATE"
    assert cells["int8_convrot"]["figures"]["psnr"] > cells["steps=1"]["figures"]["psnr"]
    assert cells["lossless"]["host_bytes_peak"] > 2**27 and 0 <= cells["lossless"]["busy_with_others"]


def test_a_path_that_fails_is_told_with_its_sentence(finished):
    bench, cells, _ = finished
    failed = next(cell for cell in cells if cell["way"] == "lora")
    assert "needs a LoRA" in failed["failed"] and cells[-1]["failed"] is None
    assert "failed: path 'lora' needs a LoRA" in markdown(bench, cells)
    said: list[str] = []
    run(replace(bench, again=True), said)
    assert said[-1] == "4 cells, 2 of them measured now", "and the lossless clip, whose frames are gone"


def test_a_changed_setting_is_a_new_cell(finished, tmp_path):
    bench = finished[0]
    cells = Cells(bench)
    way = bench.ways[1]
    assert not cells.wanted(way, bench.prompts[0], 0)
    for changed in (
        replace(bench, request=replace(REQUEST, num_forwards=3)),
        replace(bench, request=replace(REQUEST, frames=39)),
        replace(bench, bed=replace(bench.bed, dtype=None)),
    ):
        assert Cells(changed).wanted(way, bench.prompts[0], 0)
    assert cells.wanted(way, bench.prompts[0], 1) and cells.wanted(way, "another prompt", 0)
    weights = json.loads(json.dumps(cells.weights))
    weights["video_vae"][0][2] += 1
    cells.weights = weights
    assert cells.wanted(way, bench.prompts[0], 0), "weights that were replaced"


def test_a_cell_that_ends_the_process_twice_has_failed(tmp_path):
    bench = bench_in(tmp_path / "out", ways=read_ways(["lossless"]))
    cells = Cells(bench)
    key = cells.key(bench.ways[0], bench.prompts[0], 0)
    (tmp_path / "out" / "cells" / f"{key}.begun").write_text("xx")
    (cell,) = run(bench)
    assert "the process ended 2 times" in cell["failed"] and cells.deaths(key) == 0


def test_the_table_in_three_forms(finished):
    bench, cells, _ = finished
    page, text, data = (bench.out / name for name in FILES)
    rows = rows_of(bench, cells)
    assert [row.way for row in rows] == ["lossless", *WAYS]
    lines = text.read_text("utf-8").splitlines()
    columns = {line.count("|") for line in lines if line.startswith("|")}
    assert len(columns) == 1 and sum(line.startswith("|") for line in lines) == 2 + len(rows)
    assert json.loads(data.read_text("utf-8"))["rows"][1]["figures"]["psnr"] == rows[1].figures["psnr"]
    html = page.read_text("utf-8")
    assert html.count("<svg") == 2 and html.count("<circle") == 6, "three paths in each plot"
    named = {row["name"]: row["value"] for row in results(bench, cells)}
    assert 0 < named["paths/steps=1/cpu_seconds/denoise"] < named["paths/lossless/cpu_seconds/denoise"]
    assert named["paths/steps=1/dit_calls"] == 1 and named["paths.html"] == str(page.resolve())


def test_a_time_under_load_is_marked(finished):
    bench, cells, _ = finished
    quiet = [{**cell, "busy_with_others": 0.0} for cell in cells]
    assert "other programs" not in markdown(bench, quiet)
    busy = [{**cell, "busy_with_others": 0.5} if cell["way"] == "steps=1" else cell for cell in quiet]
    marked = [line for line in markdown(bench, busy).splitlines() if "*" in line]
    assert [line.split(" | ")[0] for line in marked][:1] == ["| steps=1"] and "other programs" in marked[1]


def test_medians_do_not_invent_numbers():
    assert middle([1.0, 3.0, 2.0]) == 2.0
    assert middle(["identical", "identical"]) == "identical" and middle(["identical", 3.0, 2.0]) == 3.0
    assert middle([1.0, "not measured: no sound"]) == "not measured: no sound"
    assert middle([]).startswith("not measured")


def test_the_highest_memory_and_the_load_are_watched():
    with Watched("cpu") as watched:
        held = mmap.mmap(-1, 2**26)  # 64 MiB of its own: what an allocator gives may have been there before
        for page in range(0, 2**26, 4096):
            held[page] = 1
        watched.over.wait(0.1)
    rose = watched.host
    held.close()
    with Watched("cpu") as after:
        after.over.wait(0.05)
    assert rose - after.host > 2**25
    assert 0 <= watched.found()["busy_with_others"] <= 1.5


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["paths"], "add --out DIR"),
        (["step", "--paths", "fp8"], "--paths belongs to bench paths"),
        (["paths", "--out", "x", "--paths", "fp9"], "part 'fp9'"),
        (["paths", "--out", "x", "--seeds", "-1"], "seed is -1"),
        (["paths", "--out", "x", "--dit", "a"], "add --model DIR"),
        (["paths", "--out", "x", "--lora", "no.safetensors"], "does not exist"),
        (["paths", "--out", "x", "--steps", "0"], "steps (forwards) is 0"),
        (["paths", "--out", "x", "--frames", "-1"], "frames is -1"),
        (["paths", "--out", "x", "--frames", "0"], "frames is 0"),
        (["paths", "--out", "x", "--size", "1x1"], "width is 1"),
        (["paths", "--out", "x", "--size", "99999968x99999968"], "GiB for its latents"),
        (["paths", "--out", "x", "--prompts", os.devnull], "holds no prompt"),
        (["step", "--steps", "0"], "--steps belongs to bench paths"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(words, refusal, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *words]) == 2
    assert refusal in capsys.readouterr().out and not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", '{"key": "x"}', "[" * 100_000])
def test_a_cell_edited_by_hand_counts_as_missing(tmp_path, text):
    cells = Cells(bench_in(tmp_path))
    way, take = cells.bench.ways[0], cells.bench.takes[0]
    cells._path(cells.key(way, *take)).write_text(text)
    assert cells.wanted(way, *take) and cells.all() == []
    (cells.folder / f"{cells.key(way, *take)}.begun").write_bytes(b"\xff")
    assert cells.deaths(cells.key(way, *take)) == 1


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(H3Error, match="cannot be made"):
        Cells(bench_in(tmp_path / "file"))
