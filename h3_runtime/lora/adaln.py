"""AdaLN pairs of the full DiT on a pruned base, whose modulation reads a curve instead of the time embedding.

    full base     g(t) = SiLU(time embedding) [2688]  ──▶ linear [out, 2688]        pair: B [out, r] @ A [r, 2688]
    pruned base   c(t) = row of adaln_t_table [8]     ──▶ linear [out, 8]

        g(t) ~ c(t) @ P + m   (least squares over the table's rows)   ──▶   A P^T [r, 8]  and the constant A m [r]

The pair becomes one of the small linear and a part of its bias. The grid of g over t is either a file beside the LoRA
or computed from the time embedder of a full checkpoint; a LoRA alone does not hold it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint.opening import open_checkpoint
from ..checkpoint.reader import open_source
from ..errors import CheckpointError, H3Error
from ..models.dit import DiTConfig, TimeEmbedder
from .opening import LowRank

GRID_FILE = "h3_silu_temb_grid.safetensors"  # as published beside the first few-step LoRA
GRID_NAME = "silu_t_emb_grid"
EMBEDDER = ("proj_in.weight", "proj_in.bias", "proj_out.weight", "proj_out.bias")


@dataclass(frozen=True)
class Projection:
    """g ~ c @ matrix + constant: matrix [k, n], constant [n], float32. ``residual`` is the relative L2 error of that
    over the grid, its mean taken out."""

    matrix: Tensor
    constant: Tensor
    residual: float

    def pair(self, low: LowRank) -> LowRank:
        """The pair [r, n] as one of the curve: [r, k] and the constant [r], both float32."""
        a = low.a.to(self.matrix.device, torch.float32)
        return replace(low, a=a @ self.matrix.T, offset=a @ self.constant)


def fit_projection(table: Tensor, grid: Tensor) -> Projection:
    """Least squares of ``grid`` [G, n] on ``table`` [G, k] and a constant, in float64. Row i of both is the same t.

    H3Error when the rows do not correspond, or when grid or table hold NaN or infinity.
    """
    if table.dim() != 2 or grid.dim() != 2 or table.shape[0] != grid.shape[0]:
        raise H3Error(
            f"the grid of SiLU(time embedding) is {list(grid.shape)} and the base's curve {list(table.shape)}: they "
            "need the same number of rows; compute the grid with as many rows as the curve."
        )
    table, grid = table.to("cpu", torch.float64), grid.to("cpu", torch.float64)
    if not (torch.isfinite(table).all() and torch.isfinite(grid).all()):
        raise H3Error("the grid of SiLU(time embedding) or the base's curve holds NaN or infinity; get the file again.")
    # with the means out, the constant is exact whatever the curve's columns are
    curve, means = table - table.mean(0), grid.mean(0)
    centred = grid - means
    matrix = torch.linalg.lstsq(curve, centred, driver="gelsd").solution  # [k, n]; gelsd: the curve may lack rank
    constant = means - table.mean(0) @ matrix
    size = torch.linalg.vector_norm(centred).item()
    left = torch.linalg.vector_norm(centred - curve @ matrix).item()
    return Projection(matrix.float(), constant.float(), left / size if size else 0.0)


@torch.no_grad()
def grid_of(embedder: TimeEmbedder, rows: int) -> Tensor:
    """SiLU(time embedding) float32 [rows, time_dim] at t = 0 .. 1 in equal steps."""
    if rows < 2:
        raise H3Error(f"a grid of {rows} rows was asked for; 2 or more are needed.")
    t = torch.arange(rows, dtype=torch.float32) / (rows - 1)
    return F.silu(embedder(t.to(embedder.proj_in.weight.device))).cpu()


def grid_from_checkpoint(path: str | os.PathLike, rows: int) -> Tensor:
    """The grid of a full DiT checkpoint, float32 [rows, time_dim]; of its tensors only the time embedder is read."""
    checkpoint = open_checkpoint(path, "dit")
    names = [f"time_embedder.{leaf}" for leaf in EMBEDDER]
    absent = [name for name in names if name not in checkpoint.recipes]
    if absent:
        raise CheckpointError(f"{path} has no {absent[0]}; a full (not pruned) DiT is needed to compute the grid.")
    config = DiTConfig.from_shapes(checkpoint.shapes)
    embedder = TimeEmbedder(config).requires_grad_(False)
    embedder.load_state_dict({leaf: checkpoint.build(name).float() for leaf, name in zip(EMBEDDER, names)})
    return grid_of(embedder, rows)


def read_grid(path: str | os.PathLike) -> Tensor:
    """A grid file: one tensor, float32 [rows, time_dim]."""
    source = open_source(path)
    name = GRID_NAME if GRID_NAME in source.shapes else next(iter(source.shapes), GRID_NAME)
    if len(source.shapes.get(name, ())) != 2 or len(source.shapes) != 1:
        raise CheckpointError(f"{path} is no grid of SiLU(time embedding): one tensor [rows, width] is needed.")
    return source.read(name).float()


def find_grid(lora: Path) -> Path | None:
    """The grid file beside a LoRA, if there is one."""
    file = (lora if lora.is_dir() else lora.parent) / GRID_FILE
    return file if file.is_file() else None
