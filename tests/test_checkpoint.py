"""Every layout of weights gives the same modules, and whatever does not fit is named before anything is read."""

import json
import shutil

import pytest
import torch

from h3_runtime.checkpoint import formats, opening, reader
from h3_runtime.checkpoint.load import canonical_tensors, load_audio_vae, load_dit, load_video_vae
from h3_runtime.checkpoint.parts import DiTPath, find_parts
from h3_runtime.checkpoint.reader import SafetensorsFile, fingerprint, open_source
from h3_runtime.errors import CheckpointError, H3Error
from tests.checkpoint_fixtures import (
    AUDIO_CONFIG,
    GOLDEN,
    assert_refused,
    assert_same,
    diffusers_repository,
    dit_bytes,
    golden,
    official_repository,
    text_encoder_like,
    write_file,
    write_sharded,
)

DIT_PROBE = "blocks.1.attn.qkv_proj.weight"


# ---------------------------------------------------------------- layouts


@pytest.fixture(scope="module")
def repositories(tmp_path_factory):
    root = tmp_path_factory.mktemp("repositories")
    return official_repository(root / "official"), diffusers_repository(root / "diffusers")


def test_dit_is_bit_equal_from_every_layout(tmp_path, repositories):
    official, diffusers = repositories
    want = golden("b_dit_comfy")
    places = {
        "comfyui": [write_file(tmp_path / "plain.safetensors", want)],
        "official": [official / "FL2VA" / "transformer"],
        "diffusers": [
            diffusers / "transformer",
            write_file(tmp_path / "one" / "diffusion_pytorch_model.safetensors", golden("b_dit_diffusers")).parent,
        ],
    }
    for prefix in formats.DIT_PREFIXES:
        prefixed = {prefix + name: tensor for name, tensor in want.items()}
        places["comfyui"].append(write_file(tmp_path / f"{prefix}safetensors", prefixed))
    # an index, or any one shard, stands for its folder
    transformer = official / "FL2VA" / "transformer"
    places["official"] += [
        transformer / "model.safetensors.index.json",
        transformer / "model-00002-of-00003.safetensors",
    ]
    for layout, paths in places.items():
        for path in paths:
            assert_same(canonical_tensors(path), want, but=("rope.inv_freq",) if layout == "diffusers" else ())
            module, info = load_dit(path)
            assert_same(module.state_dict(), want)
            assert (info.format, info.part, info.approximate) == (layout, "dit", None)
            assert info.nbytes == sum(t.nbytes for n, t in want.items() if layout != "diffusers" or "rope" not in n)
            assert info.dtypes["F32"] + info.dtypes["BF16"] == len(canonical_sources(path))


def canonical_sources(path):
    return [name for recipe in opening.open_checkpoint(path).recipes.values() for name in recipe.sources]


def test_layout_override_decides_where_names_cannot(tmp_path, repositories):
    want = golden("b_dit_comfy")
    # the interleaved tensors in one file look like ComfyUI's; the caller knows better
    single = write_file(tmp_path / "merged.safetensors", golden("b_dit_raw"))
    assert load_dit(single)[1].format == "comfyui"
    assert not torch.equal(canonical_tensors(single)[DIT_PROBE], want[DIT_PROBE])
    assert_same(canonical_tensors(single, layout="official"), want)
    # and the other way round: stacked tensors in shards
    sharded = write_sharded(tmp_path / "stacked", want, "model")
    assert load_dit(sharded)[1].format == "official"
    assert_same(load_dit(sharded, layout="comfyui")[0].state_dict(), want)
    with pytest.raises(
        CheckpointError, match="DiT in the ComfyUI layout; a DiT in the diffusers layout that was asked"
    ):
        load_dit(single, layout="diffusers")
    with pytest.raises(CheckpointError, match="layout is 'kijai'; choose one of official, diffusers, comfyui"):
        load_dit(single, layout="kijai")


def test_every_format_answers_to_its_part_and_layout():
    for part in formats.PARTS:
        for layout in formats.LAYOUTS:
            answering = [f for f in formats.FORMATS if f.part == part and f.answers_to(layout)]
            assert len(answering) == 1, (part, layout)


