"""Which kernel runs where and why, what a card allows, what a missing library says; GGUF blocks against the package."""

from __future__ import annotations

import builtins
import importlib
import logging
import threading

import pytest
import torch

from h3_runtime.errors import CheckpointError, MissingDependency
from h3_runtime.quant import gguf, kernels
from h3_runtime.quant.kernels import (
    DEQUANTISED,
    INT_MM,
    SCALED_MM,
    Device,
    Kitchen,
    allowed,
    choose_float8,
    choose_int8,
    kitchen_backend,
)
from h3_runtime.quant.linear import NUMBER_TYPES, linear_from_stored
from tests.quant_fixtures import integers
from tests.small_jobs import one_thread  # noqa: F401 (a fixture)

NONE = Kitchen(missing="comfy-kitchen is not installed")
ALL = Kitchen(("cuda", "triton", "eager"), triton=(3, 6))


def works(*_) -> str:
    return ""


def fails(*_) -> str:
    return "RuntimeError: no"


@pytest.fixture
def anew():
    kernels.forget_choices()
    yield
    kernels.forget_choices()


def cuda(major: int, minor: int, toolkit: tuple[int, ...] = (13, 0)) -> Device:
    return Device("cuda", (major, minor), toolkit=toolkit)


# ---- the table of capabilities


@pytest.mark.parametrize(
    ("device", "int8", "float8"),
    [
        (cuda(7, 0), DEQUANTISED, DEQUANTISED),
        (cuda(7, 5), "int8", DEQUANTISED),
        (cuda(8, 6), "int8", DEQUANTISED),
        (cuda(8, 9), "int8", "float8"),
        (cuda(12, 0), "int8", "float8"),
        (Device("cpu"), "int8", DEQUANTISED),
    ],
    ids=str,
)
def test_allowed(device, int8, float8):
    rows = {row.number_type: row for row in allowed(device)}
    assert rows.keys() == NUMBER_TYPES.keys()
    for name, row in rows.items():
        integers_inside = name in ("int8_tensorwise", "convrot_w4a4", "asym_w4a8_int8")
        assert row.arithmetic == (int8 if integers_inside else float8 if name == "float8_e4m3fn" else DEQUANTISED)
        if row.arithmetic == DEQUANTISED:
            assert row.note == "saves memory, not time"
        else:
            assert row.note.startswith("saves memory") and "not time" not in row.note
    assert ("Ampere" in rows["int8_tensorwise"].note) == (device.capability == (8, 6))


@pytest.mark.parametrize(
    ("device", "library", "kernel", "int_mm", "backend", "words"),
    [
        (cuda(7, 0), ALL, works, works, DEQUANTISED, "7.0 has no int8 tensor cores"),
        (cuda(7, 5), ALL, works, works, "comfy-kitchen/cuda", "compute capability 7.5"),
        (cuda(8, 6), ALL, works, works, "comfy-kitchen/cuda", "checked on this device"),
        (cuda(8, 6, (12, 8)), ALL, works, works, "comfy-kitchen/triton", "checked"),
        (cuda(7, 5, (12, 8)), ALL, works, works, INT_MM, "CUDA 13 or newer"),
        (cuda(12, 0), NONE, works, works, INT_MM, "comfy-kitchen is not installed"),
        (cuda(12, 0), Kitchen(("eager",)), works, works, INT_MM, "no kernel switched on"),
        (cuda(12, 0), ALL, fails, works, INT_MM, "cuda kernel was tried and failed here (RuntimeError: no)"),
        (cuda(12, 0), ALL, fails, fails, DEQUANTISED, "torch._int_mm was tried and failed here"),
        (Device("cpu"), ALL, works, works, INT_MM, "slower than ours"),
        (Device("cpu"), NONE, works, fails, DEQUANTISED, "memory, not time"),
        (Device("mps"), NONE, works, fails, DEQUANTISED, "RuntimeError: no"),
        (Device("hip", architecture="gfx1100"), Kitchen(("hip",)), works, works, "comfy-kitchen/hip", "gfx1100"),
        (
            Device("hip", architecture="gfx1100"),
            Kitchen(("triton",), triton=(3, 7)),
            works,
            works,
            "comfy-kitchen/triton",
            "",
        ),
        (Device("hip", architecture="gfx1100"), ALL, works, works, INT_MM, "no kernel switched on"),
        (Device("hip", architecture="gfx1030"), Kitchen(("triton",), triton=(3, 7)), works, works, INT_MM, "gfx1030"),
    ],
)
def test_int8_choice(device, library, kernel, int_mm, backend, words):
    made = choose_int8(device, library, int_mm, kernel)
    assert made.backend == backend and words in made.reason and made.op == "int8 linear"


