"""LoRA files: one delta in every layout gives the same weights; alpha, presets, and what does not fit is named."""

from __future__ import annotations

import json

import pytest
import torch

from h3_runtime.demo.carried import FEW_STEP_LORA
from h3_runtime.errors import CheckpointError, H3Error
from h3_runtime.lora import PRESETS, Lora, open_lora, plan, preset_for
from h3_runtime.models.dit import DiT, DiTConfig
from tests.lora_fixtures import (
    ADALN,
    BLOCKS,
    CONFIG,
    EXPRESSIONS,
    FIRST,
    INNER,
    expected,
    furthest,
    interleaved,
    make_delta,
    make_dit,
    merged,
    native,
    one_pair,
    peft,
    ranks,
    write,
)


@pytest.fixture(scope="module")
def dit():
    return make_dit()


@pytest.fixture(scope="module")
def delta(dit):
    return make_delta(dit)


# ---- the layouts


@pytest.mark.parametrize("key", EXPRESSIONS)
def test_one_delta_in_every_layout(tmp_path, dit, delta, key):
    layout, name, make, metadata = EXPRESSIONS[key]
    path = write(tmp_path / name, make(delta), metadata)
    file = open_lora(path)
    assert file.layout == layout
    assert not file.names.unknown
    made = plan(dit, [Lora(path)])
    assert set(made.modules) == set(delta) and not made.partial
    weights = merged(dit, Lora(path))
    assert furthest(weights, expected(dit, delta)) < 1e-6
    untouched = set(weights) - set(delta)
    assert untouched and all(torch.equal(weights[n], dit.get_submodule(n).weight) for n in untouched)


@pytest.mark.parametrize("form", ["{m}.lora_{ab}.weight", "diffusion_model.{m}.lora_{du}.weight"])
def test_pruned_conversions(tmp_path, dit, delta, form):
    """g: no AdaLN pairs, and tensors that replace the curve; the latter are counted, not applied."""
    kept = {name: pairs for name, pairs in delta.items() if name not in ADALN}
    tensors = native(kept, form) | {
        "diffusion_model.adaln_t_table.set_weight": torch.ones(5, 4),
        "blocks.0.adaln_proj.linear.weight": torch.ones(4, 4),
        "blocks.0.adaln_proj.linear.set_bias": torch.ones(4),
        "diffusion_model.final_layer.adaln_proj.linear.bias.set_weight": torch.ones(4),
    }
    path = write(tmp_path / "g.safetensors", tensors)
    made = plan(dit, [Lora(path)])
    assert len(made.applied) == len(kept) and len(made.skipped) == 4 and made.partial
    assert all("AdaLN curve" in row.reason for row in made.skipped)
    assert furthest(merged(dit, Lora(path)), expected(dit, kept)) < 1e-6


def test_a_wrong_order_is_seen_by_the_delta(tmp_path, dit, delta):
    """The two orders of rows have the same names and shapes; the delta tells them apart, and an override turns it."""
    path = write(tmp_path / "s.safetensors", native(delta, "{m}.lora_{ab}.default.weight", interleaved))
    assert any("interleaved" in note for note in open_lora(path).notes)
    stacked = open_lora(path, layout="native")
    assert "as asked" in stacked.notes[0] and not stacked.interleaved
    weights = merged(dit, Lora(path, layout="native"))
    wrong = (weights["blocks.0.attn.qkv_proj"] - expected(dit, delta)["blocks.0.attn.qkv_proj"]).abs().max()
    assert wrong > 0.1
    bare = write(tmp_path / "n.safetensors", native(delta, "{m}.lora_{ab}.weight", interleaved))
    assert furthest(merged(dit, Lora(bare, layout="diffsynth")), expected(dit, delta)) < 1e-6


def test_default_infix_in_half_precision_is_doubted(tmp_path, delta):
    tensors = native(delta, "{m}.lora_{ab}.default.weight", interleaved)
    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    assert "DiffSynth writes F32 and these are BF16" in open_lora(write(tmp_path / "s.safetensors", halves)).notes[0]