def test_video_vae_is_bit_equal_from_every_layout(tmp_path, repositories):
    official, diffusers = repositories
    want = {name: tensor.float() for name, tensor in golden("f_vae_comfy").items()}
    config = {"heads": 2, "head_dim": 16}
    single = write_file(
        tmp_path / "v.safetensors", golden("f_vae_comfy"), metadata={"h3_runtime.config": json.dumps(config)}
    )
    vae = diffusers / "vae"
    for layout, path in (("comfyui", single), ("official", official / "FL2VA/video_vae/source"), ("diffusers", vae)):
        module, info = load_video_vae(path)
        # the reference leaves out the token that only training used
        assert_same(module.state_dict(), want, but=("decoder.mask_token",) if layout == "diffusers" else ())
        assert (info.format, info.part, module.config.heads) == (layout, "video_vae", 2)
        assert "F16" in info.approximate and info.dtypes["F16"] >= 100
    exact = write_file(tmp_path / "f32.safetensors", want, metadata={"h3_runtime.config": json.dumps(config)})
    assert load_video_vae(exact)[1].approximate is None
    assert_same(load_video_vae(exact)[0].state_dict(), want)


def test_audio_vae_from_every_layout(tmp_path, repositories):
    official, diffusers = repositories
    want = golden("g_audio_vae_comfy")
    folded = {name[:-2] for name in golden("g_audio_vae_diffusers") if name.endswith(".weight_v")}
    tolerance = next(f.tolerance for f in formats.FORMATS if (f.part, f.name) == ("audio_vae", "diffusers"))
    for path in (official / "Ref2VA" / "audio_vae", diffusers / "audio_vae"):
        module, info = load_audio_vae(path)
        assert (info.format, module.config.heads) == ("diffusers", 2)
        got = module.state_dict()
        assert set(got) == set(want)
        for name, tensor in want.items():
            error = (got[name] - tensor.float()).norm() / tensor.float().norm().clamp_min(1e-30)
            assert error <= (tolerance if name in folded else 0), (name, error)
    single = write_file(tmp_path / "a.safetensors", want)
    module, info = load_audio_vae(single, config=AUDIO_CONFIG)
    assert info.format == "comfyui"
    assert_same(module.state_dict(), {name: tensor.float() for name, tensor in want.items()})


def test_weight_norm_is_folded_as_torch_does():
    conv = torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv1d(5, 7, 3))
    length, direction = (p.detach() for p in conv.parametrizations.weight.parameters())
    length *= 1.7
    folded = formats.fold_weight_norm([direction, length], formats.Header({}))
    assert torch.equal(folded, conv.weight.detach())


def test_config_sits_beside_and_is_checked(tmp_path, repositories):
    _, diffusers = repositories
    folder = tmp_path / "vae"
    shutil.copytree(diffusers / "vae", folder)
    config = folder / "config.json"
    settings = json.loads(config.read_text())

    def fails(changes, message):
        config.write_text(json.dumps({**settings, **changes}))
        with pytest.raises(CheckpointError, match=message) as error:
            load_video_vae(folder)
        assert str(folder) in str(error.value)

    fails({"clip_length": 25}, "clip_length is 25; only 17 can be run")
    fails({"decoder_num_attention_heads": "two"}, "decoder_num_attention_heads is 'two'")
    fails({"decoder_attention_head_dim": 0}, "decoder_attention_head_dim is 0")
    fails({"decoder_attention_head_dim": 12}, "32 rows is not made of heads of 12")
    fails({"decoder_attention_head_dim": [16]}, "nothing can be made of decoder.transformer_blocks")
    fails({"latents_std": [0.0] * 24}, "latents_std must be above zero")
    fails({"latents_mean": settings["latents_mean"][:-1]}, r"misshapen .*latents_mean \[23\], needed \[24\]")
    fails({"latents_mean": None}, "latents_mean is neither in the file nor in a config.json")
    # another model's config.json is not ours to follow
    fails({"_class_name": "AutoencoderKLMiniMaxH3Audio"}, "latents_mean is neither in the file nor in a config.json")
    config.write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read as JSON"):
        load_video_vae(folder)
    config.unlink()
    with pytest.raises(CheckpointError, match=r"decoder_attention_head_dim is needed beside the weights.*latents_mean"):
        load_video_vae(folder)
    # a text encoder's config.json in a flat folder says nothing about a loose audio VAE
    loose = write_file(tmp_path / "flat" / "a.safetensors", golden("g_audio_vae_comfy"), {"num_attention_heads": 64})
    assert opening.config_of(open_source(loose), "audio_vae") == {}


