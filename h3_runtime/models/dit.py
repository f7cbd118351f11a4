"""The DiT: one packed sequence of text, condition, sound and picture rows through modulated transformer blocks.

    text rows ──condition_proj──▶ refiner (2 blocks, once per request) ─┐
    sound rows ──audio_patch_proj──▶                                    ├─▶ h [S, H] ─▶ block 0 .. block n-1
    picture rows ──video_patch_proj──▶                                  ┘                    │
    block:  h += gate * attention(norm1(h) * (1 + scale) + shift)                            │  target rows only
            h += gate * ffn(norm2(h) * (1 + scale) + shift)                                  ▼
            shift, scale, gate: rows of a table per (timestep, modality)        final norm ─▶ video_out, audio_out

Attribute names are those of the ComfyUI checkpoint. Modulation comes in as a table and a list of ``Run``s that say
which table row each packed row reads, so the 13 B AdaLN parameters are not touched inside the loop. The only big
tensors of a forward are h, its normed copy, one head group's q, k, v and the attention output; everything row-wise
runs in canonical row chunks, in place. Formulas: diffusers ``MiniMaxH3Transformer3DModel``.

A pruned checkpoint has no time embedder: ``adaln_t_table`` [G, k] holds a curve over t in its place, read between its
points, and the AdaLN linears take those k values as they are, without SiLU and in float32 (ComfyUI's rule).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import CheckpointError
from .attention import (
    CANONICAL,
    Attention,
    AttentionCall,
    ChunkSizes,
    FeedForward,
    Linear,
    dense_attention,
    inverse_frequencies,
    row_chunks,
)

EPS = 1e-5
MODALITIES = 3
TABLE_BATCH = 64  # rows of every time-embedding and AdaLN matmul, the last padded: a row's bits never depend on others
SHIFT_ATTENTION, SCALE_ATTENTION, GATE_ATTENTION, SHIFT_FFN, SCALE_FFN, GATE_FFN = range(6)
TIME_BASE = 10000.0
CURVE = "adaln_t_table"


@dataclass(frozen=True)
class DiTConfig:
    """Sizes of the DiT; the defaults are the release (33.1 B parameters)."""

    hidden: int = 5376
    layers: int = 50
    refiner_layers: int = 2
    heads: int = 56
    head_dim: int = 128
    ffn: int = 14336
    text_dim: int = 5120
    video_channels: int = 24
    audio_channels: int = 32
    time_features: int = 256
    time_hidden: int = 5376
    time_dim: int = 2688
    rope_frequencies: int = 16
    curve_points: int = 0  # of a pruned checkpoint's curve, time_dim wide; 0: a time embedder

    @staticmethod
    def from_shapes(shapes: dict[str, tuple[int, ...]]) -> DiTConfig:
        """Read the sizes from tensor shapes under ComfyUI names; CheckpointError names what is missing.

        ``rope.inv_freq`` is not in every layout: without it the release's ratio (6 F = 3/4 of the head) is taken.
        """
        try:
            head_dim = shapes["blocks.0.attn.q_norm.weight"][0]
            rope = shapes.get("rope.inv_freq", (head_dim // 8,))[0]
            points, width = shapes.get(CURVE, (0, 0))
            features, time_hidden = (0, 0) if points else shapes["time_embedder.proj_in.weight"][::-1]
            return DiTConfig(
                hidden=shapes["blocks.0.norm1.weight"][0],
                layers=_count(shapes, "blocks."),
                refiner_layers=_count(shapes, "token_refiner.blocks."),
                heads=shapes["blocks.0.attn.qkv_proj.weight"][0] // (3 * head_dim),
                head_dim=head_dim,
                ffn=shapes["blocks.0.mlp.fc1.weight"][0] // 2,
                text_dim=shapes["condition_proj.weight"][1],
                video_channels=shapes["video_patch_proj.weight"][1] // 4,
                audio_channels=shapes["audio_patch_proj.weight"][1],
                time_features=features,
                time_hidden=time_hidden,
                time_dim=width if points else shapes["time_embedder.proj_out.weight"][0],
                rope_frequencies=rope,
                curve_points=points,
            )
        except KeyError as missing:
            raise CheckpointError(f"this is not a MiniMax-H3 DiT: the tensor {missing.args[0]} is missing") from None

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, int]) -> DiTConfig:
        return DiTConfig(**values)


def _count(shapes: dict[str, tuple[int, ...]], prefix: str) -> int:
    return 1 + max(
        (int(name[len(prefix) :].split(".")[0]) for name in shapes if name.startswith(prefix)),
        default=-1,
    )


class Run(NamedTuple):
    """Packed rows start..stop read table row ``row``; a tensor gives one table row per packed row (masks)."""

    start: int
    stop: int
    row: int | Tensor


class ForwardContext(NamedTuple):
    """What every block of one forward needs besides h."""

    forward: int  # index of this forward in the grid
    runs: Sequence[Run]  # packed row -> row of the block's modulation table
    rotary: tuple[Tensor, Tensor]  # cos, sin [S, 3F]
    attention: AttentionCall
    table: Callable[[int], Tensor]  # block index -> [P, 6, hidden] on the compute device
    chunks: ChunkSizes = CANONICAL


def pieces(runs: Sequence[Run], start: int, stop: int) -> Iterator[Run]:
    """The parts of ``runs`` inside the rows start..stop."""
    for run in runs:
        first, last = max(run.start, start), min(run.stop, stop)
        if first < last:
            row = run.row[first - run.start : last - run.start] if isinstance(run.row, Tensor) else run.row
            yield Run(first, last, row)


def modulated_norm(
    h: Tensor, norm: nn.RMSNorm, shift: Tensor, scale: Tensor, runs: Sequence[Run], rows: tuple[int, int], out: Tensor
) -> Tensor:
    """out <- norm(h[rows]) * (1 + scale) + shift, with shift and scale [P, hidden] read by run."""
    for first, last, row in pieces(runs, *rows):
        y = norm(h[first:last])
        factor = scale[row].add(1.0)
        torch.addcmul(shift[row], y, factor, out=out[first - rows[0] : last - rows[0]])
    return out


def gated_add_(h: Tensor, gate: Tensor, y: Tensor, runs: Sequence[Run], start: int, stop: int) -> None:
    """h[start:stop] += gate * y, gate [P, hidden] read by run."""
    for first, last, row in pieces(runs, start, stop):
        h[first:last].addcmul_(gate[row], y[first - start : last - start])


class Modulation(nn.Module):
    """AdaLN projection: SiLU(time embedding) -> per modality six vectors."""

    def __init__(self, time_dim: int, out: int):
        super().__init__()
        self.linear = Linear(time_dim, out)

    def forward(self, embedding: Tensor) -> Tensor:
        """[n, time_dim] -> [n, out]."""
        return self.linear(embedding)


class Block(nn.Module):
    """One transformer block; see the module's picture."""

    def __init__(self, config: DiTConfig):
        super().__init__()
        self.norm1 = nn.RMSNorm(config.hidden, eps=EPS)
        self.attn = Attention(config.hidden, config.heads, config.head_dim, EPS)
        self.norm2 = nn.RMSNorm(config.hidden, eps=EPS)
        self.mlp = FeedForward(config.hidden, config.ffn)
        self.adaln_proj = Modulation(config.time_dim, MODALITIES * 6 * config.hidden)

    def forward(self, index: int, h: Tensor, context: ForwardContext) -> Tensor:
        """h [S, hidden], changed in place and returned."""
        table, runs = context.table(index), context.runs
        part = table.unbind(1)  # six of [P, hidden]
        x = torch.empty_like(h)
        for start, stop in row_chunks(0, h.shape[0], context.chunks.rows):
            modulated_norm(
                h, self.norm1, part[SHIFT_ATTENTION], part[SCALE_ATTENTION], runs, (start, stop), x[start:stop]
            )
        attended = self.attn.attend(x, context.rotary, context.attention, index, context.forward, context.chunks)
        for start, stop in row_chunks(0, h.shape[0], context.chunks.rows):
            # x's rows are free once all heads have read them; they hold this chunk's normed input from here on
            gated_add_(h, part[GATE_ATTENTION], self.attn.out_proj(attended[start:stop]), runs, start, stop)
            y = modulated_norm(h, self.norm2, part[SHIFT_FFN], part[SCALE_FFN], runs, (start, stop), x[start:stop])
            gated_add_(h, part[GATE_FFN], self.mlp(y), runs, start, stop)
        return h


