"""Streamed == resident == resumed, bit for bit, over placements x tasks x quantisations x accelerators x solvers.

The suite runs a pairwise covering of the axes, with a crash after every forward and in the middle of a save, and one
real kill of the command; ``python dev.py test --long tests/test_matrix.py`` runs every combination and twelve kills.
The axes read the registries, so an accelerator or solver that is added joins by itself.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from h3_runtime.accelerators import ACCELERATORS, build
from h3_runtime.checkpoint.load import load_dit, open_dit
from h3_runtime.demo.maker import make_model
from h3_runtime.job import Guide, Masks, Reference, RenderJob
from h3_runtime.memory.placement import Placement, place_dit
from h3_runtime.quant.online import SCHEMES
from h3_runtime.recovery import RecoveryFolder
from h3_runtime.sampler import sample
from h3_runtime.selftest import drawn, tiny_job
from h3_runtime.solvers import SOLVERS

from .small_jobs import Crash, Inertia, engaged, same

CPU = torch.device("cpu")
FORWARDS = 4


def jobs() -> dict[str, RenderJob]:
    plain = replace(tiny_job(), num_forwards=FORWARDS)
    picture, sound = drawn(1, 24, 1, 4, 6, seed=7), drawn(1, 32, 2, 5, seed=8)
    from h3_runtime.job import AVLatent

    clip = AVLatent(drawn(1, 24, 7, 4, 6, seed=9), drawn(1, 32, 2, 37, seed=10))
    levels = (torch.arange(7 * 4 * 6).view(7, 4, 6) % 6) / 5
    return {
        "t2va": plain,
        "fl2va": replace(plain, guides=(Guide(0, picture, keyframe=True), Guide(9, picture, sound, 0.5))),
        "ref2va": replace(plain, references=(Reference("image", picture), Reference("audio", audio=sound))),
        "masked": replace(plain, source=clip, masks=Masks.make(levels, None)),
    }


AXES = {
    "placement": (
        Placement("ram"),
        Placement("disk"),
        Placement("ram", resident=2, ahead=2, adaln="ram"),
        Placement("disk", resident=1, adaln="resident"),
        Placement("resident", adaln="disk"),
    ),
    "task": tuple(jobs()),
    "quantise": (None, *SCHEMES),
    "accelerator": (None, Inertia, *ACCELERATORS),
    "solver": tuple(SOLVERS),
}


def pairwise(axes: dict[str, tuple]) -> list[tuple]:
    """A small set of combinations in which every pair of values of two axes occurs; greedy, deterministic."""
    sizes = [range(len(values)) for values in axes.values()]
    spots = list(itertools.combinations(range(len(sizes)), 2))
    left = {(a, b, i, j) for a, b in spots for i in sizes[a] for j in sizes[b]}
    chosen = []
    while left:
        best = max(itertools.product(*sizes), key=lambda row: sum((a, b, row[a], row[b]) in left for a, b in spots))
        left -= {(a, b, best[a], best[b]) for a, b in spots}
        chosen.append(tuple(values[index] for values, index in zip(axes.values(), best)))
    return chosen


def test_the_covering_covers():
    rows = pairwise(AXES)
    values = list(AXES.values())
    for a, b in itertools.combinations(range(len(values)), 2):
        assert {(row[a], row[b]) for row in rows} == set(itertools.product(values[a], values[b]))
    assert len(rows) <= 1.3 * max(len(a) * len(b) for a, b in itertools.combinations(values, 2))


def pytest_generate_tests(metafunc):
    if "row" in metafunc.fixturenames:
        rows = list(itertools.product(*AXES.values())) if metafunc.config.getoption("--long") else pairwise(AXES)
        metafunc.parametrize("row", rows, ids=["-".join(name_of(value) for value in row) for row in rows])
    if "kill" in metafunc.fixturenames:
        metafunc.parametrize("kill", range(12 if metafunc.config.getoption("--long") else 1))


def name_of(value) -> str:
    return getattr(value, "name", None) or str(value)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True, scope="module")
def without_a_compiler():
    """Everything of the compiled block but the compiler, which takes minutes here; test_fidelity.py has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **options: function)
        yield


