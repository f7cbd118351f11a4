"""Float32 means float32: the switches under which the baseline computes, set for a while and put back.

    with exact_float32():   TF32 and bf16 stand-ins off in matmuls and convolutions, on card and CPU;
        ...                 no reduced-precision sums; cuDNN picks its kernels by rule, not by a race
                            on leaving, every switch stands as the host had it

PyTorch lets cuDNN use TF32 by default, which rounds float32 inputs to 10 bits. Nothing outside the block changes: other
programs in this process keep their own settings.

PyTorch has two sets of these switches since 2.9, and reading an old one raises once a new one was set to something
else. So both are set here, the old ones only where they can be read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

# (where below torch.backends, switch, value inside the block); what this PyTorch lacks or cannot read is passed over.
# Old switches come first: setting one also sets the new one that it stands for. ``cuda.matmul.allow_tf32`` is the same
# flag as the matmul precision below, in two steps instead of three.
SWITCHES = (
    ("cudnn", "allow_tf32", False),
    ("cuda.matmul", "allow_fp16_reduced_precision_reduction", False),
    ("cuda.matmul", "allow_bf16_reduced_precision_reduction", False),
    ("cuda.matmul", "allow_fp16_accumulation", False),
    ("cudnn", "benchmark", False),
    *(
        (owner, "fp32_precision", "ieee")
        for owner in ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
    ),
)


@contextmanager
def exact_float32() -> Iterator[None]:
    """Every float32 product inside the block is one of float32 inputs, summed in float32."""
    before = []
    for path, name, value in SWITCHES:
        with suppress(AttributeError, RuntimeError):
            owner = _owner(path)
            before.append((owner, name, getattr(owner, name), value))
    level = None
    with suppress(RuntimeError):
        level = torch.get_float32_matmul_precision()
    try:
        if level is not None:
            torch.set_float32_matmul_precision("highest")
        for owner, name, _, value in before:
            setattr(owner, name, value)
        yield
    finally:
        if level is not None:
            torch.set_float32_matmul_precision(level)
        for owner, name, had, _ in before:
            setattr(owner, name, had)


def _owner(path: str):
    owner = torch.backends
    for part in path.split("."):
        owner = getattr(owner, part)
    return owner


def is_finite(values: torch.Tensor) -> bool:
    """Whether no value is NaN or infinity, without a second tensor of their size: both ends tell, and NaN spreads."""
    if not values.numel():
        return True
    low, high = torch.aminmax(values.detach())
    return bool(torch.isfinite(low) & torch.isfinite(high))
