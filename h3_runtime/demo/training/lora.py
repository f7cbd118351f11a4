"""The few-step LoRA: the carried DiT's own clips, reached from their own noise in four forwards.

    noise ─the DiT, many forwards─▶ clip        pairs (noise, clip), made once
    x = (1 - sigma) clip + sigma noise at the four levels of the short grid ─▶ v should be clip - noise
    (the coupling of rectified flow, Liu et al., 2022: paths between the two become straight)

Only low-rank factors on the blocks' linears are trained; the file has the DiT's own names.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ...models.dit import DiT
from ...schedule import AUDIO_SHIFT, VIDEO_SHIFT, sigma_grid
from .batches import Batch, collate
from .clips import Example
from .forward import velocity

RANK = 8
FORWARDS, TEACHER_FORWARDS = 4, 16
RATE = 2e-3
LEAVES = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")


class LowRank(nn.Module):
    """weight + b @ a."""

    def __init__(self, outputs: int, inputs: int):
        super().__init__()
        self.a = nn.Parameter(torch.randn(RANK, inputs) * inputs**-0.5)
        self.b = nn.Parameter(torch.zeros(outputs, RANK))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


def attach(dit: DiT, seed: int) -> dict[str, LowRank]:
    """Put fresh factors on the blocks' linears of ``dit``, whose own weights stand still."""
    torch.manual_seed(seed)
    dit.requires_grad_(False)
    factors = {}
    for index, block in enumerate(dit.blocks):
        for leaf in LEAVES:
            linear = block.get_submodule(leaf)
            factors[f"blocks.{index}.{leaf}"] = low = LowRank(*linear.weight.shape)
            parametrize.register_parametrization(linear, "weight", low)
    return factors


def at_levels(batch: Batch, ends: tuple, noises: tuple, base: Tensor) -> Batch:
    """``batch`` with its streams between ``ends`` and ``noises`` at the base sigmas [B], all rows made anew."""
    sigma_v, sigma_a = (shift * base / (1 + (shift - 1) * base) for shift in (VIDEO_SHIFT, AUDIO_SHIFT))
    pinned = (1 - sigma_v).clamp(min=0.999)
    mixed = [
        (1 - sigma[:, None, None]) * end + sigma[:, None, None] * noise
        for sigma, end, noise in zip((sigma_v, sigma_a), ends, noises)
    ]
    return replace(
        batch,
        video=mixed[0],
        audio=mixed[1],
        video_target=ends[0] - noises[0],
        audio_target=ends[1] - noises[1],
        timesteps=torch.stack([1 - sigma_v, 1 - sigma_a, pinned, torch.ones_like(base)], dim=1),
    )


@torch.no_grad()
def sample(dit: DiT, batch: Batch, noises: tuple[Tensor, Tensor], forwards: int) -> tuple[Tensor, Tensor]:
    """The clips [B, V, 96], [B, A, 32] that ``dit`` makes of ``noises`` by Euler steps on the product's grids."""
    video, audio = noises
    grids = [sigma_grid(forwards + 1, shift).tolist() for shift in (VIDEO_SHIFT, AUDIO_SHIFT)]
    for step in range(forwards):
        (sv, nv), (sa, na) = ((grid[step], grid[step + 1]) for grid in grids)
        count = len(video)
        times = torch.tensor([1 - sv, 1 - sa, max(1 - sv, 0.999), 1.0]).expand(count, -1)
        made = velocity(dit, replace(batch, video=video, audio=audio, timesteps=times))
        video, audio = video + (sv - nv) * made[0], audio + (sa - na) * made[1]
    return video, audio


def make_pairs(dit: DiT, examples: list[Example], count: int, seed: int, size: int = 16) -> list[tuple]:
    """(batch, clips, noises) of ``count`` batches of text examples."""
    random, pairs = np.random.default_rng(seed), []
    for _ in range(count):
        picked = [examples[int(n)] for n in random.choice(len(examples), size, replace=False)]
        generator = torch.Generator().manual_seed(int(random.integers(2**62)))
        batch = unmasked(collate(picked, generator, torch.full((size,), 0.5)))
        noises = tuple(torch.randn(x.shape, generator=generator) for x in (batch.video, batch.audio))
        pairs.append((batch, sample(dit, batch, noises, TEACHER_FORWARDS), noises))
    return pairs


def unmasked(batch: Batch) -> Batch:
    """All target rows made anew, whatever masks were drawn."""
    sounds, pictures = batch.audio.shape[1], batch.video.shape[1]
    rows = batch.rows.clone()
    rows[:, -sounds - pictures : -pictures] = 1 * 3 + 2
    rows[:, -pictures:] = 0
    ones = torch.ones_like(batch.video_counts), torch.ones_like(batch.audio_counts)
    return replace(batch, rows=rows, video_counts=ones[0], audio_counts=ones[1])


def train(
    dit: DiT, pairs: list[tuple], steps: int, seed: int, loss_of: Callable, say: Callable[[str], None]
) -> dict[str, Tensor]:
    """Factors by module name, trained on ``pairs``; the file's tensors."""
    factors = attach(dit, seed)
    optimiser = torch.optim.AdamW([p for low in factors.values() for p in low.parameters()], lr=RATE, weight_decay=0.0)
    random, began = np.random.default_rng(seed), time.monotonic()
    levels = torch.linspace(1.0, 0.0, FORWARDS + 1)[:-1]
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 10) * (1 - step / steps)
        batch, ends, noises = pairs[int(random.integers(len(pairs)))]
        base = levels[torch.from_numpy(random.integers(0, FORWARDS, len(batch.video)))]
        loss = loss_of(dit, at_levels(batch, ends, noises, base))
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        if (step + 1) % 25 == 0:
            say(f"LoRA: step {step + 1}, {time.monotonic() - began:.0f} s, loss {loss.item():.4f}")
    tensors = {}
    for name, low in sorted(factors.items()):
        tensors[f"{name}.lora_A.weight"] = low.a.detach().to(torch.bfloat16).contiguous()
        tensors[f"{name}.lora_B.weight"] = low.b.detach().to(torch.bfloat16).contiguous()
    return tensors
