"""The main job through the command line, on the small model: clips, edits, repeats, partial runs, bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from h3_runtime import cli
from h3_runtime.demo.maker import make_model
from h3_runtime.demo.run import disc, tone
from h3_runtime.latents import load_latent
from h3_runtime.media import read_clip, read_metadata, write_image

SIZE = "96x64"
FRAMES = 22


@pytest.fixture(autouse=True)
def recovery_folder(tmp_path, monkeypatch):
    """States go to a folder of the test, never to the user's cache."""
    monkeypatch.setenv("H3_RECOVERY", str(tmp_path.parent / (tmp_path.name + "-recovery")))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def run(capsys, *arguments) -> tuple[int, dict, str]:
    """Exit status, the JSON object (empty when there is none) and the words of one command."""
    status = cli.main([*map(str, arguments), "--json"])
    captured = capsys.readouterr()
    return status, json.loads(captured.out) if captured.out.strip() else {}, captured.err


def render(capsys, model: Path, out: Path, *arguments, prompt: str | None = "a red ball", steps: int | None = 2):
    given = ["render", "--model", model, "--dtype", "float32", "--out", out]
    given += [] if prompt is None else ["--prompt", prompt]
    given += [] if steps is None else ["--steps", steps]
    return run(capsys, *given, *arguments)


def small(capsys, model: Path, out: Path, *arguments, **options):
    status, result, words = render(capsys, model, out, "--size", SIZE, "--frames", FRAMES, *arguments, **options)
    assert status == 0, words
    return values(result), words


def values(result: dict) -> dict:
    return {row["name"]: row["value"] for row in result["results"]}


def test_a_clip_has_its_frames_and_exactly_its_samples(capsys, model, tmp_path):
    rows, words = small(capsys, model, tmp_path / "a.mp4")
    clip = read_clip(tmp_path / "a.mp4")
    assert clip.frames.shape == (FRAMES, 64, 96, 3)
    assert clip.audio.shape == (2, round(FRAMES / 24 * 32000))
    assert rows["dit_calls"] == 2
    assert "APPROXIMATE (fp32 compute) + BEYOND THE REFERENCE" in rows["label"]
    assert "denoise 2/2" in words
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "a.mp4", "a.report.json"]


def test_kept_frames_are_those_before_encoding(capsys, model, tmp_path):
    rows, words = small(capsys, model, tmp_path / "a.mp4", "--keep-frames")
    assert "a.kept.mkv keeps frames and sound as before encoding" in words
    small(capsys, model, tmp_path / "b.mp4", "--keep-frames", "--seed", 1)
    status, told, words = run(capsys, "compare", tmp_path / "a.mp4", tmp_path / "b.mp4")
    measured = values(told)
    assert status == 0 and measured["basis"] == "before encoding" and measured["label/A"] == rows["label"], words
    kept, coded = read_clip(tmp_path / "a.kept.mkv"), read_clip(tmp_path / "a.mp4")
    apart = np.abs(kept.frames.astype(int) - coded.frames).mean()
    assert kept.frames.shape == coded.frames.shape and 0 < apart < 20
    report = json.loads((tmp_path / "a.report.json").read_text())
    assert 0 < report["stats"]["first_frame_seconds"] <= sum(report["stage_seconds"].values())
    small(capsys, model, tmp_path / "a.mp4")
    assert not (tmp_path / "a.kept.mkv").exists(), "they were of the render before"


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(capsys, model, tmp_path):
    first, _ = small(capsys, model, tmp_path / "a.mp4")
    second, _ = small(capsys, model, tmp_path / "b.mp4")
    other, _ = small(capsys, model, tmp_path / "c.mp4", "--seed", 1)
    assert first["latent"] == second["latent"] != other["latent"]
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()


