"""The card's script runs end to end on a tiny model, sees what it is there to see, and says what it could not prove."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from h3_runtime import bench_card, bench_gpu, cli
from h3_runtime.bench_card import TINY, CardCase, OneBlockModel, disk_ring, equal_bits, streaming
from h3_runtime.memory.moments import DiTLoad, denoise_moments, largest
from h3_runtime.memory.rows import RenderSizes
from h3_runtime.memory.streaming import LayerLayout
from h3_runtime.memory.weights import named_dit

from .small_jobs import one_thread  # noqa: F401 (a fixture)

CPU = torch.device("cpu")


def by_name(results) -> dict:
    return {row["name"]: row for row in results}


def test_without_a_card_the_command_says_what_it_did_not_prove(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "card", "--json"]) == 0
    captured = capsys.readouterr()
    rows = by_name(json.loads(captured.out)["results"])
    assert "PROOF INCOMPLETE: no CUDA card here" in captured.err
    assert all(rows[f"card/bits/{kind}"]["pass"] for kind in ("stored", "int8_convrot", "fp8", "full-size"))
    for name in ("resident", "streamed", "disk/plain", "disk/ring"):
        assert rows[f"card/{name}"]["value"] > 0
    assert "pass" not in rows["card/overhead"] and "pass" not in rows["card/disk/ring"]


def test_placements_that_differ_are_named(monkeypatch):
    original = bench_card.place_dit

    def spoiled(opened, placement, device):
        dit, layers = original(opened, placement, device)
        if placement.rung == "disk":
            next(dit.final_layer.parameters()).data.add_(1.0)
        return dit, layers

    monkeypatch.setattr(bench_card, "place_dit", spoiled)
    row = equal_bits(CPU)[0]
    assert row["value"] == 2 and row["pass"] is False and row["differ"][0] == "streamed from disk, 1 ahead"


def test_a_streamed_run_with_other_bytes_is_seen(monkeypatch):
    filled = OneBlockModel._filled

    def other(self, name, module):
        made = filled(self, name, module)
        if name == "blocks":
            next(made.parameters()).data.mul_(1.01)
        return made

    assert streaming(CPU, replace(TINY, dtype=torch.bfloat16))[0]["pass"] is True
    monkeypatch.setattr(OneBlockModel, "_filled", other)
    assert streaming(CPU, TINY)[0]["pass"] is False


def test_the_case_is_the_release_and_its_prediction_fits_the_cap():
    case = CardCase()
    job = case.job()
    assert job.canvas.num_frames == 124 and case.config.layers == 50 and case.cap == 24 << 30
    load = DiTLoad.of(RenderSizes.of_job(job), named_dit("bf16"))
    assert largest(denoise_moments(load, 0, 1)).nbytes < case.cap


def test_the_one_block_is_as_large_as_the_plans():
    model = OneBlockModel(TINY, CPU)
    weights = named_dit("fp32", TINY.config)
    assert model.stores["blocks"].one.nbytes == weights.slot
    assert model.stores["adaln"].one.nbytes == weights.adaln
    assert model.stores["refiner"].one.nbytes == max(weights.refiner)
    placed = model.streamed()
    assert len(placed.blocks) == TINY.config.layers and all(t.is_meta for t in model.block.parameters())
    assert LayerLayout.of(model.block, (bench_card.ADALN,)) == model.stores["blocks"].one


def test_the_ring_reads_the_whole_file(tmp_path):
    rows = by_name(disk_ring(CPU, TINY))
    assert rows["card/disk/plain"]["bytes"] == TINY.disk_layers * OneBlockModel(TINY, CPU).stores["blocks"].one.nbytes
    assert rows["card/disk/ring"]["share"] == pytest.approx(
        rows["card/disk/ring"]["value"] / rows["card/disk/plain"]["value"]
    )


# --- the one run for a card -------------------------------------------------------------------------------------------


def test_attention_kernels_are_measured_or_say_why_not():
    rows = {row["name"]: row for row in bench_gpu.bench_attention(torch.device("cpu"), rows=64, repeat=1)}
    assert rows["attention/sdpa"]["value"] == 1.0
    assert set(rows) == {f"attention/{name}" for name in ("sdpa", *bench_gpu.KERNELS)}
    exact, rounded = rows["attention/flash-eager"], rows["attention/int8-eager"]
    assert exact["value"] > 0 and float(exact["relative_l2"]) < float(rounded["relative_l2"]) < 0.1
    assert rows["attention/flash-3"]["value"] is None and rows["attention/flash-3"]["unit"].startswith("not here: ")


def test_a_wrong_kernel_shows_in_its_error(monkeypatch):
    wrong = replace(bench_gpu.KERNELS["flash-eager"], run=lambda q, k, v: 2 * bench_gpu._attend(q, k, v))
    monkeypatch.setitem(bench_gpu.KERNELS, "flash-eager", wrong)
    rows = {row["name"]: row for row in bench_gpu.bench_attention(torch.device("cpu"), rows=64, repeat=1)}
    assert float(rows["attention/flash-eager"]["relative_l2"]) > 0.9


def test_the_run_for_a_card_is_all_of_them(monkeypatch):
    for name in ("bench_card", "bench_attention"):
        monkeypatch.setattr(bench_gpu, name, lambda *given, name=name: [{"name": name, "value": 1.0, "unit": ""}])
    names = [row["name"] for row in bench_gpu.bench_gpu()]
    assert names[-2:] == ["bench_card", "bench_attention"] and "selftest/dit/bf16" in names
    assert torch.cuda.is_available() or "PROOF INCOMPLETE" in bench_gpu.bench_gpu()[0]["unit"]
