"""Verify: the reference vectors pass, and every kind of mistake turns their cases red."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from h3_runtime import layout, sampler, schedule, solvers, steps
from h3_runtime.errors import H3Error
from h3_runtime.models import attention
from h3_runtime.models.dit import DiT, DiTConfig
from h3_runtime.verify import CaseResult, OutputResult, cases, format_lines, to_results, verify_folder
from h3_runtime.verify.folder import Golden, compare

GOLDEN = Path(__file__).parent / "golden"
INDEX = json.loads((GOLDEN / "index.json").read_text(encoding="utf-8"))
GROUPS = list(dict.fromkeys(case["group"] for case in INDEX["cases"]))


def copied(target: Path, *parts: str) -> Path:
    """A folder with those golden cases whose id contains one of ``parts``, and the weight files of their groups."""
    kept = [case for case in INDEX["cases"] if any(part in case["id"] for part in parts)]
    weights = [case for case in INDEX["cases"] if not case["inputs"] and case["file"].endswith("comfy.safetensors")]
    kept += [case for case in weights if case not in kept]
    target.mkdir(exist_ok=True)
    for name in {case["file"] for case in kept}:
        shutil.copyfile(GOLDEN / name, target / name)
    write_index(target, {**INDEX, "cases": kept})
    return target


def write_index(folder: Path, index: dict) -> None:
    """``index`` with the sizes and sums of the files that are there."""
    files = {}
    for path in folder.glob("*.safetensors"):
        files[path.name] = {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    (folder / "index.json").write_text(json.dumps({**index, "files": files}), encoding="utf-8")


def change_tensor(folder: Path, file: str, name: str, by: float) -> None:
    """Add ``by`` to the last value of one tensor of ``file`` and put the new sums into the index."""
    tensors = load_file(folder / file)
    tensors[name].view(-1)[-1] += by
    save_file(tensors, folder / file)
    write_index(folder, json.loads((folder / "index.json").read_text(encoding="utf-8")))


def change_index(folder: Path, case_id: str, **changes) -> None:
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    for case in index["cases"]:
        if case["id"] == case_id:
            case.update(changes)
    (folder / "index.json").write_text(json.dumps(index), encoding="utf-8")


def reds(folder: Path, only=None) -> set[str]:
    return {result.id for result in verify_folder(folder, only) if not result.passed}


# --- the proof --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results() -> list[CaseResult]:
    return verify_folder(GOLDEN)


@pytest.mark.parametrize("group", GROUPS)
def test_golden_group(results, group):
    chosen = [result for result in results if result.group == group]
    assert [result.id for result in chosen] == [case["id"] for case in INDEX["cases"] if case["group"] == group]
    assert all(result.passed for result in chosen), "\n".join(["", *format_lines(chosen)])


def test_every_stored_output_is_compared(results):
    """In every layout of the weights where the case asks for a glob; the layouts among its inputs as well."""
    found = {result.id: {output.name for output in result.outputs} for result in results}
    files = [f"b_dit_{word}.safetensors" for word in ("comfy", "raw", "diffusers")]
    for case in INDEX["cases"]:
        if "*" in case["config"].get("weights", ""):
            assert {f"{name} [{file}]" for name in case["outputs"] for file in files} <= found[case["id"]]
        else:
            assert set(case["outputs"]) <= {name.partition(" [")[0] for name in found[case["id"]]}
    assert {"position_ids", "segments"} <= found["dit/kf_and_refs"]
    assert {"noise_video", "noise_audio_rows", "kf0_noise", "audio_sigmas"} <= found["loop/fl2va_first"]


def test_the_largest_errors_are_those_measured(results):
    """Float32 alone stays near the two references' own distance: far below the stated tolerances."""
    for result in results:
        for output in result.outputs:
            if output.name.startswith("out_") and "_bf16" not in output.name and "condition" not in output.name:
                assert output.rel_l2 < 5e-6, (result.id, output)


# --- mistakes in the runtime ------------------------------------------------------------------------------------------

NUMBERED = [case["id"] for case in INDEX["cases"] if case["group"] in ("dit", "mask") and "text" in case["inputs"]]


def test_a_flipped_sign_of_the_step_is_seen(monkeypatch):
    right = schedule.euler_step

    def wrong(x, velocity, *rest):
        return right(x, -velocity, *rest)

    monkeypatch.setattr(solvers, "euler_step", wrong)
    monkeypatch.setattr(cases, "euler_step", wrong)
    assert reds(GOLDEN, ["loop/", "schedule/"]) == {"loop/t2va", "loop/fl2va_first", "schedule/step"}


