"""Quantised linears: reference vectors, integer arithmetic, every number type there and back, online quantisation."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from h3_runtime import bench_quant
from h3_runtime.checkpoint.reader import SafetensorsFile
from h3_runtime.errors import CheckpointError, H3Error
from h3_runtime.models.dit import DiT, DiTConfig
from h3_runtime.quant import kernels
from h3_runtime.quant.convrot import (
    check_group,
    choose_group,
    hadamard,
    quantise_float8,
    quantise_int8,
    quantise_rows,
    rotate,
    rotate_rows,
)
from h3_runtime.quant.linear import (
    NUMBER_TYPES,
    IntegerLinear,
    QuantisedLinear,
    linear_from_stored,
    number_type_of,
    what_ran,
)
from h3_runtime.quant.marker import read_marker, write_marker
from h3_runtime.quant.online import DIT_GEMMS, TEXT_GEMMS, VIDEO_VAE_GEMMS, by_part, quantise_linear, quantise_module
from h3_runtime.schedule import Schedule, map_sigma
from h3_runtime.steps import plan_steps
from h3_runtime.verify.cases import forward_values, layout_of
from tests.quant_fixtures import EXAMPLES, draw, example
from tests.small_jobs import one_thread, small_dit  # noqa: F401 (one is a fixture)

GOLDEN = Path(__file__).parent / "golden"
INDEX = json.loads((GOLDEN / "index.json").read_text(encoding="utf-8"))
GROUP_CASES = {
    group: [case for case in INDEX["cases"] if case["group"] == group] for group in ("quant", "quant_linear")
}


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2."""
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def within(got: torch.Tensor, expected: torch.Tensor, tolerance: dict) -> None:
    if "rel_l2" in tolerance:
        assert distance(got, expected) <= tolerance["rel_l2"]
    else:
        torch.testing.assert_close(got, expected, **tolerance)


@cache
def golden_file(name: str) -> SafetensorsFile:
    return SafetensorsFile(GOLDEN / name)


@pytest.fixture
def dequantised(monkeypatch):
    """A machine without an int8 matmul."""
    made = kernels.KernelChoice(kernels.OPS[0], kernels.DEQUANTISED, "as asked by the test")
    monkeypatch.setattr(kernels, "choice", lambda op, device: made)


# ---- reference vectors


@pytest.mark.parametrize("size", [16, 64])
def test_hadamard_is_the_reference(size):
    signs = golden_file("e_linear.safetensors").read(f"hadamard/signs_{size}")
    assert torch.equal(hadamard(size) * size**0.5, signs.float())