def test_manifest_repeats_a_render_and_names_what_differs(capsys, model, tmp_path):
    write_image(tmp_path / "first.png", disc((200, 0, 0), 0.3))
    first, _ = small(capsys, model, tmp_path / "a.mp4", "--first-frame", tmp_path / "first.png", "--seed", 7)
    embedded = json.loads(read_metadata(tmp_path / "a.mp4")["h3_manifest"])
    assert embedded == json.loads((tmp_path / "a.json").read_text())
    assert str(tmp_path) not in json.dumps(embedded)

    again = ["--from", tmp_path / "a.mp4"]
    status, result, words = render(capsys, model, tmp_path / "b.mp4", *again, prompt=None, steps=None)
    assert status == 0, words
    assert values(result)["latent"] == first["latent"]
    assert "differs: nothing" in words
    assert (tmp_path / "b.mp4").read_bytes() == (tmp_path / "a.mp4").read_bytes()

    write_image(tmp_path / "first.png", disc((0, 0, 200), 0.3))
    status, result, words = render(capsys, model, tmp_path / "c.mp4", *again, prompt=None, steps=None)
    assert status == 0
    assert "first.png has other content" in words
    assert "latent_sha256" in words
    (tmp_path / "first.png").unlink()
    status, _, words = render(capsys, model, tmp_path / "d.mp4", *again, prompt=None, steps=None)
    assert status == 2 and "first.png is needed" in words and "--inputs" in words
    status, _, words = render(capsys, model, tmp_path / "d.mp4", *again)
    assert status == 2 and "--prompt cannot change it" in words


def test_no_metadata_leaves_no_manifest(capsys, model, tmp_path):
    (tmp_path / "a.json").write_text("of an earlier clip")
    small(capsys, model, tmp_path / "a.mp4", "--no-metadata")
    assert "h3_manifest" not in read_metadata(tmp_path / "a.mp4")
    assert not (tmp_path / "a.json").exists()
    status, _, words = render(capsys, model, tmp_path / "b.mp4", "--from", tmp_path / "a.mp4", prompt=None, steps=None)
    assert status == 2 and "carries no manifest" in words


def test_guides_of_every_kind_in_one_render(capsys, model, tmp_path):
    import wave

    write_image(tmp_path / "at@12.png", disc((0, 200, 0), 0.5))
    samples = (tone(440, 0.4).numpy().T * 32767).astype("<i2")
    with wave.open(str(tmp_path / "tone.wav"), "wb") as file:
        file.setnchannels(2), file.setsampwidth(2), file.setframerate(32000)
        file.writeframes(samples.tobytes())
    small(capsys, model, tmp_path / "clip.mp4")
    rows, words = small(
        capsys, model, tmp_path / "a.mp4",
        "--first-frame", tmp_path / "at@12.png", "--last-frame", tmp_path / "at@12.png",
        "--guide", f"{tmp_path / 'at@12.png'}@10", "--guide", f"{tmp_path / 'tone.wav'}@0.5s:0.7",
        "--guide", f"{tmp_path / 'clip.mp4'}@3",
    )  # fmt: skip
    assert "guides in the middle" in rows["label"] and "guide strength" in rows["label"]
    assert "clip.mp4: 5 of 22 frames held from frame 3" in words
    assert "sound cut from 0.917 to 0.792 s" in words
    plain, _ = small(capsys, model, tmp_path / "b.mp4")
    assert plain["latent"] != rows["latent"]


def test_what_is_changed_is_told_before_the_work_and_once(capsys, model, tmp_path):
    write_image(tmp_path / "first.png", disc((200, 0, 0), 0.3))
    frame = ["--first-frame", tmp_path / "first.png"]
    status, _, words = render(capsys, model, tmp_path / "a.mp4", "--size", "64x64", "--frames", "6", *frame)
    assert status == 0, words
    for sentence in ("frames raised from 6 to 22", "22 frames is outside the trained range", "first.png ("):
        assert words.count(f"note: {sentence}") == 1 and words.index(sentence) < words.index("encode 1/1"), words
    report = json.loads((tmp_path / "a.report.json").read_text())
    assert any("raised from 6 to 22" in note for note in report["notes"]), "the report holds all of them"


