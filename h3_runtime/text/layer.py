"""One language layer of the text encoder, in chunks that do not depend on the card.

    hidden [S, D] ──2,048 rows at a time──▶ norm ─▶ q, k, v ─norm─rotate─▶ q [S, heads, d]   k, v [key heads, S, d]
                  per key head: causal attention of its queries over all rows ─▶ in the place of those queries
                  ──2,048 rows at a time──▶ + o_proj     ──2,048 rows at a time──▶ + down(silu(gate) * up)

A picture of 2048 x 3648 pixels is 7,296 rows, and nine of them 66 thousand: whole, the feed-forward alone would take
10 GB. So no tensor of all rows is wider than the queries, and the hidden state is changed in place. The sizes are part
of the baseline: one chunk gives transformers' bits, more give its numbers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.attention import ROW_CHUNK, row_chunks


class ChunkedLayer(nn.Module):
    """The parts of transformers' Qwen3-VL decoder layer, under their own names, run in chunks.

    It stands where the layer stood: the names of its tensors stay, and transformers' own loop can call it.
    """

    def __init__(self, layer: nn.Module, chunk: int = ROW_CHUNK):
        super().__init__()
        self.input_layernorm = layer.input_layernorm
        self.self_attn = layer.self_attn
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.mlp = layer.mlp
        self.chunk = chunk

    def forward(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **unused) -> Tensor:
        """hidden_states [1, S, D], changed in place and returned; cos and sin [1, S, head_dim].

        Rows see those before them and themselves; there is one sequence and no padding, so a mask would say no more.
        """
        assert hidden_states.shape[0] == 1, hidden_states.shape
        rows = hidden_states[0]  # [S, D]
        cos, sin = (table[0, :, None] for table in position_embeddings)  # [S, 1, head_dim]
        self._attend(rows, cos, sin)
        for start, stop in row_chunks(0, len(rows), self.chunk):
            x = self.post_attention_layernorm(rows[start:stop])
            rows[start:stop] += self.mlp.down_proj(F.silu(self.mlp.gate_proj(x)).mul_(self.mlp.up_proj(x)))
        return hidden_states

    def _attend(self, rows: Tensor, cos: Tensor, sin: Tensor) -> None:
        attention = self.self_attn
        size, count = attention.head_dim, len(rows)
        heads = attention.q_proj.out_features // size
        key_heads = attention.k_proj.out_features // size
        group = heads // key_heads
        q = rows.new_empty(count, heads, size)
        k, v = rows.new_empty(key_heads, count, size), rows.new_empty(key_heads, count, size)
        for start, stop in row_chunks(0, count, self.chunk):
            x = self.input_layernorm(rows[start:stop])
            turn = cos[start:stop], sin[start:stop]
            q[start:stop] = rotate_(attention.q_norm(attention.q_proj(x).view(-1, heads, size)), *turn)
            keys = rotate_(attention.k_norm(attention.k_proj(x).view(-1, key_heads, size)), *turn)
            k[:, start:stop] = keys.transpose(0, 1)
            v[:, start:stop] = attention.v_proj(x).view(-1, key_heads, size).transpose(0, 1)
        for index in range(key_heads):
            own = slice(index * group, (index + 1) * group)
            shape = (1, group, count, size)
            seen = F.scaled_dot_product_attention(
                q[:, own].transpose(0, 1)[None],  # [1, group, S, head_dim]
                k[None, index : index + 1].expand(shape),
                v[None, index : index + 1].expand(shape),
                is_causal=True,
                scale=attention.scaling,
            )
            q[:, own] = seen[0].transpose(0, 1)  # these queries are not needed any more
            del seen
        q = q.view(count, heads * size)
        for start, stop in row_chunks(0, count, self.chunk):
            rows[start:stop] += attention.o_proj(q[start:stop])


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs (c, c + d/2) of x [n, heads, d] by the angles of cos and sin [n, 1, d], in place."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1).mul_(sin)
    return x.mul_(cos).add_(turned)