def golden_linear(case) -> tuple[QuantisedLinear, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    file, prefix = golden_file(case["file"]), case["prefix"]
    stored = {n.removeprefix("stored."): file.read(prefix + n) for n in case["inputs"] if n.startswith("stored.")}
    others = {n: file.read(prefix + n) for n in (*case["inputs"], *case["outputs"]) if not n.startswith("stored.")}
    shape = (case["config"]["n"], case["config"]["k"])
    return linear_from_stored(stored, None, torch.float32, shape), stored, others


LINEAR_CASES = [case for case in GROUP_CASES["quant_linear"] if "stored" in case["config"]]


@pytest.mark.parametrize("case", LINEAR_CASES, ids=lambda case: case["id"].rpartition("/")[2])
def test_golden_linear(case):
    linear, stored, given = golden_linear(case)
    got = {
        "out_comfy": linear(given["x"]),
        "weight_dequantised": linear.dequantised(),
        "out_dequant": linear._dequantised_rows(linear_input(linear, given["x"]), 0, linear.out_features),
    }
    for name in case["outputs"]:
        within(got[name], given[name], case["tolerance"][name])
    assert distance(got["out_comfy"], given["out_comfy"]) < 1e-6  # far below the tolerance: the same integers
    assert dict(linear.ran) == ({"int8": 1} if isinstance(linear, IntegerLinear) else {"dequantised": 1})
    back = linear.stored()
    assert back.keys() == stored.keys()
    assert all(same_bytes(back[name], stored[name]) for name in stored)


def linear_input(linear, x):
    """What ``prepare`` gives where there is no int8 matmul."""
    return QuantisedLinear.prepare(linear, x) if isinstance(linear, IntegerLinear) else linear.prepare(x)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bytes_of(a) == bytes_of(b)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("case", LINEAR_CASES, ids=lambda case: case["id"].rpartition("/")[2])
def test_golden_weight_is_quantised_to_the_same_bytes(case):
    """The references' own weights through our quantisers; a rotation of 256 may differ by the last bit of a matmul."""
    _, stored, given = golden_linear(case)
    form, group = case["config"]["format"], case["config"]["group"] or None
    if form in ("int8_convrot", "int8_row"):
        values, scale = quantise_int8(given["weight_original"], group)
        assert torch.equal(values, stored["weight"])
        torch.testing.assert_close(scale, stored["weight_scale"], rtol=1e-6, atol=0)
    elif form == "fp8":
        values, scale = quantise_float8(given["weight_original"])
        assert same_bytes(values, stored["weight"]) and torch.equal(scale, stored["weight_scale"])
    else:
        assert form in ("int8_tensor", "nvfp4", "nvfp4_awq")  # read here, not made here


@cache
def golden_dit(file: str, dtype: torch.dtype) -> DiT:
    """The DiT of a quantised reference file: each layer as it is stored, the rest cast."""
    tensors = {name: golden_file(file).read(name) for name in golden_file(file).shapes}
    dit = DiT(DiTConfig.from_shapes({name: tuple(tensor.shape) for name, tensor in tensors.items()}))
    for name in [name for name in tensors if name.endswith(".comfy_quant")]:
        layer, prefix = name.removesuffix(".comfy_quant"), name.removesuffix("comfy_quant")
        stored = {n.removeprefix(prefix): tensors.pop(n) for n in list(tensors) if n.startswith(prefix)}
        owner, _, leaf = layer.rpartition(".")
        setattr(dit.get_submodule(owner), leaf, linear_from_stored(stored, None, dtype, where=layer))
    for name, tensor in tensors.items():
        island = name.startswith(dit.float32_islands)
        tensors[name] = tensor.to(torch.float32 if island else dtype)
    dit.load_state_dict(tensors, strict=False, assign=True)
    return dit.requires_grad_(False)


FORWARD_CASES = [case for case in GROUP_CASES["quant"] if case["inputs"]]


def golden_forward(case, dtype) -> dict[str, torch.Tensor]:
    given = {name: golden_file(case["file"]).read(case["prefix"] + name) for name in case["inputs"]}
    layout = layout_of(case["config"], given["text_token_tags"])
    sigma = given["sigma"]
    schedule = Schedule((sigma.item(), 0.0), (map_sigma(sigma, 12.0, 3.0).item(), 0.0), 0, 1)
    return forward_values(golden_dit(case["config"]["weights"], dtype), layout, plan_steps(layout, schedule), given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", FORWARD_CASES, ids=lambda case: case["id"].removeprefix("quant/"))
def test_golden_forward(case, dtype):
    values = golden_forward(case, dtype)
    suffix = "_bf16" if dtype == torch.bfloat16 else ""
    for stream in ("video", "audio"):
        name = f"out_comfy_{stream}{suffix}"
        expected = golden_file(case["file"]).read(case["prefix"] + name)
        within(values[f"out_comfy_{stream}"].to(expected.dtype), expected, case["tolerance"][name])


@pytest.mark.parametrize("case", FORWARD_CASES, ids=lambda case: case["id"].removeprefix("quant/"))
def test_golden_forward_without_int8(case, dequantised):
    values = golden_forward(case, torch.float32)
    for stream in ("video", "audio"):
        name = f"out_dequant_{stream}"
        expected = golden_file(case["file"]).read(case["prefix"] + name)
        within(values[f"out_comfy_{stream}"], expected, case["tolerance"][name])


def test_golden_weights_decode():
    for case in GROUP_CASES["quant"]:
        if case["id"].startswith("quant/dequant:"):
            dit = golden_dit(case["file"].replace("_dequant", ""), torch.float32)
            for name in case["outputs"]:
                linear = dit.get_submodule(name.removesuffix(".weight"))
                within(linear.dequantised().half(), golden_file(case["file"]).read(name), case["tolerance"][name])


# ---- rotation and quantisers


@pytest.mark.parametrize("group", [4, 16, 64, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_is_its_own_inverse_and_fast_form_agrees(group, dtype):
    x = draw(5, 512).to(dtype)
    turned = rotate(x.double(), group)
    torch.testing.assert_close(rotate(turned, group), x.double())
    fast = rotate_rows(x[:, :256], group, torch.empty(5, 256))  # not contiguous
    assert fast.dtype == torch.float32
    assert distance(fast, turned[:, :256]) < (2e-7 if dtype == torch.float32 else 4e-3)


def test_group_rule():
    features = (5376, 2048, 192, 80, 12, 10, 7)
    assert [choose_group(n) for n in features] == [256, 256, 64, 16, 4, None, None]
    assert choose_group(5376, 64) == 64
    for group in (0, 2, 8, 32, 100):
        with pytest.raises(H3Error, match="power of four"):
            hadamard(group)
    with pytest.raises(H3Error, match=r"256 does not divide the layer's 192 inputs"):
        check_group(192, 256)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns", "group"), [(33, 512, 256), (7, 192, 64), (3, 20, None), (1, 16, 4)])
def test_weights_are_quantised_as_comfy_kitchen_does(dtype, rows, columns, group, monkeypatch):
    eager = pytest.importorskip("comfy_kitchen.backends.eager.quantization", reason="needs comfyui: no comfy-kitchen")
    weight = (draw(rows, columns) * 0.02).to(dtype)
    weight[rows // 2] = 0
    for chunk in (1 << 24, 17 * columns):
        monkeypatch.setattr("h3_runtime.quant.convrot.WEIGHT_CHUNK", chunk)
        got = quantise_int8(weight, group)
        expected = (
            eager.quantize_int8_rowwise(weight) if group is None else eager.quantize_int8_convrot_weight(weight, group)
        )
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
        values, scale = quantise_float8(weight)
        assert same_bytes(values, eager.quantize_per_tensor_fp8(weight, scale, torch.float8_e4m3fn))


@pytest.mark.parametrize("group", [None, 16, 256])
def test_rows_are_quantised_to_their_own_scale(group, monkeypatch):
    x = draw(37, 512) * torch.logspace(-6, 6, 37)[:, None]
    x[3] = 0
    whole = quantise_rows(x, group)
    monkeypatch.setattr("h3_runtime.quant.convrot.CPU_CHUNK", 1500)
    values, scale = quantise_rows(x, group)
    assert torch.equal(values, whole[0]) and torch.equal(scale, whole[1])
    turned = x if group is None else rotate(x.double(), group)
    assert ((values * scale.double() - turned).abs() <= scale * 0.5001).all()
    assert values[3].eq(0).all() and values.abs().amax(-1)[[0, 36]].eq(127).all()


# ---- int8 is int8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "outputs", "features", "group"), [(70, 96, 512, 256), (1, 7, 12, 4), (5, 9, 11, None)]
)
def test_int8_sums_are_the_integer_reference(dtype, rows, outputs, features, group, monkeypatch):
    monkeypatch.setattr(kernels, "CPU_SUMS", 64 * 48)  # several pieces
    monkeypatch.setattr(kernels, "SCALED", 200)
    linear = nn.Linear(features, outputs)
    quantised = quantise_linear(linear.to(dtype), "int8" if group is None else "int8_convrot")
    assert quantised.group == group
    x = draw(rows, features).to(dtype)
    prepared = quantised.prepare(x)
    sums = kernels.int8_matmul(prepared.values, quantised.weight)
    assert sums.dtype == torch.int32
    assert torch.equal(sums.long(), prepared.values.long() @ quantised.weight.long().T)
    expected = sums.double() * prepared.scale * quantised.weight_scale.T + quantised.bias.double()
    got = quantised(x)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=2e-6 if dtype == torch.float32 else 4e-3, atol=1e-6)
    assert distance(got, nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())) < 0.03


def test_every_quantised_linear_of_a_dit_runs_int8():
    dit = copy.deepcopy(small_dit())
    names = quantise_module(dit, "int8_convrot")
    kernels.COUNTS.reset()
    bench_quant.run_blocks(dit, torch.float32, rows=40)
    ran = what_ran(dit)
    assert sorted(ran) == sorted(names)
    for name, counts in ran.items():
        assert counts == {"int8": 3 if name.endswith("qkv_proj") else 1}, name  # q, k, v of one head group
    assert kernels.stats() == {"int8_tensorwise": {"int8": sum(c["int8"] for c in ran.values())}}


def test_a_fallback_is_counted(dequantised):
    linear = quantise_linear(nn.Linear(64, 16), "int8_convrot")
    kernels.COUNTS.reset()
    x = draw(4, 64)
    torch.testing.assert_close(linear(x), nn.functional.linear(x, linear.dequantised(), linear.bias))
    assert dict(linear.ran) == {"dequantised": 1}
    assert kernels.stats() == {"int8_tensorwise": {"dequantised": 1}}


def test_a_broken_input_shows():
    linear = quantise_linear(nn.Linear(64, 16), "int8_convrot")
    x = draw(3, 64)
    clean = linear(x)
    x[1, 5] = float("inf")
    x[2, 5] = float("nan")
    got = linear(x)
    assert torch.equal(got[0], clean[0])
    assert not got[1].isfinite().any() and not got[2].isfinite().any()


# ---- every number type


@pytest.mark.parametrize("name", EXAMPLES)
def test_number_type_there_and_back(name):
    made = example(name)
    linear = made.linear(torch.float32)
    assert type(linear) is NUMBER_TYPES[linear.number_type].linear
    assert (linear.out_features, linear.in_features) == made.weight.shape
    torch.testing.assert_close(linear.dequantised(), made.weight, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(linear.dequantised(5, 23), made.weight[5:23], rtol=1e-6, atol=1e-6)
    again = linear_from_stored(linear.stored(), None, torch.float32, made.weight.shape)
    assert again.marker() == linear.marker()
    assert torch.equal(again.dequantised(), linear.dequantised())
    assert linear.bytes == sum(buffer.nbytes for buffer in linear.buffers()) > 0
    assert not [name for name, _ in linear.named_parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EXAMPLES)
def test_forward_and_rows(name, dtype):
    made = example(name)
    linear = made.linear(dtype)
    x = draw(2, 3, made.weight.shape[1], seed=5).to(dtype)
    smooth = made.tensors.get("pre_quant_scale", torch.ones(()))
    expected = nn.functional.linear(x.double() * smooth.double(), made.weight.double(), made.bias.double())
    got = linear(x)
    assert got.dtype == dtype and got.shape == expected.shape and got.is_contiguous()
    integers = isinstance(linear, IntegerLinear)
    assert distance(got, expected) < (0.02 if integers else 3e-6 if dtype == torch.float32 else 0.008)
    prepared = linear.prepare(x)
    for start, stop in ((0, 16), (3, 20), (20, made.weight.shape[0])):
        part = linear.rows(prepared, start, stop)
        assert part.is_contiguous()
        if integers:
            assert torch.equal(part, got[..., start:stop])
        else:
            assert distance(part, got[..., start:stop]) < (1e-6 if dtype == torch.float32 else 0.004)
        assert torch.equal(part, linear.rows(x, start, stop))
    assert linear.ran.total() == 7


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_rows_and_gradients(name):
    linear = example(name).linear(torch.float32)
    assert linear(draw(0, linear.in_features)).shape == (0, linear.out_features)
    x = draw(2, linear.in_features).requires_grad_()
    assert torch.equal(linear(x), linear(x.detach()))  # an upstream layer may track gradients; this one does not
    with torch.inference_mode():
        inside = linear(draw(3, linear.in_features))
    assert torch.equal(linear(draw(3, linear.in_features)), inside)


@pytest.mark.parametrize("name", EXAMPLES)
def test_casting_the_model_keeps_number_types(name):
    linear = example(name).linear(torch.float32)
    before = {key: (tensor.dtype, bytes_of(tensor)) for key, tensor in linear.named_buffers()}
    nn.Sequential(linear).to(torch.float16).to(torch.float32)
    assert {key: (tensor.dtype, bytes_of(tensor)) for key, tensor in linear.named_buffers()} == before


def test_old_float8_names_and_plain_casts():
    weight = draw(32, 48).to(torch.float8_e4m3fn)
    scale = torch.tensor(0.25)
    old = {"weight": weight, "scale_weight": scale, "scale_input": torch.tensor(2.0)}
    linear = linear_from_stored(old, None, torch.bfloat16)
    assert torch.equal(linear.dequantised(), weight.float() * 0.25)
    assert linear.stored().keys() == {"weight", "weight_scale", "input_scale", "comfy_quant"}
    assert torch.equal(linear_from_stored({"weight": weight}, None, torch.bfloat16).dequantised(), weight.float())
    rows = {"weight": weight, "weight_scale": torch.arange(32.0)[:, None]}
    linear = linear_from_stored(rows, {"format": "float8_e4m3fn"}, torch.bfloat16)
    assert torch.equal(linear.dequantised(2, 4), weight[2:4].float() * torch.tensor([[2.0], [3.0]]))


def test_float8_matmul_where_the_card_has_it(monkeypatch):
    made = kernels.KernelChoice(kernels.OPS[1], kernels.SCALED_MM, "as asked by the test")
    monkeypatch.setattr(kernels, "choice", lambda op, device: made)
    monkeypatch.setattr(kernels, "float8_matmul", lambda a, b: a.float() @ b.float().T)  # the kernel's eager twin
    linear = quantise_linear(nn.Linear(256, 48).bfloat16(), "fp8")
    x = (draw(9, linear.in_features) * torch.logspace(-4, 4, 9)[:, None]).bfloat16()
    expected = nn.functional.linear(x.double(), linear.dequantised().double(), linear.bias.double())
    got = linear(x)
    assert ((got - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < 0.06
    assert torch.equal(linear.rows(x, 5, 23), got[:, 5:23])
    assert dict(linear.ran) == {"float8": 2}
    odd = example("float8_e4m3fn").linear(torch.bfloat16)  # 40 outputs: not a multiple of 16
    odd(x)
    assert dict(odd.ran) == {"dequantised": 1}
    linear.full_precision = True
    assert distance(linear(x), expected) < 0.01
    assert linear.ran["dequantised"] == 1
    assert read_marker(linear.stored()["comfy_quant"]) == {
        "format": "float8_e4m3fn",
        "full_precision_matrix_mult": True,
    }


@pytest.mark.parametrize("name", ["convrot_w4a4", "asym_w4a8_int8", "mxfp8", "nvfp4", "int8_tensorwise"])
def test_decoding_agrees_with_comfy_kitchen(name):
    eager = pytest.importorskip("comfy_kitchen.backends.eager", reason="needs comfyui: no comfy-kitchen")
    weight = draw(48, 256) * 0.02
    if name == "convrot_w4a4":
        values, scale = eager.quantize_convrot_w4a4_weight(weight, 64)
        tensors, marker = {"weight": values, "weight_scale": scale}, {"convrot_groupsize": 64}
        expected = eager.dequantize_convrot_w4a4_weight(values, scale, 64)
    elif name == "asym_w4a8_int8":
        values, relative, channel, _, codebook = eager.quantize_w4a8_int8_weight(weight)
        tensors = {"weight": values, "weight_s_rel": relative, "weight_s_channel": channel}
        tensors, marker = {**tensors, "weight_codebook": codebook}, {"group_size": 16, "convrot_groupsize": 256}
        expected = eager.dequantize_w4a8_int8_weight(values, relative, channel, codebook, output_dtype=torch.float32)
    elif name == "mxfp8":
        values, scale = eager.quantize_mxfp8(weight)
        tensors, marker = {"weight": values, "weight_scale": scale}, {}
        expected = eager.dequantize_mxfp8(values, scale, torch.float32)
    elif name == "nvfp4":
        top = weight.abs().max() / (448 * 6)
        values, scale = eager.quantize_nvfp4(weight, top)
        tensors, marker = {"weight": values, "weight_scale": scale, "weight_scale_2": top}, {}
        expected = eager.dequantize_nvfp4(values, top, scale, torch.float32)
    else:
        values, scale = eager.quantize_int8_convrot_weight(weight, 256)
        tensors, marker = {"weight": values, "weight_scale": scale}, {"convrot": True, "convrot_groupsize": 256}
        expected = eager.dequantize_int8_convrot_weight(values, scale, 256)
    linear = linear_from_stored(tensors, {"format": name, **marker}, torch.float32)
    torch.testing.assert_close(linear.dequantised(), expected, rtol=1e-6, atol=1e-8)
    assert distance(linear.dequantised(), weight) < 0.2


def test_comfy_kitchen_path_gives_the_same(monkeypatch):
    """Its plain backend stands in for its kernels: same integers, scales in another order."""
    pytest.importorskip("comfy_kitchen", reason="needs comfyui: no comfy-kitchen")
    linear, x = example("int8_tensorwise").linear(torch.float32), draw(6, 256)
    ours = linear(x)
    made = kernels.KernelChoice(kernels.OPS[0], f"{kernels.KITCHEN}/eager", "as asked by the test")
    monkeypatch.setattr(kernels, "choice", lambda op, device: made)
    assert distance(linear(x), ours) < 1e-3 and distance(linear.rows(linear.prepare(x), 4, 20), ours[:, 4:20]) < 1e-3
    monkeypatch.setattr(kernels, "KITCHEN_GROUPS", ())  # a shape it does not take
    assert torch.equal(linear(x), ours)
    assert dict(linear.ran) == {"int8": 4}


# ---- what is refused


INT8 = {"weight": torch.zeros(8, 64, dtype=torch.int8), "weight_scale": torch.ones(8, 1)}


@pytest.mark.parametrize(
    ("tensors", "marker", "words"),
    [
        (INT8, {"format": "int7"}, r"'int7'; read are int8_tensorwise"),
        (INT8, None, "int8 without a comfy_quant marker"),
        ({"weight": INT8["weight"]}, {"format": "int8_tensorwise"}, "lacks weight_scale"),
        ({**INT8, "weight_zero": torch.ones(1)}, {"format": "int8_tensorwise"}, "weight_zero, which is unknown"),
        ({**INT8, "weight_scale": torch.ones(3)}, {"format": "int8_tensorwise"}, "one value or 8 are allowed"),
        ({**INT8, "weight": torch.zeros(8, 64)}, {"format": "int8_tensorwise"}, "float32; int8 is needed"),
        ({**INT8, "weight": INT8["weight"][0]}, {"format": "int8_tensorwise"}, "a matrix is needed"),
        (INT8, {"format": "int8_tensorwise", "convrot": True}, "256 does not divide"),
        (INT8, {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": "x"}, "'x' is not a whole number"),
        (INT8, {"format": "convrot_w4a4", "convrot_groupsize": 256}, "256 does not divide"),
        (INT8, {"format": "nvfp4"}, "lacks weight_scale_2"),
        (
            {**INT8, "weight": torch.zeros(8, 64, dtype=torch.float8_e4m3fn)},
            {"format": "mxfp8"},
            r"8 values; 512 are needed",
        ),
        ({"weight": torch.zeros(8, 64, dtype=torch.uint8)}, {"format": "gguf", "type": "Q9_X"}, "Q9_X is unknown"),
        ({"weight": torch.zeros(8, 64, dtype=torch.uint8)}, {"format": "gguf", "type": "Q4_K"}, "Q4_K blocks of 144"),
    ],
)
def test_what_cannot_be_read_is_named(tensors, marker, words):
    with pytest.raises(CheckpointError, match=words):
        linear_from_stored(tensors, marker, torch.float32, where="blocks.3.mlp.fc1")


def test_shape_against_the_model():
    with pytest.raises(CheckpointError, match=r"fc2: weight is 8 x 64; the model needs 8 x 72"):
        linear_from_stored(INT8, {"format": "int8_tensorwise"}, torch.float32, (8, 72), "fc2")


def test_plain_layers_are_left_alone():
    assert number_type_of(None, {"weight": torch.bfloat16, "bias": torch.float32}) is None
    assert linear_from_stored({"weight": torch.zeros(2, 2)}, None, torch.float32) is None


@pytest.mark.parametrize("raw", [b"{", b"[1]", b'{"format": 3}', b"\xff\xfe", b"", b"[" * 5000])
def test_a_broken_marker_is_named(raw):
    with pytest.raises(CheckpointError, match=r"marker of blocks\.0"):
        read_marker(torch.tensor(list(raw), dtype=torch.uint8), "blocks.0")


def test_options_may_stand_under_params():
    marker = {"format": "int8_tensorwise", "params": {"convrot": True, "convrot_groupsize": 16}}
    assert linear_from_stored(INT8, read_marker(write_marker(marker)), torch.float32).group == 16


# ---- online


@pytest.mark.parametrize(("scheme", "near"), [("int8_convrot", 0.02), ("int8", 0.02), ("fp8", 0.06)])
def test_quantising_a_module_changes_the_gemms_alone(scheme, near):
    plain, dit = small_dit(), copy.deepcopy(small_dit())
    names = quantise_module(dit, scheme)
    parts = ("attn.out_proj", "attn.qkv_proj", "mlp.fc1", "mlp.fc2")
    assert sorted(names) == [f"blocks.{block}.{part}" for block in (0, 1) for part in parts]
    changed = {n for n, m in dit.named_modules() if isinstance(m, QuantisedLinear)}
    assert changed == set(names)
    before = dict(plain.named_parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in dit.named_parameters())
    expected, got = (bench_quant.run_blocks(model, torch.float32, rows=40) for model in (plain, dit))
    assert 1e-5 < distance(got, expected) < near
    assert DIT_GEMMS.search("token_refiner.blocks.0.attn.qkv_proj") is None
    if scheme != "fp8":
        written = {f"{name}.{key}": value for name in names for key, value in dit.get_submodule(name).stored().items()}
        assert len(written) == 3 * len(names)


def test_exclusions():
    dit = copy.deepcopy(small_dit())
    assert sorted(quantise_module(dit, "int8", exclude=("blocks.0", "*.fc2"))) == [
        "blocks.1.attn.out_proj",
        "blocks.1.attn.qkv_proj",
        "blocks.1.mlp.fc1",
    ]
    with pytest.raises(H3Error, match=r"'blocks.7' matches no linear"):
        quantise_module(copy.deepcopy(small_dit()), "int8", exclude=("blocks.7",))
    with pytest.raises(H3Error, match="no linear is left"):
        quantise_module(copy.deepcopy(small_dit()), "int8", exclude=("blocks.*",))
    with pytest.raises(H3Error, match="'int4' is unknown; take one of int8_convrot, int8, fp8"):
        quantise_module(dit, "int4")


def test_parts_are_named_with_their_scheme():
    assert by_part(None) == {} and by_part("int8") == {"dit": ("int8", ())}
    asked = by_part("dit=int8_convrot, text=fp8,video_vae=int8", ("blocks.0.*", "text:a", "dit:b", "text:c"))
    assert asked == {
        "dit": ("int8_convrot", ("blocks.0.*", "b")),
        "text_encoder": ("fp8", ("a", "c")),
        "video_vae": ("int8", ()),
    }


@pytest.mark.parametrize(
    ("quantise", "exclude", "words"),
    [
        ("int4", (), "'int4' is unknown"),
        ("", (), "a part without its way"),
        ("text=", (), "a part without its way"),
        ("dit=int8,", (), "a part without its way"),
        ("sound=int8", (), "part 'sound' is unknown; take one of dit, text, video_vae"),
        ("text=int8,text=fp8", (), "names text twice"),
        ("text=int8", ("blocks.0.*",), "of 'dit' out of a quantisation, and that is not quantised"),
        ("int8", ("text:a",), "of 'text' out of a quantisation, and that is not quantised"),
        ("int8", ("sound:a",), "'sound' out of a quantisation, and that is not among dit, text, video_vae"),
        (None, ("blocks.0.*",), "give quantise"),
    ],
)
def test_parts_that_cannot_be_read_are_named(quantise, exclude, words):
    with pytest.raises(H3Error, match=words):
        by_part(quantise, exclude)


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        (TEXT_GEMMS, "model.layers.49.self_attn.o_proj", "visual.blocks.0.attn.qkv"),
        (TEXT_GEMMS, "layers.3.mlp.gate_proj", "layers.3.self_attn.q_norm"),
        (VIDEO_VAE_GEMMS, "decoder.transformer_blocks.35.ff.w2", "decoder.proj_out"),
        (DIT_GEMMS, "blocks.49.mlp.fc2", "blocks.49.adaln_proj.linear"),
    ],
)
def test_the_linears_of_each_part(pattern, yes, no):
    assert pattern.search(yes) and not pattern.search(no)


# ---- speed


def test_bench_names_and_that_every_linear_was_quantised():
    from dataclasses import replace

    config = replace(bench_quant.CONFIG, hidden=64, layers=2, heads=2, head_dim=32, ffn=128, rope_frequencies=4)
    results = {row["name"]: row["value"] for row in bench_quant.bench_cpu(config, rows=16, repeat=1)}
    assert min(results["int8_to_bf16"], results["int8_to_fp32"]) > 0
    assert results["linears"] == 8 and any(name.startswith("kernel/") for name in results)
    shares = {name.removeprefix("share/"): value for name, value in results.items() if name.startswith("share/")}
    parts = {"matmul", "rotation", "rounding", "scaling", "attention", "norms"}
    assert set(shares) == {*parts, "other"} and sum(shares.values()) == pytest.approx(1)
    assert min(shares[name] for name in parts) > 0
    int8, bf16 = results["int8"], results["bf16"]
    plain = shares["matmul"] * int8 / results["matmul_int8_to_bf16"]  # seconds of the matmuls in bf16
    assert results["floor_to_bf16"] == pytest.approx((bf16 - plain + shares["matmul"] * int8) / bf16)


def test_the_parts_of_a_block_do_its_own_work(monkeypatch):
    """Each part alone calls what the INT8 block calls, as often and on as many rows and columns."""
    from dataclasses import replace

    config = replace(bench_quant.CONFIG, hidden=64, layers=1, heads=10, head_dim=32, ffn=128, rope_frequencies=4)
    half = bench_quant.DiT(config).eval().requires_grad_(False).to(torch.bfloat16)
    quantised = bench_quant.copy.deepcopy(half)
    bench_quant.quantise_module(quantised, "int8_convrot")
    parts = bench_quant.parts_of_block(quantised.blocks[0], half.blocks[0], config, 40)
    kernels.choices("cpu")  # its probe multiplies too
    done = []
    int_mm = torch._int_mm

    def count_matmul(a, b, **out):
        done.append(a.shape[0] * a.shape[1] * b.shape[1])
        return int_mm(a, b, **out)

    monkeypatch.setattr(torch, "_int_mm", count_matmul)
    bench_quant.run_blocks(quantised, torch.bfloat16, 40)
    within, alone = sum(done), len(done)
    parts["matmul"]()
    assert sum(done[alone:]) == within > 0
    shapes = []
    monkeypatch.setattr(bench_quant, "dense_attention", lambda q, k, v, where: shapes.append(q.shape) or q)
    parts["attention"]()
    bench_quant.run_blocks(quantised, torch.bfloat16, 40)
    assert shapes[:2] == shapes[2:] == [(40, 8, 32), (40, 2, 32)]


def test_the_bench_of_a_card_tells_kernels_and_both_methods():
    from dataclasses import replace

    config = replace(bench_quant.CONFIG, hidden=64, layers=1, heads=2, head_dim=32, ffn=128, rope_frequencies=4)
    rows = bench_quant.bench_card(torch.device("cpu"), config, rows=16, repeat=1)
    results = {row["name"]: row["value"] for row in rows}
    assert results["card/int8_to_bf16"] == pytest.approx(results["card/int8"] / results["card/bf16"])
    assert results["card/fp8_to_bf16"] == pytest.approx(results["card/fp8"] / results["card/bf16"])
    assert results["card/kernel/int8/aten::_int_mm"] > 0 and "card/kernel/fp8/aten::_int_mm" not in results
    for method in ("int8", "fp8"):
        shares = [value for name, value in results.items() if name.startswith(f"card/kernel/{method}/")]
        assert len(shares) <= bench_quant.SHOWN and shares == sorted(shares, reverse=True) and 0.3 < sum(shares) <= 1