@pytest.mark.parametrize(
    ("device", "probe", "backend", "words"),
    [
        (cuda(8, 6), works, DEQUANTISED, "8.6 has no float8 tensor cores"),
        (cuda(8, 9), works, SCALED_MM, "float8 tensor cores"),
        (cuda(12, 0), fails, DEQUANTISED, "RuntimeError: no"),
        (Device("cpu"), works, DEQUANTISED, "memory, not time"),
    ],
)
def test_float8_choice(device, probe, backend, words):
    made = choose_float8(device, probe)
    assert made.backend == backend and words in made.reason


# ---- this machine


def test_choices_here_are_logged_once_and_never_import_the_library(anew, caplog, monkeypatch):
    def refuse(name, *arguments, **options):
        raise AssertionError(f"imported {name}")

    monkeypatch.setattr(importlib, "import_module", refuse)
    with caplog.at_level(logging.INFO, "h3_runtime.quant"):
        made = kernels.choices("cpu")
        assert kernels.choices("cpu") == made
    assert [choice.op for choice in made] == list(kernels.OPS)
    assert made[0].backend == INT_MM
    assert len(caplog.messages) == len(kernels.OPS)
    assert all(choice.reason in message for choice, message in zip(made, caplog.messages))


def test_an_int8_matmul_that_saturates_is_not_used(anew, monkeypatch):
    exact = kernels.int8_matmul
    monkeypatch.setattr(kernels, "int8_matmul", lambda a, b: exact(a, b).clamp(max=2**15 - 1))
    made = kernels.choice(kernels.OPS[0], "cpu")
    assert made.backend == DEQUANTISED and "its sums are not exact" in made.reason


def test_probes_accept_what_agrees_and_refuse_what_does_not(monkeypatch):
    place = torch.device("cpu")
    assert kernels._attempt(kernels._probe_int_mm, place) == ""
    monkeypatch.setattr(kernels, "float8_matmul", lambda a, b: a.float() @ b.float().T)
    assert kernels._attempt(kernels._probe_scaled_mm, place) == ""
    monkeypatch.setattr(kernels, "float8_matmul", lambda a, b: a.float() @ b.float().T * 1.1)
    assert kernels._attempt(kernels._probe_scaled_mm, place) == "off by 0.1"
    monkeypatch.setattr(kernels, "kitchen_int8", lambda *arguments: None)
    assert kernels._attempt(kernels._probe_kitchen, place, "cuda") == "it does not take this shape"
    monkeypatch.setattr(kernels, "float8_matmul", lambda a, b: 1 / 0)
    assert kernels._attempt(kernels._probe_scaled_mm, place) == "ZeroDivisionError: division by zero"


def test_probe_of_comfy_kitchen(anew):
    pytest.importorskip("comfy_kitchen", reason="needs comfyui: no comfy-kitchen")
    assert kernels._attempt(kernels._probe_kitchen, torch.device("cpu"), "eager") == ""
    assert "eager" in kernels.kitchen().backends
    assert kitchen_backend(Device("cpu"), kernels.kitchen())[0] is None


def test_padding_for_cards():
    """What cuBLAS takes: more than 16 rows, sizes in multiples of 8. The padding itself runs anywhere."""
    a, b = integers(-128, 128, 3, 13).to(torch.int8), integers(-128, 128, 5, 13).to(torch.int8)
    padded = kernels._padded(kernels._padded(a, 0, 32), 1, 8), kernels._padded(kernels._padded(b, 0, 32), 1, 8)
    assert [tuple(x.shape) for x in padded] == [(32, 16), (32, 16)]
    sums = torch._int_mm(padded[0], padded[1].T)[:3, :5]
    assert torch.equal(sums.long(), a.long() @ b.long().T)


# ---- libraries that are not there


