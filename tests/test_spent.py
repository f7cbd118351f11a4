"""What a render's stages take: in the report beside the clip, right to the byte, and shown by a comparison."""

from __future__ import annotations

import contextlib
import json
import time

import pytest
import torch

from h3_runtime.accelerators import spec_of
from h3_runtime.checkpoint.load import load_dit
from h3_runtime.checkpoint.parts import find_parts
from h3_runtime.compare.costs import costs
from h3_runtime.compare.sources import Side
from h3_runtime.demo.maker import make_model
from h3_runtime.memory.placement import Placement
from h3_runtime.memory.spent import Spent
from h3_runtime.memory.streaming import LayerLayout
from h3_runtime.model import Loading, Models
from h3_runtime.render import render_request
from h3_runtime.request import RenderRequest
from h3_runtime.save import save_clip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def report_of(folder, out, placement: Placement, forwards: int = 3, **asked) -> dict:
    request = RenderRequest("a", (96, 64), frames=22, num_forwards=forwards, dtype="float32", **asked)
    models = Models(find_parts(folder), torch.float32, loading=Loading(placement=placement))
    saved = save_clip(render_request(request, models), models, out)
    assert b"bytes_streamed" not in saved.video.read_bytes(), "measurements decide nothing of the output"
    return json.loads(saved.report.read_text(encoding="utf-8"))


def layer_bytes(modules, skip: tuple[str, ...] = ()) -> list[int]:
    return [LayerLayout.of(module, skip).nbytes for module in modules]


@pytest.mark.parametrize("rung", ["ram", "disk"])
def test_bytes_streamed_are_those_of_the_layers_times_the_forwards(folder, tmp_path, rung):
    dit, _ = load_dit(folder / "dit.safetensors", torch.float32)
    blocks = layer_bytes(dit.blocks, ("adaln_proj.",))
    once = sum(layer_bytes([block.adaln_proj for block in dit.blocks]) + layer_bytes(dit.token_refiner.blocks))
    report = report_of(folder, tmp_path / "a.mp4", Placement(rung, resident=1, adaln="disk"))
    assert report["stage_bytes_streamed"]["denoise"] == 3 * sum(blocks[1:]) + once
    assert report["bytes_streamed"] == report["stage_bytes_streamed"]["denoise"]
    fewer = report_of(
        folder,
        tmp_path / "b.mp4",
        Placement(rung, resident=1, adaln="disk"),
        8,
        accelerators=(spec_of("forecast", calls=0.6),),
    )
    assert fewer["dit_calls"] < 8
    assert fewer["bytes_streamed"] == fewer["dit_calls"] * sum(blocks[1:]) + once, "what is foretold loads nothing"


def test_a_resident_render_streams_nothing_and_has_no_card(folder, tmp_path):
    report = report_of(folder, tmp_path / "a.mp4", Placement(adaln="resident"))
    assert report["bytes_streamed"] == 0 and report["gpu_seconds"] is None
    assert set(report["stage_cpu_seconds"]) == set(report["stage_seconds"]) >= {"encode", "denoise", "decode"}
    assert report["cpu_seconds"] == pytest.approx(sum(report["stage_cpu_seconds"].values())) and report["cpu_seconds"]
    shown = {row["title"]: row["value"] for row in costs(Side("a", lambda: iter(()), report=report))}
    assert shown["CPU time, all threads"] == report["cpu_seconds"]
    assert shown["CPU time of denoise"] == report["stage_cpu_seconds"]["denoise"]
    assert shown["bytes streamed"] == 0
    if report["machine"]["device"] == "cpu":
        assert shown["GPU time"] == shown["peak VRAM"] == "not measured: it ran on the CPU"


def test_processor_time_is_work_and_not_waiting():
    spent = Spent()
    with spent.stage("waits"):
        time.sleep(0.2)
    with spent.stage("works"):
        end = time.process_time() + 0.1
        while time.process_time() < end:
            pass
    assert spent.seconds["waits"] >= 0.2 > 0.1 > spent.cpu_seconds["waits"]
    assert spent.cpu_seconds["works"] >= 0.1


def test_time_on_a_card_is_between_its_events(monkeypatch):
    events = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing
            events.append(self)

        def record(self):
            self.at = len(events) * 250.0  # milliseconds

        def synchronize(self):
            self.waited = True

        def elapsed_time(self, end):
            assert end.waited, "an event that has not happened has no time"
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    spent = Spent("cuda")
    with spent.stage("denoise"):
        pass
    assert spent.gpu_seconds == {"denoise": 0.25} and spent.to_dict()["gpu_seconds"] == 0.25