def test_a_flipped_sign_of_the_rotation_is_seen(monkeypatch):
    right = attention.rotate_
    monkeypatch.setattr(attention, "rotate_", lambda x, cos, sin: right(x, cos, -sin))
    assert reds(GOLDEN, NUMBERED) == set(NUMBERED)


def test_a_swapped_position_axis_is_seen(monkeypatch):
    right = layout.frame_grid

    def wrong(height, width):
        grid, columns = right(height, width)
        return grid.flip(1), columns

    monkeypatch.setattr(layout, "frame_grid", wrong)
    layouts = {case["id"] for case in INDEX["cases"] if case["group"] == "layout"}
    assert reds(GOLDEN, ["layout/", *NUMBERED]) == layouts | set(NUMBERED)
    by_output = verify_folder(GOLDEN, "mask/video_only")[0].outputs
    assert any(not output.passed for output in by_output if output.name.startswith("out_comfy_video"))


def test_a_wrong_timestep_of_the_conditions_is_seen(monkeypatch):
    monkeypatch.setattr(steps, "CONDITION_TIMESTEP", 1.0)
    assert reds(GOLDEN, NUMBERED) >= {"dit/fl2va_first", "dit/ref_image", "dit/kf_and_refs", "mask/both_with_keyframe"}
    outputs = {output.name: output for output in verify_folder(GOLDEN, "mask/both_with_keyframe")[0].outputs}
    assert not outputs["inner_mod_row_per_token [b_dit_comfy.safetensors]"].passed
    assert not outputs["out_comfy_video [b_dit_comfy.safetensors]"].passed


@pytest.mark.parametrize("right, wrong", [(steps.MODALITY_VIDEO, 1), (steps.MODALITY_AUDIO, 0)])
def test_a_wrong_modality_is_seen(monkeypatch, right, wrong):
    name = "MODALITY_VIDEO" if right == steps.MODALITY_VIDEO else "MODALITY_AUDIO"
    monkeypatch.setattr(steps, name, wrong)
    outputs = {output.name.partition(" [")[0]: output for output in verify_folder(GOLDEN, "dit/t2va")[0].outputs}
    assert not outputs["inner_mod_row_per_token"].passed and outputs["inner_t_values"].passed


def test_other_noise_is_seen(monkeypatch):
    right = sampler.draw_noise

    def late(job):  # sound before picture
        noise = right(job)
        return noise._replace(video=noise.video.flip(2))

    monkeypatch.setattr(sampler, "draw_noise", late)
    monkeypatch.setattr(cases, "draw_noise", late)
    result = verify_folder(GOLDEN, "loop/t2va")[0]
    wrong = {output.name.partition(" [")[0] for output in result.outputs if not output.passed}
    assert {"noise_video", "out_video_rows", "out_rms_per_step"} <= wrong


# --- mistakes in the files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "tensor", "only"),
    [
        ("b_dit_comfy.safetensors", "condition_proj.weight", "mask/video_only"),
        ("b_dit_comfy.safetensors", "token_refiner.blocks.1.mlp.fc2.weight", "mask/uniform"),
        ("b_dit_comfy.safetensors", "blocks.0.attn.qkv_proj.weight", "mask/audio_only"),
        ("b_dit_comfy.safetensors", "blocks.1.adaln_proj.linear.bias", "mask/both"),
        ("b_dit_comfy.safetensors", "final_layer.audio_out.bias", "mask/both_low_sigma"),
        ("f_vae_comfy.safetensors", "decoder.transformer_blocks.1.ff.w2.weight", "vae_decode/dec_1z"),
        ("f_vae_comfy.safetensors", "encoder.down.0.block.0.conv1.weight", "vae_encode/enc_1f"),
        ("g_audio_vae_comfy.safetensors", "decoder.resblocks.0.convs1.0.weight", "audio_decode/dec_1"),
    ],
)
def test_one_changed_weight_is_seen(tmp_path, file, tensor, only):
    folder = copied(tmp_path, only)
    assert only not in reds(folder, only)
    change_tensor(folder, file, tensor, 0.5)
    assert only in reds(folder, only)


