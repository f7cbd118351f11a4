"""The self-test passes on the CPU, and can fail: a device that computes something else is found out."""

from __future__ import annotations

import pytest
import torch

from h3_runtime import selftest
from h3_runtime.cli import main
from h3_runtime.models import attention


def test_the_cpu_equals_itself(capsys):
    assert main(["selftest", "--device", "cpu"]) == 0
    words = capsys.readouterr().out
    assert words.count("ok ") == 6 and "WRONG" not in words and "not here" not in words


def test_checks_that_must_be_equal_are(monkeypatch):
    job = selftest.tiny_job()
    dit = selftest.seeded_module(selftest.DiT, selftest.DIT)
    assert selftest.streamed_distance(dit, job) == 0.0
    assert 0 < selftest.distance(
        selftest.sample(selftest.to_bf16(dit), job).latent.video, selftest.sample(dit, job).latent.video
    ) <= selftest.BF16_BOUND  # fmt: skip


def test_a_wrong_kernel_is_found(monkeypatch):
    job = selftest.tiny_job()
    dit = selftest.seeded_module(selftest.DiT, selftest.DIT)
    right = selftest.sample(dit, job).latent.video
    monkeypatch.setattr(attention, "rotate_", lambda x, cos, sin: x)
    wrong = selftest.distance(selftest.sample(dit, job).latent.video, right)
    assert not selftest.Check("dit/float32", wrong, selftest.FLOAT32_BOUND).passed


def test_a_check_that_cannot_run_says_why_and_fails_the_command(monkeypatch, capsys):
    def broken(*arguments):
        raise RuntimeError("no such kernel on this device\nlong trace")

    monkeypatch.setattr(selftest, "streamed_distance", broken)
    assert main(["selftest", "--device", "cpu"]) == 1
    assert "not here  placement/streamed-equals-resident: no such kernel on this device" in capsys.readouterr().out


def test_no_float64_reaches_a_device():
    """Positions are float64 on the CPU only: whatever is sent to another device is at most float32."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class NoDouble(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.device.type == "meta":
                assert out.dtype != torch.float64, function
            return out

    positions = torch.rand(7, 3, dtype=torch.float64)
    with NoDouble():
        cos, _ = attention.rotary_table(positions, torch.ones(4, device="meta"), torch.float32)
    assert cos.device.type == "meta" and cos.shape == (7, 12)


@pytest.mark.parametrize("name", ["nonsense", "mps", "cuda:99"])
def test_an_unusable_device_is_one_sentence(name, capsys):
    assert main(["selftest", "--device", name]) == 2
    assert f"error: device {name!r} cannot be used here" in capsys.readouterr().out
