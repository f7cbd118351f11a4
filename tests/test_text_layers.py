"""The text encoder read layer by layer, from every layout and number type: names, shapes and values."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from h3_runtime.checkpoint.reader import SafetensorsFile
from h3_runtime.checkpoint.text_layers import TextLayers
from h3_runtime.checkpoint.text_sizes import TextSizes
from h3_runtime.demo.maker import make_model
from h3_runtime.errors import CheckpointError, H3Error
from h3_runtime.quant.linear import QuantisedLinear
from h3_runtime.text.config import TextEncoderConfig
from h3_runtime.text.encoder import open_weights

from .checkpoint_fixtures import write_sharded
from .quantised_fixtures import ENCODERS, int8, nvfp4, nvfp4_awq, quantised, relative, text_linears, write_gguf

LAYERS = 3
PREFIXES = {
    "official": ("model.language_model.", "model.visual."),
    "transformers": ("language_model.", "visual."),
    "comfyui": ("model.", "visual."),
    "all-in-one": ("text_encoders.qwen3vl_32b.transformer.model.", "text_encoders.qwen3vl_32b.transformer.visual."),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The small encoder's file, ComfyUI names, bf16."""
    return make_model(tmp_path_factory.mktemp("model")) / "text_encoder.safetensors"


@pytest.fixture(scope="module")
def weights(plain):
    return load_file(plain)


def renamed(weights, layout):
    """The weights under the names of ``layout``, with the norm, the head and layers that a whole encoder has."""
    language, vision = PREFIXES[layout]
    made = {}
    for name, tensor in weights.items():
        own = language + name.removeprefix("model.") if name.startswith("model.") else vision + name[7:]
        made[own] = tensor
    if layout in ("official", "transformers"):
        made[f"{language}norm.weight"] = torch.ones(64).bfloat16()
        made["lm_head.weight"] = torch.ones(2, 64).bfloat16()
    if layout == "official":
        last = {n: t for n, t in made.items() if ".layers.2." in n}
        made |= {name.replace(".layers.2.", ".layers.3."): tensor * 2 for name, tensor in last.items()}
    if layout == "all-in-one":
        made["model.diffusion_model.blocks.0.norm1.weight"] = torch.ones(3)
    return made


def everything(layers: TextLayers) -> dict[str, torch.Tensor]:
    """Every tensor under the module's names, linears decoded."""
    found = {"embed": layers.embeddings()(torch.arange(layers.sizes.vocab))}
    count = range(layers.sizes.layers)
    pieces = {f"layers.{i}.{name}": piece for i in count for name, piece in layers.layer(i).items()}
    pieces |= {f"visual.{name}": piece for name, piece in layers.vision().items()}
    for name, piece in pieces.items():
        if isinstance(piece, QuantisedLinear):
            found[f"{name}.weight"] = piece.dequantised()
            if piece.bias is not None:
                found[f"{name}.bias"] = piece.bias
        else:
            found[name] = piece
    return found


def assert_near(got, want, tolerance):
    assert set(got) == set(want)
    for name in want:
        assert got[name].shape == want[name].shape, name
        assert relative(got[name].float(), want[name].float()) <= tolerance, name


@pytest.mark.parametrize("layout", PREFIXES)
def test_every_layout_gives_the_same_tensors(layout, plain, weights, tmp_path):
    want = everything(TextLayers(plain))
    given = renamed(weights, layout)
    if layout == "official":
        path = write_sharded(tmp_path / "text_encoder", given, "model")
    else:
        path = tmp_path / "text.safetensors"
        save_file(given, path)
    layers = TextLayers(path, layers=LAYERS)
    assert layers.info.format == layout and layers.sizes.layers == LAYERS
    got = everything(layers)
    assert_near(got, want, 0.0)
    assert all(tensor.dtype is torch.bfloat16 for tensor in got.values())


