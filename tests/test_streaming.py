"""Streamed equals resident bit for bit, and the schedule of copies is exactly the model's, on a virtual clock."""

from __future__ import annotations

import copy
import itertools
from contextlib import contextmanager

import pytest
import torch

from h3_runtime.accelerators import Accelerator
from h3_runtime.job import Guide, Masks
from h3_runtime.memory.streaming import (
    DiskStore,
    DiTLayers,
    HostMover,
    LayerLayout,
    LayerStream,
    RamStore,
    StreamedLayers,
    run_in_order,
)
from h3_runtime.sampler import sample

from .small_jobs import CONFIG, clip, job, picture, render, same, small_dit

LAYERS = CONFIG.layers


class Stop(Exception):
    """A cancel."""


def streamed(modules, store: str, resident: int, ahead: int, skip=()) -> StreamedLayers:
    """``modules`` from ``resident`` on in a store of the given kind, their skeletons on the meta device."""
    skeletons = [copy.deepcopy(module) for module in modules]
    for skeleton in skeletons[resident:]:
        skeleton.to("meta")
    layouts = [LayerLayout.of(module, skip) for module in modules[resident:]]

    def fill(layer, views):
        tensors = modules[layer + resident].state_dict()
        for name, view in views.items():
            view.copy_(tensors[name])

    made = RamStore(layouts, fill, pin=False) if store == "ram" else DiskStore(layouts, fill)
    return StreamedLayers(skeletons, resident, HostMover(made, len(layouts), ahead + 1), ahead)


def placed(store: str = "ram", resident: int = 0, ahead: int = 1) -> DiTLayers:
    dit = small_dit()
    blocks = streamed(list(dit.blocks), store, resident, ahead, skip=("adaln_proj.",))
    return DiTLayers(blocks, streamed([block.adaln_proj for block in dit.blocks], store, 0, ahead))


def hollow_dit():
    """The small DiT without any block weights: whatever runs must come from the layers."""
    dit = copy.deepcopy(small_dit())
    dit.blocks.to("meta")
    return dit


JOBS = {
    "plain": job(num_forwards=3),
    "masked": job(num_forwards=2, source=clip(), masks=Masks.make((torch.arange(168).view(7, 4, 6) % 9) / 8, None)),
    "guided": job(num_forwards=2, guides=(Guide(0, picture(), keyframe=True), Guide(9, picture(seed=3), strength=0.5))),
}


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize(("store", "ahead"), [("ram", 1), ("disk", 1), ("ram", 2), ("disk", 2)])
def test_streamed_equals_resident(name, store, ahead):
    whole = render(JOBS[name])
    assert same(sample(hollow_dit(), JOBS[name], layers=placed(store, 0, ahead)).latent, whole)


def test_mixed_placements_and_tables_by_forward(monkeypatch):
    whole = render(JOBS["masked"])
    monkeypatch.setattr("h3_runtime.steps.MAX_TABLE_PAIRS", 0)
    assert same(sample(hollow_dit(), JOBS["masked"], layers=placed("disk")).latent, whole)
    half = placed("ram", resident=1)
    assert same(sample(hollow_dit(), JOBS["masked"], layers=half).latent, whole)


class FirstBlockOnly(Accelerator):
    """Runs block 0 alone in every forward but the first: the others must not be loaded."""

    name = "first"

    def wrap_blocks(self, call):
        return lambda h, step, start, stop: call(h, step, start, stop if step.index == 0 else start + 1)


def test_blocks_that_do_not_run_are_not_copied():
    layers = placed("ram")
    asked = job(num_forwards=4)
    accelerated = sample(hollow_dit(), asked, [FirstBlockOnly()], layers=layers).latent
    assert same(accelerated, render(asked, FirstBlockOnly()))
    assert layers.blocks.stream.copies == LAYERS + 3


def test_every_forward_copies_each_block_once():
    layers = placed("disk")
    sample(hollow_dit(), job(num_forwards=3), layers=layers)
    assert layers.blocks.stream.copies == 3 * LAYERS
    assert layers.adaln.stream.copies == LAYERS


