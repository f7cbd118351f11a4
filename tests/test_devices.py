"""Where tensors are: every part on a CUDA card that is only pretended, fed from the CPU as a render feeds it.

Fake tensors know their device and refuse to mix two, so a part that forgets to move its input fails here without a
card. What they cannot know is values: checks for NaN are taken as passed.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from h3_runtime import sampler, steps
from h3_runtime.demo.maker import AUDIO_VAE, VIDEO_VAE
from h3_runtime.job import Guide, Masks, RenderJob
from h3_runtime.layout import PackedLayout
from h3_runtime.models.audio_vae import AudioVAE
from h3_runtime.models.dit import DiT
from h3_runtime.models.video_vae import VideoVAE
from h3_runtime.solvers import SOLVERS

from .small_jobs import CONFIG, clip, job, picture, sound

CUDA = torch.device("cuda", 0)


class Finite:
    """The answer of a NaN check that found none."""

    def all(self) -> bool:
        return True

    def __bool__(self) -> bool:
        return True

    def __and__(self, other: Finite) -> Finite:
        return self

    def __invert__(self) -> Finite:
        return self

    def sum(self) -> int:
        return 0


@pytest.fixture
def card(monkeypatch):
    monkeypatch.setattr(torch, "isfinite", lambda tensor: Finite())
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        yield CUDA


def on_card(kind, config) -> torch.nn.Module:
    with CUDA:
        return kind(config).eval()


def test_mixing_devices_is_noticed(card):
    with pytest.raises(RuntimeError, match="device"):
        torch.zeros(2) @ torch.zeros(2, 2, device=card)


def test_the_audio_vae_takes_sound_and_latents_from_the_cpu(card, monkeypatch):
    vae = on_card(AudioVAE, AUDIO_VAE)
    # its thousands of small convolutions take fake tensors 7 s; where the latent goes shows in the first
    monkeypatch.setattr(AudioVAE, "_decode_mono", lambda self, latent: self.dec_in_proj(latent)[:, :1])
    latent = vae.encode(torch.zeros(1, 2, 1600))
    assert latent.device == card and latent.shape == (1, 32, 2, 2)
    assert vae.decode(latent.cpu()).device == card


@pytest.mark.parametrize("frames", [1, 22])
def test_the_video_vae_takes_pixels_and_latents_from_the_cpu(card, frames):
    vae = on_card(VideoVAE, VIDEO_VAE)
    pixels = torch.zeros(frames, 64, 96, 3, dtype=torch.uint8)
    assert vae.encode_condition(pixels).device.type == "cpu"
    latent = vae.encode_mean(pixels)
    assert {chunk.device for chunk in vae.decode_chunks(latent.cpu())} == {card}


MASKED = {"source": clip(), "masks": Masks.make(torch.rand(7, 4, 6), torch.rand(2, 37))}
JOBS = {
    "guides": {"guides": (Guide(0, picture(), keyframe=True), Guide(5, picture(2), sound(5), strength=0.5))},
    "masks": MASKED,
    "state": MASKED | {"state": clip(seed=3), "start": 2},
}


@pytest.mark.parametrize("before_loop", [True, False])
@pytest.mark.parametrize("name", JOBS)
def test_a_forward_mixes_no_devices(monkeypatch, request, name, before_loop):
    """Layout, step plans and noise are made on the CPU; streams, tables and forwards run on the card."""
    monkeypatch.setattr(steps, "MAX_TABLE_PAIRS", 1000 if before_loop else 0)
    made = job(**JOBS[name])
    schedule = made.schedule
    layout = PackedLayout.of(made.text.tags, made.canvas, made.guides, made.references)
    plans = steps.plan_steps(layout, schedule, made.masks)
    noise = sampler.draw_noise(made)
    held = sampler.condition_rows(made, layout, noise)
    monkeypatch.setattr(RenderJob, "schedule", schedule)
    card = request.getfixturevalue("card")
    dit = on_card(DiT, CONFIG)
    streams = sampler._streams(made, noise, card)
    model = sampler.VelocityModel(dit, layout, plans, dit.refine_text(made.text.hidden), held)
    solver = SOLVERS["second-order"]()
    for plan in plans.forwards[:2]:
        step = steps.on_device(plan, card)
        velocity = model.velocity(sampler.Rows(*(stream.feed() for stream in streams)), step)
        for stream, rows in zip(streams, velocity):
            assert rows.device == card
            stream.step(solver, rows, step.video_sigma, step.video_sigma_next)
            assert stream.rows.device == card