def test_the_reference_reads_the_same_delta(tmp_path):
    """The reference's converter, on heads of 128 (the only ones it knows), against our reading of the same file."""
    module = pytest.importorskip("diffusers.loaders.lora_conversion_utils")
    convert = module._convert_non_diffusers_minimax_h3_lora_to_diffusers
    config = DiTConfig(**{**CONFIG.to_dict(), "head_dim": 128, "layers": 1})
    torch.manual_seed(3)
    dit = DiT(config).requires_grad_(False)
    for infix in ("", ".default"):
        tensors = {}
        for name in ("blocks.0.attn.qkv_proj", "blocks.0.mlp.fc1", "token_refiner.blocks.0.attn.qkv_proj"):
            outputs, inputs = dit.get_submodule(name).weight.shape
            tensors[f"{name}.lora_A{infix}.weight"] = torch.randn(5, inputs) / 8
            tensors[f"{name}.lora_B{infix}.weight"] = torch.randn(outputs, 5) / 8
        ours = write(tmp_path / f"ours{infix}.safetensors", tensors)
        theirs = write(tmp_path / f"theirs{infix}.safetensors", convert(dict(tensors)))
        assert open_lora(theirs).layout == "diffusers"
        assert furthest(merged(dit, Lora(ours)), merged(dit, Lora(theirs))) < 1e-6


def test_block_diagonal_pairs_take_a_third(tmp_path, dit, delta):
    path = write(tmp_path / "a.safetensors", native(delta, "{m}.lora_{ab}.weight"))
    file = open_lora(path)
    pair = next(p for p in file.pairs if p.is_fused_qkv)
    thirds = file.read(pair, CONFIG.head_dim)
    assert [low.start for low in thirds] == [0, INNER, 2 * INNER]
    assert all(low.a.shape[0] * 3 == pair.rank and low.scale == pair.scale == 1 for low in thirds)
    name = "blocks.0.attn.qkv_proj"
    for row, column in ((0, 2), (2, 0)):  # one number outside the diagonal blocks, above and below
        b = torch.block_diag(*(torch.randn(INNER, 2) for _ in range(3)))
        b[row * INNER, column * 2] = 1.0
        tensors = {f"{name}.lora_A.weight": torch.randn(6, 64), f"{name}.lora_B.weight": b}
        file = open_lora(write(tmp_path / "f.safetensors", tensors))
        (low,) = file.read(file.pairs[0], CONFIG.head_dim)
        assert torch.equal(low.b, b)


def test_only_q_and_v(tmp_path, dit, delta):
    """PEFT's usual choice: k is left as it is."""
    tensors = peft({"blocks.1.attn.qkv_proj": delta["blocks.1.attn.qkv_proj"]}, "{m}.lora_{ab}.weight")
    path = write(tmp_path / "qv.safetensors", {n: t for n, t in tensors.items() if "to_k" not in n})
    weight, base = merged(dit, Lora(path))["blocks.1.attn.qkv_proj"], dit.blocks[1].attn.qkv_proj.weight
    assert torch.equal(weight[INNER : 2 * INNER], base[INNER : 2 * INNER])
    (q, _, v) = delta["blocks.1.attn.qkv_proj"]
    assert torch.allclose(weight[:INNER], base[:INNER] + q[1] @ q[0], atol=1e-6)
    assert torch.allclose(weight[2 * INNER :], base[2 * INNER :] + v[1] @ v[0], atol=1e-6)


def test_float8_factors(tmp_path, dit, delta):
    pairs = {name: delta[name] for name in ("blocks.0.mlp.fc1", "blocks.0.attn.qkv_proj")}
    coarse = {n: [(a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)) for a, b in p] for n, p in pairs.items()}
    exact = {n: [(a.float(), b.float()) for a, b in p] for n, p in coarse.items()}
    tensors = {k: t.to(torch.float8_e4m3fn) for k, t in native(exact, "{m}.lora_{ab}.weight").items()}
    path = write(tmp_path / "e.safetensors", tensors)
    assert furthest(merged(dit, Lora(path)), expected(dit, exact)) < 1e-6


# ---- alpha

