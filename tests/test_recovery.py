"""A killed run goes on bit for bit; the folder stays bounded; a finished latent stays until its clip is saved."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
import torch

from h3_runtime.accelerators import spec_of
from h3_runtime.errors import CheckpointError, H3Error
from h3_runtime.job import Masks
from h3_runtime.latents import load_latent, save_latent
from h3_runtime.recovery import RecoveryFolder, RunRecovery, default_folder
from h3_runtime.sampler import sample

from .small_jobs import CANVAS, Crash, Inertia, clip, job, picture, render, same, small_dit

FINGERPRINT = "0123456789abcdef" * 4


def kinds() -> dict:
    levels = (torch.arange(7 * 4 * 6).view(7, 4, 6) % 5) / 4
    return {
        "plain": job(),
        "masked": job(source=clip(), masks=Masks.make(levels, None)),
        "denoise": job(source=clip(), denoise=0.5),
        "stopped": job(stop=3),
        "guided": job(guides=guides()),
    }


def guides():
    from h3_runtime.job import Guide

    return (Guide(0, picture(), keyframe=True), Guide(9, picture(seed=3), strength=0.5))


def crash_after(done: int):
    def progress(count, total, seconds):
        if count == done:
            raise Crash

    return progress


@pytest.mark.parametrize("kind", kinds())
@pytest.mark.parametrize("accelerated", [False, True])
def test_a_crash_after_any_forward_changes_nothing(kind, accelerated, tmp_path):
    asked = kinds()[kind]
    made = [Inertia] if accelerated else []
    whole = render(asked, *(make() for make in made))
    total = asked.schedule.num_forwards
    for done in range(1, total + 1):
        run = RecoveryFolder(tmp_path).run(asked.fingerprint(str(done)), CANVAS)
        with pytest.raises(Crash):
            sample(small_dit(), asked, [make() for make in made], crash_after(done), recovery=run)
        again = sample(small_dit(), asked, [make() for make in made], recovery=run)
        assert same(again.latent, whole)
        assert again.resumed_after == done and again.dit_calls == total - done
        assert run.load().finished == asked.schedule.reaches_zero
        finished = sample(small_dit(), asked, [make() for make in made], recovery=run)
        assert same(finished.latent, whole) and finished.dit_calls == 0


def test_a_crash_in_the_middle_of_a_save_leaves_the_state_before_it(tmp_path, monkeypatch):
    run = RecoveryFolder(tmp_path).run(FINGERPRINT, CANVAS)
    run.save(1, False, clip(seed=1))

    def dies(*arguments):
        raise Crash

    monkeypatch.setattr(os, "replace", dies)
    with pytest.raises(Crash):
        run.save(2, False, clip(seed=2))
    monkeypatch.undo()
    state = run.load()
    assert state.done == 1 and same(state.latent, clip(seed=1))
    assert [path.name for path in tmp_path.iterdir()] == [run.path.name]


def test_another_job_does_not_take_up_the_state(tmp_path):
    folder = RecoveryFolder(tmp_path)
    run = folder.run(FINGERPRINT, CANVAS)
    run.save(2, False, clip())
    assert folder.run("f" * 64, CANVAS).load() is None
    other = folder.run(FINGERPRINT[:32] + "0" * 32, CANVAS)  # the same file name, another fingerprint
    assert other.path == run.path and other.load() is None


def test_a_damaged_state_counts_as_none(tmp_path):
    run = RecoveryFolder(tmp_path).run(FINGERPRINT, CANVAS)
    run.save(2, False, clip())
    whole = run.path.read_bytes()
    run.path.write_bytes(whole[:-20])
    assert run.load() is None
    run.path.write_bytes(whole[:-20] + bytes([whole[-20] ^ 1]) + whole[-19:])  # one bit, in a file of the right size
    assert run.load() is None
    with pytest.raises(CheckpointError, match="holds other bytes than were written"):
        load_latent(run.path)
    asked = job()
    assert same(sample(small_dit(), asked, recovery=run).latent, render(asked))
    assert RecoveryFolder(tmp_path).read()[0][1].finished


@pytest.mark.parametrize("info", [{"stop": "2"}, {"stop": None}, {"held": ["x"]}, {"held": "x"}])
def test_a_state_that_tells_nonsense_counts_as_none(tmp_path, info):
    run = RecoveryFolder(tmp_path).run(FINGERPRINT, CANVAS)
    told = {"stop": 2, "finished": False, "fingerprint": FINGERPRINT, "held": {}}
    save_latent(run.path, CANVAS, clip(), **told)
    assert run.load().done == 2
    save_latent(run.path, CANVAS, clip(), **told | info)
    assert run.load() is None


def test_what_another_run_let_go_is_written_again(tmp_path):
    """Two runs of one job at once: the first to end removes the files of both."""
    run = RecoveryFolder(tmp_path).run(FINGERPRINT, CANVAS)
    holder = Holding()
    run.save(1, False, clip(), [holder])
    RecoveryFolder(tmp_path).run(FINGERPRINT, CANVAS).discard()
    run.save(2, False, clip(), [holder])
    assert run.load().accelerators["inertia"]["a@0"].tolist() == [1.0]


class Holding(Inertia):
    def state(self):
        return {"a@0": torch.ones(1)}


def test_the_folder_is_bounded_and_keeps_the_newest(tmp_path):
    folder = RecoveryFolder(tmp_path, max_states=3)
    runs = [folder.run(f"{index:x}" * 64, CANVAS, prompt=f"p{index}") for index in range(6)]
    for index, run in enumerate(runs):
        run.save(1, True, clip())
        os.utime(run.path, (1000 + index, 1000 + index))
    assert folder.states() == [run.path for run in runs[:2:-1]]
    assert [latent.info["prompt"] for _, latent in folder.read()] == ["p5", "p4", "p3"]
    size = runs[-1].path.stat().st_size
    small = RecoveryFolder(tmp_path, max_bytes=2 * size + 64)  # prompts differ in length
    small.run("a" * 64, CANVAS, prompt="last").save(1, True, clip())
    assert len(small.states()) == 2
    runs[-1].discard()
    assert len(small.states()) == 1


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(H3Error, match="file is a file: states of runs need a folder"):
        RecoveryFolder(tmp_path / "file")
    run = RecoveryFolder(tmp_path / "file" / "below").run(FINGERPRINT, CANVAS)
    run.discard()
    with pytest.raises(H3Error, match="switch recovery off"):
        run.save(1, False, clip())


def test_other_runs_and_programs_never_end_a_render(tmp_path, monkeypatch):
    """A state that another run removes while this one looks, and one that Windows keeps because it is open."""
    folder = RecoveryFolder(tmp_path, max_states=1)
    first, second = (folder.run(f"{index}" * 64, CANVAS) for index in (1, 2))
    first.save(1, True, clip())
    plain = Path.stat

    def vanished(path, **options):
        if path == first.path:
            raise FileNotFoundError(path)
        return plain(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", vanished)
        second.save(1, True, clip())
        assert folder.states() == [second.path]

    def held(path, **_):
        raise PermissionError(13, "in use", str(path))

    monkeypatch.setattr(
        Path, "unlink", lambda path, **options: held(path) if path.name.endswith(".safetensors") else None
    )
    second.save(2, True, clip())
    second.discard()
    assert len(folder.states()) == 2


def test_the_default_folder_is_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("H3_RECOVERY", str(tmp_path))
    assert default_folder() == tmp_path
    monkeypatch.delenv("H3_RECOVERY")
    assert default_folder().parts[-2:] == ("h3_runtime", "recovery")


# ---- what accelerators keep is written once


def accelerated(name: str, **options):
    return job(num_forwards=10, accelerators=(spec_of(name, **options),))


WIDE = {
    "forecast": accelerated("forecast", calls=0.6),
    "block-cache": accelerated("block-cache", video=10.0, audio=10.0, most=2),
}


@pytest.mark.parametrize("name", WIDE)
def test_what_was_kept_at_a_forward_is_written_once(name, tmp_path, monkeypatch):
    """The same bits after a crash anywhere; a forward that keeps nothing new writes nothing of it again."""
    asked, writes = WIDE[name], []
    plain = RunRecovery._write
    monkeypatch.setattr(RunRecovery, "_write", lambda run, file, held: writes.append(file) or plain(run, file, held))
    whole = sample(small_dit(), asked)
    for done in (3, 6, 9):
        run = RecoveryFolder(tmp_path / str(done)).run(FINGERPRINT, CANVAS)
        with pytest.raises(Crash):
            sample(small_dit(), asked, progress=crash_after(done), recovery=run)
        resumed = RecoveryFolder(tmp_path / str(done)).run(FINGERPRINT, CANVAS)
        again = sample(small_dit(), asked, recovery=resumed)
        assert same(again.latent, whole.latent) and again.resumed_after == done
        assert again.stats == whole.stats
        assert len(writes) == len(set(writes)) == whole.stats[name]["computed"], writes
        writes.clear()
        resumed.discard()
        assert not list((tmp_path / str(done)).iterdir())


@pytest.mark.parametrize("nth", [0, 1, 2, 3, 5])
def test_a_crash_between_two_files_of_a_save_changes_nothing(nth, tmp_path, monkeypatch):
    """What was written for a state that did not come is written over, and the state before it is whole."""
    asked, count, put = WIDE["forecast"], itertools.count(), os.replace
    run = RecoveryFolder(tmp_path).run(FINGERPRINT, CANVAS)

    def dies(part, path):
        if next(count) == nth:
            raise Crash
        put(part, path)

    monkeypatch.setattr(os, "replace", dies)
    with pytest.raises(Crash):
        sample(small_dit(), asked, recovery=run)
    monkeypatch.undo()
    again = sample(small_dit(), asked, recovery=RecoveryFolder(tmp_path).run(FINGERPRINT, CANVAS))
    assert same(again.latent, sample(small_dit(), asked).latent)
    named = {file.name for file in tmp_path.glob("*.h3-held.safetensors")}
    assert named == set(load_latent(run.path).info["held"])


def test_only_what_the_state_names_lies_beside_it(tmp_path):
    run = RecoveryFolder(tmp_path).run(FINGERPRINT, CANVAS)
    with pytest.raises(Crash):
        sample(small_dit(), WIDE["forecast"], progress=crash_after(8), recovery=run)
    named = load_latent(run.path).info["held"]
    assert len(named) == 3 and sorted(named) == [p.name for p in sorted(tmp_path.glob("*.h3-held.safetensors"))]
    damaged = tmp_path / next(iter(named))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x7f")
    assert RecoveryFolder(tmp_path).run(FINGERPRINT, CANVAS).load() is None, "other bytes than were written"
    damaged.unlink()
    assert RecoveryFolder(tmp_path).run(FINGERPRINT, CANVAS).load() is None


def test_the_folder_counts_and_removes_what_belongs_to_a_state(tmp_path):
    folder = RecoveryFolder(tmp_path, max_states=1)
    first = folder.run("1" * 64, CANVAS)
    with pytest.raises(Crash):
        sample(small_dit(), WIDE["forecast"], progress=crash_after(4), recovery=first)
    ((_, _, size),) = folder._aged()
    assert size == sum(path.stat().st_size for path in tmp_path.iterdir()) > first.path.stat().st_size
    orphan = tmp_path / f"{'9' * 32}.forecast@1.h3-held.safetensors"
    young = tmp_path / f"{'8' * 32}.forecast@1.h3-held.safetensors"
    for path in (orphan, young):
        path.write_bytes(b"")
    os.utime(orphan, (1000, 1000))
    second = folder.run("2" * 64, CANVAS)
    second.save(1, False, clip())
    assert sorted(tmp_path.iterdir()) == sorted([second.path, young])