def test_one_changed_weight_breaks_the_equality_of_the_layouts(tmp_path):
    folder = copied(tmp_path, "dit/")
    change_tensor(folder, "b_dit_raw.safetensors", "blocks.0.mlp.fc1.weight", 0.01)
    results = {result.id: result for result in verify_folder(folder, ["dit/weights", "dit/kf_and_refs"])}
    assert {name for name, result in results.items() if not result.passed} == {
        "dit/weights:b_dit_raw",
        "dit/kf_and_refs",
    }
    wrong = [output.name for output in results["dit/weights:b_dit_raw"].outputs if not output.passed]
    assert wrong == ["blocks.0.mlp.fc1.weight"]
    assert all("b_dit_raw" in output.name for output in results["dit/kf_and_refs"].outputs if not output.passed)


def test_one_changed_output_is_seen(tmp_path):
    folder = copied(tmp_path, "mask/sampler_side", "schedule/map_12_to_3")
    assert not reds(folder)
    change_tensor(folder, "c_mask_pooling.safetensors", "out_injected_video", 1e-3)
    change_tensor(folder, "h_schedule.safetensors", "map_12_to_3/out_sigma", 1e-3)
    assert reds(folder) == {"mask/sampler_side", "schedule/map_12_to_3"}


def test_sizes_that_are_not_the_file_s_are_seen(tmp_path):
    folder = copied(tmp_path, "dit/weights")
    config = next(case["config"] for case in INDEX["cases"] if case["id"] == "dit/weights:b_dit_comfy")
    change_index(folder, "dit/weights:b_dit_comfy", config={**config, "ffn": 256})
    result = verify_folder(folder, "dit/weights:b_dit_comfy")[0]
    assert [output.name for output in result.outputs if not output.passed] == ["config.ffn"]


def test_a_weight_file_alone_is_still_compared(tmp_path):
    folder = copied(tmp_path, "dit/weights:b_dit_diffusers")
    kept = [case for case in INDEX["cases"] if case["id"] == "dit/weights:b_dit_diffusers"]
    write_index(folder, {"cases": kept})
    result = verify_folder(folder)[0]
    assert result.passed and {"config.hidden", "blocks.1.attn.qkv_proj.weight"} <= {o.name for o in result.outputs}


def test_a_missing_file_is_an_error_that_names_it(tmp_path):
    folder = copied(tmp_path, "schedule/step", "layout/t2va")
    (folder / "a_layouts.safetensors").unlink()
    results = {result.id: result for result in verify_folder(folder, ["schedule/step", "layout/t2va"])}
    assert results["schedule/step"].passed
    assert results["layout/t2va"].status == "error" and "a_layouts.safetensors is not in" in results["layout/t2va"].note
    assert any("ERROR" in line and "a_layouts.safetensors" in line for line in format_lines(list(results.values())))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "h_schedule.safetensors is not the file of the index"),
        (lambda data: data[:-4], "h_schedule.safetensors has 9,572 bytes, the index says 9,576"),
    ],
)
def test_a_tampered_file_is_named(tmp_path, damage, words):
    folder = copied(tmp_path, "schedule/step")
    path = folder / "h_schedule.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    result = verify_folder(folder, "schedule/step")[0]
    assert result.status == "error" and words in result.note


def test_a_file_outside_the_folder_is_refused(tmp_path):
    folder = copied(tmp_path / "folder", "schedule/step")
    shutil.copyfile(folder / "h_schedule.safetensors", tmp_path / "h_schedule.safetensors")
    change_index(folder, "schedule/step", file="../h_schedule.safetensors")
    assert verify_folder(folder, "schedule/step")[0].status == "error"


def test_an_unknown_group_is_not_built_and_fails(tmp_path):
    folder = copied(tmp_path, "schedule/step")
    change_index(folder, "schedule/step", group="sparse_attention")
    result = verify_folder(folder, "schedule/step")[0]
    assert result.status == "not built" and not result.passed
    assert to_results([result])[0]["pass"] is False
    lines = format_lines([result])
    assert lines[0].startswith("NOT BUILT") and "0 of 1 cases pass" in lines[-1] and "sparse_attention 1" in lines[-1]


def test_an_output_that_nobody_computes_is_an_error(tmp_path):
    folder = copied(tmp_path, "mask/uniform")
    tensors = load_file(folder / "c_masks.safetensors")
    tensors["uniform/inner_gate"] = torch.zeros(3)
    save_file(tensors, folder / "c_masks.safetensors")
    write_index(folder, json.loads((folder / "index.json").read_text(encoding="utf-8")))
    case = next(case for case in INDEX["cases"] if case["id"] == "mask/uniform")
    change_index(folder, "mask/uniform", outputs=[*case["outputs"], "inner_gate"])
    result = verify_folder(folder, "mask/uniform")[0]
    assert result.status == "error" and "does not compute inner_gate" in result.note


