"""Real but unkind use of the command line and of what stands behind it: one sentence, or the right clip."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from h3_runtime import cli, save, terminal, unfinished
from h3_runtime.checkpoint.reader import SafetensorsFile
from h3_runtime.demo.maker import make_model
from h3_runtime.demo.run import disc, guided, text_to_video, tone, write_sound
from h3_runtime.errors import H3Error
from h3_runtime.guides import place
from h3_runtime.latents import KIND, load_latent
from h3_runtime.manifest import load_manifest, request_from
from h3_runtime.media import Mp4Writer, read_audio, write_image
from h3_runtime.request import GuideRequest, Media, RenderRequest, SoundMask
from h3_runtime.sampler import draw_noise
from h3_runtime.unfinished import claimed

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
        rows = json.loads(captured.out)["results"]
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
        with pytest.raises(H3Error, match=r"m has|of m holds"):
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


def test_what_a_render_reads_is_never_overwritten(render, pixels):
    assert render("--stop", 1, steps=2, out="part.mp4")[0] == 0
    state = pixels / "part.latent.safetensors"
    before = {path.name: path.read_bytes() for path in pixels.iterdir()}
    continued = ["--state", state, "--start", 1]
    refused(
        render(*continued, out="part.mp4", steps=2, size=None, frames=None), "would replace part.latent.safetensors"
    )
    refused(render("--source", pixels / "clip.mp4", "--denoise", 0.5, out="clip.mp4"), "would replace clip.mp4")
    again = {"prompt": None, "size": None, "frames": None, "steps": None}
    refused(render("--from", pixels / "part.json", out="part.mp4", **again), "would replace part.json")
    assert {path.name: path.read_bytes() for path in pixels.iterdir()} == before


def test_a_state_goes_on_only_where_it_stood(render, tmp_path):
    assert render("--stop", 1, steps=2, out="part.mp4")[0] == 0
    go_on = ["--state", tmp_path / "part.latent.safetensors", "--start", 1]
    fixed = {"size": None, "frames": None}
    refused(render(*go_on, steps=3, **fixed), "stands at sigma", "give the steps, denoise and shifts")
    refused(render(*go_on, "--video-shift", 5, steps=2, **fixed), "stands at sigma")
    refused(render(*go_on, "--mask", "keep", steps=2, **fixed), "part.latent.safetensors holds none: add --source")
    status, _, words = render(*go_on, steps=2, **fixed)
    assert status == 0 and "another run" not in words
    status, _, words = render(*go_on, "--seed", 4, steps=2, **fixed)
    assert status == 0 and "the saved state is of another run" in words


def test_a_source_without_effect_is_told(render, pixels):
    _, _, words = render("--source", pixels / "clip.mp4", "--denoise", 0.9)
    assert "denoise 0.9 of 1 forwards rounds to the full run" in words
    assert "clip.mp4 only gave the size" in words


DAMAGE = {
    "size": {"size": None},
    "guides": {"guides": [{}]},
    "medium": {"first_frame": "p.png"},
    "sound mask": {"sound_mask": {"ranges": [], "curve": []}},
    "place": {"source": {"name": "../p.png", "sha256": ""}},
    "windows place": {"source": {"name": "..\\p.png", "sha256": ""}},
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_manifest_is_one_sentence(damage):
    whole = {"size": [96, 64], "frames": 22, "prompt": "", "guides": [], "sound_mask": None, "mask": None}
    whole |= dict.fromkeys(("first_frame", "last_frame", "source", "state"))
    request_from({"request": whole}, [])
    for damaged in ({"request": whole | DAMAGE[damage]}, {"h3_manifest": 1}):
        with pytest.raises(H3Error, match=r"the manifest (is damaged|names the file)"):
            request_from(damaged, [])


def test_a_manifest_that_is_no_text(tmp_path):
    for name, content in (("bytes.json", b"\xff\xfe{"), ("deep.json", b"[" * 100_000), ("list.json", b"[]")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(H3Error, match=f"{name} is not a manifest"):
            load_manifest(tmp_path / name)


def test_half_precision_vaes_stand_in_label_and_manifest(render, model, tmp_path):
    """Also when only the decode needs them; and the label says which file."""
    folder = tmp_path / "half"
    shutil.copytree(model, folder)
    half = {name: tensor.half() for name, tensor in load_file(model / "video_vae.safetensors").items()}
    save_file(half, folder / "video_vae.safetensors", SafetensorsFile(model / "video_vae.safetensors").metadata)
    status, _, words = render(folder=folder)
    assert status == 0, words
    assert "APPROXIMATE: the video VAE file video_vae.safetensors stores" in words
    manifest = json.loads((tmp_path / "o.json").read_text())
    assert sorted(manifest["models"]) == ["audio_vae", "dit", "text_encoder", "video_vae"]
    parts = {part["name"]: part["reason"] for part in manifest["fidelity"]["parts"]}
    assert "video_vae.safetensors" in parts["video-vae/file-approximate"]


def test_a_truncated_part_is_named_with_its_reason(render, model, tmp_path):
    folder = tmp_path / "short"
    shutil.copytree(model, folder)
    whole = (model / "audio_vae.safetensors").read_bytes()
    (folder / "audio_vae.safetensors").write_bytes(whole[: len(whole) // 2])
    refused(render(folder=folder), "no audio VAE was found", "is truncated")


OPTIONS = {
    "feather alone": (["--audio-feather", "0.1"], "softens the ranges of --audio-mask"),
    "feather on a word": (["--audio-mask", "keep", "--audio-feather", "0.1"], "softens the ranges"),
    "inputs alone": (["--inputs", "."], "add --from MANIFEST"),
    "resume without": (["--resume", "--no-recovery"], "leave one of them out"),
    "fresh without": (["--fresh", "--no-recovery"], "leave one of them out"),
    "layers of nothing": (["--resident-layers", "0"], "go with --place ram or --place disk"),
    "ahead of nothing": (["--ahead", "1", "--place", "resident"], "go with --place ram or --place disk"),
    "negative layers": (["--place", "ram", "--resident-layers", "-1"], "placement keeps -1 layers"),
    "nothing ahead": (["--place", "ram", "--ahead", "0"], "copies 0 ahead"),
    "too many layers": (["--place", "ram", "--resident-layers", "99"], "99 layers shall stay on the device"),
    "too many ahead": (["--place", "disk", "--ahead", "99"], "99 layers shall be copied ahead"),
    "superscript": (["--size", "\u00b2x3"], "cannot be read: give WxH"),
    "endless": (["--size", "9" * 5000 + "x64"], "cannot be read: give WxH"),
    "device": (["--device", "meta"], "give cuda or cpu"),
    "unknown device": (["--device", "foo"], "give cuda or cpu"),
    "recovery in a file": (["--recovery", __file__], "is a file: states of runs need a folder"),
    "half a character": (["--prompt", "a\udcffb"], "no valid text at character 2"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_that_would_be_ignored_or_crash(render, case):
    arguments, sentence = OPTIONS[case]
    refused(render(*arguments, size=None, steps=None), sentence)


def test_a_ratio_of_the_cinema():
    arguments = cli.build_parser().parse_args(
        ["render", "--model", ".", "--out", "o.mp4", "--prompt", "", "--ratio", "2.39:1"]
    )
    assert cli.request_of(arguments).ratio == (2.39, 1.0)


def test_memory_that_is_not_enough_is_a_sentence(render, monkeypatch):
    def full(*arguments, **options):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory\nframe 1")

    monkeypatch.setattr("h3_runtime.render.place", full)
    refused(render(), "the memory was not enough")


def test_a_medium_is_hashed_as_it_was_read(pixels):
    medium = Media(str(pixels / "p.png"))
    request = RenderRequest("", (96, 64), frames=22, first_frame=medium)
    place(request)
    before = medium.sha256
    (pixels / "p.png").unlink()
    assert medium.sha256 == before
    with pytest.raises(H3Error, match=r"p\.png cannot be read"):
        place(RenderRequest("", (96, 64), first_frame=Media(str(pixels / "p.png"))))


def test_names_that_are_no_text_can_be_saved():
    name = Media("/x/caf\udce9.png").name
    assert json.loads(json.dumps(name).encode()) == "caf\\udce9.png"
    name.encode()


def test_progress_without_a_terminal_is_told_now_and_then(monkeypatch, capsys):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(clock))
    say = terminal.Say(to_stderr=False)
    for done in range(1, 6):
        say.progress("denoise", done, 5)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "denoise 5/5" and 2 <= len(lines) <= 4
    assert "s left" in lines[0]


@pytest.mark.parametrize("part", ["dit", "video_vae", "audio_vae"])
def test_a_part_that_is_not_whole_is_refused_before_the_work(render, model, tmp_path, monkeypatch, part):
    """Also a VAE that only the decode would have read, an hour later."""
    monkeypatch.setattr("h3_runtime.text.encoder.TextEncoder.load", lambda *a, **k: pytest.fail("weights were loaded"))
    folder = tmp_path / "part"
    shutil.copytree(model, folder)
    file = folder / f"{part}.safetensors"
    tensors = load_file(file)
    lost = next(name for name in tensors if name.endswith("bias"))
    metadata = SafetensorsFile(file).metadata
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, file, metadata)
    refused(render(folder=folder), "is no complete", lost)


def test_a_nan_in_a_word_that_the_prompt_lacks_is_found(render, model, tmp_path):
    folder = tmp_path / "nan"
    shutil.copytree(model, folder)
    file = folder / "text_encoder.safetensors"
    tensors, metadata = load_file(file), SafetensorsFile(file).metadata
    tensors["model.embed_tokens.weight"][7, 3] = float("nan")
    save_file(tensors, file, metadata)
    refused(render(folder=folder), "embed_tokens.weight holds NaN or infinity")


def test_a_demo_where_nothing_can_be_made(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert cli.main(["demo", "--out", str(tmp_path / "file" / "demo")]) == 2
    assert "cannot be made" in capsys.readouterr().out


def test_an_interrupted_render_says_how_to_go_on(capsys, model, tmp_path, monkeypatch):
    def stopped(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("h3_runtime.render.place", stopped)
    command = ["render", "--model", str(model), "--prompt", "", "--out", str(tmp_path / "o.mp4")]
    assert cli.main(command) == 130
    assert "the same command goes on" in capsys.readouterr().out
    assert cli.main([*command, "--no-recovery"]) == 130
    assert capsys.readouterr().out == "stopped: nothing half-written was left\n"


def test_a_latent_file_that_does_not_tell_its_size(tmp_path):
    saved = clip()
    for metadata in ("{}", "[]", "nothing", '{"num_frames": 22, "width": 96, "height": "64"}'):
        save_file({"video": saved.video, "audio": saved.audio}, tmp_path / "l.safetensors", {KIND: metadata})
        with pytest.raises(H3Error, match=r"l\.safetensors does not tell its size"):
            load_latent(tmp_path / "l.safetensors")


@pytest.mark.parametrize("ending", [".json", ".report.json", ".latent.safetensors", ".kept.mkv"])
def test_a_folder_where_a_file_goes_beside_the_clip_is_refused_before_the_work(render, tmp_path, ending):
    (tmp_path / f"o{ending}").mkdir()
    refused(render(), f"o{ending} is a folder", "rename it")
    assert [path.name for path in tmp_path.iterdir()] == [f"o{ending}"]


def test_a_folder_that_takes_no_state_is_refused_before_the_work(render, tmp_path, monkeypatch):
    monkeypatch.setattr("h3_runtime.render.place", lambda *a, **k: pytest.fail("the work began"))
    (tmp_path / "file").write_text("")
    refused(render("--recovery", tmp_path / "file" / "inside"), "no state can be saved in")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_two_runs_do_not_make_one_clip(render, tmp_path):
    with claimed(tmp_path / "o.mp4"):
        refused(render(), "o.mp4 is being made by another run", "choose another name")
        with claimed(tmp_path / "p.mp4"):
            pass
    assert list(tmp_path.iterdir()) == []
    assert render()[0] == 0


def test_of_two_claims_the_earlier_one_holds(tmp_path, monkeypatch):
    """Whichever of them looks first."""
    out, seen = tmp_path / "o.mp4", []
    look = unfinished._older_claim

    def late(mine, stem):
        os.utime(mine, ns=(1, 1))  # written before the other, which looked already
        seen.append(look(mine, stem))
        return seen[-1]

    with claimed(out):
        monkeypatch.setattr(unfinished, "_older_claim", late)
        with claimed(out):
            assert seen == [None]


def test_a_claim_of_the_dead_holds_nothing(tmp_path):
    code = "import sys, os; from pathlib import Path; from h3_runtime.unfinished import claimed\n"
    code += "with claimed(Path(sys.argv[1])): os._exit(9)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "o.mp4")], check=False)
    assert len(list(tmp_path.iterdir())) == 1
    with claimed(tmp_path / "o.mp4"):
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_latent_that_is_gone_already_ends_no_finished_render(render, tmp_path, monkeypatch):
    decoded = save._decode_to

    def and_removed(*arguments, **options):
        (tmp_path / "o.latent.safetensors").unlink()
        return decoded(*arguments, **options)

    monkeypatch.setattr(save, "_decode_to", and_removed)
    status, _, words = render()
    assert status == 0, words
    assert sorted(path.name for path in tmp_path.iterdir()) == ["o.json", "o.mp4", "o.report.json"]


# --- what a program is told ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "command", "sentence"),
    [
        (["inspect", "nothing.safetensors"], "inspect", "nothing.safetensors"),
        (["embed", "show", "nothing.safetensors"], "embed", "nothing.safetensors"),
        (["render", "--out", "o.mp4", "--prompt", "a cat"], "render", "no model was given"),
        (["plan", "--frames", "x"], "plan", "--frames: invalid int value"),
        (["bench", "paths"], "bench", "--out"),
        (["engine"], "engine", "list|check"),
        ([], None, "invalid choice"),
    ],
)
def test_an_error_is_an_object_too(capsys, tmp_path, monkeypatch, words, command, sentence):
    """--json: one object on stdout, whatever came of it; the same sentence goes to stderr."""
    monkeypatch.chdir(tmp_path)
    assert cli.main([*words, *(["nonsense"] if command is None else []), "--json"]) == 2
    said = capsys.readouterr()
    made = json.loads(said.out)
    assert made["command"] == (command or "nonsense") and made["results"] == [] and made["version"]
    assert sentence in made["error"] and made["error"] in said.err


def test_a_stop_is_an_object_too(capsys, tmp_path, monkeypatch):
    def stopped(*arguments):
        raise KeyboardInterrupt("stopped: half way")

    monkeypatch.setattr(cli, "run_demo", stopped)
    assert cli.main(["demo", "--out", str(tmp_path), "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["error"] == "stopped: half way"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["render", "--model", "", "--prompt", "a", "--out", "o.mp4"], "--model"),
        (["render", "--model", ".", "--prompt", "a", "--out", "o.mp4", "--embeds", ""], "--embeds"),
        (["render", "--model", ".", "--prompt", "a", "--out", "o.mp4", "--state", " "], "--state"),
        (["render", "--model", ".", "--prompt", "a", "--out", "o.mp4", "--ref-image", ""], "--ref-..."),
        (["render", "--model", ".", "--out", "o.mp4", "--from", ""], "--from"),
        (["compare", "", "b.mp4"], "A.mp4"),
        (["recover", ""], "FILE"),
        (["demo", "--out", ""], "--out"),
        (["quantize", "", "o.safetensors", "--int8"], "IN"),
        (["inspect", ""], "FILE"),
        (["verify", ""], "FOLDER"),
    ],
)
def test_an_empty_name_is_not_the_current_folder(capsys, tmp_path, monkeypatch, words, name):
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 2
    assert f"error: {name} is given an empty name" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shift", [1e-9, 1e-300])
def test_a_shift_that_float32_cannot_bend_is_refused_before_the_work(render, shift):
    refused(render("--video-shift", shift, steps=2), "is too near 0")
    refused(render("--audio-shift", shift, steps=2), "is too near 0")
