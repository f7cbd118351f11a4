"""The carried DiT: flow matching on the world's latents, with every condition of the product mixed in.

    v = clean - noise on the target's rows, the squared error per channel weighted by what the channel does in pixels
    Muon on the blocks' matrices, AdamW on the rest, a moving average of the weights is what is kept

A run goes in pieces: ``train`` takes up a saved state at its step; batch, noise and levels of a step come from
a seed of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...models.dit import DiT, DiTConfig
from .batches import Batch, batch_size, collate
from .clips import Example
from .forward import velocity

CONFIG = DiTConfig(
    hidden=192,
    layers=4,
    refiner_layers=1,
    heads=3,
    head_dim=64,
    ffn=320,
    text_dim=64,
    time_features=64,
    time_hidden=128,
    time_dim=32,
    rope_frequencies=8,
)
SEED = 9
MUON_RATE, ADAM_RATE = 0.02, 2e-3
AVERAGE = 0.995
LATE = 0.02  # weight that the clean end keeps
COOLING = 0.3  # share of a run in which the rate falls to zero
# How often an example of each kind is drawn, in each phase of a run: prompts, frames, references, then shapes again
SHARES = (
    {"text": 1.0, "first": 1.6, "last": 1.6, "both": 1.6, "middle": 1.2, "reference": 1.2},
    {"text": 1.0, "first": 3.0, "last": 3.0, "both": 3.0, "middle": 2.0, "reference": 1.0},
    {"text": 1.0, "first": 1.5, "last": 1.5, "both": 1.5, "middle": 1.0, "reference": 5.0},
    {"text": 4.0, "first": 1.5, "last": 1.5, "both": 1.5, "middle": 1.0, "reference": 3.0},
)
TURNS = (850, 2300, 2600)  # the steps at which a phase ends


def start() -> DiT:
    """A DiT that says v = -x at first: what is right where all is noise, and a path for the noise through the model."""
    torch.manual_seed(SEED)
    dit = DiT(CONFIG)
    width = CONFIG.hidden
    with torch.no_grad():
        for module in dit.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.normal_(std=module.in_features**-0.5)
                if module.bias is not None:
                    module.bias.zero_()
        for block in (*dit.blocks, *dit.token_refiner.blocks):
            block.attn.out_proj.weight.zero_()
            block.mlp.fc2.weight.zero_()
        for block in dit.blocks:
            block.adaln_proj.linear.weight.mul_(0.1)
            block.adaln_proj.linear.bias.view(3, 6, width)[:, (2, 5)] = 1.0
        dit.final_layer.adaln_proj.linear.weight.mul_(0.1)
        for into, out in (
            (dit.video_patch_proj, dit.final_layer.video_out),
            (dit.audio_patch_proj, dit.final_layer.audio_out),
        ):
            basis = torch.linalg.qr(torch.randn(width, into.in_features)).Q  # [width, in]
            into.weight.copy_(basis)
            out.weight.copy_(-basis.T * (into.in_features / width) ** 0.5)
    return dit


def channel_weights(std: Tensor, repeat: int) -> Tensor:
    """[channels * repeat] in a row's order: a channel's spread, as the pixels or samples feel it, mean 1."""
    weights = std / std.mean()
    return weights.repeat_interleave(repeat)


def loss_of(dit: DiT, batch: Batch, weights: tuple[Tensor, Tensor]) -> Tensor:
    """The weighted squared error of both streams, as the clean clip feels it."""
    video, audio = velocity(dit, batch)
    total = 0.0
    sigma = 1 - batch.timesteps  # [B, 4]; an error of v is sigma times as large in the clean clip that it points to
    for made, target, counts, weight, share, slot in (
        (video, batch.video_target, batch.video_counts, weights[0], 1.0, 0),
        (audio, batch.audio_target, batch.audio_counts, weights[1], 0.5, 1),
    ):
        error = ((made - target).square() * weight).mean(-1)  # [B, rows]
        error = error * (sigma[:, slot, None].square() + LATE)
        total = total + share * (error * counts).sum() / counts.sum().clamp(min=1)
    return total


class Muon:
    """Momentum whose update is made orthogonal by five Newton-Schulz steps (Jordan et al., 2024), for matrices."""

    def __init__(self, parameters: list[Tensor], momentum: float = 0.95):
        self.parameters, self.momentum = parameters, momentum
        self.moments = [torch.zeros_like(p) for p in parameters]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for parameter, moment in zip(self.parameters, self.moments):
            moment.lerp_(parameter.grad, 1 - self.momentum)
            update = orthogonal(parameter.grad.lerp(moment, self.momentum))
            parameter.add_(update, alpha=-rate * max(1.0, update.shape[0] / update.shape[1]) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    x = matrix.bfloat16()
    wide = x.shape[0] <= x.shape[1]
    x = (x if wide else x.T) / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x if wide else x.T).to(matrix.dtype)


def split_parameters(dit: DiT) -> tuple[list[Tensor], list[Tensor]]:
    """(matrices of the blocks, everything else that is trained)."""
    matrices, rest = [], []
    for name, parameter in dit.named_parameters():
        inside = name.startswith(("blocks.", "token_refiner.")) and parameter.ndim == 2 and "adaln" not in name
        (matrices if inside else rest).append(parameter)
    return matrices, rest


def draw_batch(groups: list[list[Example]], step: int, seed: int) -> Batch:
    """The batch of one step."""
    random = np.random.default_rng((seed, step))
    kinds = SHARES[sum(step >= turn for turn in TURNS)]
    shares = np.array([len(group) * kinds[group[0].kind] for group in groups])
    group = groups[int(random.choice(len(groups), p=shares / shares.sum()))]
    first = group[int(random.integers(len(group)))]
    like = [e for e in group if e.reference is None or e.reference.shape == first.reference.shape]
    size = batch_size(first, max(len(first.hidden), 14))
    picked = [like[int(n)] for n in random.choice(len(like), min(size, len(like)), replace=False)]
    longest = max(len(e.hidden) for e in picked)
    # texts with a picture of one size and of another do not go together: mostly filling
    picked = [e for e in picked if longest - len(e.hidden) < 30] if len(first.hidden) > 20 else picked
    return collate(picked, torch.Generator().manual_seed(int(random.integers(2**62))))


def train(
    groups: list[list[Example]],
    weights: tuple[Tensor, Tensor],
    state: Path,
    steps: tuple[int, int],
    say: Callable[[str], None],
    every: int = 50,
) -> None:
    """Train from the step in ``state`` (none: from the start) up to ``steps[0]`` of a run of ``steps[1]``."""
    dit = start()
    matrices, rest = split_parameters(dit)
    muon, adam = Muon(matrices), torch.optim.AdamW(rest, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    average = {name: value.detach().clone() for name, value in dit.named_parameters()}
    first = 0
    if state.exists():
        saved = torch.load(state, weights_only=True)
        first, average = saved["step"], saved["average"]
        dit.load_state_dict(saved["dit"])
        adam.load_state_dict(saved["adam"])
        muon.moments = saved["muon"]
    began, recent = time.monotonic(), []
    for step in range(first, steps[0]):
        rate = min(1.0, (step + 1) / 50, (steps[1] - step) / (COOLING * steps[1]))
        for group in adam.param_groups:
            group["lr"] = ADAM_RATE * rate
        loss = loss_of(dit, draw_batch(groups, step, SEED), weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(rest, 1.0)
        muon.step(MUON_RATE * rate)
        adam.step()
        dit.zero_grad(set_to_none=True)
        keep = min(AVERAGE, (step + 1) / (step + 10))
        with torch.no_grad():
            for name, value in dit.named_parameters():
                average[name].lerp_(value, 1 - keep)
        recent = [*recent[-199:], loss.item()]
        if (step + 1) % every == 0 or step + 1 == steps[0]:
            mean = sum(recent[-every:]) / len(recent[-every:])
            say(f"DiT: step {step + 1}, {time.monotonic() - began:.0f} s, loss {mean:.4f}")
            parts = {"step": step + 1, "dit": dit.state_dict(), "average": average, "adam": adam.state_dict()}
            part = state.with_suffix(".part")
            torch.save({**parts, "muon": muon.moments}, part)
            part.replace(state)


def load_average(state: Path) -> DiT:
    """The averaged weights of a saved run, for inference."""
    dit = DiT(CONFIG).eval().requires_grad_(False)
    dit.load_state_dict(torch.load(state, weights_only=True)["average"], strict=False)
    return dit
