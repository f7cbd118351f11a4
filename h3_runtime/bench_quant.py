"""What INT8 does to a step on this machine: the same blocks in INT8, bf16 and float32, alternating in one process.

int8_to_bf16   seconds of all blocks in INT8 (ConvRot, bf16 activations) over those in bf16; below 1 is faster
int8_to_fp32   the same over float32
"""

from __future__ import annotations

import copy
import statistics

import torch
from torch import Tensor

from .bench import Results, take_turns
from .models.attention import dense_attention, inverse_frequencies, rotary_table
from .models.dit import DiT, DiTConfig, ForwardContext, Run
from .quant.kernels import choices
from .quant.online import quantise_module

CONFIG = DiTConfig(
    hidden=1024,
    layers=8,
    refiner_layers=0,
    heads=11,
    head_dim=128,
    ffn=2752,
    text_dim=64,
    time_features=64,
    time_hidden=64,
    time_dim=64,
    rope_frequencies=16,
)
ROWS = 1024


def bench_quant(config: DiTConfig = CONFIG, rows: int = ROWS, repeat: int = 9) -> Results:
    """Ratios of medians over ``repeat`` rounds, with the seconds behind them and the kernel that was chosen."""
    torch.manual_seed(0)
    plain = DiT(config).eval().requires_grad_(False)
    half = copy.deepcopy(plain).to(torch.bfloat16)
    quantised = copy.deepcopy(half)
    replaced = quantise_module(quantised, "int8_convrot")
    kinds = {"int8": (quantised, torch.bfloat16), "bf16": (half, torch.bfloat16), "fp32": (plain, torch.float32)}
    seconds = take_turns(
        {
            name: lambda model=model, dtype=dtype: run_blocks(model, dtype, rows)
            for name, (model, dtype) in kinds.items()
        },
        repeat,
    )
    results: Results = []
    for other in ("bf16", "fp32"):
        ratios = [a / b for a, b in zip(seconds["int8"], seconds[other])]
        value = {"value": statistics.median(ratios), "unit": "ratio", "low": min(ratios), "high": max(ratios)}
        results.append({"name": f"int8_to_{other}", **value})
    results += [{"name": name, "value": statistics.median(taken), "unit": "s"} for name, taken in seconds.items()]
    results.append({"name": "linears", "value": len(replaced), "unit": "quantised"})
    for choice in choices(torch.device("cpu")):
        results.append({"name": f"kernel/{choice.op}", "value": None, "unit": choice.backend, "note": choice.reason})
    return results


def run_blocks(dit: DiT, dtype: torch.dtype, rows: int) -> Tensor:
    """All blocks over ``rows`` rows with two modulation rows: a step without embedding and heads."""
    generator = torch.Generator().manual_seed(2)
    h = torch.randn(rows, dit.config.hidden, generator=generator).to(dtype)
    table = (0.1 * torch.randn(2, 6, dit.config.hidden, generator=generator)).to(dtype)
    positions = torch.arange(3 * rows, dtype=torch.float64).view(rows, 3)
    rotary = rotary_table(positions, inverse_frequencies(dit.config.rope_frequencies), dtype)
    runs = (Run(0, rows // 2, 0), Run(rows // 2, rows, 1))
    context = ForwardContext(0, runs, rotary, dense_attention, lambda index: table)
    with torch.no_grad():
        for index, block in enumerate(dit.blocks):
            h = block(index, h, context)
    return h
