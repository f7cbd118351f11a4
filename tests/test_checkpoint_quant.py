"""One small DiT in every quantised layout: each loads, says what it is, and gives the bf16 velocity within its
format's tolerance; what does not fit is named; quantising while loading gives the bits of the prequantised file."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from h3_runtime.checkpoint.load import load_audio_vae, load_dit, load_video_vae, open_dit
from h3_runtime.checkpoint.opening import wrong_partition
from h3_runtime.checkpoint.pieces import Online, quantise_linear
from h3_runtime.checkpoint.reader import SafetensorsFile
from h3_runtime.demo.maker import make_model
from h3_runtime.errors import CheckpointError, H3Error, MissingDependency
from h3_runtime.models.dit import DiT
from h3_runtime.quant import gguf, kernels
from h3_runtime.quant.linear import QuantisedLinear

from .checkpoint_fixtures import assert_refused, golden
from .quantised_fixtures import (
    BLOCK_LINEARS,
    CONFIG,
    ENCODERS,
    as_bytes,
    int8_convrot,
    pruned,
    quantised,
    relative,
    tensors,
    velocity,
    write_gguf,
)

# relative L2 of the velocity against the bf16 file's: about 1.5 times what was measured
TOLERANCES = {
    "int8_convrot": 0.011,
    "int8": 0.012,
    "fp8": 0.021,
    "fp8_legacy": 0.021,
    "fp8_plain": 0.021,
    "nvfp4": 0.07,
    "nvfp4_awq": 0.07,
    "mxfp8": 0.021,
    "w4a4": 0.09,
    "w4a8": 0.06,
}
GGUF_TOLERANCES = {"Q8_0": 0.008, "Q6_K": 0.016, "Q4_K": 0.06, "Q4_0": 0.075}
PRUNED_TOLERANCE = 0.006
TITLES = {
    "int8_convrot": "int8_convrot g256",
    "fp8": "fp8_e4m3 scaled",
    "fp8_legacy": "fp8_e4m3 scaled",
    "fp8_plain": "fp8_e4m3 unscaled",
    "nvfp4_awq": "nvfp4 awq",
    "w4a4": "convrot_w4a4",
    "w4a8": "asym_w4a8_int8",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> torch.Tensor:
    """The velocity of the bf16 file."""
    path = tmp_path_factory.mktemp("base") / "base.safetensors"
    save_file(tensors(), path)
    return velocity(load_dit(path)[0])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def saved(tmp_path, given, name="dit.safetensors", metadata=None):
    save_file(given, tmp_path / name, metadata)
    return tmp_path / name


def linears(dit: DiT) -> dict[str, QuantisedLinear]:
    return {name: module for name, module in dit.named_modules() if isinstance(module, QuantisedLinear)}


def same_weights(got: torch.nn.Module, want: torch.nn.Module) -> bool:
    a, b = got.state_dict(), want.state_dict()
    return set(a) == set(b) and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


# ---- every format


@pytest.mark.parametrize("format", ENCODERS)
def test_every_format_loads_and_keeps_the_velocity(format, base, tmp_path):
    dit, info = load_dit(saved(tmp_path, quantised(format)))
    assert info.formats == {TITLES.get(format, format): len(BLOCK_LINEARS)}
    assert set(linears(dit)) == set(BLOCK_LINEARS)
    assert dit.dtype is torch.bfloat16 and dit.video_patch_proj.weight.dtype is torch.float32
    error = relative(velocity(dit), base)
    assert 0 < error < TOLERANCES[format]
    assert str(info.formats[TITLES.get(format, format)]) in info.approximate and info.kernels
    assert all(sum(linear.ran.values()) > 0 for linear in linears(dit).values())


@pytest.mark.parametrize("kind", GGUF_TOLERANCES)
def test_gguf_stays_in_its_blocks(kind, base, tmp_path):
    names = {f"{name}.weight": kind for name in BLOCK_LINEARS}
    dit, info = load_dit(write_gguf(tmp_path / "dit.gguf", tensors(), names))
    assert info.formats == {kind: len(BLOCK_LINEARS)} and info.paths == ("dit/gguf", "kernel/gguf-dequantised")
    stored = sum(linear.weight.nbytes for linear in linears(dit).values())
    assert stored < sum(tensors()[name].nbytes for name in names)
    assert 0 < relative(velocity(dit), base) < GGUF_TOLERANCES[kind]


def test_integers_are_multiplied_as_integers(base, tmp_path):
    dit, _ = load_dit(saved(tmp_path, quantised("int8_convrot")))
    velocity(dit)
    assert all(set(linear.ran) == {kernels.INT8} for linear in linears(dit).values())


def test_pruned_adaln_in_bf16_int8_and_gguf(base, tmp_path):
    dit, info = load_dit(saved(tmp_path, pruned()))
    assert info.paths == ("dit/pruned-curve",) and "curve" in info.approximate
    assert not hasattr(dit, "time_embedder") and dit.blocks[0].adaln_proj.linear.weight.dtype is torch.float32
    assert 0 < relative(velocity(dit), base) < PRUNED_TOLERANCE
    dit, info = load_dit(saved(tmp_path, quantised("int8_convrot", pruned()), "pruned_int8.safetensors"))
    assert set(info.paths) == {"dit/int8-convrot", "dit/pruned-curve", "kernel/int8-int-mm"}
    assert relative(velocity(dit), base) < TOLERANCES["int8_convrot"] + PRUNED_TOLERANCE
    types = {f"{name}.weight": "Q8_0" for name in BLOCK_LINEARS}
    types |= {name: "F16" for name in pruned() if ".adaln_proj." in name}
    dit, info = load_dit(write_gguf(tmp_path / "pruned.gguf", pruned(), types))
    assert set(info.paths) == {"dit/gguf", "dit/pruned-curve", "kernel/gguf-dequantised"}
    assert relative(velocity(dit), base) < GGUF_TOLERANCES["Q8_0"] + PRUNED_TOLERANCE


def test_the_full_int8_file_has_its_adaln_in_groups_of_64(base, tmp_path):
    adaln = tuple(f"blocks.{i}.adaln_proj.linear" for i in range(CONFIG.layers))
    dit, info = load_dit(saved(tmp_path, quantised("int8_convrot", None, BLOCK_LINEARS + adaln)))
    assert info.formats == {"int8_convrot g256": 8, "int8_convrot g64": 2}
    assert relative(velocity(dit), base) < 0.02
    online = load_dit(saved(tmp_path, tensors(), "b.safetensors"), quantise=Online("int8_convrot", adaln=True))[0]
    assert same_weights(online, dit)


def test_formats_are_read_layer_by_layer(base, tmp_path):
    """Four formats and bf16 in one file, as mixed files and those that skip the edge blocks have them."""
    given = quantised("int8_convrot", None, ("blocks.0.attn.qkv_proj", "blocks.0.mlp.fc1"))
    given = quantised("nvfp4", given, ("blocks.0.mlp.fc2",))
    given = quantised("fp8", given, ("blocks.0.attn.out_proj",))
    dit, info = load_dit(saved(tmp_path, given))
    assert info.formats == {"int8_convrot g256": 2, "nvfp4": 1, "fp8_e4m3 scaled": 1}
    assert {type(linear).__name__ for linear in linears(dit).values()} == {"Int8Linear", "Nvfp4Linear", "Float8Linear"}
    assert type(dit.blocks[1].mlp.fc1) is type(
        load_dit(saved(tmp_path, tensors(), "b.safetensors"))[0].blocks[1].mlp.fc1
    )
    assert relative(velocity(dit), base) < TOLERANCES["nvfp4"]


def test_prefix_other_parts_and_trailing_bytes(tmp_path):
    plain = load_dit(saved(tmp_path, quantised("int8_convrot")))[0]
    given = {f"model.diffusion_model.{name}": t for name, t in quantised("int8_convrot").items()}
    given["first_stage_model.decoder.weight"] = torch.ones(2, 2)
    path = saved(tmp_path, given, "merged.safetensors")
    with open(path, "ab") as file:
        file.write(b"\0" * 77)
    dit, info = load_dit(path)
    assert same_weights(dit, plain)
    assert any("77 bytes after the payload" in note for note in info.notes)
    assert any("1 tensors of other parts" in note for note in info.notes)


def test_markers_in_the_header_instead_of_tensors(tmp_path):
    plain = load_dit(saved(tmp_path, quantised("int8_convrot")))[0]
    given = quantised("int8_convrot")
    markers = {n[:-12]: json.loads(bytes(given.pop(n).tolist())) for n in list(given) if n.endswith(".comfy_quant")}
    metadata = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": markers})}
    assert same_weights(load_dit(saved(tmp_path, given, "m.safetensors", metadata))[0], plain)
    prefixed = {f"model.diffusion_model.{name}": t for name, t in given.items()}
    markers = {f"model.diffusion_model.{name}": marker for name, marker in markers.items()}
    metadata = {"_quantization_metadata": json.dumps({"layers": markers})}
    assert same_weights(load_dit(saved(tmp_path, prefixed, "p.safetensors", metadata))[0], plain)


def test_gguf_names_arch_and_folded_shapes(base, tmp_path):
    """A prefix, an arch of another model, shapes folded for the format, and no metadata at all."""
    names = {f"{name}.weight": "Q8_0" for name in BLOCK_LINEARS}
    plain = load_dit(write_gguf(tmp_path / "plain.gguf", tensors(), names))[0]
    given = {f"model.diffusion_model.{name}": t for name, t in tensors().items()}
    types = {f"model.diffusion_model.{name}": kind for name, kind in names.items()}
    folded = "model.diffusion_model.video_patch_proj.weight"
    rows, columns = tensors()["video_patch_proj.weight"].shape
    pairs = {"general.architecture": "wan", f"comfy.gguf.orig_shape.{folded}": [rows, columns]}
    path = write_gguf(tmp_path / "city.gguf", given, types, pairs, {folded: (rows // 2, 2 * columns)})
    assert same_weights(load_dit(path)[0], plain)
    wrong = write_gguf(tmp_path / "wrong.gguf", given, types, {f"comfy.gguf.orig_shape.{folded}": [rows, columns + 1]})
    assert_refused(load_dit, wrong, "comfy.gguf.orig_shape")


def test_gguf_islands_are_decoded_to_float32(tmp_path):
    """What the model computes in float32 is decoded once, whatever a maker quantised."""
    types = {f"{name}.weight": "Q8_0" for name in BLOCK_LINEARS} | {"video_patch_proj.weight": "Q8_0"}
    types |= {"condition_proj.weight": "Q8_0", "time_embedder.proj_out.weight": "Q8_0"}
    dit, info = load_dit(write_gguf(tmp_path / "dit.gguf", tensors(), types))
    assert info.formats == {"Q8_0": 11}
    for name in ("video_patch_proj", "time_embedder.proj_out"):
        weight = dit.get_submodule(name).weight
        assert weight.dtype is torch.float32 and not torch.equal(weight, tensors()[f"{name}.weight"])
        assert relative(weight, tensors()[f"{name}.weight"]) < 0.01
    assert isinstance(dit.condition_proj, QuantisedLinear)
    assert torch.isfinite(velocity(dit)).all()


def test_a_gguf_type_that_needs_the_package_says_so(tmp_path, monkeypatch):
    """Types decoded by the package ``gguf`` are named before anything is loaded where it is missing."""
    names = {f"{name}.weight": "Q8_0" for name in BLOCK_LINEARS}
    path = write_gguf(tmp_path / "dit.gguf", tensors(), names)
    monkeypatch.delitem(gguf.DECODERS, "Q8_0")
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert open_dit(path).info.needs == ("the package gguf, to decode Q8_0: pip install gguf",)
    with pytest.raises(MissingDependency, match="pip install gguf"):
        load_dit(path)


# ---- what does not fit


def without(given, *names):
    return {name: t for name, t in given.items() if name not in names}


FC1 = "blocks.0.mlp.fc1"


def wrong(format, change):
    given = quantised(format)
    change(given)
    return given


CHANGES = {
    "no scale": ("int8_convrot", lambda g: g.pop(f"{FC1}.weight_scale"), f"missing {FC1}.weight_scale"),
    "short scale": (
        "int8_convrot",
        lambda g: g.update({f"{FC1}.weight_scale": torch.ones(7, 1)}),
        f"{FC1}.weight_scale [7, 1], needed [] or [1]",
    ),
    "NaN scale": ("int8", lambda g: g[f"{FC1}.weight_scale"].fill_(torch.nan), "holds NaN or infinity"),
    "NaN weight": ("fp8", lambda g: g[f"{FC1}.weight"].view(torch.uint8)[3].fill_(0xFF), "holds NaN or infinity"),
    "NaN block scale": ("mxfp8", lambda g: g[f"{FC1}.weight_scale"].view(torch.uint8).fill_(0xFF), "holds NaN"),
    "no marker": ("int8", lambda g: g.pop(f"{FC1}.comfy_quant"), f"{FC1}.weight is stored as I8"),
    "no weight": (
        "int8",
        lambda g: g.pop(f"{FC1}.weight"),
        f"missing {FC1}.weight (its comfy_quant says int8_tensorwise)",
    ),
    "short weight": (
        "fp8",
        lambda g: g.update({f"{FC1}.weight": torch.zeros(512, 128).to(torch.float8_e4m3fn)}),
        f"{FC1}.weight [512, 128], needed [512, 256]",
    ),
    "packed as if it were not": (
        "nvfp4",
        lambda g: g.update({f"{FC1}.weight": torch.zeros(512, 256, dtype=torch.uint8)}),
        "needed [512, 128]",
    ),
    "scales not tiled": (
        "nvfp4",
        lambda g: g.update({f"{FC1}.weight_scale": torch.ones(512, 15).to(torch.float8_e4m3fn)}),
        "needed [512, 16]",
    ),
    "another type": (
        "int8",
        lambda g: g.update({f"{FC1}.weight": torch.zeros(512, 256)}),
        "is stored as F32, not as I8",
    ),
    "unknown format": (
        "int8",
        lambda g: g.update({f"{FC1}.comfy_quant": as_bytes({"format": "int3_magic"})}),
        "'int3_magic', which this version does not know",
    ),
    "group that does not divide": (
        "int8",
        lambda g: g.update(
            {f"{FC1}.comfy_quant": as_bytes({"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 1024})}
        ),
        "a ConvRot group of 1024 does not divide 256 inputs",
    ),
    "marker that is no JSON": (
        "int8",
        lambda g: g.update({f"{FC1}.comfy_quant": torch.tensor(list(b"{not json"), dtype=torch.uint8)}),
        "is no JSON",
    ),
    "marker of another type": (
        "int8",
        lambda g: g.update({f"{FC1}.comfy_quant": torch.zeros(3)}),
        "is no JSON in bytes",
    ),
    "a scale without a layer": (
        "int8",
        lambda g: g.update({"token_refiner.final_norm.weight_scale": torch.ones(1)}),
        "extra",
    ),
    "a role of another format": (
        "int8",
        lambda g: g.update({f"{FC1}.weight_scale_2": torch.ones(())}),
        f"extra {{path}}: {FC1}.weight_scale_2",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_every_misfit_is_named(case, tmp_path):
    format, change, message = CHANGES[case]
    path = saved(tmp_path, wrong(format, change))
    assert_refused(load_dit, path, message.replace("{path}", str(path)))


def test_several_faults_are_all_named(tmp_path):
    given = without(quantised("int8"), f"{FC1}.weight_scale", "blocks.1.norm1.weight")
    given["blocks.1.mlp.fc2.weight_scale"] = torch.ones(3, 1)
    given["blocks.0.mlp.fc2.extra"] = torch.ones(1)
    faults = (f"missing {FC1}.weight_scale", "missing blocks.1.norm1.weight", "fc2.weight_scale [3, 1]", "fc2.extra")
    assert_refused(load_dit, saved(tmp_path, given), *faults)


def test_layers_of_zeros_are_noted(tmp_path):
    given = quantised("int8_convrot")
    given[f"{FC1}.weight"].zero_()
    _, info = load_dit(saved(tmp_path, given))
    assert f"all zeros: {FC1}.weight" in info.notes
    assert not any("all zeros" in note for note in load_dit(saved(tmp_path, tensors(), "b.safetensors"))[1].notes)


def test_damaged_header_markers_are_refused(tmp_path):
    for text in ("{", "[]", '{"layers": 3}', '{"layers": {"blocks.0.mlp.fc1": 1}}'):
        path = saved(tmp_path, quantised("int8"), metadata={"_quantization_metadata": text})
        assert_refused(load_dit, path, "_quantization_metadata")


def test_quantised_files_are_comfyuis(tmp_path):
    """Other layouts have no quantised files: their rows would have to be unscrambled together with their scales."""
    given = golden("b_dit_diffusers")
    name = "transformer_blocks.0.ff.net.2"
    given.update({f"{name}.{role}": t for role, t in ENCODERS["int8"](given.pop(f"{name}.weight")).items()})
    assert_refused(load_dit, saved(tmp_path, given), "quantised files are read in the ComfyUI layout only")
    audio = golden("g_audio_vae_comfy")
    audio["dec_in_proj.weight"] = audio["dec_in_proj.weight"].to(torch.float8_e4m3fn)
    assert_refused(load_audio_vae, saved(tmp_path, audio, "audio.safetensors"), "float32 only")


# ---- while loading


@pytest.mark.parametrize("method", ["int8_convrot", "int8", "fp8"])
def test_quantised_while_loading_is_the_prequantised_file(method, tmp_path):
    stored, _ = load_dit(saved(tmp_path, without(quantised(method), *(f"{n}.input_scale" for n in BLOCK_LINEARS))))
    online, info = load_dit(saved(tmp_path, tensors(), "b.safetensors"), quantise=method)
    assert same_weights(online, stored)
    assert info.online == {method: 8} and not info.formats and f"8 linears to {method}" in info.approximate
    assert f"dit/{method.replace('_', '-')}" in info.paths


def test_quantised_while_loading_from_interleaved_rows(tmp_path):
    """The official shards' q, k, v are put in order before they are quantised, so scales belong to their rows."""
    stacked, raw = (saved(tmp_path, golden(f"b_dit_{word}"), f"{word}.safetensors") for word in ("comfy", "raw"))
    want, _ = load_dit(stacked, quantise="int8_convrot")
    got, _ = load_dit(raw, quantise="int8_convrot", layout="official")
    assert same_weights(got, want)


