"""What a killed writer leaves is swept up by the next write; what a living one writes is never touched."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest
import torch

from h3_runtime import cli, unfinished
from h3_runtime.checkpoint.writer import write_safetensors
from h3_runtime.errors import H3Error
from h3_runtime.latents import save_latent
from h3_runtime.media import Mp4Writer
from h3_runtime.media.pictures import write_image
from h3_runtime.unfinished import part_path, sweep, sweep_folder

from .small_jobs import CANVAS, clip

LEFT = """
import os, sys
from pathlib import Path
from h3_runtime.unfinished import part_path
for name in sys.argv[2:]:
    part_path(Path(sys.argv[1]) / name, Path(name).suffix if name.endswith(".mp4") else "").write_bytes(b"half")
"""


def left_by_the_dead(folder, *names: str) -> None:
    """Temporary files of a process that has ended, one for each target."""
    subprocess.run([sys.executable, "-c", LEFT, str(folder), *names], check=True)


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_next_write_to_a_target_sweeps_its_own(tmp_path):
    left_by_the_dead(tmp_path, "clip.mp4", "clip.mp4", "other.mp4", "clip.json")
    alive = part_path(tmp_path / "clip.mp4", ".mp4")
    alive.write_bytes(b"being written")
    assert [name.split(".")[1] for name in names(tmp_path)] == ["clip", "clip", "other"]
    with Mp4Writer(tmp_path / "clip.mp4", 32, 32) as writer:
        writer.write(torch.zeros(1, 3, 2, 32, 32))
    assert alive.read_bytes() == b"being written" and (tmp_path / "clip.mp4").is_file()
    assert len(names(tmp_path)) == 4


def test_what_was_swept_is_told(tmp_path):
    left_by_the_dead(tmp_path, "clip.mp4")
    with Mp4Writer(tmp_path / "clip.mp4", 32, 32) as writer:
        writer.write(torch.zeros(1, 3, 2, 32, 32))
    assert names(tmp_path) == ["clip.mp4"]
    assert len(writer.notes) == 1 and "(4 bytes), left by a run that was killed" in writer.notes[0]


def test_a_state_is_swept_by_the_next_one(tmp_path):
    left_by_the_dead(tmp_path, "a.safetensors")
    save_latent(tmp_path / "a.safetensors", CANVAS, clip())
    assert names(tmp_path) == ["a.safetensors"]


@pytest.mark.skipif(sys.platform == "win32", reason="a second process of the same number")
def test_a_number_in_use_again_is_no_life_sign(tmp_path, monkeypatch):
    target = tmp_path / "a.bin"
    part_path(target).write_bytes(b"")
    assert not sweep(target) and len(names(tmp_path)) == 1
    begun = unfinished._start(os.getpid())
    monkeypatch.setattr(unfinished, "_start", lambda process: begun + 1)
    assert len(sweep(target)) == 1 and not names(tmp_path)


def test_a_process_that_may_not_be_seen_counts_as_alive(tmp_path, monkeypatch):
    part_path(tmp_path / "a.bin").write_bytes(b"")
    monkeypatch.setattr(unfinished, "_start", lambda process: None)
    assert not sweep_folder(tmp_path) and len(names(tmp_path)) == 1


def test_another_machines_file_is_named_and_kept(tmp_path, monkeypatch):
    left_by_the_dead(tmp_path, "a.bin")
    monkeypatch.setattr(unfinished, "_machine", lambda: "0123abcd")
    (said,) = sweep(tmp_path / "a.bin")
    assert "on another machine: delete it by hand" in said and len(names(tmp_path)) == 1


def test_a_file_that_cannot_be_removed_is_named(tmp_path, monkeypatch):
    left_by_the_dead(tmp_path, "a.bin")

    def refuses(self):
        raise PermissionError(13, "in use")

    monkeypatch.setattr("pathlib.Path.unlink", refuses)
    (said,) = sweep(tmp_path / "a.bin")
    assert "cannot be removed (in use)" in said


def test_recover_sweeps_states_and_this_folder(tmp_path, monkeypatch, capsys):
    states, here = tmp_path / "states", tmp_path / "here"
    for folder in (states, here):
        folder.mkdir()
        left_by_the_dead(folder, "x" * 60 + ".mp4")
    (states / ("0" * 32 + ".h3-state.safetensors")).write_bytes(b"no state")
    (here / ".a.part").write_bytes(b"not ours")
    monkeypatch.chdir(here)
    assert cli.main(["recover", "--recovery", str(states)]) == 0
    said = capsys.readouterr().out
    assert said.count("left by a run that was killed") == 2 and "is damaged" in said
    assert names(here) == [".a.part"] and len(names(states)) == 1


def write_condition(path) -> None:
    write_safetensors(path, {"rows": ("F32", (2,))}, [("rows", torch.zeros(2))], {})


@pytest.mark.parametrize(
    "write",
    [
        lambda path: save_latent(path, CANVAS, clip()),
        write_condition,
        lambda path: write_image(path.with_suffix(".png"), torch.zeros(8, 8, 3, dtype=torch.uint8)),
    ],
)
def test_a_place_that_refuses_writing_and_removing_has_one_sentence(tmp_path, monkeypatch, write):
    def refused(*given, **more):
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("replace", "link", "rename", "unlink"):
        monkeypatch.setattr(os, name, refused)
    with pytest.raises(H3Error, match=r"(could not|cannot) be written.*Read-only file system"):
        write(tmp_path / "kept.safetensors")