def test_masks_keep_the_source(capsys, model, tmp_path):
    small(capsys, model, tmp_path / "source.mp4", "--keep-latent")
    source = tmp_path / "source.latent.safetensors"
    mask = np.zeros((64, 96, 3), np.uint8)
    mask[:32, :32] = 255
    write_image(tmp_path / "mask.png", mask)
    edit = ["--source", source, "--keep-latent", "--seed", 5]
    status, result, words = render(
        capsys, model, tmp_path / "a.mp4", *edit, "--mask", tmp_path / "mask.png", "--audio-mask", "0.5-0.7"
    )
    assert status == 0, words
    assert "masks" in values(result)["label"]
    assert "mask: 16.7% of the latent grid is made anew" in words
    kept, new = load_latent(source).latent, load_latent(tmp_path / "a.latent.safetensors").latent
    same = (kept.video == new.video).all(1)[0]
    assert same[:, 2:].all() and same[:, :, 2:].all() and not same[:, :2, :2].any()
    sound = (kept.audio == new.audio).all(1)[0]
    assert sound[:, :20].all() and sound[:, 28:].all() and not sound[:, 20:28].any()

    status, result, _ = render(capsys, model, tmp_path / "b.mp4", *edit, "--mask", "keep", "--audio-mask", "keep")
    untouched = load_latent(tmp_path / "b.latent.safetensors").latent
    assert status == 0
    assert torch.equal(untouched.video, kept.video) and torch.equal(untouched.audio, kept.audio)


def test_a_clip_in_pixels_is_a_source_too(capsys, model, tmp_path):
    small(capsys, model, tmp_path / "source.mp4")
    status, result, words = render(
        capsys, model, tmp_path / "a.mp4", "--source", tmp_path / "source.mp4", "--denoise", "0.5"
    )
    assert status == 0, words
    rows = values(result)
    assert rows["size"] == SIZE and rows["frames"] == FRAMES and "denoise strength" in rows["label"]
    manifest = json.loads((tmp_path / "a.json").read_text())
    assert len(manifest["resolved"]["sigmas_video"]) == 3
    assert manifest["resolved"]["sigmas_video"][0] < 1


def test_a_stopped_run_goes_on_bit_for_bit(capsys, model, tmp_path):
    whole, _ = small(capsys, model, tmp_path / "whole.mp4", steps=3)
    part, words = small(capsys, model, tmp_path / "part.mp4", "--stop", 2, steps=3)
    assert part["video"] is None and not (tmp_path / "part.mp4").exists()
    state = tmp_path / "part.latent.safetensors"
    status, result, words = render(capsys, model, tmp_path / "rest.mp4", "--state", state, "--start", 2, steps=3)
    assert status == 0, words
    assert values(result)["latent"] == whole["latent"]
    status, _, words = render(capsys, model, tmp_path / "x.mp4", "--state", state, "--start", 1, steps=3)
    assert status == 2 and "continue it with --start 2" in words