@pytest.mark.parametrize("store", ["ram", "disk"])
def test_a_cancel_in_any_block_leaves_the_stream_usable(store):
    asked, layers = job(num_forwards=2), placed(store)
    whole = render(asked)
    for stop_at in range(2 * LAYERS):
        seen = itertools.count()

        def poll(seen=seen, stop_at=stop_at):
            if next(seen) == stop_at:
                raise Stop

        with pytest.raises(Stop):
            sample(hollow_dit(), asked, poll=poll, layers=layers)
        assert same(sample(hollow_dit(), asked, layers=layers).latent, whole)


def test_an_error_while_reading_reaches_the_caller_and_frees_the_ring():
    layers = placed("disk")
    store = layers.blocks.stream.mover.store
    fill = store.fill

    def broken(layer, views):
        raise OSError("the disk is gone")

    store.fill = broken
    with pytest.raises(OSError, match="the disk is gone"):
        sample(hollow_dit(), job(num_forwards=2), layers=layers)
    store.fill = fill
    assert same(sample(hollow_dit(), job(num_forwards=2), layers=layers).latent, render(job(num_forwards=2)))


def test_nothing_is_allocated_after_the_ring_is_made():
    layers = placed("ram", ahead=2)
    before = [slot.data_ptr() for slot in layers.blocks.stream.mover.slots]
    sample(hollow_dit(), job(num_forwards=3), layers=layers)
    mover = layers.blocks.stream.mover
    assert [slot.data_ptr() for slot in mover.slots] == before
    for (layer, slot), views in mover.views.known.items():
        size = mover.store.layout(layer).nbytes
        first = mover.slots[slot].data_ptr()
        assert all(first <= view.data_ptr() < first + size for view in views.values())


def test_layer_major_work_keeps_a_layer_until_the_next_is_asked_for():
    modules = [torch.nn.Linear(3, 3) for _ in range(4)]
    layers = streamed(modules, "ram", 1, 1)
    tiles = [torch.ones(3), torch.zeros(3)]
    for layer in run_in_order(layers):
        tiles = [layer(tile) for tile in tiles]
    expected = [torch.ones(3), torch.zeros(3)]
    for module in modules:
        expected = [module(tile) for tile in expected]
    assert all(torch.equal(a, b) for a, b in zip(tiles, expected))


# --- the schedule on a virtual clock ---------------------------------------------------------------------------------


class VirtualMover:
    """A machine with one copy engine and one compute engine, in made-up seconds; the host issues at no cost."""

    def __init__(self, copy_seconds: list[float], slots: int, serial: bool = False, waiting_host: bool = False):
        self.copy_seconds, self.serial, self.waiting_host = copy_seconds, serial, waiting_host
        self.copy_end = self.now = 0.0
        self.holds: list[int | None] = [None] * slots

    def copy(self, layer, slot, after):
        begin = max(self.copy_end, after or 0.0, self.now if self.serial or self.waiting_host else 0.0)
        self.copy_end = begin + self.copy_seconds[layer]
        if self.serial:
            self.now = self.copy_end
        self.holds[slot] = layer
        return self.copy_end

    def wait(self, ticket):
        self.now = max(self.now, ticket)

    def mark(self):
        return self.now

    def tensors(self, layer, slot):
        assert self.holds[slot] == layer
        return {}

    def drain(self):
        pass


def makespan(copies: list[float], computes: list[float], ahead: int, passes: int = 1, serial: bool = False) -> float:
    mover = VirtualMover(copies, ahead + 1, serial)
    stream = LayerStream(mover, ahead)
    for turn in range(passes):
        stream.announce([*range(len(copies)), *([0] if turn < passes - 1 else [])])
        for layer, seconds in enumerate(computes):
            with stream.use(layer):
                mover.now += seconds
    return mover.now


