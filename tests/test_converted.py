"""Blocks kept ready in a converted file: the resident bits, written once, reused, refused when damaged."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from h3_runtime import cli
from h3_runtime.checkpoint.load import load_dit, open_dit
from h3_runtime.demo.maker import make_model
from h3_runtime.errors import H3Error
from h3_runtime.geometry import Canvas
from h3_runtime.lora import Lora, apply
from h3_runtime.lora import plan as plan_loras
from h3_runtime.memory import placement
from h3_runtime.memory.converted import SUFFIX, converted_store
from h3_runtime.memory.placement import Placement, place_dit
from h3_runtime.memory.plan import plan
from h3_runtime.memory.probe import Card, Host, probe_transforms
from h3_runtime.memory.rows import RenderSizes
from h3_runtime.memory.weights import named_dit, released
from h3_runtime.sampler import sample
from h3_runtime.selftest import tiny_job

from .small_jobs import Crash, same

CPU = torch.device("cpu")
OPENED = {
    "quantised": {"quantise": "int8_convrot"},
    "fp8 but for a block": {"quantise": "fp8", "exclude": ["blocks.1.*"]},
    "interleaved": {"layout": "official"},
    "cast": {"dtype": torch.float32},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def path(folder):
    return folder / "dit.safetensors"


def placed(path, kept, resident=0, loras=(), **how):
    def carry(dit):
        if loras:
            apply(dit, plan_loras(dit, list(loras)), mode="side")

    return place_dit(open_dit(path, **how), Placement("disk", resident, converted=str(kept)), CPU, carry)


def rendered(dit, layers):
    return sample(dit, replace(tiny_job(), num_forwards=2), layers=layers).latent


def files(folder) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("kind", OPENED)
def test_a_converted_file_gives_the_resident_bits_and_is_reused(path, tmp_path, kind, monkeypatch):
    how = OPENED[kind]
    expected = rendered(load_dit(path, **how)[0], None)
    dit, layers = placed(path, tmp_path, **how)
    assert same(rendered(dit, layers), expected) and "converted once into" in layers.blocks.notes[0]
    (name,) = files(tmp_path)
    assert name.endswith(SUFFIX)
    # whatever number stays on the card, the same file serves, and no block is transformed again
    monkeypatch.setattr("h3_runtime.memory.placement.converted_store", keeping_from_reading(converted_store))
    for resident in (0, 1, 3):
        dit, layers = placed(path, tmp_path, resident, **how)
        assert "reused from" in layers.blocks.notes[0] and files(tmp_path) == [name]
        assert same(rendered(dit, layers), expected)


def keeping_from_reading(make):
    return lambda folder, key, layouts, read, first: make(folder, key, layouts, None, first)


def test_loras_travel_in_the_file_and_name_it(path, tmp_path):
    base = load_dit(path)[0]
    out, inside = base.blocks[0].mlp.fc1.weight.shape
    generator = torch.Generator().manual_seed(2)
    key = "diffusion_model.blocks.0.mlp.fc1"
    factors = {
        f"{key}.lora_A.weight": torch.randn(4, inside, generator=generator) / inside**0.5,
        f"{key}.lora_B.weight": torch.randn(out, 4, generator=generator),
    }
    save_file(factors, tmp_path / "l.safetensors")
    kept = tmp_path / "kept"
    kept.mkdir()
    found = []
    for strength in (1.0, 0.5):
        lora = Lora(tmp_path / "l.safetensors", strength)
        whole, _ = load_dit(path, quantise="int8")
        apply(whole, plan_loras(whole, [lora]), mode="side")
        for resident in (0, 1):
            dit, layers = placed(path, kept, resident, [lora], quantise="int8")
            assert same(rendered(dit, layers), rendered(whole, None))
        found.append(rendered(whole, None))
    assert not same(*found) and len(files(kept)) == 2


def test_what_decides_the_bytes_names_the_file(path, tmp_path):
    for how in OPENED.values():
        placed(path, tmp_path, **how)
    other = tmp_path / "other.safetensors"
    shutil.copy(path, other)
    with open(other, "r+b") as file:
        file.seek(-3, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    placed(other, tmp_path, quantise="int8_convrot")
    assert len([name for name in files(tmp_path) if name.endswith(SUFFIX)]) == len(OPENED) + 1


def test_bytes_that_need_no_work_are_not_converted(path, tmp_path):
    dit, layers = placed(path, tmp_path)
    assert not files(tmp_path) and not layers.blocks.notes
    assert same(rendered(dit, layers), rendered(load_dit(path)[0], None))


def test_a_damaged_file_is_refused_and_stays(path, tmp_path):
    placed(path, tmp_path, quantise="int8")
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(H3Error, match=r"is damaged .*delete it, and it is made again"):
        placed(path, tmp_path, quantise="int8")
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 4
    file.write_bytes(flipped)
    dit, layers = placed(path, tmp_path, quantise="int8")
    with pytest.raises(H3Error, match=r"is damaged \(layer \d is not what was written\)"):
        rendered(dit, layers)
    placed(path, tmp_path, quantise="fp8")
    (wrong,) = [other for other in tmp_path.iterdir() if other != file]
    wrong.replace(file)
    with pytest.raises(H3Error, match="holds other layers than its name says"):
        placed(path, tmp_path, quantise="int8")


def test_a_stop_in_the_middle_leaves_no_file(path, tmp_path, monkeypatch):
    original, calls = placement._LayerSource.read, []

    def stops(self, layer, views):
        calls.append(layer)
        if layer == 2:
            raise Crash
        original(self, layer, views)

    monkeypatch.setattr(placement._LayerSource, "read", stops)
    with pytest.raises(Crash):
        placed(path, tmp_path, quantise="int8")
    assert calls == [0, 1, 2] and not files(tmp_path)


def test_a_disk_without_room_is_refused_before_the_work(path, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: shutil._ntuple_diskusage(10**6, 10**6, 1000))
    with pytest.raises(H3Error, match="1,000 free: choose another folder"):
        placed(path, tmp_path, quantise="int8")
    with pytest.raises(H3Error, match="is not a folder that exists"):
        placed(path, tmp_path / "none", quantise="int8")


def render(capsys, folder, out, *more) -> tuple[int, str]:
    words = ["render", "--model", folder, "--prompt", "a", "--size", "96x64", "--frames", 5, "--steps", 2, "--out", out]
    status = cli.main([str(word) for word in (*words, "--no-recovery", "--no-prompt-cache", *more)])
    return status, capsys.readouterr().out


def test_the_command_converts_and_says_so(capsys, folder, tmp_path):
    kept = tmp_path / "kept"
    given = ["--quantise", "int8", "--place", "disk"]
    status, said = render(capsys, folder, tmp_path / "a.mp4", *given, "--converted", kept)
    assert status == 2 and "is not a folder that can be written to" in said
    kept.mkdir()
    status, said = render(capsys, folder, tmp_path / "a.mp4", *given, "--converted", kept)
    assert status == 0 and "weights were converted once into" in said
    assert render(capsys, folder, tmp_path / "b.mp4", *given)[0] == 0
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()
    status, said = render(capsys, folder, tmp_path / "c.mp4", "--place", "disk", "--converted", kept)
    assert status == 0 and "nothing was converted: the file's bytes are used as they are" in said
    status, said = render(capsys, folder, tmp_path / "c.mp4", "--place", "ram", "--converted", kept)
    assert status == 2 and "--converted keeps transformed weights for --place disk, not ram" in said


def test_the_plan_says_which_transform_runs_where_and_what_it_costs():
    sizes = RenderSizes(Canvas.fit(124, (1344, 768)), text_rows=512)
    weights, card = released(named_dit("int8")), Card.given(8.0)
    host = replace(Host.given(12.0), transform_rates=(("int8", 1e8),))
    each = plan(sizes, weights, card, host)
    once = plan(sizes, weights, card, replace(host, converted="DIR"))
    ram = plan(sizes, weights, card, replace(host, available=64 << 30, pinnable=64 << 30))
    whole = sum(weights.dit.block_bytes)
    streamed = sum(weights.dit.block_bytes[each.stage("denoise").resident :])
    note = next(note for note in each.notes if "linears are quantised (int8)" in note)
    assert f"at each read, in every forward ({streamed / 1e8:.1f} s each)" in note
    assert f"a converted file of {whole / 1e9:.1f} GB" in note
    assert f"once, into a converted file of {whole / 1e9:.1f} GB in DIR ({whole / 1e8:.0f} s)" in " ".join(once.notes)
    assert f"once, into RAM ({whole / 1e8:.0f} s)" in " ".join(ram.notes)
    stage = each.stage("denoise")
    assert dict(stage.times)["disk"] == pytest.approx(streamed / host.disk_rate + streamed / 1e8)
    assert stage.bound == "disk" and stage.seconds > once.stage("denoise").seconds


def test_rates_of_transforms_are_measured_once(tmp_path, monkeypatch):
    monkeypatch.setattr("h3_runtime.memory.probe.MEASURE_SECONDS", 0.0)
    monkeypatch.setattr("h3_runtime.memory.probe.TRANSFORM_ROWS", 768)
    kinds = ("reorder", "cast", "int8_convrot", "fp8")
    rates = probe_transforms(kinds, tmp_path / "rates.json")
    assert set(rates) == set(kinds) and min(rates.values()) > 0
    monkeypatch.setattr("h3_runtime.memory.probe._measure_transform", lambda kind, clock: 0.0)
    assert probe_transforms(kinds, tmp_path / "rates.json") == rates
