"""Real but unkind use of the command line and of what stands behind it: one sentence, or the right clip."""

from __future__ import annotations

import pytest
import torch

from h3_runtime.sampler import draw_noise

from .small_jobs import Probe, clip, job, same
from .small_jobs import render as sampled


@pytest.mark.parametrize("shift", [0.4, 0.84, 2.07, 1e-6, 1000.0])
def test_any_shift_starts_from_the_pure_noise(shift):
    """Shifted in float32, the first sigma of these grids is not exactly 1."""
    plain = job(num_forwards=2, video_shift=shift, audio_shift=shift)
    probe = Probe()
    without = sampled(plain, probe)
    assert torch.equal(probe.fed[0].audio, draw_noise(plain).audio)
    assert same(without, sampled(job(num_forwards=2, video_shift=shift, audio_shift=shift, source=clip())))