def test_excluded_layers_and_everything_else_stay_as_stored(tmp_path):
    path = saved(tmp_path, tensors())
    plain, _ = load_dit(path)
    dit, info = load_dit(path, quantise="int8", exclude=["blocks.0", "blocks.*.mlp.fc2"])
    assert set(linears(dit)) == {"blocks.1.attn.qkv_proj", "blocks.1.attn.out_proj", "blocks.1.mlp.fc1"}
    state = dit.state_dict()
    for name, tensor in plain.state_dict().items():
        if not name.startswith(tuple(linears(dit))):
            assert torch.equal(state[name], tensor) and state[name].dtype == tensor.dtype
    assert info.online == {"int8": 3}


def test_groups_are_the_largest_that_fit(tmp_path):
    dit, _ = load_dit(saved(tmp_path, golden("b_dit_comfy")), quantise="int8_convrot")
    groups = {name.rpartition(".")[2]: linear.group for name, linear in linears(dit).items()}
    assert groups == {"qkv_proj": 64, "out_proj": 16, "fc1": 64, "fc2": 64}  # 64, 96, 64 and 128 wide
    plain = quantise_linear(torch.ones(3, 6), None, "int8_convrot", torch.float32)
    assert plain.group is None and plain.marker() == {"format": "int8_tensorwise"}