def test_sizes_are_those_of_the_config_and_of_the_released_file(plain):
    layers = TextLayers(plain)
    config, sizes = open_weights(plain).config, layers.sizes
    for name in ("hidden", "layers", "ffn", "vocab", "vision_depth"):
        assert getattr(sizes, name) == getattr(config, name)
    assert sizes.query_rows == config.heads * config.head_dim and sizes.key_rows == config.kv_heads * config.head_dim
    assert sizes.deepstack == len(config.deepstack)
    released = TextEncoderConfig()
    sizes = TextSizes(
        released.vocab, released.hidden, released.layers, released.ffn, 64 * 128, 8 * 128, 128,
        released.vision_hidden, released.vision_ffn, released.vision_depth, released.vision_positions, 3,
    )  # fmt: skip
    tensors = sizes.tensors()
    assert len(tensors) == 902 and len(sizes.vision_tensors()) == 351
    # of the published bf16 file's 51,506,295,256 bytes all but the header
    assert 2 * sum(torch.Size(shape).numel() for shape in tensors.values()) == 51_506_191_840


TOLERANCES = {"int8_convrot": 0.012, "fp8": 0.04, "fp8_legacy": 0.04, "nvfp4": 0.12, "mxfp8": 0.04, "w4a4": 0.2}


@pytest.mark.parametrize("format", TOLERANCES)
def test_quantised_linears_stay_quantised(format, plain, weights, tmp_path):
    path = tmp_path / "text.safetensors"
    save_file(quantised(format, weights, text_linears(LAYERS)), path, SafetensorsFile(plain).metadata)
    layers = TextLayers(path)
    layer = layers.layer(1)
    assert sum(isinstance(piece, QuantisedLinear) for piece in layer.values()) == 7 and len(layer) == 11
    assert sum(layers.info.formats.values()) == 7 * LAYERS and layers.info.approximate
    assert_near(everything(layers), everything(TextLayers(plain)), TOLERANCES[format])
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    want = F.linear(x, weights["model.layers.1.self_attn.q_proj.weight"])
    assert relative(layer["self_attn.q_proj"](x), want) < 2 * TOLERANCES[format]


def test_fp8_with_a_quantised_tower(plain, weights, tmp_path):
    """The community's FP8 file quantises the vision tower as well."""
    tower = [name.removesuffix(".weight") for name, t in weights.items() if name.startswith("visual.") and t.dim() == 2]
    tower = tuple(name for name in tower if "pos_embed" not in name)
    path = tmp_path / "text.safetensors"
    save_file(quantised("fp8_legacy", weights, (*text_linears(LAYERS), *tower)), path)
    layers = TextLayers(path, layers=LAYERS)
    vision = layers.vision()
    assert isinstance(vision["blocks.0.attn.qkv"], QuantisedLinear) and vision["blocks.0.attn.qkv"].bias is not None
    assert_near(everything(layers), everything(TextLayers(plain)), 0.04)


def test_awq_with_int8_embeddings(plain, weights, tmp_path):
    """NVFP4-AWQ: inputs of o_proj and down_proj are scaled, embeddings are int8 by row without rotation."""
    smoothed = tuple(name for name in text_linears(LAYERS) if name.endswith(("o_proj", "down_proj")))
    given = quantised("nvfp4_awq", weights, smoothed)
    given = quantised("nvfp4", given, tuple(name for name in text_linears(LAYERS) if name not in smoothed))
    given = quantised("int8", given, ("model.embed_tokens",))
    path = tmp_path / "text.safetensors"
    save_file(given, path)
    layers = TextLayers(path, layers=LAYERS)
    assert layers.info.formats == {"nvfp4": 15, "nvfp4 awq": 6, "int8": 1}
    embeddings, ids = layers.embeddings(), torch.tensor([[5, 1, 5], [600, 0, 2]])
    rows = embeddings(ids)
    assert rows.dtype is torch.bfloat16 and embeddings.weight.dtype is torch.int8
    made = int8(weights["model.embed_tokens.weight"])
    assert torch.equal(rows, (made["weight"].float() * made["weight_scale"]).bfloat16()[ids])
    down = layers.layer(2)["mlp.down_proj"]
    x = torch.randn(3, 160, generator=torch.Generator().manual_seed(1)).bfloat16()
    want = F.linear(x, weights["model.layers.2.mlp.down_proj.weight"])
    assert relative(down(x), want) < 0.15
    made = nvfp4_awq(weights["model.layers.2.mlp.down_proj.weight"])
    assert torch.equal(down.pre_quant_scale, made["pre_quant_scale"])