@pytest.fixture(scope="module")
def expected(model):
    """The resident, unbroken result of a task, quantisation, accelerator and solver."""

    @cache
    def result(task, quantise, accelerator, solver):
        dit, _ = load_dit(model / "dit.safetensors", quantise=quantise)
        whole = sample(dit, replace(jobs()[task], solver=solver), made(accelerator))
        if accelerator in ACCELERATORS:
            assert "did not engage" not in whole.notes[0], whole.notes
        return whole

    return result


def made(accelerator) -> list:
    """A fresh one, with options under which it does something in so few forwards."""
    if accelerator in ACCELERATORS:
        return build((engaged(accelerator.name),))
    return [] if accelerator is None else [accelerator()]


def test_streamed_and_resumed_equal_resident(row, model, expected, tmp_path, monkeypatch):
    placement, task, quantise, accelerator, solver = row
    whole = expected(task, quantise, accelerator, solver)
    job = replace(jobs()[task], solver=solver)
    dit, layers = place_dit(open_dit(model / "dit.safetensors", quantise=quantise), placement, CPU)

    def run(recovery, progress=None):
        return sample(dit, job, made(accelerator), progress, recovery=recovery, layers=layers)

    for crash_after in range(1, FORWARDS + 1):
        recovery = RecoveryFolder(tmp_path).run(f"{crash_after}" * 64, job.canvas)

        def crash(done, total, seconds, crash_after=crash_after):
            if done == crash_after:
                raise Crash

        with pytest.raises(Crash):
            run(recovery, crash)
        resumed = run(recovery)
        assert same(resumed.latent, whole.latent) and resumed.notes == whole.notes
        assert resumed.resumed_after == crash_after and len(resumed.step_seconds) == FORWARDS - crash_after

    recovery = RecoveryFolder(tmp_path).run("f" * 64, job.canvas)
    saves, put = itertools.count(), os.replace

    def dies_in_the_second_save(part, path):
        if path == recovery.path and next(saves) == 1:
            raise Crash
        put(part, path)

    monkeypatch.setattr(os, "replace", dies_in_the_second_save)
    with pytest.raises(Crash):
        run(recovery)
    monkeypatch.setattr(os, "replace", put)
    resumed = run(recovery)
    assert same(resumed.latent, whole.latent) and resumed.resumed_after == 1


def test_a_real_kill(kill, model, tmp_path):
    """SIGKILL of the command after some forwards: the next run takes up what was saved and gives the same bytes."""
    root = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    environment["H3_CONDITIONS"] = str(tmp_path / "conditions")
    forwards, place = 12, ["ram", "disk", "resident"][kill % 3]

    def command(out: Path, *more: object) -> list[str]:
        words = [
            sys.executable, "-m", "h3_runtime", "render", "--model", model, "--dtype", "float32", "--prompt", "a ball",
            "--size", "96x64", "--frames", 22, "--steps", forwards, "--place", place, "--out", out, *more,
        ]  # fmt: skip
        return [str(word) for word in words]

    states = tmp_path / "states"
    process = subprocess.Popen(command(tmp_path / "a.mp4", "--recovery", states), env=environment)
    while process.poll() is None and not list(states.glob("*")):
        time.sleep(0.002)
    time.sleep(0.03 * kill)
    process.kill()
    process.wait()
    subprocess.run(command(tmp_path / "a.mp4", "--recovery", states), env=environment, check=True)
    subprocess.run(command(tmp_path / "b.mp4", "--no-recovery"), env=environment, check=True)
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()
    assert not list(states.iterdir()) and not list(tmp_path.glob("*.part*"))
