"""The carried files, written as the released ones are: ComfyUI's names, float32 islands, sizes in the header.

dit.safetensors (bf16, islands float32; it serves text, keyframes and references)
video_vae.safetensors  audio_vae.safetensors  text_encoder.safetensors  vocab.json  merges.txt
loras/few_step.safetensors
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ...checkpoint.writer import WORDS, write_safetensors
from ...models.dit import DiT
from ..maker import CONFIG_KEY, PARTITION_KEY


def write_part(path: Path, module: nn.Module, config) -> None:
    """A DiT as bf16 with its float32 islands, a VAE as float32."""
    islands = module.float32_islands if isinstance(module, DiT) else ("",)
    tensors = {
        name: (value.float() if name.startswith(islands) else value.to(torch.bfloat16)).contiguous()
        for name, value in sorted(module.state_dict().items())
    }
    serves = {PARTITION_KEY: "fl2va ref2va"} if isinstance(module, DiT) else {}
    write_tensors(path, tensors, {CONFIG_KEY: json.dumps(config.to_dict(), sort_keys=True), **serves})


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = {name: (WORDS[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_safetensors(path, entries, tensors.items(), metadata)
