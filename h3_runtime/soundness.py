"""Whether a finished latent can be a clip at all: noise, emptiness and overflow look like success until somebody looks.

    a clip      neighbouring cells are alike, values a few units around 0
    noise       neighbours have nothing in common, values spread by exactly 1    (a broken kernel, a run never finished)
    constant    no spread at all                                                 (an empty latent, a dead stream)
    overflow    values far beyond what the VAEs were trained on

Warnings, not errors: a latent may be meant to be odd.
"""

from __future__ import annotations

from torch import Tensor

from .job import AVLatent

STILL = 1e-3  # spread below which a stream holds one value
NOISE_SPREAD = 0.06  # how near to 1 the spread of drawn noise is
NOISE_LIKENESS = 0.06  # correlation of neighbours below which they have nothing in common
LARGEST = 30.0  # latents are normalised: beyond this the decoders see what no clip gives


def judge_latent(latent: AVLatent) -> list[str]:
    """Sentences about streams that cannot be a clip's; empty for a sound one."""
    said = []
    for name, stream in (("picture", latent.video), ("sound", latent.audio)):
        values = stream.float()
        spread, largest = values.std().item(), values.abs().max().item()
        if spread < STILL:
            what = "empty (all zeros)" if largest == 0 else f"the constant {values.mean().item():.3g}"
            said.append(f"the {name} latent is {what}: it was not rendered, or the render failed")
        elif largest > LARGEST:
            said.append(f"the {name} latent reaches {largest:.3g}, far beyond the decoder's range: check the render")
        elif abs(spread - 1) < NOISE_SPREAD and all(abs(value) < NOISE_LIKENESS for value in _likeness(values)):
            said.append(f"the {name} latent is pure noise: the render was stopped at its start, or its kernels failed")
    return said


def _likeness(stream: Tensor) -> list[float]:
    """Correlation of neighbours along each axis after the channels: [1, C, ...] -> one number per axis of length > 1.

    The axis of left and right (length 2) is left out: both may carry one sound.
    """
    axes = range(2, stream.ndim)
    values = stream - stream.mean(dim=tuple(axes), keepdim=True)
    power = values.square().mean()
    found = []
    for axis in axes:
        length = stream.shape[axis]
        if length > 2:
            pairs = values.narrow(axis, 0, length - 1) * values.narrow(axis, 1, length - 1)
            found.append((pairs.mean() / power).item())
    return found