def test_embeddings_in_tiles_are_decoded_row_by_row(plain, weights, tmp_path):
    path = tmp_path / "text.safetensors"
    made = nvfp4(weights["model.embed_tokens.weight"])
    given = {name: t for name, t in weights.items() if name != "model.embed_tokens.weight"}
    save_file(given | {f"model.embed_tokens.{role}": t for role, t in made.items()}, path)
    rows = TextLayers(path, layers=LAYERS).embeddings()(torch.tensor([200, 3, 200]))
    assert torch.equal(rows[0], rows[2])
    assert relative(rows.float(), weights["model.embed_tokens.weight"][[200, 3, 200]].float()) < 0.12


def test_gguf_with_folded_patches(plain, weights, tmp_path):
    """As the public makers write it: ComfyUI names, quantised embeddings, patches without their fifth axis."""
    types = {f"{name}.weight": "Q8_0" for name in text_linears(LAYERS)} | {"model.embed_tokens.weight": "Q8_0"}
    patches = "visual.patch_embed.proj.weight"
    types[patches] = "F16"
    shape = weights[patches].shape
    assert shape[1:] == (3, 2, 16, 16)
    path = write_gguf(tmp_path / "text.gguf", weights, types, None, {patches: (3 * shape[0], 2, 16, 16)})
    layers = TextLayers(path, layers=LAYERS)
    assert layers.info.formats == {"Q8_0": 7 * LAYERS + 1} and set(layers.info.paths) >= {"encoder/gguf"}
    got = everything(layers)
    assert got[patches].shape == shape
    assert_near(got, everything(TextLayers(plain)), 0.01)


def test_quantised_while_reading_is_the_quantised_file(plain, weights, tmp_path):
    path = tmp_path / "text.safetensors"
    save_file(quantised("int8_convrot", weights, text_linears(LAYERS)), path)
    stored, online = TextLayers(path, layers=LAYERS).layer(0), TextLayers(plain, quantise="int8_convrot").layer(0)
    for name, piece in stored.items():
        other = online[name]
        if isinstance(piece, QuantisedLinear):
            assert torch.equal(piece.weight, other.weight) and torch.equal(piece.weight_scale, other.weight_scale)
            assert piece.marker() == other.marker()
        else:
            assert torch.equal(piece, other)
    part = TextLayers(plain, quantise="fp8", exclude=["language_model.layers.0"])
    assert not any(isinstance(piece, QuantisedLinear) for piece in part.layer(0).values())
    assert part.info.online == {"fp8": 14} and set(ENCODERS) >= {"fp8"}


def test_what_is_no_whole_encoder_is_named(plain, weights, tmp_path):
    path = tmp_path / "text.safetensors"

    def refused(given, *messages, **arguments):
        save_file(given, path)
        with pytest.raises(CheckpointError) as error:
            TextLayers(path, **{"layers": LAYERS, **arguments})
        for message in (str(path), *messages):
            assert message in str(error.value)

    gone = "model.layers.1.mlp.up_proj.weight"
    refused(
        {n: t for n, t in weights.items() if n != gone}, f"missing language_model.layers.1.mlp.up_proj.weight ({gone})"
    )
    refused(weights | {"model.layers.1.mlp.bias": torch.ones(2)}, "extra", "model.layers.1.mlp.bias")
    refused(weights | {gone: torch.ones(2, 2)}, "misshapen", "[2, 2]")
    refused({n: t for n, t in weights.items() if "visual" not in n}, "no whole text encoder", "visual.pos_embed.weight")
    refused(weights, "has 3 layers and the condition is the state after layer 50", layers=None)
    refused(quantised("int8", weights, text_linears(3)) | {gone: torch.ones(160, 64)}, "is stored as F32, not as I8")
    with pytest.raises(H3Error, match="give quantise as well"):
        TextLayers(plain, exclude=["language_model.layers.0"])


def test_the_file_itself_says_where_the_condition_is_read(plain):
    assert json.loads(SafetensorsFile(plain).metadata["h3_runtime.config"])["layers"] == LAYERS
    assert TextLayers(plain, layers=2).sizes.layers == 2
    assert set(TextLayers(plain, layers=2).layer(1)) == set(TextLayers(plain).layer(2))
