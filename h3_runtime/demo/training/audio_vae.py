"""The carried audio VAE, computed from the world's tones: a codec of 25 ms blocks inside the release's architecture.

    encoder   strided convolutions as block transforms:  2 samples ─▶ 2 numbers, x4 ─▶ 8, x4 ─▶ 16, x5 ─▶ 32, x5 ─▶ 32
              each holds the largest principal directions; residual units silent, snakes nearly straight
    decoder   least squares from the latents and their neighbours to the block's 800 samples, split over the upsampling
              stages: two x5 stages make 32 samples side by side, five x2 stages put them one after another

Tones are multiples of 40 Hz at phase 0, so a steady tone is the same latent over and over. A third of the sample are
other tones below 640 Hz at any phase, so that other sounds are not lost altogether.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ...geometry import SAMPLE_RATE
from ...models.audio_vae import AliasFree, AudioVAE, AudioVAEConfig, ResidualBlock, ResidualUnit, Snake
from ..world import LEVEL, random_scene
from .video_vae import SILENT, fit

CONFIG = AudioVAEConfig(
    encoder_dim=4, latent_dim=128, heads=4, decoder_dim=128, res_kernels=(3,), res_dilations=((1, 3, 5),)
)
SEED = 8
KEPT = (2, 8, 16, 32, 32)  # numbers that each encoder stage passes on
CONSTANT = 2000.0
STRAIGHT = 1e-4  # the snakes' alpha: x + alpha x^2, nearly x
STD_FLOOR = 0.1
REACH = (-1, 0, 1)  # latents that a block is decoded from


def build(clips: int = 120) -> AudioVAE:
    """The whole VAE; nothing is left to chance but what a later training would move."""
    torch.manual_seed(SEED)
    vae = AudioVAE(CONFIG).eval().requires_grad_(False)
    ears = sample_sounds(SEED, clips)
    with torch.no_grad():
        _silence(vae)
        _build_encoder(vae, ears)
        latents = [vae._encode_mono(ear[None, None]) for ear in ears]  # each [1, 32, T], not normalised yet
        flat = torch.cat([latent[0] for latent in latents[: clips * 2]], dim=1)  # the world's own
        spread = flat.std(dim=1)
        _build_decoder(vae, latents, ears)
        vae.latents_mean.copy_(flat.mean(dim=1))
        vae.latents_std.copy_(spread.clamp(min=STD_FLOOR * spread.max().item()))
    return vae


def sample_sounds(seed: int, clips: int) -> list[Tensor]:
    """Ears [800 n] float32: both of ``clips`` scenes, then as many other tones."""
    random = np.random.default_rng(seed)
    ears = []
    for _ in range(clips):
        sound = random_scene(random).sound(22)
        ears += [sound[:, : sound.shape[1] // 800 * 800][ear] for ear in (0, 1)]
    at = torch.arange(16_000, dtype=torch.float64) / SAMPLE_RATE
    for _ in range(clips):
        wave = sum(
            random.uniform(0.2, 1) * torch.sin(2 * math.pi * random.uniform(60, 620) * at + random.uniform(0, 7))
            for _ in range(int(random.integers(1, 3)))
        )
        ears.append((LEVEL * random.uniform(0.2, 0.7) * wave).float())
    return ears


def _silence(vae: AudioVAE) -> None:
    """Residual branches add nothing, activations are straight lines, to begin with."""
    for module in vae.modules():
        if isinstance(module, ResidualUnit):
            module.block[3].weight.normal_(std=SILENT)
            module.block[3].bias.zero_()
        elif isinstance(module, ResidualBlock):
            for conv in module.convs2:
                conv.weight.normal_(std=SILENT)
                conv.bias.zero_()
        elif isinstance(module, Snake):
            module.alpha.fill_(STRAIGHT)
        elif isinstance(module, AliasFree):
            module.act.alpha.fill_(-3.0)
            module.act.beta.fill_(4.0)
    block = vae.pre_block
    for linear in (block.attn.proj, block.mlp.w2):
        linear.weight.normal_(std=SILENT)
        linear.bias.zero_()
    for conv in (vae.mean_proj, vae.dec_in_proj, vae.decoder.conv_pre, vae.decoder.conv_post):
        conv.weight.zero_()
        if conv.bias is not None:
            conv.bias.zero_()


def _build_encoder(vae: AudioVAE, ears: list[Tensor]) -> None:
    stages = vae.encoder.block
    stages[0].weight.zero_()
    stages[0].bias.zero_()
    stages[0].weight[0, 0, 3] = 1.0
    grids = [ear[None] for ear in ears]  # [C, T]
    for stage, rate, kept in zip(list(stages)[1:-2], CONFIG.encoder_rates, KEPT):
        used, conv = grids[0].shape[0], stage.block[4]
        blocks = [grid.unflatten(1, (-1, rate)).permute(0, 2, 1).flatten(0, 1) for grid in grids]  # [C * rate, T]
        columns = torch.cat(blocks, dim=1).double()
        basis = torch.linalg.eigh(columns @ columns.T).eigenvectors[:, -kept:].flip(1).T.float()
        first = math.ceil(rate / 2)
        conv.weight.zero_()
        conv.bias.zero_()
        conv.weight[:kept, :used, first : first + rate] = basis.view(kept, used, rate)
        grids = [basis @ block for block in blocks]
    last, channels = stages[-1], CONFIG.latent_channels
    last.weight.zero_()
    last.bias.zero_()
    last.weight[range(channels), range(channels), 1] = 1.0
    last.bias[-2], last.bias[-1] = CONSTANT, -CONSTANT
    signals = torch.cat(grids, dim=1).T  # [N, 32]
    trunk = torch.cat([signals, last.bias[channels:].expand(len(signals), -1)], dim=1)
    norm = vae.pre_block.norm3
    norm.weight.fill_(CONSTANT * (2 / CONFIG.latent_dim) ** 0.5)
    norm.bias.zero_()
    weight, bias = fit(norm(trunk), signals, 1e-14)
    vae.pre_block.proj.weight.copy_(weight)
    vae.pre_block.proj.bias.copy_(bias)
    vae.mean_proj.weight[range(channels), range(channels), 0] = 1.0


def _build_decoder(vae: AudioVAE, latents: list[Tensor], ears: list[Tensor]) -> None:
    channels, decoder = CONFIG.latent_channels, vae.decoder
    vae.dec_in_proj.weight[range(channels), range(channels), 0] = 1.0
    rows = [_with_neighbours(latent[0]) for latent in latents]
    samples = torch.cat([ear.view(-1, CONFIG.hop) for ear in ears])  # [N, 800]
    synthesis, _ = fit(torch.cat(rows), samples, 1e-7)  # [800, 32 * len(REACH)]
    for place, shift in enumerate(REACH):  # conv_pre lays the neighbours side by side
        own = range(place * channels, (place + 1) * channels)
        decoder.conv_pre.weight[own, range(channels), 3 + shift] = 1.0
    parts = synthesis.view(5, 160, -1)  # five pieces of a block, 160 samples each
    basis = torch.linalg.svd(torch.cat(list(parts), dim=1), full_matrices=False).U[:, : CONFIG.decoder_dim // 2]
    first, second = decoder.ups[0][0], decoder.ups[1][0]
    for upsampler in (up[0] for up in decoder.ups):
        upsampler.weight.zero_()
        upsampler.bias.zero_()
    for phase in range(5):
        first.weight[: parts.shape[2], : basis.shape[1], phase + 2] = (basis.T @ parts[phase]).T
        second.weight[: basis.shape[1], :, phase + 2] = basis.view(5, 32, -1)[phase].T
    for wide, narrow in pairwise([32 // 2**n for n in range(6)]):  # n samples side by side: two of n / 2
        upsampler = decoder.ups[2 + int(math.log2(32 // wide))][0]
        for phase in (0, 1):
            upsampler.weight[range(phase * narrow, (phase + 1) * narrow), range(narrow), phase + 1] = 1.0
    decoder.conv_post.weight[0, 0, 3] = 1.0


def _with_neighbours(latent: Tensor) -> Tensor:
    """[32, T] -> [T, 32 * len(REACH)]; zeros beyond the ends, as the convolution has them."""
    wide = torch.nn.functional.pad(latent, (1, 1))
    count = latent.shape[1]
    return torch.cat([wide[:, 1 + shift : 1 + shift + count] for shift in REACH]).T