# ---------------------------------------------------------------- number types, partition, what info says


def test_dit_number_types(tmp_path):
    want = golden("b_dit_comfy")
    path = write_file(tmp_path / "dit.safetensors", want)
    module, _ = load_dit(path, dtype=torch.float32)
    assert_same(module.state_dict(), {name: tensor.float() for name, tensor in want.items()})

    halved = write_file(tmp_path / "all_bf16.safetensors", {n: t.bfloat16() for n, t in want.items()})
    module, info = load_dit(halved)
    assert module.video_patch_proj.weight.dtype == torch.float32
    assert module.blocks[0].mlp.fc1.weight.dtype == torch.bfloat16
    assert "released in F32 in half precision" in info.approximate
    assert any("audio_patch_proj.weight" in note for note in info.notes)
    assert torch.equal(module.rope.inv_freq, want["rope.inv_freq"])  # computed, not the rounded copy

    fp16 = write_file(
        tmp_path / "fp16.safetensors", {n: t.half() if t.dtype != torch.float32 else t for n, t in want.items()}
    )
    module, info = load_dit(fp16)
    assert module.dtype == torch.float16 and "F16" in info.approximate

    fp32 = write_file(tmp_path / "fp32.safetensors", {n: t.float() for n, t in want.items()})
    module, info = load_dit(fp32)
    assert module.dtype == torch.float32 and info.approximate is None
    assert "rounded to bfloat16" in load_dit(fp32, dtype=torch.bfloat16)[1].approximate

    mixed = write_file(
        tmp_path / "mixed.safetensors", want | {"blocks.0.norm1.weight": want["blocks.0.norm1.weight"].float()}
    )
    module, info = load_dit(mixed)
    assert module.blocks[0].norm1.weight.dtype == torch.bfloat16
    assert any("64 values cast" in note for note in info.notes)
    with pytest.raises(H3Error, match=r"dtype is torch\.float16"):
        load_dit(path, dtype=torch.float16)


def test_loaded_modules_are_whole_and_frozen(repositories):
    for module in (load_dit(GOLDEN / "b_dit_comfy.safetensors")[0], load_video_vae(repositories[1] / "vae")[0]):
        assert not module.training
        for tensor in (*module.parameters(), *module.buffers()):
            assert not tensor.is_meta and not tensor.requires_grad


def test_partition_signs(tmp_path, repositories):
    official, diffusers = repositories

    def partition(path):
        return load_dit(path)[1]

    assert partition(official / "FL2VA" / "transformer").partition == "fl2va"
    assert partition(official / "Ref2VA" / "transformer").partition == "ref2va"
    assert partition(diffusers / "transformer").partition == "fl2va"
    assert partition(diffusers / "transformer_ref").partition == "ref2va"
    plain = golden("b_dit_comfy")
    assert partition(write_file(tmp_path / "MiniMax_H3_Ref2VA_bf16.safetensors", plain)).partition == "ref2va"
    assert partition(write_file(tmp_path / "h3_fl2v_turbo.safetensors", plain)).partition == "fl2va"
    # renamed: nothing is guessed
    both = write_file(tmp_path / "ref2va_too.safetensors", plain, metadata={"h3_runtime.partition": "fl2va ref2va"})
    assert partition(both).partition == "both" and not partition(both).notes  # it says that it serves either
    info = partition(write_file(tmp_path / "model.safetensors", plain))
    assert info.partition == "unknown" and any("partition unknown" in note for note in info.notes)
    # metadata survives a wrong name, and the contradiction is told
    info = partition(write_file(tmp_path / "fl2va.safetensors", plain, metadata={"h3_runtime.partition": "ref2va"}))
    assert info.partition == "ref2va"
    assert any("ref2va by metadata h3_runtime.partition, against file name fl2va" in note for note in info.notes)