ALPHA_RULES = [
    ("some.safetensors", {}, None, None, 1.0, "alpha = rank, assumed", True),
    ("some.safetensors", {}, 16.0, None, 16 / 128, "alpha tensors in the file", False),
    ("some.safetensors", {"alpha": "None"}, 16.0, None, 16 / 128, "alpha tensors in the file", False),
    ("some.safetensors", {"alpha": "8"}, 16.0, None, 16 / 128, "alpha tensors in the file", False),
    ("some.safetensors", {"alpha": "8"}, None, None, 8 / 128, "metadata alpha", False),
    ("some.safetensors", {"lora_alpha": "64"}, None, None, 64 / 128, "metadata lora_alpha", False),
    ("some.safetensors", {"alpha": "8"}, 16.0, 32.0, 32 / 128, "asked for", False),
    ("minimax_h3_fl2v_turbo_4step_v0.1.safetensors", {}, None, None, 8 / 128, "known file fl2v_4step_v0.1", False),
    ("minimax_h3_ref2v_turbo_4step_v0.1.safetensors", {}, None, None, 8 / 128, "known file ref2v_4step_v0.1", False),
    ("minimax_h3_fl2v_turbo_4step_v0.1_resized_20.safetensors", {}, None, None, 1.0, "alpha = rank, assumed", True),
    (
        "minimax_h3_fl2v_turbo_4step_v1.0_768p_bf16.safetensors",
        {"alpha": "8"},
        None,
        None,
        8 / 128,
        "metadata alpha",
        True,
    ),
    ("minimax_h3_fl2v_turbo_4step_v1.2_768p.safetensors", {}, None, None, 1.0, "alpha = rank, assumed", True),
    ("minimax_h3_turbo_v4_step600_ema.safetensors", {}, None, None, 1.0, "alpha = rank, known file larryvrh_v4", False),
]


@pytest.mark.parametrize(("name", "metadata", "tensor", "asked", "scale", "rule", "noted"), ALPHA_RULES)
def test_alpha_rules(tmp_path, name, metadata, tensor, asked, scale, rule, noted):
    tensors = one_pair()
    if tensor is not None:
        tensors[f"{FIRST}.alpha"] = torch.tensor(tensor)
    file = open_lora(write(tmp_path / name, tensors, metadata or None), alpha=asked)
    assert file.pairs[0].scale == scale
    assert file.alpha_from == rule
    assert any("alpha" in note for note in file.notes) == noted


def test_missing_alpha_says_what_it_would_cost(tmp_path):
    (note,) = open_lora(write(tmp_path / "x.safetensors", one_pair())).notes
    assert "alpha = rank" in note and "16 times too strong" in note and "give alpha" in note


