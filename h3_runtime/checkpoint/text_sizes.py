"""The sizes of a text encoder, read from the shapes of its tensors, and every tensor that such an encoder has.

shapes ──▶ TextSizes(hidden, ffn, heads ...) ──▶ layer_tensors: 11 names      vision_tensors: 351 names (released)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import CheckpointError
from .text_layout import EMBEDDING, count_layers

Shapes = Mapping[str, tuple[int, ...]]
LAYER_LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
MERGE_AREA = 4  # patches that the merger joins into one row
PATCH_SHAPE = (3, 2, 16, 16)  # colours, frames, height, width


@dataclass(frozen=True)
class TextSizes:
    """Counts of channels, rows, layers and blocks; what shapes do not tell (vision heads, taps) is not here."""

    vocab: int
    hidden: int
    layers: int
    ffn: int
    query_rows: int  # heads * head_dim
    key_rows: int
    head_dim: int
    vision_hidden: int
    vision_ffn: int
    vision_depth: int
    vision_positions: int
    deepstack: int  # mergers

    @staticmethod
    def from_shapes(shapes: Shapes) -> TextSizes:
        """From shapes under the module's names; CheckpointError names the tensor that is missing."""
        layer = "language_model.layers.0"
        try:
            return TextSizes(
                vocab=shapes[EMBEDDING][0],
                hidden=shapes[EMBEDDING][1],
                layers=count_layers(shapes),
                ffn=shapes[f"{layer}.mlp.gate_proj.weight"][0],
                query_rows=shapes[f"{layer}.self_attn.q_proj.weight"][0],
                key_rows=shapes[f"{layer}.self_attn.k_proj.weight"][0],
                head_dim=shapes[f"{layer}.self_attn.q_norm.weight"][0],
                vision_hidden=shapes["visual.pos_embed.weight"][1],
                vision_ffn=shapes["visual.blocks.0.mlp.linear_fc1.weight"][0],
                vision_depth=_count(shapes, r"visual\.blocks\.(\d+)\."),
                vision_positions=shapes["visual.pos_embed.weight"][0],
                deepstack=_count(shapes, r"visual\.deepstack_merger_list\.(\d+)\."),
            )
        except (KeyError, IndexError) as missing:
            raise CheckpointError(f"missing or misshapen {missing.args[0]}") from None

    def layer_tensors(self) -> dict[str, tuple[int, ...]]:
        """Name inside a layer -> shape: 7 linears and 4 norms."""
        return {
            "self_attn.q_proj.weight": (self.query_rows, self.hidden),
            "self_attn.k_proj.weight": (self.key_rows, self.hidden),
            "self_attn.v_proj.weight": (self.key_rows, self.hidden),
            "self_attn.o_proj.weight": (self.hidden, self.query_rows),
            "mlp.gate_proj.weight": (self.ffn, self.hidden),
            "mlp.up_proj.weight": (self.ffn, self.hidden),
            "mlp.down_proj.weight": (self.hidden, self.ffn),
            "self_attn.q_norm.weight": (self.head_dim,),
            "self_attn.k_norm.weight": (self.head_dim,),
            "input_layernorm.weight": (self.hidden,),
            "post_attention_layernorm.weight": (self.hidden,),
        }

    def vision_tensors(self) -> dict[str, tuple[int, ...]]:
        """The tower's names (``visual.`` taken off) -> shapes: blocks, mergers, patch and position embeddings."""
        width, merged = self.vision_hidden, self.vision_hidden * MERGE_AREA
        found: dict[str, tuple[int, ...]] = {
            "patch_embed.proj.weight": (width, *PATCH_SHAPE),
            "patch_embed.proj.bias": (width,),
            "pos_embed.weight": (self.vision_positions, width),
        }
        for i in range(self.vision_depth):
            linears = {"attn.qkv": (3 * width, width), "attn.proj": (width, width)}
            linears |= {"mlp.linear_fc1": (self.vision_ffn, width), "mlp.linear_fc2": (width, self.vision_ffn)}
            for name, shape in linears.items():
                found |= {f"blocks.{i}.{name}.weight": shape, f"blocks.{i}.{name}.bias": shape[:1]}
            for norm in ("norm1", "norm2"):
                found |= dict.fromkeys((f"blocks.{i}.{norm}.weight", f"blocks.{i}.{norm}.bias"), (width,))
        mergers = {"merger": width} | {f"deepstack_merger_list.{i}": merged for i in range(self.deepstack)}
        for name, normed in mergers.items():  # the last merger norms before joining patches, the others after
            found |= dict.fromkeys((f"{name}.norm.weight", f"{name}.norm.bias"), (normed,))
            found |= {f"{name}.linear_fc1.weight": (merged, merged), f"{name}.linear_fc1.bias": (merged,)}
            found |= {f"{name}.linear_fc2.weight": (self.hidden, merged), f"{name}.linear_fc2.bias": (self.hidden,)}
        return found

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the encoder under the module's names."""
        found: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab, self.hidden)}
        for i in range(self.layers):
            found |= {f"language_model.layers.{i}.{name}": shape for name, shape in self.layer_tensors().items()}
        return found | {f"visual.{name}": shape for name, shape in self.vision_tensors().items()}


def patch_embed_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The patch embedding's shape: GGUF has no fifth axis and stores (3456, 2, 16, 16) for (1152, 3, 2, 16, 16)."""
    if len(shape) == len(PATCH_SHAPE) and shape[1:] == PATCH_SHAPE[1:] and shape[0] % PATCH_SHAPE[0] == 0:
        return (shape[0] // PATCH_SHAPE[0], *PATCH_SHAPE)
    return shape


def _count(shapes: Shapes, pattern: str) -> int:
    numbers = [int(match[1]) for name in shapes if (match := re.match(pattern, name))]
    return max(numbers, default=-1) + 1
