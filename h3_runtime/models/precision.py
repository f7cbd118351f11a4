"""Float32 means float32: the switches under which the baseline computes, set for a while and put back.

    with exact_float32():   TF32 off in matmuls and convolutions, SDPA without reduced-precision sums
        ...                 on leaving, every switch stands as the host had it

PyTorch lets cuDNN use TF32 by default, which rounds float32 inputs to 10 bits. Nothing outside the block changes: other
programs in this process keep their own settings.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def exact_float32() -> Iterator[None]:
    """TF32 and reduced-precision reductions off inside the block."""
    switches = (
        (torch.backends.cuda.matmul, "allow_tf32"),
        (torch.backends.cudnn, "allow_tf32"),
        (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
        (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    )
    before = [getattr(owner, name) for owner, name in switches]
    try:
        for owner, name in switches:
            setattr(owner, name, False)
        yield
    finally:
        for (owner, name), value in zip(switches, before):
            setattr(owner, name, value)