def test_alpha_beside_a_peft_file(tmp_path):
    write(tmp_path / "adapter_model.safetensors", one_pair())
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps({"lora_alpha": 32, "r": 128}))
    assert open_lora(tmp_path).pairs[0].scale == 32 / 128
    config.write_text(json.dumps({"lora_alpha": 32, "use_rslora": True}))
    with pytest.raises(CheckpointError, match="use_rslora"):
        open_lora(tmp_path)
    inside = {"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 16, "transformer.r": 128})}
    assert open_lora(write(tmp_path / "x.safetensors", one_pair(), inside)).pairs[0].scale == 16 / 128
    with pytest.raises(CheckpointError, match="lora_adapter_metadata is damaged"):
        open_lora(write(tmp_path / "y.safetensors", one_pair(), {"lora_adapter_metadata": "{"}))


@pytest.mark.parametrize(("rank", "scale"), [(6, 0.5), (2, 0.5), (5, 0.2)])
def test_file_wide_alpha_and_stacked_ranks(tmp_path, rank, scale):
    """A file-wide alpha belongs to the rank that was trained: q, k and v stacked to 3 r keep the scale of one."""
    tensors = one_pair(2) | {
        "blocks.0.attn.qkv_proj.lora_A.weight": torch.randn(rank, 64),
        "blocks.0.attn.qkv_proj.lora_B.weight": torch.randn(3 * INNER, rank),
    }
    file = open_lora(write(tmp_path / "x.safetensors", tensors, {"alpha": "1"}))
    assert next(p for p in file.pairs if p.is_fused_qkv).scale == scale


@pytest.mark.parametrize("bad", ["0", "-8", "nan", "eight"])
def test_impossible_alpha(tmp_path, bad):
    path = write(tmp_path / "x.safetensors", one_pair(), {"alpha": bad})
    with pytest.raises(CheckpointError, match=r"metadata alpha is .*not a number above 0"):
        open_lora(path)
    assert open_lora(path, alpha=8).pairs[0].scale == 8 / 128
    with pytest.raises(H3Error, match="LoRA alpha is"):
        open_lora(path, alpha=-1)


# ---- presets

NAMED = {
    "minimax_h3_fl2v_turbo_4step_v0.1": ("t2va fl2va", 4, 12, 3, 8.0),
    "minimax_h3_fl2v_turbo_8step_v1.0_bf16": ("t2va fl2va", 8, 12, 3, 8.0),
    "minimax_h3_fl2v_turbo_4step_v1.0_768p_comfyui_bf16": ("t2va fl2va", 4, 6, 3, 128.0),
    "minimax_h3_fl2v_turbo_4step_v1.1_768p_bf16": ("t2va fl2va", 4, 6, 3, "file"),
    "minimax_h3_fl2v_turbo_4step_v1.2_768p_comfyui_resized_avg_rank_20_bf16": ("t2va fl2va", 4, 6, 3, "file"),
    "minimax_h3_fl2v_turbo_8step_v1.0_768p_bf16": ("t2va fl2va", 8, 6, 3, "file"),
    "minimax_h3_ref2v_turbo_4step_v0.1_comfyui_bf16": ("ref2va", 4, 12, 3, 8.0),
    "minimax_h3_ref2v_turbo_8step_v1.0_768p_bf16": ("ref2va", 8, 6, 3, "file"),
    "minimax_h3_fl2v_lightx2v_turbo_4step_v0.1_comfy": ("t2va fl2va", 4, 12, 3, 8.0),
    "fl2v_8step_v1.0": ("t2va fl2va", 8, 12, 3, 8.0),
    "minimax_h3_turbo_4step_ema": ("t2va fl2va", 4, 12, 3, "rank"),
    "minimax_h3_turbo_4step_ema_ckpt850_pruned_comfyui": ("t2va fl2va", 4, 12, 3, "rank"),
    "minimax_h3_turbo_v4_step600_ema": ("t2va fl2va", 6, 12, 3, "rank"),
    "taomate_h3_3step_comfy": ("t2va fl2va", 3, None, None, "rank"),
}


@pytest.mark.parametrize("name", NAMED)
def test_presets_by_name(name):
    tasks, forwards, video, audio, alpha = NAMED[name]
    preset = preset_for(f"/somewhere/{name}.safetensors")
    assert preset in PRESETS
    assert (" ".join(preset.tasks), preset.forwards, preset.video_shift, preset.audio_shift) == (
        tasks,
        forwards,
        video,
        audio,
    )
    assert preset.alpha == alpha
    assert json.dumps(preset.to_dict())


def test_presets_beyond_the_table():
    assert preset_for("my_style_lora.safetensors") is None
    renamed = preset_for("x.safetensors", {"modelspec.title": "minimax_h3_ref2v_turbo_4step_v0.1"})
    assert renamed.name == "ref2v_4step_v0.1"
    new = preset_for("minimax_h3_ref2v_turbo_6step_v2.0_768p_bf16.safetensors")
    assert (new.forwards, new.video_shift, new.alpha, new.partition) == (6, 6.0, "file", "ref2va")
    assert "not a known file" in new.note and new not in PRESETS
    carried = open_lora(FEW_STEP_LORA).preset
    assert (carried.name, carried.forwards) == ("carried_4step", 4), "of the small model that the package carries"
    assert "disagree on its picture shift" in preset_for("minimax_h3_ref2v_turbo_8step_v1.0_768p.safetensors").note


def test_warnings(tmp_path, dit):
    path = write(tmp_path / "minimax_h3_fl2v_turbo_4step_v1.0_768p.safetensors", one_pair())
    file = open_lora(path)
    assert file.partition == "fl2va"
    assert file.warnings("fl2va", 4, 6.0, 3.0) == [] == file.warnings()
    wrong = file.warnings("ref2va", 49, 12.0, 5.0)
    assert len(wrong) == 4
    assert "made for fl2va weights and the base is ref2va" in wrong[0]
    assert "49 forwards" in wrong[1] and "trained for 4" in wrong[1]
    assert "picture shift 12" in wrong[2] and "sound shift 5" in wrong[3]
    assert file.warnings(forwards=5)  # grid points instead of model calls
    other = write(tmp_path / "minimax_h3_turbo_v4_step600_ema.safetensors", one_pair())
    stacked = plan(dit, [Lora(path), Lora(other)]).warnings("fl2va", 4, 12.0, 3.0)
    assert any("stacked" in line for line in stacked)
    assert not plan(dit, [Lora(path, 0.0), Lora(other)]).warnings("fl2va", 4, 12.0, 3.0)


def test_partition_from_the_names(tmp_path):
    tensors = {
        f"transformer_ref.transformer_blocks.0.ff.net.2.lora_{x}.weight": t for x, t in zip("AB", one_pair().values())
    }
    assert open_lora(write(tmp_path / "x.safetensors", tensors)).partition == "ref2va"


# ---- what does not fit


def test_wrong_shapes_and_unknown_names_are_named(tmp_path, dit):
    tensors = one_pair(2) | {
        "blocks.0.attn.out_proj.lora_A.weight": torch.ones(2, 65),
        "blocks.0.attn.out_proj.lora_B.weight": torch.ones(64, 2),
        "blocks.0.attn.qkv_proj.lora_A.weight": torch.ones(2, 64),
        "blocks.0.attn.qkv_proj.lora_B.weight": torch.ones(64, 2),
        "blocks.0.mlp.fc1.lora_A.weight": torch.ones(3, 64),
        "blocks.0.mlp.fc1.lora_B.weight": torch.ones(96, 2),
        "blocks.1.mlp.fc1.lora_A.weight": torch.ones(3, 64),
        "blocks.1.mlp.fc2.lora_A.weight": torch.ones(2, 48, dtype=torch.int8),
        "blocks.1.mlp.fc2.lora_B.weight": torch.ones(64, 2, dtype=torch.int8),
        "blocks.7.mlp.fc2.lora_A.weight": torch.ones(2, 48),
        "blocks.7.mlp.fc2.lora_B.weight": torch.ones(64, 2),
        "double_blocks.0.img_attn.lora_A.weight": torch.ones(2, 8),
        "blocks.0.norm1.alpha": torch.tensor(1.0),
        "blocks.0.norm1.diff": torch.ones(64),
    }
    made = plan(dit, [Lora(write(tmp_path / "x.safetensors", tensors))])
    assert [p.pair.slot.module for p in made.applied] == [FIRST]
    wrong = {row.name: row.reason for row in made.mismatched}
    assert "reads 65 inputs and the module has 96" in wrong["blocks.0.attn.out_proj"]
    assert f"writes 64 outputs and the module has {3 * INNER}" in wrong["blocks.0.attn.qkv_proj"]
    assert "A [3, 64] and B [96, 2] do not multiply" in wrong["blocks.0.mlp.fc1"]
    assert "B (lora_B, lora_up) is not in the file" in wrong["blocks.1.mlp.fc1"]
    assert "stored as I8" in wrong["blocks.1.mlp.fc2"]
    skipped = {row.name: row.reason for row in made.skipped}
    assert skipped["blocks.7.mlp.fc2"] == "this base has no such module"
    for name in ("double_blocks.0.img_attn.lora_A.weight", "blocks.0.norm1.alpha", "blocks.0.norm1.diff"):
        assert skipped[name] == "its meaning is unknown"
    assert made.partial
    line = made.summary(0)
    assert "1 of 10 applied" in line and "4 skipped" in line and "5 mismatched" in line
    described = made.describe()
    assert json.dumps(described)
    assert (described["applied"], len(described["skipped"]), len(described["mismatched"])) == (1, 4, 5)


def test_describe_rows(tmp_path, dit, delta):
    path = write(tmp_path / "minimax_h3_fl2v_turbo_8step_v1.0.safetensors", EXPRESSIONS["c"][2](delta))
    row = open_lora(path).describe()
    assert json.dumps(row)
    assert row["layout"] == "diffusers" and row["pairs"] == len(delta) + 2 * len(BLOCKS)
    assert row["modules"] == len(delta) and row["adaln_pairs"] == 3
    assert set(row["ranks"]) == set(ranks().values())
    assert row["preset"]["name"] == "fl2v_8step_v1.0" and row["partition"] == "fl2va"
    assert row["bytes"] == sum(t.nbytes for t in EXPRESSIONS["c"][2](delta).values())


def test_zero_applied_is_an_error(tmp_path, dit, delta):
    good = write(tmp_path / "a.safetensors", EXPRESSIONS["a"][2](delta))
    path = write(tmp_path / "x.safetensors", one_pair(2, "blocks.40.mlp.fc2"))
    with pytest.raises(H3Error, match=r"x\.safetensors: none of 1 entries.*blocks.40.mlp.fc2: this base has no such"):
        plan(dit, [Lora(good), Lora(path)])
    with pytest.raises(CheckpointError, match="holds no LoRA pair"):
        open_lora(write(tmp_path / "dit.safetensors", dit.state_dict()))
    for tensors in ({"lora_te1_text.lora_down.weight": torch.ones(2, 2)}, {"weight": torch.ones(2)}):
        with pytest.raises(CheckpointError, match="holds no LoRA pair of a MiniMax-H3 DiT"):
            open_lora(write(tmp_path / "other.safetensors", tensors))


SPECIAL = {
    "PDD": {"proj_out.weight": torch.ones(32, 96, 8), "audio_proj_out.bias": torch.ones(32, 32)},
    "PDD ": {"diffusion_model.final_layer.video_out.set_weight": torch.ones(32, 8)},
    "HyperFlow": {"transformer.endpoint_time_embedder.linear_1.lora_A.weight": torch.ones(2, 2)},
    "HyperFlow ": {"hyperflow_endpoint.linear_1.lora_A.weight": torch.ones(2, 2)},
    "DoRA": {f"{FIRST}.dora_scale": torch.ones(64, 1)},
    "LoKr": {"lora_unet_blocks_0_mlp_fc2.lokr_w1": torch.ones(2, 2)},
    "LoHa": {"lora_unet_blocks_0_mlp_fc2.hada_w1_a": torch.ones(2, 2)},
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_special_adapters_are_refused_by_name(tmp_path, kind):
    path = write(tmp_path / "x.safetensors", one_pair() | SPECIAL[kind])
    with pytest.raises(CheckpointError, match=f"{kind.strip()}.*cannot be applied"):
        open_lora(path)


def test_hyperflow_without_its_second_time_is_refused(tmp_path):
    """Conversions leave the two-time part out; metadata or the name still tell."""
    for name, metadata in (
        ("minimax_h3_hyperflow_8step.safetensors", None),
        ("x.safetensors", {"hyperflow_gate": "1"}),
    ):
        with pytest.raises(CheckpointError, match="HyperFlow"):
            open_lora(write(tmp_path / name, one_pair(), metadata))


def test_a_pair_there_twice_and_two_adapters(tmp_path):
    a, b = one_pair().values()
    twice = one_pair() | {
        "lora_unet_blocks_0_mlp_fc2.lora_down.weight": a,
        "lora_unet_blocks_0_mlp_fc2.lora_up.weight": b,
    }
    with pytest.raises(CheckpointError, match=r"the pair of blocks.0.mlp.fc2 twice"):
        open_lora(write(tmp_path / "x.safetensors", twice))
    two = {f"{FIRST}.lora_{x}.{n}.weight": t for n in ("first", "second") for x, t in (("A", a), ("B", b))}
    with pytest.raises(CheckpointError, match=r"2 adapters \(first, second\)"):
        open_lora(write(tmp_path / "y.safetensors", two))


def test_options_that_cannot_be(tmp_path, delta):
    path = write(tmp_path / "c.safetensors", EXPRESSIONS["c"][2](delta))
    with pytest.raises(H3Error, match="LoRA layout is 'peft'; choose one of native"):
        open_lora(path, layout="peft")
    with pytest.raises(H3Error, match="names decide between"):
        open_lora(path, layout="native")


def test_files_that_are_none(tmp_path):
    whole = write(tmp_path / "a.safetensors", one_pair()).read_bytes()
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=r"cut.safetensors is truncated.*100 missing"):
        open_lora(cut)
    pickle = tmp_path / "lora.pt"
    torch.save(one_pair(), pickle)
    with pytest.raises(CheckpointError, match="is a pickle"):
        open_lora(pickle)
    with pytest.raises(CheckpointError, match="does not exist"):
        open_lora(tmp_path / "absent.safetensors")