def test_what_cannot_be_quantised_is_refused(model, tmp_path):
    path = saved(tmp_path, tensors())
    for arguments, message in (
        ({"quantise": "int4"}, "choose one of int8_convrot, int8, fp8"),
        ({"quantise": "int8", "exclude": ["blocks.7.*"]}, "matches none of the 8 linears"),
        ({"exclude": ["blocks.0.*"]}, "give quantise as well"),
    ):
        with pytest.raises(H3Error, match=message):
            load_dit(path, **arguments)
    assert_refused_h3(load_dit, saved(tmp_path, quantised("fp8"), "q.safetensors"), "is quantised already")
    assert_refused_h3(
        load_dit, write_gguf(tmp_path / "d.gguf", tensors(), {f"{FC1}.weight": "Q8_0"}), "quantised already"
    )


def assert_refused_h3(loader, path, message):
    with pytest.raises(H3Error, match=message) as error:
        loader(path, quantise="int8")
    assert str(path) in str(error.value)


# ---- the video VAE


VAE_LINEARS = ("attn.to_qkv", "attn.to_out", "ff.w1", "ff.w2")


def test_video_vae_in_int8_convrot(model, tmp_path):
    whole = model / "video_vae.safetensors"
    metadata = SafetensorsFile(whole).metadata
    names = tuple(f"decoder.transformer_blocks.{i}.{leaf}" for i in range(3) for leaf in VAE_LINEARS)
    given = load_file(whole)
    stored, info = load_video_vae(saved(tmp_path, quantised("int8_convrot", given, names), metadata=metadata))
    assert info.formats == {"int8_convrot g64": 9, "int8_convrot g256": 3}
    assert set(info.paths) == {"video-vae/int8-convrot", "kernel/int8-int-mm"}
    online, _ = load_video_vae(whole, quantise="int8_convrot")
    assert same_weights(online, stored)
    exact, _ = load_video_vae(whole)
    latent = torch.randn(1, 24, 2, 4, 6, generator=torch.Generator().manual_seed(1))
    error = relative(stored.decode(latent), exact.decode(latent))
    assert 0 < error < 0.02
    assert all(t.dtype is torch.float32 for name, t in stored.named_parameters() if "transformer_blocks" not in name)


