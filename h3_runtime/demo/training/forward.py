"""The DiT's own weights in a batched forward that gradients pass through: the same formulas as ``models/dit.py``.

models/dit.py works in place, one packed sequence at a time, with modulation tables made before the loop; here a batch
goes through at once, bf16 products on a float32 residual. ``tests/test_demo_training.py`` holds the two together.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...models.dit import EPS, MODALITIES, DiT
from .batches import Batch

SLOTS = 4


def velocity(dit: DiT, batch: Batch, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """float32 velocity rows (picture [B, V, 96], sound [B, A, 32]) of a float32 ``dit``; products in ``dtype``."""
    config = dit.config
    length = batch.hidden.shape[1]
    sounds = batch.audio.shape[1]
    mask = _key_mask(batch.there[:, :length], dtype)
    text = _linear(dit.condition_proj, batch.hidden, dtype).float()
    for block in dit.token_refiner.blocks:
        text = text + _attend(block.attn, _norm(text, block.norm1), None, mask, dtype)
        text = text + _feed_forward(block.mlp, _norm(text, block.norm2), dtype)
    text = _norm(text, dit.token_refiner.final_norm)
    held, video = dit.video_patch_proj(batch.conditions), dit.video_patch_proj(batch.video)
    h = torch.cat([text, held, dit.audio_patch_proj(batch.audio), video], dim=1)
    angles = (batch.positions[..., None] * dit.rope.inv_freq).flatten(2)[:, None]  # [B, 1, S, 3F]
    rotary = angles.cos().to(dtype), angles.sin().to(dtype)
    mask = _key_mask(batch.there, dtype)
    embedding = F.silu(dit.time_embedder(batch.timesteps.flatten()))  # [B * 4, time_dim]
    reads = F.one_hot(batch.rows, SLOTS * MODALITIES).to(dtype)  # [B, S, 12]
    for block in dit.blocks:
        table = block.adaln_proj.linear(embedding).view(len(h), SLOTS * MODALITIES, 6 * config.hidden)
        part = torch.bmm(reads, table.to(dtype)).chunk(6, dim=-1)  # [B, S, hidden] each
        y = _norm(h, block.norm1) * (1 + part[1]) + part[0]
        h = h + part[2] * _attend(block.attn, y, rotary, mask, dtype)
        y = _norm(h, block.norm2) * (1 + part[4]) + part[3]
        h = h + part[5] * _feed_forward(block.mlp, y, dtype)
    layer = dit.final_layer
    table = layer.adaln_proj.linear(embedding).view(len(h), SLOTS, 2, config.hidden)
    first = h.shape[1] - batch.video.shape[1]
    slots = F.one_hot(batch.rows[:, first - sounds :] // MODALITIES, SLOTS).float()
    shift, scale = torch.einsum("bsk,bknc->nbsc", slots, table)
    y = _norm(h[:, first - sounds :], layer.norm) * (1 + scale) + shift
    return layer.video_out(y[:, sounds:]), layer.audio_out(y[:, :sounds])


def _key_mask(there: Tensor, dtype: torch.dtype) -> Tensor | None:
    """[B, 1, 1, S] added to the scores; None where nothing is filling."""
    if bool(there.all()):
        return None
    return torch.zeros(there.shape, dtype=dtype).masked_fill(~there, float("-inf"))[:, None, None]


def _linear(layer: nn.Linear, x: Tensor, dtype: torch.dtype) -> Tensor:
    bias = None if layer.bias is None else layer.bias.to(dtype)
    return F.linear(x.to(dtype), layer.weight.to(dtype), bias)


def _norm(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    return F.rms_norm(x, norm.normalized_shape, norm.weight, EPS)


def _attend(layer: nn.Module, x: Tensor, rotary: tuple[Tensor, Tensor] | None, mask: Tensor | None, dtype) -> Tensor:
    batch, rows = x.shape[:2]
    qkv = _linear(layer.qkv_proj, x, dtype).view(batch, rows, 3, layer.heads, layer.head_dim)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, heads, S, D]
    q, k = (
        F.rms_norm(part, (layer.head_dim,), norm.weight.to(dtype), EPS)
        for part, norm in ((q, layer.q_norm), (k, layer.k_norm))
    )
    if rotary is not None:
        q, k = _rotate(q, *rotary), _rotate(k, *rotary)
    scores = (q * layer.head_dim**-0.5) @ k.transpose(-1, -2)  # for a few hundred rows faster than the fused kernel
    out = (scores if mask is None else scores + mask).softmax(-1) @ v
    return _linear(layer.out_proj, out.transpose(1, 2).flatten(2), dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def _feed_forward(layer: nn.Module, x: Tensor, dtype: torch.dtype) -> Tensor:
    gate, value = _linear(layer.fc1, x, dtype).chunk(2, dim=-1)
    return _linear(layer.fc2, F.silu(gate) * value, dtype)
