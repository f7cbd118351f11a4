"""What looks like success and is none, told while the clip is decoded: black, flat, broken off, beating, flashing.

frames of noise around a grey ─a fault is put in─▶ FrameLevels ─▶ one sentence; without it none
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from h3_runtime import cli
from h3_runtime.decode import Decoder, decode_video
from h3_runtime.demo.maker import make_model
from h3_runtime.job import AVLatent
from h3_runtime.media import Mp4Writer
from h3_runtime.media.join import Take, join_files
from h3_runtime.sampler import sample
from h3_runtime.soundness import FrameLevels, judge_clips

FRAMES = 73


def frames(count: int = FRAMES) -> torch.Tensor:
    return torch.rand(1, 3, count, 16, 24, generator=torch.Generator().manual_seed(count)) * 0.5 + 0.2


def judged(clip: torch.Tensor, chunk: int = 17) -> list[str]:
    levels = FrameLevels()
    for part in clip.split(chunk, dim=2):
        levels.add(part)
    return levels.judge()


def with_frames(at, change) -> torch.Tensor:
    clip = frames()
    clip[:, :, at] = change(clip[:, :, at])
    return clip


@pytest.mark.parametrize(
    "clip, words",
    [
        (torch.zeros(1, 3, 22, 16, 16), "every frame of the picture is black"),
        (torch.full((1, 3, 22, 16, 16), 0.5), "every frame of the picture is one flat colour"),
        (with_frames(slice(50, None), lambda part: part * 0 + 0.5), "breaks off: frames 50 to 72 are one flat colour"),
        (with_frames(slice(16, None, 17), lambda part: part * 0.8), "every 17th frame is darker than its neighbours"),
        (
            with_frames(slice(0, None, 17), lambda part: part + 0.1),
            r"brighter than its neighbours \(0, 17, 34 \.\.\.\)",
        ),
        (with_frames(slice(0, 2), lambda part: 1 - part / 10), "the first 2 frames are brighter"),
        (with_frames(slice(-1, None), lambda part: part * 0.3), "the last frame is darker than those beside by 3"),
    ],
)
@pytest.mark.parametrize("chunk", [5, 17])
def test_a_picture_that_is_none_is_told(clip, words, chunk):
    said = judged(clip, chunk)
    assert len(said) == 1
    assert re.search(words, said[0]), said


def fading() -> torch.Tensor:
    ramp = torch.linspace(1, 0, 30)[None, None, :, None, None]
    return with_frames(slice(-30, None), lambda part: part * ramp)


@pytest.mark.parametrize(
    "clip",
    [
        frames(),
        frames(5),
        fading(),
        frames() * torch.linspace(0.3, 1, FRAMES)[None, None, :, None, None],
        with_frames(slice(40, None), lambda part: part * 0.4),
        with_frames(slice(17, 18), lambda part: part * 0.5),
    ],
    ids=["steady", "shortest", "fades out", "grows lighter", "one cut", "one dark frame"],
)
def test_a_picture_that_may_be_meant_is_not(clip):
    assert judged(clip) == []


# ---- where it is told


def test_the_decoder_tells_it_and_writes_every_frame():
    written = []
    latent = AVLatent(torch.zeros(1, 24, 7, 4, 6), torch.zeros(1, 32, 2, 37))
    way = Decoder(
        "here", lambda z, start: iter([torch.full((1, 3, 17, 64, 96), 0.5), torch.full((1, 3, 5, 64, 96), 0.5)])
    )
    sink = type("Sink", (), {"write": lambda self, chunk: written.append(chunk.shape[2])})()
    said = decode_video([way], latent, sink)
    assert written == [17, 5] and said[0].startswith("WARNING: every frame of the picture is one flat colour")


def test_a_clip_of_the_command_line_tells_it_too(tmp_path, capsys, monkeypatch):
    """A render whose latent is noise ends with a file, and with a warning in its words and its report."""
    model = make_model(tmp_path / "model")

    def broken(dit, job, *given, **options):
        result = sample(dit, job, *given, **options)
        noise = torch.randn(result.latent.video.shape, generator=torch.Generator().manual_seed(1))
        return replace(result, latent=AVLatent(noise, result.latent.audio))

    arguments = [
        "render",
        "--model",
        str(model),
        "--prompt",
        "x",
        "--size",
        "256x192",
        "--frames",
        "39",
        "--steps",
        "1",
    ]
    monkeypatch.setattr("h3_runtime.pressure.sample", broken)
    assert cli.main([*arguments, "--out", str(tmp_path / "noise.mp4"), "--no-recovery"]) == 0
    words = capsys.readouterr().out
    assert "note: WARNING: the picture latent is pure noise" in words
    report = json.loads((tmp_path / "noise.report.json").read_text())
    assert any(note.startswith("WARNING: the picture latent is pure noise") for note in report["notes"])


# ---- clips in a row


@pytest.mark.parametrize(
    "contrasts, words",
    [
        ([0.18, 0.19, 0.22, 0.25], r"climbs from clip to clip \(0\.180, 0\.190, 0\.220, 0\.250\)"),
        ([0.25, 0.22, 0.18], "falls from clip to clip"),
        ([0.18, 0.25, 0.2, 0.26], None),
        ([0.18, 0.185, 0.19], None),
        ([0.1, 0.3], None),
        ([0.0, 0.0, 0.0], None),
    ],
)
def test_contrast_that_climbs_from_clip_to_clip_is_told(contrasts, words):
    said = judge_clips(contrasts)
    assert len(said) == (words is not None) and (words is None or re.search(words, said[0])), said


def test_and_where_clips_are_joined(tmp_path):
    generator, takes = np.random.default_rng(0), []
    for index, spread in enumerate((20, 40, 60)):
        pixels = generator.integers(128 - spread, 128 + spread, (5, 32, 64, 1), dtype=np.uint8).repeat(3, 3)
        with Mp4Writer(tmp_path / f"{index}.mp4", 64, 32) as writer:
            writer.write(pixels)
        takes.append(Take(writer.path))
    _, _, notes = join_files(takes, tmp_path / "all.mp4")
    assert any("contrast climbs from clip to clip" in note for note in notes)
    assert not any("contrast" in note for note in join_files(takes[:1] * 3, tmp_path / "same.mp4")[2])