@pytest.fixture
def without(monkeypatch, anew):
    def hide(name: str) -> None:
        real_module, real_import = importlib.import_module, builtins.__import__

        def refused(wanted, *arguments, real, **options):
            if wanted.split(".")[0] == name:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            return real(wanted, *arguments, **options)

        monkeypatch.setattr(importlib, "import_module", lambda *a, **o: refused(*a, real=real_module, **o))
        monkeypatch.setattr(builtins, "__import__", lambda *a, **o: refused(*a, real=real_import, **o))

    return hide


def test_without_comfy_kitchen(without):
    without("comfy_kitchen")
    assert kernels.kitchen() == Kitchen(missing="comfy-kitchen is not installed")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ModuleNotFoundError("No module named 'packaging'", name="packaging"), "needs the package packaging"),
        (OSError("_C.so: undefined symbol"), "cannot be imported: _C.so: undefined symbol"),
    ],
)
def test_a_broken_comfy_kitchen(anew, monkeypatch, error, words):
    def broken(name):
        raise error

    monkeypatch.setattr(importlib, "import_module", broken)
    assert words in kernels.kitchen().missing


def test_gguf_types_without_the_package(without):
    without("gguf")
    rows = torch.zeros(2, 34, dtype=torch.uint8)
    assert torch.equal(gguf.decode(rows, "Q8_0"), torch.zeros(2, 32))  # ours needs no package
    with pytest.raises(MissingDependency, match=r"type IQ4_NL needs the package gguf.*pip install gguf"):
        linear_from_stored({"weight": rows[:, :18]}, {"format": "gguf", "type": "IQ4_NL"}, torch.float32)


# ---- counts


def test_counts_from_many_threads():
    counts = kernels.Counts()
    threads = [threading.Thread(target=lambda: [counts.add("nvfp4", DEQUANTISED) for _ in range(500)]) for _ in "1234"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts.add("int8_tensorwise", "int8")
    assert counts.snapshot() == {"int8_tensorwise": {"int8": 1}, "nvfp4": {DEQUANTISED: 2000}}
    counts.reset()
    assert counts.snapshot() == {}


# ---- GGUF

HALVES = {  # where a block's float16 scales stand; random bytes there would be NaN
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "IQ3_S": (0,),
    "TQ2_0": (64,),
}


@pytest.mark.parametrize("name", HALVES)
def test_gguf_blocks_decode_as_the_package_does(name):
    package = pytest.importorskip("gguf")
    block = gguf.block_type(name)
    blocks = integers(0, 256, 7, 3, block.nbytes, seed=len(name)).to(torch.uint8)
    for at in HALVES[name]:
        scale = torch.randn(7, 3, 1, generator=torch.Generator().manual_seed(at)).half()
        blocks[..., at : at + 2] = scale.view(torch.uint8)
    rows = blocks.flatten(1)
    expected = torch.from_numpy(package.quants.dequantize(rows.numpy(), package.GGMLQuantizationType[name]))
    assert expected.shape == (7, 3 * block.values) and expected.isfinite().all()
    assert torch.equal(gguf.decode(rows, name), expected)
    linear = linear_from_stored({"weight": rows}, {"format": "gguf", "type": name}, torch.float32)
    assert torch.equal(linear.dequantised(2, 5), expected[2:5])
    assert linear.bytes == rows.numel()
    x = torch.randn(4, linear.in_features, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(linear(x), x @ expected.T, rtol=1e-5, atol=1e-3 * expected.abs().max().item())


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_gguf_made_by_the_package(name):
    package = pytest.importorskip("gguf")
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(3))
    rows = torch.from_numpy(package.quants.quantize(weight.numpy(), package.GGMLQuantizationType[name]))
    error = (gguf.decode(rows, name) - weight).norm() / weight.norm()
    assert error < {"8": 0.01, "5": 0.06, "4": 0.12}[name[1]]


def test_gguf_table_is_the_packages():
    package = pytest.importorskip("gguf")
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in package.GGML_QUANT_SIZES.items()}
    ours = {number: tuple(block) for number, block in gguf.BLOCK_TYPES.items()}
    assert {number: theirs.get(number) for number in ours} == ours


def test_gguf_rows_that_are_not_whole_blocks():
    with pytest.raises(CheckpointError, match="143 bytes is not made of Q4_K blocks of 144 bytes"):
        gguf.decode(torch.zeros(1, 143, dtype=torch.uint8), "Q4_K")