def test_video_vae_in_a_format_nobody_offers(model, tmp_path):
    given = quantised("mxfp8", load_file(model / "video_vae.safetensors"), ("decoder.transformer_blocks.0.ff.w1",))
    metadata = SafetensorsFile(model / "video_vae.safetensors").metadata
    assert_refused(
        load_video_vae, saved(tmp_path, given, metadata=metadata), "mxfp8, which is not offered for this part"
    )


# ---- partition


def test_a_task_on_the_wrong_partition_is_told():
    assert wrong_partition("fl2va", "t2va") is None and wrong_partition("ref2va", "ref2va") is None
    assert wrong_partition("unknown", "ref2va") is None
    assert "needs ref2va weights and these are fl2va" in wrong_partition("fl2va", "ref2va")
    assert "needs fl2va weights and these are ref2va" in wrong_partition("ref2va", "fl2va")


def test_encoders_of_the_tests_are_independent():
    """The fixture's own int8 rows against their definition, so that a mistake shared with the runtime cannot hide."""
    weight = torch.randn(4, 16, generator=torch.Generator().manual_seed(2))
    made = int8_convrot(weight)
    h4 = torch.tensor([[1.0, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]])
    back = (made["weight"].float() * made["weight_scale"]) @ (torch.kron(h4, h4) / 4)
    assert relative(back, weight) < 0.01
    with pytest.raises(CheckpointError):
        load_dit("nowhere.safetensors")
