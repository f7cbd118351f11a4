"""Makes the small model: the architecture of the release, tiny, with seeded random weights.

    make_model(folder, seed) ─▶ dit.safetensors  video_vae.safetensors  audio_vae.safetensors
                                text_encoder.safetensors  vocab.json  merges.txt

Random weights show what the runtime does, not what the model can: pictures are drifting blotches of colour and sound
is soft hiss, yet prompts, guides, masks and seeds all have their effect. Files are in ComfyUI's single-file layouts
with their float32 islands, like the released ones.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from ..checkpoint.writer import WORDS, write_safetensors
from ..geometry import PIXELS_PER_LATENT
from ..models.audio_vae import AudioVAE, AudioVAEConfig
from ..models.dit import DiT, DiTConfig
from ..models.video_vae import VideoVAE, VideoVAEConfig
from .text_maker import make_text_encoder

CONFIG_KEY = "h3_runtime.config"
PARTITION_KEY = "h3_runtime.partition"
SEED = 2026

DIT = DiTConfig(
    hidden=192,
    layers=4,
    refiner_layers=1,
    heads=4,
    head_dim=64,
    ffn=512,
    text_dim=64,
    time_features=64,
    time_hidden=192,
    time_dim=96,
    rope_frequencies=8,
)
VIDEO_VAE = VideoVAEConfig(channels=(32, 32, 32, 32, 32, 32), resnets=1, layers=3, heads=4, head_dim=32, ffn=256)
AUDIO_VAE = AudioVAEConfig(encoder_dim=4, latent_dim=128, heads=4, decoder_dim=128)
SOUND_LEVEL = 0.01  # of full scale, roughly
REFERENCE_DIT = "dit_ref2va.safetensors"
PARTS = ("dit.safetensors", "video_vae.safetensors", "audio_vae.safetensors", "text_encoder.safetensors")


def make_model(folder: str | Path, seed: int = SEED) -> Path:
    """Write the small model into ``folder`` (made where it is missing); the same seed gives the same bytes."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    make_text_encoder(folder, seed)
    generator = torch.Generator().manual_seed(seed)
    _save(folder / PARTS[0], DiT(DIT), DIT, generator, half=True)
    _save(folder / PARTS[1], VideoVAE(VIDEO_VAE), VIDEO_VAE, generator)
    _save(folder / PARTS[2], AudioVAE(AUDIO_VAE), AUDIO_VAE, generator)
    return folder


def make_reference_dit(folder: str | Path, seed: int = SEED + 1) -> Path:
    """Write a second small DiT into ``folder``, whose weights say they are for references (Ref2VA)."""
    path = Path(folder) / REFERENCE_DIT
    _save(path, DiT(DIT), DIT, torch.Generator().manual_seed(seed), half=True, partition="ref2va")
    return path


def seeded_tensors(module: nn.Module, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """float32 values for every tensor of ``module``, drawn in the order of their names."""
    return {name: _seeded(name, tensor, generator) for name, tensor in sorted(module.state_dict().items())}


def seeded_module(kind: type[nn.Module], config, seed: int = SEED) -> nn.Module:
    """One part of the small model in memory, float32, for inference."""
    module = kind(config).eval().requires_grad_(False)
    module.load_state_dict(seeded_tensors(module, torch.Generator().manual_seed(seed)))
    return module


def _save(
    path: Path, module: nn.Module, config, generator: torch.Generator, half: bool = False, partition: str = "fl2va"
) -> None:
    islands = DiT.float32_islands if isinstance(module, DiT) else ()
    tensors = {
        name: (value.to(torch.bfloat16) if half and not name.startswith(islands) else value).contiguous()
        for name, value in seeded_tensors(module, generator).items()
    }
    metadata = {CONFIG_KEY: json.dumps(config.to_dict(), sort_keys=True)}
    if half:
        metadata[PARTITION_KEY] = partition
    entries = {name: (WORDS[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    # not by safetensors' own writer: it orders several metadata entries differently in every process
    write_safetensors(path, entries, tensors.items(), metadata)


def _seeded(name: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Matrices at 1 / sqrt(fan in), norms near one, biases near zero; filters and frequencies as they are computed."""
    noise = torch.randn(tensor.shape, generator=generator)
    leaf = name.rsplit(".", 1)[-1]
    if leaf in ("filter", "inv_freq", "zero_k_bias"):
        return tensor.float().clone()
    if leaf == "latents_mean":
        return torch.zeros(tensor.shape)
    if leaf == "latents_std" or (leaf == "alpha" and tensor.ndim == 3):
        return torch.ones(tensor.shape)
    if leaf in ("scale1", "scale2"):
        return 0.5 + 0.1 * noise
    if name == "decoder.proj_out.weight":
        return _smooth_patches(tensor.shape, generator)
    if name == "decoder.conv_post.weight":
        return SOUND_LEVEL * noise / tensor[0].numel() ** 0.5
    if tensor.ndim > 1 and leaf == "weight":
        return noise / tensor[0].numel() ** 0.5
    if leaf == "weight":
        return 1 + 0.05 * noise
    return 0.05 * noise


def _smooth_patches(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Weights [3 * 4 * 16 * 16, width] of the video VAE's last layer whose patches are a colour and its gradients.

    Free random pixels would be noise that no codec keeps; a plane per colour shows the latent grid itself.
    """
    ramp = torch.linspace(-1, 1, PIXELS_PER_LATENT)
    still = torch.ones(PIXELS_PER_LATENT, PIXELS_PER_LATENT)
    basis = torch.stack([still, 0.5 * ramp[:, None] * still, 0.5 * ramp[None] * still])  # [3, 16, 16]
    mixes = torch.randn(3, shape[1], 3, generator=generator) * 0.4 / shape[1] ** 0.5  # [colour, width, basis]
    frames = shape[0] // (3 * PIXELS_PER_LATENT**2)
    planes = torch.einsum("cwb,byx->cyxw", mixes, basis)[:, None].expand(-1, frames, -1, -1, -1)
    return planes.reshape(shape).contiguous()