def test_a_tolerance_that_bounds_nothing_is_an_error(tmp_path):
    folder = copied(tmp_path, "schedule/step")
    for tolerance in ({}, {"atoll": 1.0}, "about", None, {"atol": math.inf}, {"rel_l2": "0.1"}):
        change_index(folder, "schedule/step", tolerance={"out_sample": tolerance})
        result = verify_folder(folder, "schedule/step")[0]
        assert result.status == "error" and "tolerance" in result.note, tolerance


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "has no index.json"),
        ("{", "is no index of reference vectors"),
        ("[]", "is no index of reference vectors"),
        ('{"cases": []}', "no case"),
        ('{"cases": [{"id": "a/b", "group": "a"}]}', "a/b: file"),
    ],
)
def test_a_folder_without_a_usable_index_is_refused(tmp_path, text, words):
    if text is not None:
        (tmp_path / "index.json").write_text(text, encoding="utf-8")
    with pytest.raises(H3Error, match=words):
        verify_folder(tmp_path)


def test_only_that_matches_nothing_is_refused():
    with pytest.raises(H3Error, match="the groups are layout, dit"):
        verify_folder(GOLDEN, "no such case")


# --- other sizes ------------------------------------------------------------------------------------------------------


def test_a_folder_of_other_dimensions_runs_without_change(tmp_path):
    """Sizes unlike the golden ones throughout. The stored outputs are the runtime's own: this is about the form."""
    config = DiTConfig(
        hidden=40,
        layers=3,
        refiner_layers=1,
        heads=2,
        head_dim=24,
        ffn=56,
        text_dim=20,
        time_features=8,
        time_hidden=24,
        time_dim=12,
        rope_frequencies=2,
    )
    torch.manual_seed(0)
    weights = {name: tensor.clone() for name, tensor in DiT(config).state_dict().items()}
    weights = {name: t if name.startswith(DiT.float32_islands) else t.bfloat16() for name, t in weights.items()}
    save_file(weights, tmp_path / "n_comfy.safetensors")
    request = {
        "text_len": 7,
        "latent_t": 2,
        "latent_h": 2,
        "latent_w": 8,
        "audio_t": 8,
        "pixel_frames": 5,
        "keyframes": [{"frame_index": 2, "latent_frames": 1, "audio_latent_t": 3}],
        "refs": [{"kind": "video_audio", "t": 2, "h": 4, "w": 2, "at": 5}],
        "weights": "n_*.safetensors",
    }
    rows = {"cond_video_rows": torch.randn(4 + 4, 96), "cond_audio_rows": torch.randn(6 + 10, 32)}
    latents = {"video_x": torch.randn(1, 24, 2, 2, 8), "audio_x": torch.randn(1, 32, 2, 8)}
    text = {"text": torch.randn(1, 7, 20), "text_token_tags": torch.tensor([1, 0, 0, 1, 1, 1, 1])}
    masks = {"denoise_mask": (torch.rand(1, 1, 2, 2, 8) * 8).round() / 8, "audio_denoise_mask": torch.rand(1, 1, 2, 8)}
    clean = {"kf0_latent": torch.randn(1, 24, 1, 2, 8), "kf0_audio_latent": torch.randn(1, 32, 2, 3)}
    clean |= {"ref0_latent": torch.randn(1, 24, 2, 4, 2), "ref0_audio_latent": torch.randn(1, 32, 2, 5)}
    loop = {"noise_seed": 3, "steps": 3, "shift_v": 9.0, "shift_a": 2.0}
    forward = ["out_comfy_video", "out_diffusers_audio_rows"]
    half = ["out_comfy_audio_bf16", "inner_hidden_after_block2"]
    sigma = {"sigma": torch.tensor([0.4])}
    given = {
        "layout/a": ({}, ["position_ids", "segments", "video_update"]),
        "dit/a": ({**rows, **latents, **text, **sigma}, [*forward, *half]),
        "mask/a": (
            {**rows, **latents, **text, **sigma, **masks},
            [*forward, "inner_mod_row_per_token", "inner_t_values"],
        ),
        "loop/a": ({**text, **clean}, ["out_video_latent", "out_rms_per_step"]),
    }
    entries = [
        {
            "id": name,
            "group": name.partition("/")[0],
            "file": name.partition("/")[0] + ".safetensors",
            "config": {**request, **loop},
            "prefix": "a/",
            "inputs": list(inputs),
            "outputs": outputs,
            "tolerance": dict.fromkeys(outputs, "exact"),
        }
        for name, (inputs, outputs) in given.items()
    ]
    sizes = {theirs: getattr(config, ours) for theirs, ours in cases.DIT_SIZES.items()}
    entries.append(
        {"id": "dit/weights:n_comfy", "group": "dit", "file": "n_comfy.safetensors", "config": sizes, "prefix": ""}
        | {"inputs": [], "outputs": [], "tolerance": "exact"}
    )
    write_index(tmp_path, {"cases": entries})
    for case in entries[:-1]:
        inputs = given[case["id"]][0]
        made = {value.name: value.got for value in cases.RUNNERS[case["group"]](Golden(tmp_path), case, inputs)}
        stored = {f"a/{name}": made.get(name, inputs.get(name)) for name in (*case["inputs"], *case["outputs"])}
        save_file({name: tensor.contiguous() for name, tensor in stored.items()}, tmp_path / case["file"])
    write_index(tmp_path, {"cases": entries})
    assert not reds(tmp_path)
    change_tensor(tmp_path, "n_comfy.safetensors", "blocks.2.attn.out_proj.weight", 0.5)
    assert reds(tmp_path) == {"dit/a", "mask/a", "loop/a"}