def mixed_makespan(
    resident: int, copies: list[float], computes: list[float], ahead: int, passes: int = 1, waiting_host: bool = False
) -> float:
    """Passes over ``resident`` layers that stay and then streamed ones, as the sampler announces them."""
    mover = VirtualMover(copies, ahead + 1, waiting_host=waiting_host)
    layers = StreamedLayers([None] * len(computes), resident, mover, ahead)
    for turn in range(passes):
        layers.announce(0, len(computes), 0 if turn < passes - 1 else None)
        for layer, seconds in enumerate(computes):
            with layers.use(layer):
                mover.now += seconds
    assert layers.stream.copies == passes * len(copies)
    return mover.now


def closed_form(copies: list[float], computes: list[float], ahead: int) -> float:
    """Copy i may begin when copy i - 1 is done and slot i - ahead - 1 has been computed from."""
    copied, computed = [], []
    for index, (copy_seconds, compute_seconds) in enumerate(zip(copies, computes)):
        begin = copied[-1] if copied else 0.0
        if index > ahead:
            begin = max(begin, computed[index - ahead - 1])
        copied.append(begin + copy_seconds)
        computed.append(max(copied[-1], computed[-1] if computed else 0.0) + compute_seconds)
    return computed[-1]


CASES = {
    "copy-bound": ([3.0] * 10, [1.0] * 10, 31.0),
    "compute-bound": ([1.0] * 10, [3.0] * 10, 31.0),
    "even": ([2.0] * 10, [2.0] * 10, 22.0),
    "mixed": ([1.0, 5.0, 1.0, 1.0, 5.0, 1.0], [2.0, 1.0, 6.0, 1.0, 1.0, 3.0], None),
    "long copy": ([1.0, 1.0, 9.0, 1.0, 1.0], [4.0] * 5, None),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ahead", [1, 2])
def test_makespan_is_the_closed_form(name, ahead):
    copies, computes, known = CASES[name]
    assert makespan(copies, computes, ahead) == closed_form(copies, computes, ahead)
    if known is not None:
        assert closed_form(copies, computes, ahead) == known


def test_passes_follow_each_other_without_a_gap():
    copies, computes = [1.0] * 5, [2.0] * 5
    assert makespan(copies, computes, 1, passes=3) == closed_form(copies * 3, computes * 3, 1) == 31.0


@pytest.mark.parametrize(
    ("copy_seconds", "expected"),
    [
        (4.0, [7.0, 14.0, 21.0]),  # hidden behind the resident layers of each pass
        (9.0, [10.0, 20.0, 30.0]),  # longer than they: the copy is all there is to wait for, and the compute after it
        (6.0, [7.0, 14.0, 21.0]),
    ],
)
def test_the_first_streamed_layer_is_copied_while_resident_ones_compute(copy_seconds, expected):
    """Two resident layers of 3 s, one streamed of 1 s; a host that waits for each computation issues no copy early."""
    for passes, whole in enumerate(expected, start=1):
        assert mixed_makespan(2, [copy_seconds], [3.0, 3.0, 1.0], 1, passes, waiting_host=True) == pytest.approx(whole)


def test_the_first_streamed_layer_of_the_next_pass_is_copied_during_this_ones_end():
    """One resident layer, two streamed of 4 s: the second pass finds its first copy under way since 8 s."""
    spent = [mixed_makespan(1, [4.0, 4.0], [1.0, 1.0, 1.0], 1, passes, waiting_host=True) for passes in (1, 2)]
    assert spent == [9.0, 17.0]


def test_a_schedule_that_serialises_is_seen():
    copies, computes, _ = CASES["compute-bound"]
    assert makespan(copies, computes, 1, serial=True) > closed_form(copies, computes, 1)

    class Serial(LayerStream):
        """Copies only the layer that is about to run."""

        @contextmanager
        def use(self, layer):
            self.announced = [layer]
            with super().use(layer) as tensors:
                yield tensors

    mover = VirtualMover(copies, 2)
    stream = Serial(mover)
    for layer, seconds in enumerate(computes):
        with stream.use(layer):
            mover.now += seconds
            mover.copy_end = max(mover.copy_end, mover.now)  # the next copy is only issued after this compute
    assert mover.now == sum(copies) + sum(computes)