def test_all_in_one_file_gives_its_dit(tmp_path):
    tensors = {f"model.diffusion_model.{n}": t for n, t in golden("b_dit_comfy").items()}
    other = {f"text_encoders.qwen3vl_32b.transformer.{n}": t for n, t in text_encoder_like("model.").items()}
    path = write_file(tmp_path / "all.safetensors", tensors | other)
    module, info = load_dit(path)
    assert_same(module.state_dict(), golden("b_dit_comfy"))
    assert any("1 tensors of other parts" in note for note in info.notes)
    path = write_file(tmp_path / "odd.safetensors", tensors | {"optimizer.step": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"extra optimizer\.step"):
        load_dit(path)


def test_info_notes_zeros_and_fingerprint(tmp_path):
    zero = dit_bytes({"blocks.0.mlp.fc2.weight": torch.zeros(64, 128, dtype=torch.bfloat16)})
    path = write_file(tmp_path / "zero.safetensors", zero)
    info = load_dit(path)[1]
    assert any(note.startswith("all zeros: blocks.0.mlp.fc2.weight") for note in info.notes)
    assert info.fingerprint == fingerprint([path])


# ---------------------------------------------------------------- tensors that do not fit


def test_missing_extra_misshapen_and_wrong_types_are_all_named(tmp_path):
    changes = {
        "blocks.0.norm2.weight": torch.ones(65, dtype=torch.bfloat16),
        "blocks.1.mlp.fc1.weight": torch.ones(256, 64, dtype=torch.int32),
    }
    tensors = dit_bytes(
        changes, drop=("blocks.1.attn.out_proj.weight", "condition_proj.bias"), extra={"x": torch.ones(3)}
    )
    path = write_file(tmp_path / "dit.safetensors", tensors)
    assert_refused(
        load_dit,
        path,
        "missing blocks.1.attn.out_proj.weight",
        "missing condition_proj.bias",
        f"extra {path}: x",
        f"misshapen {path}: blocks.0.norm2.weight [65], needed [64]",
        f"{path}: blocks.1.mlp.fc1.weight is stored as I32, not as one of BF16, F16, F32",
    )


def test_missing_and_misshapen_in_the_diffusers_layout_use_its_names(tmp_path):
    tensors = golden("b_dit_diffusers")
    del tensors["transformer_blocks.1.attn.to_k.weight"], tensors["transformer_blocks.0.ff.net.2.weight"]
    path = write_file(tmp_path / "a.safetensors", tensors)
    assert_refused(
        load_dit, path, "missing transformer_blocks.1.attn.to_k.weight", "(transformer_blocks.0.ff.net.2.weight)"
    )
    name = "transformer_blocks.1.attn.to_v.weight"
    path = write_file(tmp_path / "b.safetensors", golden("b_dit_diffusers") | {name: torch.ones(96, 63)})
    assert_refused(load_dit, path, "misshapen", f"{name} [96, 63]")
    twice = golden("b_dit_diffusers") | {"blocks.0.mlp.fc2.weight": torch.ones(64, 128)}
    path = write_file(tmp_path / "c.safetensors", twice)
    assert_refused(load_dit, path, "blocks.0.mlp.fc2.weight is there twice")


def test_nothing_is_read_before_all_names_fit(tmp_path, monkeypatch):
    path = write_file(tmp_path / "dit.safetensors", dit_bytes(drop=("condition_proj.bias",)))
    monkeypatch.setattr(SafetensorsFile, "read", lambda *_: pytest.fail("a tensor was read"))
    assert_refused(load_dit, path, "missing condition_proj.bias")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_named(tmp_path, value):
    weight = golden("b_dit_comfy")[DIT_PROBE].clone()
    weight[-1, -1] = value
    path = write_file(tmp_path / "dit.safetensors", dit_bytes({DIT_PROBE: weight}))
    assert_refused(load_dit, path, f"{path}: {DIT_PROBE} holds NaN or infinity")


def test_rope_must_be_this_models(tmp_path):
    off = {"rope.inv_freq": golden("b_dit_comfy")["rope.inv_freq"] * (1 + 1e-4)}
    assert_refused(
        load_dit, write_file(tmp_path / "dit.safetensors", dit_bytes(off)), "rope.inv_freq is off by 1.0e-04"
    )


def test_impossible_layer_counts_do_not_build_a_giant(tmp_path):
    tensors = dit_bytes(extra={"blocks.999999999.norm1.weight": torch.ones(64)})
    path = write_file(tmp_path / "dit.safetensors", tensors)
    assert_refused(load_dit, path, "1000000000 layers are named, but only 56 tensors are there")
    tensors = dit_bytes(extra={"blocks.x.norm1.weight": torch.ones(64)})
    assert_refused(load_dit, write_file(tmp_path / "x.safetensors", tensors), "invalid literal")


def test_wrong_part_and_unknown_files_say_what_they_are(tmp_path):
    vae, dit = GOLDEN / "f_vae_comfy.safetensors", GOLDEN / "b_dit_comfy.safetensors"
    assert_refused(load_dit, vae, "is a video VAE in the ComfyUI layout; a DiT is needed")
    assert_refused(load_video_vae, dit, "is a DiT in the ComfyUI layout; a video VAE is needed")
    assert_refused(load_video_vae, GOLDEN / "g_audio_vae_diffusers.safetensors", "audio VAE in the diffusers layout")
    encoder = write_file(tmp_path / "te.safetensors", text_encoder_like("model."))
    assert_refused(load_dit, encoder, "is a text encoder")
    assert_refused(
        load_dit,
        GOLDEN / "a_layouts.safetensors",
        "not DiT in the official layout: it has no",
        "not DiT in the ComfyUI layout: it has no",
        "not DiT in the diffusers layout: it has no",
    )


# ---------------------------------------------------------------- finding the parts


def test_find_parts_in_the_official_repository(repositories):
    official, _ = repositories
    parts = find_parts(official)
    assert [(dit.path, dit.partition) for dit in parts.dits] == [
        (official / "FL2VA" / "transformer", "fl2va"),
        (official / "Ref2VA" / "transformer", "ref2va"),
    ]
    assert parts.video_vae == official / "FL2VA" / "video_vae" / "source" / "model.safetensors"
    assert parts.audio_vae == official / "FL2VA" / "audio_vae" / "model.safetensors"
    assert parts.text_encoder == official / "FL2VA" / "text_encoder"
    assert parts.tokenizer == official / "FL2VA" / "tokenizer"
    assert parts.dit_for("t2va") == parts.dit_for("fl2va") == parts.dits[0]
    assert parts.dit_for("ref2va") == parts.dits[1] and parts.dit == parts.dits[0].path
    one = find_parts(official / "Ref2VA")
    assert [dit.partition for dit in one.dits] == ["ref2va"]
    with pytest.raises(H3Error, match=r"the task t2va needs fl2va weights; DiTs found: .*ref2va"):
        one.dit_for("t2va")
    load_video_vae(parts.video_vae)
    load_audio_vae(parts.audio_vae)


def test_find_parts_in_the_diffusers_repository_and_both_at_once(tmp_path, repositories):
    _, diffusers = repositories
    parts = find_parts(diffusers)
    assert [(dit.path.name, dit.partition) for dit in parts.dits] == [
        ("transformer", "fl2va"),
        ("transformer_ref", "ref2va"),
    ]
    assert parts.video_vae.parent.name == "vae" and parts.audio_vae.parent.name == "audio_vae"
    assert parts.text_encoder == diffusers / "text_encoder" and parts.tokenizer == diffusers / "tokenizer"
    both = tmp_path / "both"
    shutil.copytree(diffusers, both)
    official_repository(both)
    assert [dit.path.parent for dit in find_parts(both).dits] == [both, both]  # the same weights twice count once


def test_find_parts_in_comfyui_and_flat_folders(tmp_path):
    models = tmp_path / "ComfyUI" / "models"
    dit, video, audio = golden("b_dit_comfy"), golden("f_vae_comfy"), golden("g_audio_vae_comfy")
    write_file(models / "diffusion_models" / "h3" / "minimax_h3_fl2va_bf16.safetensors", dit)
    write_file(models / "diffusion_models" / "minimax_h3_ref2va_bf16.safetensors", dit)
    write_file(models / "diffusion_models" / "some_other_model.safetensors", {"weight": torch.ones(2)})
    (models / "diffusion_models" / "minimax_h3_fl2va_new.safetensors").write_bytes(bytes(100))
    write_file(models / "text_encoders" / "qwen.safetensors", text_encoder_like("model."))
    write_file(models / "vae" / "video_fp16.safetensors", video)
    write_file(models / "vae" / "video_fp32.safetensors", {n: t.float() for n, t in video.items()})
    write_file(models / "vae" / "audio.safetensors", audio)
    tokenizer = tmp_path / "ComfyUI" / "comfy" / "text_encoders" / "qwen25_tokenizer"
    tokenizer.mkdir(parents=True)
    for name in ("vocab.json", "merges.txt"):
        (tokenizer / name).write_text("")
    parts = find_parts(models)
    assert parts.dit_for("ref2va").path.name == "minimax_h3_ref2va_bf16.safetensors"
    assert parts.dit_for("t2va").path.name == "minimax_h3_fl2va_bf16.safetensors"
    assert parts.video_vae.name == "video_fp32.safetensors" and parts.audio_vae.name == "audio.safetensors"
    assert parts.text_encoder.name == "qwen.safetensors" and parts.tokenizer.resolve() == tokenizer.resolve()
    assert any("begins with zeros" in reason for reason in parts.skipped)
    assert any("video_fp16.safetensors" in reason for reason in parts.skipped)

    flat = tmp_path / "demo"
    write_file(flat / "dit.safetensors", dit)
    write_file(flat / "video_vae.safetensors", video)
    write_file(flat / "audio_vae.safetensors", audio)
    write_file(flat / "text_encoder" / "model.safetensors", text_encoder_like("model."))
    (flat / "vocab.json").write_text("{}")
    (flat / "merges.txt").write_text("")
    parts = find_parts(flat)
    assert parts.dits == (DiTPath(flat / "dit.safetensors", "unknown"),)
    assert parts.dit_for("ref2va") == parts.dits[0]  # an unknown partition serves any task; the caller warns
    assert (parts.video_vae.name, parts.audio_vae.name) == ("video_vae.safetensors", "audio_vae.safetensors")
    assert parts.text_encoder == flat / "text_encoder" and parts.tokenizer == flat
    write_file(flat / "another.safetensors", dit)
    with pytest.raises(H3Error, match=r"2 DiTs fit the task t2va .*name one: --dit FILE"):
        find_parts(flat).dit_for("t2va")


def test_find_parts_refuses_what_is_no_folder(tmp_path):
    with pytest.raises(H3Error, match="does not exist"):
        find_parts(tmp_path / "none")
    file = write_file(tmp_path / "x.safetensors", {"a": torch.ones(1)})
    with pytest.raises(H3Error, match="is a file; give a folder"):
        find_parts(file)
    empty = find_parts(tmp_path)
    assert empty.dits == () and empty.video_vae is empty.tokenizer is None
    with pytest.raises(H3Error, match="DiTs found: none"):
        empty.dit_for("t2va")


def test_damaged_index_in_a_model_folder_is_a_reason_not_a_crash(tmp_path):
    write_sharded(tmp_path / "transformer", golden("b_dit_raw"), "model")
    (tmp_path / "transformer" / "model.safetensors.index.json").write_text("{")
    parts = find_parts(tmp_path)
    assert parts.dits == () and any("is not a shard index" in reason for reason in parts.skipped)
    assert reader.listed(str(n) for n in range(12)) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"