# --- comparing and telling --------------------------------------------------------------------------------------------


def test_tolerances_mean_what_the_index_says():
    want = torch.tensor([0.0, 1.0, -100.0])
    assert compare("x", want.clone(), want, "exact").passed
    assert not compare("x", want + torch.tensor([0, 0, 1e-5]), want, "exact").passed
    bound = {"atol": 1e-3, "rtol": 1e-2}
    assert compare("x", want + torch.tensor([9e-4, -1.0e-2, 1.0]), want, bound).passed
    assert not compare("x", want + torch.tensor([2e-3, 0, 0]), want, bound).passed
    assert not compare("x", want + torch.tensor([0, 0, 1.1]), want, bound).passed
    assert compare("x", want * 1.01, want, {"rel_l2": 0.0101}).passed
    assert not compare("x", want * 1.02, want, {"rel_l2": 0.0101}).passed
    assert not compare("x", want * 1.02, want, {"atol": 10.0, "rel_l2": 0.01}).passed
    zeros = torch.zeros(4)
    assert compare("x", zeros + 1e-6, zeros, {"atol": 1e-5}).passed
    assert not compare("x", zeros + 1e-6, zeros, {"rel_l2": 1e-5}).passed
    assert compare("x", torch.tensor([True]), torch.tensor([True]), "exact").passed
    assert not compare("x", torch.tensor([3]), torch.tensor([4]), "exact").passed


def test_what_cannot_be_measured_fails():
    want = torch.ones(2, 2)
    broken = [torch.ones(4), torch.ones(2, 2, 1), want * math.nan, torch.tensor([[1, 1], [1, math.inf]])]
    for got in broken:
        result = compare("x", got, want, {"atol": 1e9, "rel_l2": 1e9})
        assert not result.passed and math.isnan(result.max_abs) and result.note
    assert not compare("x", want, want * math.nan, {"atol": 1.0}).passed


def test_results_have_the_common_form():
    results = [
        CaseResult("a/1", "a", "pass", (OutputResult("x", True, 1e-7, 2e-8), OutputResult("y", True, 3e-7, 1e-8))),
        CaseResult("a/2", "a", "fail", tuple(OutputResult(f"o{i}", False, 1.0, math.inf) for i in range(9))),
        CaseResult("b/1", "b", "fail", (OutputResult("x", False, math.nan, math.nan, "shape [1], wanted [2]"),)),
        CaseResult("b/2", "b", "error", note="b.safetensors is not in the folder"),
    ]
    told = json.loads(json.dumps(to_results(results), allow_nan=False))
    assert [entry["pass"] for entry in told] == [True, False, False, False]
    assert told[0]["id"] == "a/1" and told[0]["name"] == "verify/a/1" and told[0]["unit"]
    assert told[0]["value"] == told[0]["max_abs"] == 3e-7 and told[0]["rel_l2"] == 2e-8
    assert told[1]["max_abs"] == 1.0 and told[1]["rel_l2"] is None and told[2]["max_abs"] is None
    lines = format_lines(results)
    assert lines[0].split()[:2] == ["pass", "a/1"] and "3.0e-07" in lines[0] and "2.0e-08" in lines[0]
    assert any("and 3 more" in line for line in lines) and any("shape [1], wanted [2]" in line for line in lines)
    assert lines[-1] == "1 of 4 cases pass; 2 fail; 1 could not be run"
