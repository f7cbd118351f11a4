"""python -m h3_runtime selftest: does this device compute what the CPU computes? In seconds, before a long run.

    one tiny DiT, seeded ─▶ CPU float32 (the yardstick) ─▶ device float32, device bf16: relative L2
                         ─▶ device, blocks resident / streamed: the same bits?
    video VAE, audio VAE ─▶ CPU against device
    kernels              ─▶ which of the optional ones run here, and why the others do not

A device without float64 is never sent any: positions are summed on the CPU and cast before they travel.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .demo.maker import AUDIO_VAE, DIT, VIDEO_VAE, seeded_module
from .geometry import Canvas
from .job import RenderJob, TextCondition
from .memory.streaming import CudaMover, DiTLayers, HostMover, LayerLayout, RamStore, StreamedLayers
from .models.audio_vae import AudioVAE
from .models.dit import DiT
from .models.video_vae import VideoVAE
from .sampler import sample

FLOAT32_BOUND = 1e-4  # of a whole three-forward run; another device sums in another order
BF16_BOUND = 0.05
VAE_BOUND = 1e-3


@dataclass(frozen=True)
class Check:
    """One comparison: its measured ``value`` against ``bound`` (None: it must be zero), or why it could not run."""

    name: str
    value: float | None
    bound: float | None
    note: str = ""

    @property
    def passed(self) -> bool | None:
        """None where it could not run here."""
        return None if self.value is None else self.value <= (self.bound or 0.0)

    def to_dict(self) -> dict:
        return {"name": self.name, "value": self.value, "unit": "relative L2", "pass": self.passed, "note": self.note}

    def line(self) -> str:
        if self.value is None:
            return f"not here  {self.name}: {self.note}"
        verdict = "ok" if self.passed else "WRONG"
        bound = "must be equal" if self.bound is None else f"at most {self.bound:g}"
        return f"{verdict:<8}  {self.name}: {self.value:.2e} ({bound}) {self.note}".rstrip()


def selftest(device: str | torch.device) -> list[Check]:
    """All checks of ``device`` against the CPU."""
    device = torch.device(device)
    job = tiny_job()
    dit = seeded_module(DiT, DIT)
    expected = sample(dit, job).latent.video
    there = copy.deepcopy(dit).to(device)
    video_vae, audio_vae = seeded_module(VideoVAE, VIDEO_VAE), seeded_module(AudioVAE, AUDIO_VAE)
    picture, sound = drawn(1, 24, 2, 4, 6, seed=2), drawn(1, 32, 2, 5, seed=3)
    checks: list[tuple[str, float | None, Callable[[], float]]] = [
        ("dit/float32", FLOAT32_BOUND, lambda: distance(sample(there, job).latent.video, expected)),
        ("dit/bf16", BF16_BOUND, lambda: distance(sample(to_bf16(there), job).latent.video, expected)),
        ("placement/streamed-equals-resident", None, lambda: streamed_distance(there, job)),
        ("repeat/same-seed-same-bits", None, lambda: repeat_distance(there, job)),
        ("video-vae/float32", VAE_BOUND, lambda: decoded_distance(video_vae, picture, device)),
        ("audio-vae/float32", VAE_BOUND, lambda: decoded_distance(audio_vae, sound, device)),
    ]
    return [run_check(*check) for check in checks]


def run_check(name: str, bound: float | None, measure: Callable[[], float]) -> Check:
    """A check that fails to run is told, not hidden: its reason stands where its figure would."""
    began = time.perf_counter()
    try:
        value = measure()
    except (RuntimeError, NotImplementedError) as error:
        return Check(name, None, bound, str(error).splitlines()[0])
    return Check(name, value, bound, f"{time.perf_counter() - began:.2f} s")


def tiny_job() -> RenderJob:
    """22 frames of 96x64, five text rows, three forwards."""
    text = TextCondition(drawn(5, DIT.text_dim, seed=1), torch.ones(5, dtype=torch.int64))
    return RenderJob(Canvas.fit(22, (96, 64)), text, num_forwards=3)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative L2."""
    return ((found.cpu() - expected.cpu()).norm() / expected.norm()).item()


def to_bf16(dit: DiT) -> DiT:
    """A copy in the release's precision: bf16 with float32 islands."""
    rounded = copy.deepcopy(dit)
    for name, parameter in rounded.named_parameters():
        if not name.startswith(DiT.float32_islands):
            parameter.data = parameter.data.to(torch.bfloat16)
    return rounded


def streamed_distance(dit: DiT, job: RenderJob) -> float:
    """Blocks resident against blocks streamed through the ring, on the DiT's own device."""
    resident = sample(dit, job).latent.video
    hollow = copy.deepcopy(dit)
    hollow.blocks.to("meta")
    layers = DiTLayers(
        _streamed(hollow.blocks, dit.blocks, ("adaln_proj.",)),
        _streamed([b.adaln_proj for b in hollow.blocks], [b.adaln_proj for b in dit.blocks]),
    )
    return distance(sample(hollow, job, layers=layers).latent.video, resident)


def _streamed(skeletons, modules, skip: tuple[str, ...] = ()) -> StreamedLayers:
    def fill(layer: int, views: dict[str, Tensor]) -> None:
        tensors = modules[layer].state_dict()
        for name, view in views.items():
            view.copy_(tensors[name])

    device = next(modules[0].parameters()).device
    store = RamStore([LayerLayout.of(module, skip) for module in modules], fill, pin=device.type == "cuda")
    if device.type == "cuda":
        return StreamedLayers(skeletons, 0, CudaMover(store, len(modules), 2, device))
    return StreamedLayers(skeletons, 0, HostMover(store, len(modules), 2))


def repeat_distance(dit: DiT, job: RenderJob) -> float:
    return distance(sample(dit, job).latent.video, sample(dit, job).latent.video)


def decoded_distance(vae: torch.nn.Module, latent: Tensor, device: torch.device) -> float:
    there = copy.deepcopy(vae).to(device)
    return distance(there.decode(latent.to(device)), vae.decode(latent))
