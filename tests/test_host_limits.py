"""What must not be used: pages that may not be locked, VRAM that is left to others, devices nothing computes on.

H3_NO_PIN, H3_RESERVE_VRAM (set by the user, or by the nodes from the host's flags) ─▶ buffers, plan, card
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from h3_runtime.demo.maker import make_model
from h3_runtime.errors import H3Error
from h3_runtime.geometry import Canvas
from h3_runtime.graph import Part
from h3_runtime.memory import probe
from h3_runtime.memory.plan import plan
from h3_runtime.memory.rows import RenderSizes
from h3_runtime.memory.streaming import LayerLayout, RamStore, host_buffer
from h3_runtime.memory.weights import released


class Locked:
    """Stands for torch.empty: counts requests for page-locked memory, and may refuse them as a system does."""

    def __init__(self, monkeypatch, refuses: bool = False):
        self.asked, self.refuses, self.plain = 0, refuses, torch.empty
        monkeypatch.setattr(torch, "empty", self)

    def __call__(self, *shape, pin_memory: bool = False, **options):
        self.asked += pin_memory
        if pin_memory and self.refuses:
            raise RuntimeError("CUDA error: out of memory\nmore words")
        return self.plain(*shape, **options)


def test_no_page_is_locked_where_that_is_forbidden(monkeypatch):
    memory, layout = Locked(monkeypatch), LayerLayout.of(nn.Linear(4, 4, bias=False))
    RamStore([layout], lambda layer, views: views["weight"].fill_(1), pin=True)
    assert memory.asked == 1 and probe.probe_host().pinnable > 0
    monkeypatch.setenv("H3_NO_PIN", "1")
    store = RamStore([layout], lambda layer, views: views["weight"].fill_(1), pin=True)
    assert memory.asked == 1 and layout.views(store.host(0))["weight"].sum() == 16
    assert probe.probe_host().pinnable == 0 and probe.Host.given(64).pinnable == 0


def test_a_system_that_refuses_to_lock_pages_costs_speed_only(monkeypatch, caplog):
    memory = Locked(monkeypatch, refuses=True)
    assert host_buffer(300, pin=True).shape == (300,) and memory.asked == 1
    assert "could not be page-locked (CUDA error: out of memory)" in caplog.text
    assert host_buffer(300, pin=False).shape == (300,) and memory.asked == 1


def test_a_plan_without_locked_pages_says_that_it_was_asked(monkeypatch):
    monkeypatch.setenv("H3_NO_PIN", "1")
    sizes = RenderSizes(Canvas.fit(124, (1344, 768)))
    for ram in (24, 128):  # from disk, from RAM
        made = plan(sizes, released(), probe.Card.given(12), probe.Host.given(ram))
        assert not made.stage("denoise").pinned
        assert "streamed weights are not page-locked: as asked, so copies are slower" in made.notes


def test_vram_that_is_left_to_others_is_not_planned_with(monkeypatch, tmp_path):
    cuda = SimpleNamespace(
        is_available=lambda: True,
        mem_get_info=lambda device: (11 * probe.GIB, 12 * probe.GIB),
        get_device_properties=lambda device: SimpleNamespace(name="card"),
    )
    monkeypatch.setattr(probe, "driver_version", lambda cuda: "1")
    monkeypatch.setattr(probe, "_measure_card", lambda *given: dict.fromkeys(probe.RATES, 1e9))
    monkeypatch.setenv("H3_RESERVE_VRAM", "2.5")
    assert probe.probe_card("cpu", cuda, tmp_path / "rates.json").free == 8.5 * probe.GIB
    for wrong in ("much", "-1", "nan"):
        monkeypatch.setenv("H3_RESERVE_VRAM", wrong)
        with pytest.raises(H3Error, match=f"H3_RESERVE_VRAM is '{wrong}': give gibibytes"):
            probe.probe_card("cpu", cuda, tmp_path / "rates.json")


@pytest.mark.parametrize("device", ["mps", "xpu", "privateuseone"])
def test_a_device_that_nothing_computes_on_is_refused_before_a_file_is_read(device, tmp_path, monkeypatch):
    model = make_model(tmp_path)
    part = Part.open("dit", model / "dit.safetensors")
    monkeypatch.setattr(Part, "load", lambda *given: pytest.fail("read"))
    with pytest.raises(H3Error, match=f"computes on cuda and cpu, not on {device}: .* with --cpu"):
        part.place(device)