class RefinerBlock(nn.Module):
    """Plain pre-norm block over the text rows: no modulation, no rotary embedding."""

    def __init__(self, config: DiTConfig):
        super().__init__()
        self.norm1 = nn.RMSNorm(config.hidden, eps=EPS)
        self.attn = Attention(config.hidden, config.heads, config.head_dim, EPS)
        self.norm2 = nn.RMSNorm(config.hidden, eps=EPS)
        self.mlp = FeedForward(config.hidden, config.ffn)

    def forward(self, index: int, h: Tensor, attention: AttentionCall) -> Tensor:
        x = torch.empty_like(h)
        for start, stop in row_chunks(0, h.shape[0]):
            x[start:stop] = self.norm1(h[start:stop])
        attended = self.attn.attend(x, None, attention, -1 - index, -1)
        for start, stop in row_chunks(0, h.shape[0]):
            h[start:stop] += self.attn.out_proj(attended[start:stop])
            h[start:stop] += self.mlp(self.norm2(h[start:stop]))
        return h


class TokenRefiner(nn.Module):
    def __init__(self, config: DiTConfig):
        super().__init__()
        self.blocks = nn.ModuleList(RefinerBlock(config) for _ in range(config.refiner_layers))
        self.final_norm = nn.RMSNorm(config.hidden, eps=EPS)


