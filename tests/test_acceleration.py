"""Acceleration as a person asks for it: presets, the command line, manifests that repeat it, plans that count it."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from h3_runtime.accelerators import BY_NAME, KERNELS, spec_of
from h3_runtime.accelerators import attention as kernels
from h3_runtime.accelerators.few_step import ScheduleSettings, few_step_settings
from h3_runtime.accelerators.presets import PRESETS, Acceleration, accelerate
from h3_runtime.demo.maker import make_model
from h3_runtime.errors import H3Error
from h3_runtime.fidelity import Label
from h3_runtime.media import read_metadata
from h3_runtime.request import LoraRequest, Media, RenderRequest

from .test_render import recovery_folder, render, run, small, values  # noqa: F401  (a fixture)

FORECAST = "forecast:calls=0.1,warmup=2,tail=1,sound-limit=10"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def lora_file(folder, name: str):
    file = folder / f"{name}.safetensors"
    down, up = torch.randn(2, 256) * 0.01, torch.randn(192, 2) * 0.01
    stem = "diffusion_model.blocks.0.attn.out_proj"
    save_file({f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up}, file)
    return file


# --- presets ---------------------------------------------------------------------------------------------------------


def test_presets_name_their_parts_labels_and_figures():
    assert list(PRESETS) == ["lossless", "extra-high", "high", "fast", "draft"]
    labels = [PRESETS[name].label for name in PRESETS]
    assert labels == [Label.LOSSLESS, Label.EXACT_MATH, *[Label.APPROXIMATE] * 3]
    for preset in PRESETS.values():
        lines = preset.lines()
        assert all(part in lines[0] for part in preset.parts)
        assert len(lines) > 1 or not preset.parts, "figures, or that there are none yet"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_leaves_out_what_is_missing_and_says_so(name, monkeypatch):
    """Here, without a card; and where everything is there."""
    made = accelerate(preset=name)
    left_out = [note for note in made.notes if "was left out, this machine lacks it (" in note]
    parts = [part.partition(":")[0] for part in PRESETS[name].parts]
    assert len(made.accelerators) + len(left_out) == len(parts)
    for kind, options in made.accelerators:
        assert BY_NAME[kind].missing(BY_NAME[kind].Options(**dict(options))) is None
    for kind in BY_NAME.values():
        monkeypatch.setattr(kind, "missing", classmethod(lambda cls, options: None))
    assert [spec[0] for spec in accelerate(preset=name).accelerators] == parts


def test_a_part_beside_a_preset_takes_its_place():
    made = accelerate(["forecast:calls=0.9", "second-order"], "draft")
    assert dict(dict(made.accelerators)["forecast"])["calls"] == 0.9 and made.solver == "second-order"
    assert [name for name, _ in made.accelerators].count("forecast") == 1
    assert Acceleration().and_part("second-order").label is Label.APPROXIMATE
    assert accelerate(["attention"]).label is Label.EXACT_MATH
    assert accelerate(["attention:kernel=int8-eager"]).label is Label.APPROXIMATE


@pytest.mark.parametrize(
    ("parts", "preset", "said"),
    [
        (["block-cache"], "high", "forecast and block-cache exclude each other"),
        ([], "warp", "preset 'warp' is unknown: choose from lossless"),
        (["warp"], None, "'warp' is not built: choose from attention, .*second-order, few-step"),
        (["second-order:x=1"], None, "second-order has no options"),
        (["forecast", "forecast:calls=0.3"], None, "given twice"),
    ],
)
def test_what_cannot_be_asked_for(parts, preset, said):
    with pytest.raises(H3Error, match=said):
        accelerate(parts, preset)


def test_auto_takes_the_first_exact_kernel_that_is_there(monkeypatch):
    for there in ("flash-4", "flash-2", "sdpa-cudnn"):
        with monkeypatch.context() as patch:
            patch.setattr(kernels.Kernel, "missing", lambda self, there=there: None if self.name == there else "no")
            kernel, why = kernels.choose_kernel(kernels.AttentionOptions())
            assert kernel is KERNELS[there] and why is None and kernel.exact


# --- few-step LoRAs --------------------------------------------------------------------------------------------------


def test_few_step_takes_its_settings_from_the_lora(tmp_path):
    file = lora_file(tmp_path, "minimax_h3_fl2v_turbo_4step_v1.2_768p_comfyui_bf16")
    settings, name, notes = few_step_settings([file], ScheduleSettings())
    assert settings == ScheduleSettings(4, 6.0, 3.0) and name == "fl2v_4step_v1.2_768p"
    kept, _, notes = few_step_settings([file], ScheduleSettings(num_forwards=8))
    assert kept.num_forwards == 8 and "num_forwards stays 8 as asked" in notes[0]
    plain = lora_file(tmp_path, "style")
    assert few_step_settings([plain, file], ScheduleSettings())[0] == settings
    for loras, said in (([plain], "none of the LoRAs is known"), ([], "none of the LoRAs"), ([file, file], "2 of the")):
        with pytest.raises(H3Error, match=said):
            few_step_settings(loras, ScheduleSettings())


def test_few_step_on_a_request(tmp_path):
    file = lora_file(tmp_path, "fl2v_turbo_8step_v1.0_768p")
    asked = RenderRequest("x", loras=(LoraRequest(Media(str(file))),))
    request, notes = accelerate(["few-step"]).on_request(asked)
    assert (request.num_forwards, request.video_shift, request.few_step) == (8, 6.0, "fl2v_8step_v1.0_768p")
    assert any(note.startswith("few-step: 8 forwards") for note in notes)
    assert accelerate().on_request(asked) == (asked, [])


# --- the command line ------------------------------------------------------------------------------------------------


def test_an_accelerated_clip_says_so_and_repeats_from_itself(capsys, model, tmp_path):
    """Label, notes, report and manifest tell it; --from gives the same bytes."""
    rows, words = small(
        capsys, model, tmp_path / "a.mp4", "--accelerate", FORECAST, "--accelerate", "attention:kernel=flash-eager",
        "--solver", "second-order", steps=5,
    )  # fmt: skip
    assert rows["dit_calls"] == 3 and "forecast: 2 of 5 forwards were foretold" in words
    assert "hidden state foretold by regression" in words and "Adams-Bashforth" in words
    manifest = json.loads(read_metadata(tmp_path / "a.mp4")["h3_manifest"])
    assert manifest["request"]["accelerators"][0] == ["forecast", {**dict(spec_of("forecast")[1]), "calls": 0.1,
        "warmup": 2, "tail": 1, "sound_limit": 10}]  # fmt: skip
    assert manifest["resolved"]["solver"] == "second-order"
    parts = {part["name"] for part in manifest["fidelity"]["parts"]}
    assert {"accelerator/forecast", "attention/flash-eager", "solver/second-order"} <= parts
    report = json.loads((tmp_path / "a.report.json").read_text(encoding="utf-8"))
    assert report["dit_calls"] == 3 and report["stats"]["forecast"]["foretold"] == 2
    status, _, said = render(capsys, model, tmp_path / "b.mp4", "--from", tmp_path / "a.mp4", prompt=None, steps=None)
    assert status == 0 and "differs: nothing" in said
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()
    status, _, said = render(
        capsys, model, tmp_path / "c.mp4", "--from", tmp_path / "a.mp4", "--preset", "fast", prompt=None, steps=None
    )
    assert status == 2 and "--preset cannot change it" in said


def test_a_preset_on_the_command_line(capsys, model, tmp_path):
    rows, words = small(capsys, model, tmp_path / "a.mp4", "--preset", "fast", steps=10)
    assert "note: preset fast: forecast:calls=0.4" in words
    assert "attention:kernel=sage-2 was left out, this machine lacks it (no GPU here)" in words
    assert rows["dit_calls"] < 10
    plain, _ = small(capsys, model, tmp_path / "b.mp4", "--preset", "lossless", steps=10)
    base, _ = small(capsys, model, tmp_path / "c.mp4", steps=10)
    assert plain["latent"] == base["latent"] != rows["latent"]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--accelerate", "forecast", "--accelerate", "block-cache"), "exclude each other"),
        (("--accelerate", "attention:kernel=flash-3"), "flash-3 cannot run here (no GPU here)"),
        (("--accelerate", "few-step"), "none of the LoRAs is known as one"),
        (("--preset", "best"), "preset 'best' is unknown"),
        (("--solver", "heun"), "--solver 'heun' is not built: choose one of euler, second-order"),
        (("--accelerate", "sparse:keep=0"), "accelerator sparse: keep is 0: give a number from 0.02 to 1"),
    ],
)
def test_bad_words_are_refused_before_the_work(capsys, model, tmp_path, option, said):
    status, _, words = render(capsys, model, tmp_path / "a.mp4", *option)
    assert status == 2 and said in words and "encode" not in words and not list(tmp_path.iterdir())


def test_paths_lists_kernels_with_why_they_cannot_run_and_presets(capsys):
    status, result, words = run(capsys, "paths")
    rows = {row["name"]: row for row in result["results"]}
    assert status == 0 and rows["attention/sage-2"]["unproven_here"] and rows["attention/flash-eager"]["label"]
    assert "preset draft: APPROXIMATE; parts: sparse:keep=0.3, forecast:calls=0.25" in words


# --- the plan --------------------------------------------------------------------------------------------------------


def test_what_an_accelerator_holds_is_in_the_plan(capsys):
    def planned(*options):
        status, result, words = run(
            capsys, "plan", "--size", "1344x768", "--frames", 124, "--vram", 80, "--ram", 256, *options
        )
        assert status == 0, words
        return values(result)

    plain, forecast = planned(), planned("--accelerate", "forecast")
    more = forecast["denoise/card"] - plain["denoise/card"]
    assert more == pytest.approx(37296 * 5376 * 2 * 3 / 2**30, rel=0.2)
    ram = planned("--accelerate", "forecast:store=ram")
    assert ram["denoise/card"] < forecast["denoise/card"] and ram["denoise/host"] > forecast["denoise/host"]
