"""Real but unkind use of the command line and of what stands behind it: one sentence, or the right clip."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from h3_runtime import cli
from h3_runtime.demo.maker import make_model
from h3_runtime.demo.run import disc, guided, text_to_video, tone, write_sound
from h3_runtime.errors import H3Error
from h3_runtime.guides import place
from h3_runtime.media import Mp4Writer, read_audio, write_image
from h3_runtime.request import GuideRequest, Media, RenderRequest, SoundMask
from h3_runtime.sampler import draw_noise

from .small_jobs import Probe, clip, job, same
from .small_jobs import render as sampled


@pytest.mark.parametrize("shift", [0.4, 0.84, 2.07, 1e-6, 1000.0])
def test_any_shift_starts_from_the_pure_noise(shift):
    """Shifted in float32, the first sigma of these grids is not exactly 1."""
    plain = job(num_forwards=2, video_shift=shift, audio_shift=shift)
    probe = Probe()
    without = sampled(plain, probe)
    assert torch.equal(probe.fed[0].audio, draw_noise(plain).audio)
    assert same(without, sampled(job(num_forwards=2, video_shift=shift, audio_shift=shift, source=clip())))


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def recovery_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("H3_RECOVERY", str(tmp_path.parent / (tmp_path.name + "-recovery")))


@pytest.fixture
def render(capsys, model, tmp_path):
    """``render(*arguments, ...)`` -> (exit status, values of the results by name, words)."""

    def run(*arguments, out="o.mp4", size="96x64", frames=22, steps=1, prompt="a cat", folder=None):
        given = ["render", "--model", folder or model, "--dtype", "float32", "--out", tmp_path / out, "--json"]
        for option, value in (("--size", size), ("--frames", frames), ("--steps", steps), ("--prompt", prompt)):
            given += [] if value is None else [option, value]
        status = cli.main([*map(str, given), *map(str, arguments)])
        captured = capsys.readouterr()
        rows = json.loads(captured.out)["results"] if captured.out else []
        return status, {row["name"]: row["value"] for row in rows}, captured.err

    return run


def refused(outcome, *sentences: str) -> None:
    status, rows, words = outcome
    errors = [line for line in words.splitlines() if line.startswith("error: ")]
    assert status == 2 and not rows and len(errors) == 1, words
    for sentence in sentences:
        assert sentence in errors[0], errors[0]


@pytest.fixture
def pixels(tmp_path):
    """A picture, a clip of 22 frames without sound, and half a second of sound, in the test's folder."""
    write_image(tmp_path / "p.png", disc((200, 0, 0), 0.3)[:64, :96])
    with Mp4Writer(tmp_path / "clip.mp4", 96, 64, 22) as writer:
        writer.write(np.full((22, 64, 96, 3), 90, np.uint8))
    write_sound(tmp_path / "s.wav", tone(440.0, 0.5))
    return tmp_path


def test_a_place_that_cannot_be_written_is_refused_before_the_work(render, tmp_path):
    refused(render(out="x" * 240 + ".mp4"), "choose a shorter name")
    refused(render(out="nul\0.mp4"), "cannot be written")
    assert list(tmp_path.iterdir()) == []


def test_a_time_inside_the_last_frame_is_inside_the_clip():
    guide = GuideRequest.parse("p.png@0.91s")
    assert guide.frame_index(22) == 21
    assert GuideRequest.parse("p.png@0.875s").frame_index(22) == 21
    with pytest.raises(H3Error, match=r"ends at 0\.917 s"):
        GuideRequest.parse("p.png@0.92s").frame_index(22)
    with pytest.raises(H3Error, match="the clip has frames 0 to 21"):
        GuideRequest(Media("p.png"), seconds=-0.01).frame_index(22)


def test_one_picture_may_be_first_and_last_frame(pixels):
    picture = Media(str(pixels / "p.png"))
    placement = place(RenderRequest("", (96, 64), frames=22, first_frame=picture, last_frame=picture))
    assert [guide.frame_index for guide in placement.guides] == [0, 21]