class TimeEmbedder(nn.Module):
    """t -> cos and sin features -> two linear layers with SiLU between, float32."""

    def __init__(self, config: DiTConfig):
        super().__init__()
        self.proj_in = Linear(config.time_features, config.time_hidden)
        self.proj_out = Linear(config.time_hidden, config.time_dim)

    def forward(self, timesteps: Tensor) -> Tensor:
        """float32 [n] -> float32 [n, time_dim]; cos before sin, t unscaled."""
        half = self.proj_in.in_features // 2
        exponent = torch.arange(half, dtype=torch.float32, device=timesteps.device) / half
        frequencies = torch.exp(-torch.log(torch.tensor(TIME_BASE)).to(timesteps.device) * exponent)
        angles = timesteps[:, None].float() * frequencies
        features = torch.cat((angles.cos(), angles.sin()), dim=-1)
        return self.proj_out(F.silu(self.proj_in(features)))


class FinalLayer(nn.Module):
    def __init__(self, config: DiTConfig):
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden, eps=EPS)
        self.adaln_proj = Modulation(config.time_dim, 2 * config.hidden)
        self.video_out = Linear(config.hidden, 4 * config.video_channels)
        self.audio_out = Linear(config.hidden, config.audio_channels)


class Rope(nn.Module):
    """Holds ``inv_freq`` under the checkpoint's name; computed, and replaced by the file's where it has one."""

    def __init__(self, count: int):
        super().__init__()
        self.register_buffer("inv_freq", inverse_frequencies(count))


