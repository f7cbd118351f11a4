"""render with quantised weights, LoRAs and placements: labelled, in the manifest, repeated from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from h3_runtime import cli
from h3_runtime.checkpoint.info import kernel_path
from h3_runtime.checkpoint.load import load_dit, open_dit
from h3_runtime.checkpoint.parts import find_parts
from h3_runtime.checkpoint.pieces import Online
from h3_runtime.demo.maker import make_model
from h3_runtime.media import read_clip
from h3_runtime.memory.plan import plan_request
from h3_runtime.memory.probe import Card, Host
from h3_runtime.memory.weights import named_dit, parts_of
from h3_runtime.quant import kernels
from h3_runtime.request import RenderRequest
from h3_runtime.text.conditions import load_condition


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    monkeypatch.setenv("H3_RECOVERY", str(tmp_path.parent / (tmp_path.name + "-recovery")))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.parent / (tmp_path.name + "-cache")))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def lora(model, tmp_path_factory) -> Path:
    dit, _ = load_dit(model / "dit.safetensors")
    generator, tensors = torch.Generator().manual_seed(1), {}
    for index in range(dit.config.layers):
        out, inside = dit.blocks[index].mlp.fc1.weight.shape
        key = f"diffusion_model.blocks.{index}.mlp.fc1"
        tensors[f"{key}.lora_A.weight"] = torch.randn(4, inside, generator=generator) / inside**0.5
        tensors[f"{key}.lora_B.weight"] = torch.randn(out, 4, generator=generator) * 0.1
    path = tmp_path_factory.mktemp("lora") / "style@v1.safetensors"
    save_file(tensors, path)
    return path


def render(
    capsys, model, out, *arguments, prompt=("--prompt", "a ball", "--steps", 2, "--size", "96x64", "--frames", 22)
):
    words = ["render", "--model", model, "--out", out, *prompt, *arguments, "--json"]
    status = cli.main([str(word) for word in words])
    captured = capsys.readouterr()
    rows = json.loads(captured.out)["results"] if captured.out.strip() else []
    return status, {row["name"]: row["value"] for row in rows}, captured.err


def test_placement_changes_nothing_and_quantisation_is_labelled(capsys, model, tmp_path):
    _, plain, _ = render(capsys, model, tmp_path / "a.mp4")
    for index, placed in enumerate((["--place", "ram"], ["--place", "disk", "--resident-layers", 1, "--ahead", 2])):
        status, streamed, words = render(capsys, model, tmp_path / f"p{index}.mp4", *placed)
        assert status == 0, words
        assert streamed["latent"] == plain["latent"]
        assert (tmp_path / f"p{index}.mp4").read_bytes() == (tmp_path / "a.mp4").read_bytes()
    status, quantised, words = render(
        capsys, model, tmp_path / "q.mp4", "--quantise", "int8_convrot", "--exclude", "blocks.0.*", "--place", "disk"
    )
    assert status == 0, words
    assert quantised["latent"] != plain["latent"]
    manifest = json.loads((tmp_path / "q.json").read_text())
    kernel = kernel_path(kernels.choice(kernels.OPS[0], torch.device("cpu")))  # what computed it: it may be unproven
    assert {"dit/int8-convrot", kernel} <= {part["name"] for part in manifest["fidelity"]["parts"]}
    assert manifest["request"]["quantise"] == "int8_convrot" and manifest["request"]["exclude"] == ["blocks.0.*"]
    status, again, words = render(capsys, model, tmp_path / "r.mp4", "--from", tmp_path / "q.mp4", prompt=())
    assert status == 0 and again["latent"] == quantised["latent"] and "differs: nothing" in words


def test_every_part_is_quantised_while_it_loads(capsys, model, tmp_path):
    """By part: the text encoder changes the latent, the video VAE the pixels alone; labelled, recorded, repeated."""
    _, plain, _ = render(capsys, model, tmp_path / "a.mp4")
    text = ("--quantise", "text=int8_convrot", "--exclude", "text:language_model.layers.0.*")
    status, encoded, words = render(capsys, model, tmp_path / "t.mp4", *text)
    assert status == 0, words
    assert encoded["latent"] != plain["latent"]
    _, whole, _ = render(capsys, model, tmp_path / "w.mp4", *text[:2])
    assert whole["latent"] not in (encoded["latent"], plain["latent"])  # also: no kept prompt of another quantisation
    _, decoded, _ = render(capsys, model, tmp_path / "v.mp4", "--quantise", "video_vae=int8")
    assert decoded["latent"] == plain["latent"]
    assert read_clip(tmp_path / "v.mp4").frames.tobytes() != read_clip(tmp_path / "a.mp4").frames.tobytes()
    every = ("--quantise", "dit=fp8,text=int8,video_vae=int8_convrot")
    status, quantised, words = render(capsys, model, tmp_path / "q.mp4", *every)
    assert status == 0, words
    manifest = json.loads((tmp_path / "q.json").read_text())
    labelled = {part["name"] for part in manifest["fidelity"]["parts"]}
    assert {"dit/fp8", "encoder/int8", "video-vae/int8-convrot"} <= labelled
    assert "text encoder file" in words and "video VAE file" in words
    recorded = {name: part["quantisation"] for name, part in manifest["models"].items()}
    assert recorded["text_encoder"] == "21 int8 (while loading)" and recorded["audio_vae"] == ""
    status, again, words = render(capsys, model, tmp_path / "r.mp4", "--from", tmp_path / "q.mp4", prompt=())
    assert status == 0 and again["latent"] == quantised["latent"] and "differs: nothing" in words
    saved = tmp_path / "said.safetensors"
    words = ["embed", "save", "--model", model, "--prompt", "a ball", *text, "--out", saved, "--size", "96x64"]
    assert cli.main([str(word) for word in [*words, "--frames", 22, "--no-prompt-cache"]]) == 0
    capsys.readouterr()
    assert "quantised while loading" in load_condition(saved).record.approximate
    status, told, words = render(capsys, model, tmp_path / "e.mp4", "--embeds", saved, *text)
    assert status == 0 and told["latent"] == encoded["latent"] and "is another encoder" not in words
    assert "quantising the text encoder has no effect" in words
    _, _, words = render(capsys, model, tmp_path / "o.mp4", "--embeds", saved)
    assert "is another encoder" in words


def test_a_fingerprint_covers_what_is_quantised_while_loading(model):
    """Recovery files and kept prompts are found by it: a bf16 run is never taken up by an INT8 one."""
    ways = [{}, {"quantise": "int8"}, {"quantise": "fp8"}, {"quantise": "int8", "exclude": ("blocks.0.*",)}]
    assert len({open_dit(model / "dit.safetensors", **way).info.fingerprint for way in ways}) == len(ways)
    again = open_dit(model / "dit.safetensors", **ways[3]).info.fingerprint
    assert again == open_dit(model / "dit.safetensors", **ways[3]).info.fingerprint


def test_the_plan_knows_what_is_quantised(capsys, model):
    def planned(*arguments) -> str:
        assert cli.main(["plan", "--model", str(model), "--size", "96x64", "--frames", "22", *arguments]) in (0, 1)
        return capsys.readouterr().out

    parts = find_parts(model)
    online = {part: Online("int8") for part in ("text_encoder", "video_vae")}
    plain, smaller = (parts_of(parts, named_dit(), way) for way in ({}, online))
    assert sum(smaller.text.layers) < 0.6 * sum(plain.text.layers)
    assert sum(smaller.video_vae.layers) < 0.6 * sum(plain.video_vae.layers)
    assert planned("--quantise", "dit=int8,text=int8,video_vae=int8") != planned()
    request = RenderRequest("a ball", (96, 64), frames=22, quantise="text=int8,video_vae=int8")
    card, host = Card.given(12.0), Host.given(16.0)
    quantised, whole = (plan_request(r, parts, card, host) for r in (request, replace(request, quantise=None)))
    peaks = [[made.stage(name).vram for name in ("text", "video decode")] for made in (quantised, whole)]
    assert peaks[0] != peaks[1]
    assert cli.main(["plan", "--weights", "bf16", "--quantise", "int8"]) == 2
    assert "is no file, and only a file is quantised" in capsys.readouterr().out
    assert cli.main(["plan", "--quantise", "text=int8"]) == 2 and "add --model DIR" in capsys.readouterr().out


def test_loras_are_applied_counted_labelled_and_repeated(capsys, model, lora, tmp_path):
    _, plain, _ = render(capsys, model, tmp_path / "a.mp4")
    status, styled, words = render(capsys, model, tmp_path / "b.mp4", "--lora", f"{lora}@0.5")
    assert status == 0, words
    assert styled["latent"] != plain["latent"]
    assert "4 of 4" in words or "applied" in words
    manifest = json.loads((tmp_path / "b.json").read_text())
    assert manifest["request"]["loras"][0]["strength"] == 0.5
    assert "dit/lora" in [part["name"] for part in manifest["fidelity"]["parts"]]
    assert manifest["loras"]["applied"] == 4 and not manifest["loras"]["partial"]
    assert str(lora.parent) not in json.dumps(manifest)
    _, streamed, _ = render(capsys, model, tmp_path / "c.mp4", "--lora", f"{lora}@0.5", "--place", "disk")
    assert streamed["latent"] == styled["latent"]
    _, other, _ = render(capsys, model, tmp_path / "d.mp4", "--lora", lora)
    assert other["latent"] not in (styled["latent"], plain["latent"])
    status, again, words = render(
        capsys, model, tmp_path / "e.mp4", "--from", tmp_path / "b.mp4", "--inputs", lora.parent, prompt=()
    )
    assert status == 0, words
    assert again["latent"] == styled["latent"] and "differs: nothing" in words


BAD = {
    "lora file": (["--lora", "none.safetensors"], "--lora none.safetensors does not exist"),
    "ring without a rung": (["--ahead", "2"], "go with --place ram or --place disk"),
    "ahead": (["--place", "ram", "--ahead", "0"], "placement keeps 0 layers"),
    "exclude": (["--quantise", "int8", "--exclude", "nothing.*"], "matches none"),
    "exclude of the encoder": (["--quantise", "text=int8", "--exclude", "text:nothing.*"], "matches none"),
    "exclude of the VAE": (["--quantise", "video_vae=int8", "--exclude", "video_vae:nothing"], "matches none"),
    "all excluded": (["--quantise", "int8", "--exclude", "*"], "leaves none of the 16 linears of dit.safetensors"),
    "all of the encoder excluded": (
        ["--quantise", "text=int8", "--exclude", "text:*"],
        "leaves none of the 21 linears",
    ),
    "empty pattern": (["--quantise", "int8", "--exclude", "dit:"], "exclude 'dit:' names no layer"),
    "half a list": (["--quantise", "dit=int8,"], "leaves a part without its way"),
    "method": (["--quantise", "int4"], "'int4' is unknown; take one of int8_convrot, int8, fp8"),
    "part": (["--quantise", "audio_vae=int8"], "the part 'audio_vae' is unknown; take one of dit, text, video_vae"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_weights_are_one_sentence(capsys, model, tmp_path, case):
    arguments, sentence = BAD[case]
    status, rows, words = render(capsys, model, tmp_path / "a.mp4", *arguments)
    assert status == 2 and not rows and sentence in words and words.count("error:") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_lora_of_another_model_is_refused_before_the_work(capsys, model, tmp_path):
    key = "diffusion_model.blocks.0.mlp.fc1"
    tensors = {f"{key}.lora_A.weight": torch.zeros(2, 7), f"{key}.lora_B.weight": torch.zeros(9, 2)}
    save_file(tensors, tmp_path / "x.safetensors")
    status, _, words = render(capsys, model, tmp_path / "a.mp4", "--lora", tmp_path / "x.safetensors")
    assert status == 2 and "x.safetensors" in words and "encode" not in words


def test_steps_and_few_step_loras_that_do_not_belong_together_are_told(capsys, model, lora, tmp_path):
    import shutil

    _, _, words = render(capsys, model, tmp_path / "a.mp4")
    assert "2 forwards without a few-step LoRA: the model was released for 49" in words
    turbo = tmp_path / "minimax_h3_fl2v_turbo_8step_v1.0_768p.safetensors"
    shutil.copy(lora, turbo)
    status, _, words = render(capsys, model, tmp_path / "b.mp4", "--lora", turbo)
    assert status == 0, words
    assert "8" in words and "shift" in words and "forwards without" not in words


def test_on_a_card_the_plan_chooses_or_refuses_before_any_weights(model, monkeypatch):
    from h3_runtime import render as rendering
    from h3_runtime.checkpoint.parts import find_parts
    from h3_runtime.errors import H3Error
    from h3_runtime.guides import place
    from h3_runtime.memory.probe import Card, Host
    from h3_runtime.model import Models
    from h3_runtime.request import RenderRequest

    request = RenderRequest("a ball", (96, 64), frames=22, num_forwards=2)
    monkeypatch.setattr(rendering, "probe_host", lambda: Host.given(16.0))
    monkeypatch.setattr(rendering, "probe_card", lambda device: Card.given(12.0))
    models = Models(find_parts(model), device="cuda")
    notes = rendering.choose_placement(request, place(request), models)
    assert models.loading.placement.rung == "resident" and notes[0].startswith("the plan: resident")
    monkeypatch.setattr(rendering, "probe_card", lambda device: Card.given(0.05))
    with pytest.raises(H3Error, match="GiB"):
        rendering.choose_placement(request, place(request), Models(find_parts(model), device="cuda"))
    assert rendering.choose_placement(request, place(request), Models(find_parts(model))) == []