def test_media_in_memory_are_checked():
    def with_guide(**media):
        return RenderRequest("", (96, 64), frames=22, guides=(GuideRequest(Media(name="m", **media), frame=3),))

    for bad in (
        {"frames": np.zeros((1, 64, 96, 3), np.float32)},
        {"frames": np.zeros((64, 96, 3), np.uint8)},
        {"frames": np.zeros((0, 64, 96, 3), np.uint8)},
        {"audio": torch.zeros(1, 800)},
        {"audio": torch.zeros(2, 0)},
        {"audio": torch.full((2, 800), float("nan"))},
    ):
        with pytest.raises(H3Error, match="m has|of m holds"):
            place(with_guide(**bad))
    placed = place(with_guide(frames=torch.zeros(7, 64, 96, 3, dtype=torch.uint8), audio=np.zeros((2, 801), np.int16)))
    assert placed.guides[0].frames.shape == (5, 64, 96, 3) and placed.guides[0].audio.shape == (2, 1600)


def test_sound_masks_outside_the_clip_are_refused_and_overhang_is_told(pixels):
    def masked(text, feather=0.0):
        source = Media(str(pixels / "clip.mp4"))
        return place(RenderRequest("", sound_mask=SoundMask.parse(text, feather), source=source)).notes

    for text in ("50-60", "0.2-0.3,0.92-1", "50=1"):
        with pytest.raises(H3Error, match=r"the clip ends at 0\.917 s"):
            masked(text)
    assert any("sound mask range 0.5-9: the clip ends at 0.917 s" in note for note in masked("0.5-9"))
    assert any("the picture has no mask" in note for note in masked("0=0,9=1"))
    with pytest.raises(H3Error, match="no edges to feather"):
        masked("0=0,1=1", 0.1)


def test_a_film_as_guide_is_read_only_as_far_as_it_is_used(tmp_path):
    with Mp4Writer(tmp_path / "film.mp4", 32, 32) as writer:
        writer.write(np.zeros((200, 32, 32, 3), np.uint8))
    write_sound(tmp_path / "song.wav", tone(440.0, 20.0))
    guides = tuple(GuideRequest(Media(str(tmp_path / name)), frame=3) for name in ("film.mp4", "song.wav"))
    placement = place(RenderRequest("", (32, 32), frames=22, guides=guides))
    assert any("5 of at least 139 frames held from frame 3" in note for note in placement.notes)
    assert any("sound cut from at least 5.792 to 0.792 s" in note for note in placement.notes)


def test_a_canvas_that_no_memory_holds_and_a_picture_like_a_thread(pixels):
    with pytest.raises(H3Error, match="GiB for its latents"):
        place(RenderRequest("", (96, 64), frames=10**9))
    with pytest.raises(H3Error, match="GiB for its latents"):
        place(RenderRequest("", (2**40, 2**40), frames=22, first_frame=Media(str(pixels / "p.png"))))
    write_image(pixels / "thread.png", np.zeros((20000, 2, 3), np.uint8))
    with pytest.raises(H3Error, match="too long and narrow"):
        place(RenderRequest("", (96, 64), guides=(GuideRequest(Media(str(pixels / "thread.png")), frame=0),)))


def test_a_source_must_have_a_picture_and_keeps_its_ratio(render, pixels):
    refused(render("--source", pixels / "s.wav", size=None, frames=None), "s.wav is sound: the clip to edit")
    wide = RenderRequest("", megapixels=0.01, source=Media(str(pixels / "clip.mp4")))
    assert (place(wide).canvas.width, place(wide).canvas.height) == (128, 96)


def test_the_demo_can_be_repeated_from_its_manifest(tmp_path):
    """All its media are files, and the dtype it computes in stands in its requests."""
    requests = text_to_video(1), guided(tmp_path, 1)
    assert {request.dtype for request in requests} == {"float32"}
    assert [Path(medium.path).parent for medium in requests[1].media.values()] == [tmp_path] * 3
    assert torch.equal(read_audio(tmp_path / "tone.wav")[0], read_audio(tmp_path / "tone.wav")[1])
    assert (read_audio(tmp_path / "tone.wav") - tone(440.0, 0.5)).abs().max() < 1e-4