class DiT(nn.Module):
    """The model. Its pieces are called by the sampler one after another; nothing here knows of steps or masks."""

    float32_islands = (
        "video_patch_proj.",
        "audio_patch_proj.",
        "time_embedder.",
        "final_layer.video_out.",
        "final_layer.audio_out.",
        "rope.",
        CURVE,
    )

    def __init__(self, config: DiTConfig):
        super().__init__()
        self.config = config
        self.video_patch_proj = Linear(4 * config.video_channels, config.hidden)
        self.audio_patch_proj = Linear(config.audio_channels, config.hidden)
        self.condition_proj = Linear(config.text_dim, config.hidden)
        if config.curve_points:
            self.register_buffer(CURVE, torch.zeros(config.curve_points, config.time_dim))
            self.float32_islands += (
                *(f"blocks.{i}.adaln_proj." for i in range(config.layers)),
                "final_layer.adaln_proj.",
            )
        else:
            self.time_embedder = TimeEmbedder(config)
        self.token_refiner = TokenRefiner(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_layer = FinalLayer(config)
        self.rope = Rope(config.rope_frequencies)

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype: that of the norms, which no format quantises."""
        return self.final_layer.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the DiT computes; its blocks may live elsewhere."""
        return self.final_layer.norm.weight.device

    def refine_text(
        self,
        hidden: Tensor,
        attention: AttentionCall = dense_attention,
        blocks: Iterable[Callable] | None = None,
    ) -> Tensor:
        """Text condition [L, text_dim] -> text rows [L, hidden] in the compute dtype. Once per request.

        ``blocks`` are the refiner's, in order, where they do not live in the module (streamed weights).
        """
        hidden = hidden.to(self.device, self.dtype)
        h = torch.empty(hidden.shape[0], self.config.hidden, dtype=hidden.dtype, device=self.device)
        for start, stop in row_chunks(0, hidden.shape[0]):
            h[start:stop] = self.condition_proj(hidden[start:stop])
        for index, block in enumerate(self.token_refiner.blocks if blocks is None else blocks):
            block(index, h, attention)
        return self.token_refiner.final_norm(h)

    def embed_video(self, rows: Tensor, out: Tensor) -> None:
        """Picture rows float32 [n, 96] -> out [n, hidden], in chunks (the projection is a float32 island)."""
        for start, stop in row_chunks(0, rows.shape[0]):
            out[start:stop] = self.video_patch_proj(rows[start:stop])

    def embed_audio(self, rows: Tensor, out: Tensor) -> None:
        """Sound rows float32 [n, 32] -> out [n, hidden]."""
        for start, stop in row_chunks(0, rows.shape[0]):
            out[start:stop] = self.audio_patch_proj(rows[start:stop])

    def embed_time(self, timesteps: Tensor) -> Tensor:
        """float32 [n] -> time embedding, or the curve at these t, float32 [n, time_dim]."""
        timesteps = timesteps.to(self.device, torch.float32)
        return self._curve_at(timesteps) if self.config.curve_points else self.time_embedder(timesteps)

    def _curve_at(self, timesteps: Tensor) -> Tensor:
        """The curve at t * (G - 1), clamped to its ends, linear between its points."""
        table = getattr(self, CURVE)
        place = timesteps.clamp(0, 1) * (table.shape[0] - 1)
        before = place.floor()
        after = place.ceil()
        return torch.lerp(table[before.long()], table[after.long()], (place - before)[:, None])

    def time_embedding(self, timesteps: Tensor) -> Tensor:
        """float32 [n] -> what the AdaLN linears take, float32 [n, time_dim]: SiLU(time embedding), or the curve.

        In batches of TABLE_BATCH rows.
        """
        timesteps = timesteps.to(self.device, torch.float32)
        activate = (lambda x: x) if self.config.curve_points else F.silu
        return _batched(timesteps, lambda t: activate(self.embed_time(t)))

    def _modulation(self, project: Callable[[Tensor], Tensor], embedding: Tensor) -> Tensor:
        """Rows of one AdaLN projection in the compute dtype; a curve's linears are float32 islands."""
        given = embedding if self.config.curve_points else embedding.to(self.dtype)
        return _batched(given, project).to(self.dtype)

    def block_table(
        self, index: int, embedding: Tensor, pairs: Tensor, project: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Modulation of block ``index`` for ``pairs`` int64 [P] (timestep * 3 + modality) -> [P, 6, hidden].

        ``project`` is its AdaLN projection where that does not live in the module (streamed weights).
        """
        rows = self._modulation(project or self.blocks[index].adaln_proj, embedding)  # [n, 3 * 6 * hidden]
        return rows.view(-1, 6, self.config.hidden).index_select(0, pairs.to(rows.device))

    def final_table(self, embedding: Tensor) -> Tensor:
        """Shift and scale of the final norm: float32 [n, time_dim] -> [n, 2, hidden]."""
        rows = self._modulation(self.final_layer.adaln_proj, embedding)
        return rows.view(-1, 2, self.config.hidden)

    def run_heads(self, h: Tensor, table: Tensor, runs: Sequence[Run], video: bool) -> Tensor:
        """Rows of h covered by ``runs`` (one target segment) -> float32 velocity rows [n, 96 or 32]."""
        layer = self.final_layer
        head = layer.video_out if video else layer.audio_out
        first, last = runs[0].start, runs[-1].stop
        out = torch.empty(last - first, head.out_features, dtype=torch.float32, device=h.device)
        shift, scale = table.unbind(1)
        for start, stop in row_chunks(first, last):
            x = torch.empty(stop - start, h.shape[1], dtype=h.dtype, device=h.device)
            modulated_norm(h, layer.norm, shift, scale, runs, (start, stop), x)
            out[start - first : stop - first] = head(x.to(head.weight.dtype))
        return out


def _batched(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """function over rows of x in batches of TABLE_BATCH, the last padded with zeros."""
    parts = []
    for start, stop in row_chunks(0, x.shape[0], TABLE_BATCH):
        batch = x.new_zeros(TABLE_BATCH, *x.shape[1:])
        batch[: stop - start] = x[start:stop]
        parts.append(function(batch)[: stop - start])
    return torch.cat(parts)
