"""A checkpoint of any layout rewritten as one ComfyUI file with its block linears quantised; tensor by tensor.

    path ──open──▶ recipes ──▶ chosen linears   quantise ──▶ weight, weight_scale, comfy_quant   ─┐
                           ──▶ everything else  as it is ───────────────────────────────────────▶ ├─▶ OUT, atomic
                               header metadata, partition, sizes that no shape tells ───────────▶ ┘

The header is written first: what a linear becomes is worked out on tensors without memory. Host memory holds one tensor
and its transform.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import H3Error
from ..models.attention import inverse_frequencies
from .load import ROPE, open_dit, open_video_vae
from .opening import CONFIG_KEY, PARTITION_KEYS, PARTITIONS, Checkpoint, find_partition, open_checkpoint
from .pieces import Online, quantise_linear
from .reader import DTYPES
from .text_layers import TextLayers, holds_text_encoder
from .text_layout import LAYOUTS
from .writer import WORDS, write_safetensors

METHOD_KEY = "h3_runtime.quantised"
COMFYUI_TEXT = next(layout for layout in LAYOUTS if layout.name == "ComfyUI")
MARGIN = 1 << 26  # bytes of disk left free


@dataclass(frozen=True)
class Converted:
    """What was written: linears quantised by name, tensors in the file, bytes read and written."""

    path: Path
    part: str
    partition: str
    linears: tuple[str, ...]
    tensors: int
    bytes_before: int
    bytes_after: int


def quantise_checkpoint(
    path: str | os.PathLike,
    out: str | os.PathLike,
    online: Online,
    progress: Callable[[int, int], None] | None = None,
) -> Converted:
    """Write the DiT, video VAE or text encoder at ``path`` to ``out`` with its linears quantised by ``online``.

    H3Error before anything is read for what cannot be done: another part, quantised already, no room, ``out`` there.
    ``progress(done, total)`` counts tensors.
    """
    checkpoint, config = _opened(path)
    chosen = online.linears(checkpoint)
    out = _free_place(out)
    entries = dict(_entries(checkpoint, chosen, online.method))
    needed = sum(_nbytes(word, shape) for word, shape in entries.values())
    free = shutil.disk_usage(out.parent).free
    if needed + MARGIN > free:
        raise H3Error(f"{out.parent} has {free:,} bytes free and {needed:,} are needed: choose another place.")
    partition, _ = find_partition(checkpoint.source)
    metadata = _metadata(checkpoint, partition, online.method, config)
    tensors = _tensors(checkpoint, chosen, online.method)
    written = write_safetensors(out, entries, _counted(tensors, len(entries), progress), metadata)
    before = sum(file.stat().st_size for file in checkpoint.source.files)
    part = checkpoint.format.part
    return Converted(out, part, partition if part == "dit" else "unknown", chosen, len(entries), before, written)


def _opened(path: str | os.PathLike) -> tuple[Checkpoint, dict | None]:
    """The part at ``path``, complete and checked, and its sizes, to be written where shapes do not tell them."""
    if holds_text_encoder(path):
        return TextLayers(path).checkpoint, None
    checkpoint = open_checkpoint(path)
    openers = {"dit": open_dit, "video_vae": open_video_vae}
    if checkpoint.format.part not in openers:
        return checkpoint, None
    opened = openers[checkpoint.format.part](path)
    return opened.pieces.checkpoint, opened.module.config.to_dict()


def _free_place(out: str | os.PathLike) -> Path:
    out = Path(out)
    if out.suffix != ".safetensors":
        raise H3Error(f"{out} must end in .safetensors: ComfyUI reads that.")
    if not out.parent.is_dir():
        raise H3Error(f"{out.parent} is not a folder: make it first, or choose another place.")
    if out.exists():
        raise H3Error(f"{out} is there already: choose another name, or delete it first.")
    return out


def _comfyui_name(checkpoint: Checkpoint, name: str) -> str:
    return COMFYUI_TEXT.stored_name(name) if checkpoint.format.part == "text_encoder" else name


def _layer(weight: Tensor, method: str) -> dict[str, Tensor]:
    return quantise_linear(weight, None, method, torch.float32).stored()


def _entries(checkpoint: Checkpoint, chosen: tuple[str, ...], method: str) -> Iterator[tuple[str, tuple]]:
    """(name in the file, (dtype word, shape)) of everything, in order."""
    for name, recipe in checkpoint.recipes.items():
        owner, _, leaf = name.rpartition(".")
        if owner in chosen and leaf == "weight":
            stored = getattr(torch, DTYPES[checkpoint.stored_as(name)][1])
            made = _layer(torch.empty(recipe.shape, dtype=stored, device="meta"), method)
            for role, tensor in made.items():
                yield _comfyui_name(checkpoint, f"{owner}.{role}"), (WORDS[tensor.dtype], tuple(tensor.shape))
        else:
            yield _comfyui_name(checkpoint, name), (checkpoint.stored_as(name), recipe.shape)
    if _lacks_rope(checkpoint):
        yield ROPE, ("F32", tuple(_rope(checkpoint).shape))


def _tensors(checkpoint: Checkpoint, chosen: tuple[str, ...], method: str) -> Iterator[tuple[str, Tensor]]:
    """(name in the file, tensor), in the order of ``_entries``, each made when it is asked for."""
    for name in checkpoint.recipes:
        owner, _, leaf = name.rpartition(".")
        if owner in chosen and leaf == "weight":
            for role, tensor in _layer(checkpoint.build(name), method).items():
                yield _comfyui_name(checkpoint, f"{owner}.{role}"), tensor
        else:
            yield _comfyui_name(checkpoint, name), checkpoint.build(name)
    if _lacks_rope(checkpoint):
        yield ROPE, _rope(checkpoint)


def _lacks_rope(checkpoint: Checkpoint) -> bool:
    """ComfyUI's DiT file holds the rotary frequencies; the diffusers one does not."""
    return checkpoint.format.part == "dit" and ROPE not in checkpoint.recipes


def _rope(checkpoint: Checkpoint) -> Tensor:
    head_dim = checkpoint.recipes["blocks.0.attn.q_norm.weight"].shape[0]
    return inverse_frequencies(checkpoint.header.config.get("rope_freq_dim", head_dim // 8))


def _metadata(checkpoint: Checkpoint, partition: str, method: str, config: dict | None) -> dict[str, str]:
    metadata = {**checkpoint.source.metadata, METHOD_KEY: method}
    if checkpoint.format.part == "dit" and partition in PARTITIONS:
        metadata[PARTITION_KEYS[0]] = partition
    if config is not None and checkpoint.header.config:
        metadata[CONFIG_KEY] = json.dumps(config, sort_keys=True)  # what config.json beside the input told
    return metadata


def _counted(
    tensors: Iterator[tuple[str, Tensor]], total: int, progress: Callable[[int, int], None] | None
) -> Iterator[tuple[str, Tensor]]:
    for done, item in enumerate(tensors):
        if progress is not None:
            progress(done, total)
        yield item
    if progress is not None:
        progress(total, total)


def _nbytes(word: str, shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel() * DTYPES[word][0] // 8