BAD = {
    "size": (["--size", "100x64"], "width 100 is not a multiple of 32: the nearest are 96 and 128"),
    "size form": (["--size", "big"], "give WxH"),
    "ratio": (["--ratio", "9:1"], "outside 1:4..4:1"),
    "ratio zero": (["--ratio", "1:0"], "outside 1:4..4:1"),
    "frames": (["--frames", "0"], "frames is 0"),
    "steps": (["--steps", "0"], "whole number from 1"),
    "stop": (["--stop", "90"], "0 <= start < stop <= 49"),
    "start": (["--start", "3"], "needs a saved state or a source clip"),
    "denoise": (["--denoise", "0.5"], "add --source FILE"),
    "denoise high": (["--denoise", "1.5"], "more than 0 and at most 1"),
    "mask": (["--mask", "keep"], "add --source FILE"),
    "guide": (["--guide", "nothing.png@3"], "nothing.png does not exist"),
    "guide form": (["--guide", "nothing.png"], "is not FILE@FRAME"),
    "first": (["--first-frame", "nothing.png"], "nothing.png does not exist"),
    "seed": (["--seed", "-1"], "seed is -1"),
    "sound mask": (["--audio-mask", "a-b"], "give ranges in seconds"),
    "megapixels": (["--megapixels", "0"], "megapixels is 0"),
    "shift": (["--video-shift", "0"], "video shift is 0"),
    "dit": (["--dit", "nothing.safetensors"], "does not exist"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_before_any_weights(capsys, model, tmp_path, monkeypatch, case):
    monkeypatch.setattr("h3_runtime.text.encoder.TextEncoder.load", lambda *a, **k: pytest.fail("weights were loaded"))
    arguments, sentence = BAD[case]
    status, result, words = render(capsys, model, tmp_path / "a.mp4", *arguments, steps=None)
    assert status == 2 and result["results"] == [] and sentence in result["error"]
    errors = [line for line in words.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and sentence in errors[0]
    assert list(tmp_path.iterdir()) == []


def test_bad_places_and_models(capsys, model, tmp_path):
    status, _, words = render(capsys, model, tmp_path / "nowhere" / "a.mp4")
    assert status == 2 and "nowhere" in words
    status, _, words = render(capsys, tmp_path / "none", tmp_path / "a.mp4")
    assert status == 2 and "is not a folder" in words
    status, _, words = render(capsys, tmp_path, tmp_path / "a.mp4")
    assert status == 2
    write_image(tmp_path / "g.png", disc((0, 0, 0), 0.5))
    status, _, words = render(capsys, model, tmp_path / "a.mp4", "--frames", 22, "--guide", f"{tmp_path / 'g.png'}@40")
    assert status == 2 and "the clip has frames 0 to 21" in words
    write_image(tmp_path / "m.png", np.zeros((32, 32, 3), np.uint8))
    small(capsys, model, tmp_path / "s.mp4")
    status, _, words = render(
        capsys, model, tmp_path / "a.mp4", "--source", tmp_path / "s.mp4", "--mask", tmp_path / "m.png"
    )
    assert status == 2 and "this clip needs 1 or 22 of 96x64" in words


def test_an_empty_prompt_renders_with_a_warning(capsys, model, tmp_path):
    _, words = small(capsys, model, tmp_path / "a.mp4", prompt="")
    assert "pad token" in words


def test_a_failed_decode_keeps_the_latent_and_leaves_no_half_video(capsys, model, tmp_path, monkeypatch):
    from h3_runtime.models.video_vae import VideoVAE

    def broken(self, latent, *arguments, **options):
        yield torch.full((1, 3, 5, 64, 96), float("nan"))

    monkeypatch.setattr(VideoVAE, "decode_chunks", broken)
    status, _, words = render(capsys, model, tmp_path / "a.mp4", "--size", SIZE, "--frames", FRAMES)
    assert status == 2 and "decoded to NaN" in words and "a.latent.safetensors" in words
    assert [p.name for p in tmp_path.iterdir()] == ["a.latent.safetensors"]


def test_paths_lists_every_entry(capsys):
    from h3_runtime.fidelity import REGISTRY

    status, result, _ = run(capsys, "paths")
    assert status == 0
    assert {row["name"]: row["label"] for row in result["results"]} == {
        name: str(entry.label) for name, entry in REGISTRY.items()
    }
    assert all(row["reason"] for row in result["results"])
    assert {"command", "version", "machine", "results"} == set(result)


def test_the_module_runs_from_another_folder(tmp_path):
    root = Path(__file__).resolve().parent.parent
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "h3_runtime", "paths", "--json"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["command"] == "paths"


def test_a_killed_render_is_taken_up_and_a_lost_clip_decoded(capsys, model, tmp_path, monkeypatch):
    """A real kill of the command in the middle; then a finished latent whose decode failed is brought back."""
    states = tmp_path / "states"
    whole, _ = small(capsys, model, tmp_path / "whole.mp4", steps=6)
    assert not states.exists()
    root = Path(__file__).resolve().parent.parent
    command = [
        sys.executable, "-m", "h3_runtime", "render", "--model", model, "--dtype", "float32", "--prompt", "a red ball",
        "--size", SIZE, "--frames", FRAMES, "--steps", 6, "--out", tmp_path / "a.mp4", "--recovery", states,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen([*map(str, command)], env=environment, stdout=subprocess.DEVNULL)
    while process.poll() is None and not list(states.glob("*.h3-state.safetensors")):
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert not list(tmp_path.glob("*.partial"))
    status, listed, _ = run(capsys, "recover", "--recovery", states)
    assert status == 0 and len(listed["results"]) == 1
    rows, words = small(capsys, model, tmp_path / "a.mp4", "--recovery", states, steps=6)
    assert rows["latent"] == whole["latent"]
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "whole.mp4").read_bytes()
    assert "taken up after forward" in words and rows["dit_calls"] < 6
    assert not list(states.iterdir())

    from h3_runtime.models.video_vae import VideoVAE

    def broken(self, *arguments, **options):
        yield torch.full((1, 3, 5, 64, 96), float("nan"))

    with monkeypatch.context() as patch:
        patch.setattr(VideoVAE, "decode_chunks", broken)
        status, _, _ = render(
            capsys, model, tmp_path / "b.mp4", "--size", SIZE, "--frames", FRAMES, "--recovery", states, steps=6
        )
    assert status == 2
    lost = next(states.iterdir())
    status, _, words = run(capsys, "recover", lost, "--model", model, "--out", tmp_path / "c.mp4")
    assert status == 0, words
    assert (read_clip(tmp_path / "c.mp4").frames == read_clip(tmp_path / "whole.mp4").frames).all()


def test_the_same_job_is_taken_up_unless_it_shall_start_over(capsys, model, tmp_path, monkeypatch):
    from h3_runtime.models.video_vae import VideoVAE

    states = ("--recovery", tmp_path / "states")
    rows, words = small(capsys, model, tmp_path / "a.mp4", *states, "--resume")
    assert "no earlier run of exactly this job has left a state" in words and rows["dit_calls"] == 2
    assert not list((tmp_path / "states").iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(VideoVAE, "decode_chunks", lambda *given, **options: iter([torch.full((1, 3, 5, 64, 96), 1e999)]))
        assert render(capsys, model, tmp_path / "b.mp4", "--size", SIZE, "--frames", FRAMES, *states)[0] == 2
    (lost,) = (tmp_path / "states").iterdir()
    kept = lost.read_bytes()

    rows, words = small(capsys, model, tmp_path / "b.mp4", *states)
    assert rows["dit_calls"] == 0 and words.count("note: taken up after forward 2 of 2") == 1
    assert (tmp_path / "b.mp4").read_bytes() == (tmp_path / "a.mp4").read_bytes()
    lost.write_bytes(kept)
    rows, words = small(capsys, model, tmp_path / "b.mp4", *states, "--fresh")
    assert rows["dit_calls"] == 2 and "forward 2 of 2, saved by an earlier run, was dropped" in words
    lost.write_bytes(kept[:-9])
    rows, words = small(capsys, model, tmp_path / "b.mp4", *states)
    assert rows["dit_calls"] == 2 and "is damaged" in words
    assert not lost.exists()


def test_tiles_decoded_at_once_are_asked_for_and_labelled(capsys, model, tmp_path):
    given = ("--size", "384x320", "--frames", 5)
    status, _, words = render(capsys, model, tmp_path / "a.mp4", *given, "--tile-batch", 3)
    assert status == 0, words
    parts = json.loads((tmp_path / "a.json").read_text())["fidelity"]["parts"]
    (part,) = [part for part in parts if part["name"] == "video-vae/tile-batch"]
    assert part["label"] == "EXACT MATH"
    again = ("render", "--model", model, "--from", tmp_path / "a.mp4", "--out", tmp_path / "b.mp4")
    status, _, words = run(capsys, *again)
    assert status == 0 and "differs: nothing" in words
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()
    status, _, words = render(capsys, model, tmp_path / "c.mp4", *given, "--tile-batch", 0)
    assert status == 2 and "tile batch 0: give 1 (the default) to 64" in words


def test_a_run_that_stops_early_leaves_its_state_in_its_own_file_only(capsys, model, tmp_path):
    small(capsys, model, tmp_path / "a.mp4", "--recovery", tmp_path / "states", "--stop", 1)
    assert (tmp_path / "a.latent.safetensors").is_file() and not list((tmp_path / "states").iterdir())
