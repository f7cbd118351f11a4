"""A small DiT with seeded weights, small jobs for it, and a probe: what the sampler's and the masks' tests share.

small_dit(seed)   2 blocks, hidden 64, 3 heads of 32 (inner width 96, so that no mix-up of the two can hide)
job(**changes)    96x64, 22 frames: 7 latents of 4x6 cells, 37 of sound, 5 text rows
Crash, Inertia    what a kill is, in process; an accelerator whose lost state changes the result
engaged(name)     an accelerator's spec under which it does something in a few forwards
Probe             an accelerator that keeps what each forward is fed, counts, and may answer for the model
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from h3_runtime.accelerators import Accelerator, spec_of
from h3_runtime.geometry import Canvas
from h3_runtime.job import AVLatent, RenderJob, TextCondition
from h3_runtime.models.dit import MODALITIES, DiT, DiTConfig
from h3_runtime.sampler import Rows, sample
from h3_runtime.steps import StepPlan

CONFIG = DiTConfig(
    hidden=64,
    layers=2,
    refiner_layers=2,
    heads=3,
    head_dim=32,
    ffn=128,
    text_dim=40,
    time_features=32,
    time_hidden=48,
    time_dim=56,
    rope_frequencies=4,
)
CANVAS = Canvas(96, 64, 22)  # 7 latents of 4x6 cells, 37 of sound
FORWARDS = 5


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors this small run on one thread: on a busy machine more of them mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 + seed))


@cache
def small_dit(seed: int = 0, text_dim: int = CONFIG.text_dim) -> DiT:
    """Seeded weights: matrices at 1 / sqrt(fan in), norms near one, biases near zero; float32."""
    dit = DiT(replace(CONFIG, text_dim=text_dim))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(dit.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 2:
            parameter.data = noise / parameter.shape[1] ** 0.5
        else:
            parameter.data = 0.1 * noise + (0.0 if name.endswith("bias") else 1.0)
    return dit.eval()


def text(rows: int = 5, vision: int = 0, seed: int = 0) -> TextCondition:
    """``rows`` text rows, of which ``vision`` in the middle are of a vision block."""
    tags = torch.ones(rows, dtype=torch.int64)
    tags[1 : 1 + vision] = 0
    return TextCondition(draw(rows, CONFIG.text_dim, seed=seed), tags)


def picture(frames: int = 1, height: int = 4, width: int = 6, seed: int = 0) -> torch.Tensor:
    return draw(1, 24, frames, height, width, seed=50 + seed)


def sound(length: int, seed: int = 0) -> torch.Tensor:
    return draw(1, 32, 2, length, seed=90 + seed)


def clip(canvas: Canvas = CANVAS, seed: int = 0) -> AVLatent:
    return AVLatent(picture(canvas.latent_t, canvas.latent_h, canvas.latent_w, seed=seed), sound(canvas.audio_t, seed))


def job(**changes) -> RenderJob:
    return RenderJob(**{"canvas": CANVAS, "text": text(), "num_forwards": FORWARDS, **changes})


def render(made: RenderJob, *accelerators: Accelerator, dit: DiT | None = None) -> AVLatent:
    return sample(dit or small_dit(), made, accelerators).latent


def same(a: AVLatent, b: AVLatent) -> bool:
    return torch.equal(a.video, b.video) and torch.equal(a.audio, b.audio)


def differ(a: AVLatent, b: AVLatent) -> bool:
    return not torch.equal(a.video, b.video) and not torch.equal(a.audio, b.audio)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


class Probe(Accelerator):
    """Keeps what every forward is fed, counts what it runs, and may answer instead of the model."""

    name = "probe"

    def __init__(self, velocity=None):
        self.velocity, self.fed, self.blocks, self.forwards = velocity, [], 0, 0

    def wrap_velocity(self, call):
        def probed(rows, step):
            self.fed.append(Rows(rows.video.clone(), rows.audio.clone()))
            return call(rows, step) if self.velocity is None else self.velocity(rows, step)

        return probed

    def wrap_blocks(self, call):
        def counted(h, step, start, stop):
            self.forwards += 1
            return call(h, step, start, stop)

        return counted

    def wrap_block(self, call):
        def counted(index, h, step):
            self.blocks += 1
            return call(index, h, step)

        return counted


class Crash(Exception):
    """What a kill is, in process."""


class Inertia(Accelerator):
    """A stand-in with state: leans on the last velocity, so that a lost state changes the result."""

    name = "inertia"

    def __init__(self):
        self.last = None

    def wrap_velocity(self, call):
        def velocity(rows, step):
            made = call(rows, step)
            if self.last is not None:
                made = made._replace(video=made.video + 0.1 * self.last)
            self.last = made.video.clone()
            return made

        return velocity

    def state(self):
        return {} if self.last is None else {"last": self.last}

    def restore(self, state):
        self.last = state.get("last")


ENGAGED = {  # options under which each does something on a job of a few forwards
    "attention": {"kernel": "int8-eager"},
    "sparse": {"keep": 0.5, "block": 4, "warmup": 1, "tail": 1},
    "block-cache": {"video": 10.0, "audio": 10.0, "warmup": 2, "tail": 1},
    "forecast": {"calls": 0.1, "warmup": 2, "tail": 1, "sound_limit": 10.0},
    "compile": {"backend": "eager"},
}


def engaged(name: str) -> tuple:
    return spec_of(name, **ENGAGED[name])


def row_labels(step: StepPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """Timestep and modality of every packed row, read back from the plan's runs."""
    timesteps = torch.empty(step.runs[-1].stop)
    modalities = torch.empty(step.runs[-1].stop, dtype=torch.int64)
    for run in step.runs:
        pair = step.pairs[run.row]
        timesteps[run.start : run.stop] = step.timesteps[pair // MODALITIES]
        modalities[run.start : run.stop] = pair % MODALITIES
    return timesteps, modalities
