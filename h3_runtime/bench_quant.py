"""What INT8 does to a step on this machine: the same blocks in INT8, bf16 and float32, alternating in one process.

On the CPU:

int8_to_bf16         seconds of all blocks in INT8 (ConvRot, bf16 activations) over those in bf16; below 1 is faster
int8_to_fp32         the same over float32
matmul_int8_to_bf16  of the matmuls alone: what this processor's int8 instructions give
floor_to_bf16        the bf16 step with its matmuls in int8 and nothing added for them: no quantised step is below it
share/NAME           each part of the INT8 step, timed alone at its shapes in the same rounds, over the whole step:
                     matmul (int8, int32 sums), rotation, rounding (absmax, divide, round), scaling (sums to bf16),
                     attention, norms (of blocks, and of q and k with RoPE); other is the rest: SiLU, gates, copies

Where there is a card, on it too, at the release's width: card/int8_to_bf16, card/fp8_to_bf16, and the share of its time
in each kernel of that step, card/kernel/METHOD/NAME.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from .bench import Results, take_turns
from .models.attention import HEAD_GROUP, Where, dense_attention, inverse_frequencies, norm_rotate, rotary_table
from .models.dit import Block, DiT, DiTConfig, ForwardContext, Run, modulated_norm
from .quant.convrot import quantise_rows, rotate_rows
from .quant.kernels import choices, int8_matmul, scale_into
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
CARD_CONFIG = replace(CONFIG, hidden=5376, layers=2, heads=56, ffn=14336)  # blocks of the release
CARD_ROWS = 8192
SHOWN = 12  # kernels told of a step on a card


def bench_quant() -> Results:
    """The bench of this machine: its CPU, and its card where it has one."""
    return bench_cpu() + (bench_card(torch.device("cuda")) if torch.cuda.is_available() else [])


def bench_card(
    device: torch.device, config: DiTConfig = CARD_CONFIG, rows: int = CARD_ROWS, repeat: int = 9
) -> Results:
    """INT8 and FP8 against bf16 on ``device``: medians of ratios inside a round, and each kernel's share."""
    torch.manual_seed(0)
    models = {"bf16": DiT(config).eval().requires_grad_(False).to(device, torch.bfloat16)}
    for name, method in (("int8", "int8_convrot"), ("fp8", "fp8")):
        models[name] = copy.deepcopy(models["bf16"])
        quantise_module(models[name], method)
    runs = {name: lambda model=model: run_blocks(model, torch.bfloat16, rows) for name, model in models.items()}

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    seconds = take_turns(runs, repeat, clock)
    results = [_ratio_of(seconds, name, "bf16") for name in ("int8", "fp8")]
    results += [{"name": name, "value": statistics.median(taken), "unit": "s"} for name, taken in seconds.items()]
    for name in ("int8", "fp8"):
        shares = kernel_shares(runs[name], device)
        results += [_ratio(f"kernel/{name}/{kernel}", share) for kernel, share in list(shares.items())[:SHOWN]]
    return [{**row, "name": f"card/{row['name']}"} for row in results + _kernels(device)]


def kernel_shares(run: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Share of the device's time in each kernel (on the CPU: operation) of ``run``, the largest first."""
    on_card = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_card else ProfilerActivity.CPU]) as seen:
        run()
        if on_card:
            torch.cuda.synchronize(device)
    spent = {
        event.key: event.self_device_time_total if on_card else event.self_cpu_time_total
        for event in seen.key_averages()
    }
    total = sum(spent.values())
    assert total > 0, "the profiler saw nothing"
    return {name: taken / total for name, taken in sorted(spent.items(), key=lambda item: -item[1]) if taken > 0}


def bench_cpu(config: DiTConfig = CONFIG, rows: int = ROWS, repeat: int = 9) -> Results:
    """Ratios of medians over ``repeat`` rounds, with the seconds behind them and the kernel that was chosen."""
    torch.manual_seed(0)
    plain = DiT(config).eval().requires_grad_(False)
    half = copy.deepcopy(plain).to(torch.bfloat16)
    quantised = copy.deepcopy(half)
    replaced = quantise_module(quantised, "int8_convrot")
    kinds = {"int8": (quantised, torch.bfloat16), "bf16": (half, torch.bfloat16), "fp32": (plain, torch.float32)}
    runs: dict[str, Callable[[], Any]] = {
        name: lambda model=model, dtype=dtype: run_blocks(model, dtype, rows) for name, (model, dtype) in kinds.items()
    }
    alone = parts_of_block(quantised.blocks[0], half.blocks[0], config, rows)
    seconds = take_turns({**runs, **alone}, repeat)
    parts = {name: config.layers * statistics.median(seconds.pop(name)) for name in alone}
    results = [_ratio_of(seconds, "int8", other) for other in ("bf16", "fp32")]
    step = {name: statistics.median(taken) for name, taken in seconds.items()}
    plain_matmul = parts.pop("bf16 matmul")
    results.append(_ratio("matmul_int8_to_bf16", parts["matmul"] / plain_matmul))
    results.append(_ratio("floor_to_bf16", (step["bf16"] - plain_matmul + parts["matmul"]) / step["bf16"]))
    parts["other"] = step["int8"] - sum(parts.values())
    results += [_ratio(f"share/{name}", part / step["int8"], seconds=part) for name, part in parts.items()]
    results += [{"name": name, "value": taken, "unit": "s"} for name, taken in step.items()]
    results.append({"name": "linears", "value": len(replaced), "unit": "quantised"})
    return results + _kernels(torch.device("cpu"))


def _ratio_of(seconds: dict[str, list[float]], one: str, other: str) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(seconds[one], seconds[other])]
    return _ratio(f"{one}_to_{other}", statistics.median(ratios), low=min(ratios), high=max(ratios))


def _kernels(device: torch.device) -> Results:
    return [
        {"name": f"kernel/{choice.op}", "value": None, "unit": choice.backend, "note": choice.reason}
        for choice in choices(device)
    ]


def _ratio(name: str, value: float, **beside: float) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": "ratio", **beside}


def parts_of_block(int8: Block, bf16: Block, config: DiTConfig, rows: int) -> dict[str, Callable[[], Any]]:
    """What the INT8 block is made of, each part alone at its full shapes; the bf16 matmul is what int8 replaces."""
    names = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")
    linears, plain = ([block.get_submodule(name) for name in names] for block in (int8, bf16))
    inputs = [torch.randn(rows, linear.in_features).bfloat16() for linear in linears]
    turned = [torch.empty(x.shape) for x in inputs]
    ready = [quantise_rows(x, linear.group) for x, linear in zip(inputs, linears)]
    sums = [torch.empty(rows, linear.out_features, dtype=torch.int32) for linear in linears]
    outputs = [torch.empty(held.shape, dtype=torch.bfloat16) for held in sums]
    q, k, v = (
        outputs[0][:, part * config.heads * config.head_dim :][:, : config.heads * config.head_dim]
        .normal_()
        .view(rows, config.heads, config.head_dim)
        for part in range(3)
    )
    headwise = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k)]  # as norm_rotate leaves q and k
    positions = torch.arange(3 * rows, dtype=torch.float64).view(rows, 3)
    rotary = rotary_table(positions, inverse_frequencies(config.rope_frequencies), torch.bfloat16)
    table, whole = torch.zeros(1, config.hidden, dtype=torch.bfloat16), (Run(0, rows, 0),)

    def groups() -> list[slice]:
        return [slice(first, first + HEAD_GROUP) for first in range(0, config.heads, HEAD_GROUP)]

    def attention() -> None:
        for part in groups():
            dense_attention(*(x[:, part] for x in headwise), v[:, part], Where(0, 0, 0, 0))

    def norms() -> None:
        for x, norm in ((inputs[0], int8.norm1), (inputs[2], int8.norm2)):
            modulated_norm(x, norm, table, table, whole, (0, rows), torch.empty_like(x))
        for x, norm in ((q, int8.attn.q_norm), (k, int8.attn.k_norm)):
            for part in groups():
                norm_rotate(x[:, part], norm, rotary, rows)

    return {
        "bf16 matmul": lambda: [F.linear(x, linear.weight) for x, linear in zip(inputs, plain)],
        "matmul": lambda: [int8_matmul(r[0], linear.weight, s) for r, linear, s in zip(ready, linears, sums)],
        "rotation": lambda: [rotate_rows(x, linear.group, y) for x, linear, y in zip(inputs, linears, turned)],
        "rounding": lambda: [quantise_rows(x, None) for x in inputs],
        "scaling": lambda: [
            scale_into(y, s, r[1], linear.scales(0, linear.out_features).T, None)
            for y, s, r, linear in zip(outputs, sums, ready, linears)
        ],
        "attention": attention,
        "norms": norms,
    }


def run_blocks(dit: DiT, dtype: torch.dtype, rows: int) -> Tensor:
    """All blocks over ``rows`` rows with two modulation rows: a step without embedding and heads."""
    generator, device = torch.Generator().manual_seed(2), dit.device
    h = torch.randn(rows, dit.config.hidden, generator=generator).to(device, dtype)
    table = (0.1 * torch.randn(2, 6, dit.config.hidden, generator=generator)).to(device, dtype)
    positions = torch.arange(3 * rows, dtype=torch.float64).view(rows, 3)
    rotary = rotary_table(positions, inverse_frequencies(dit.config.rope_frequencies).to(device), dtype)
    runs = (Run(0, rows // 2, 0), Run(rows // 2, rows, 1))
    context = ForwardContext(0, runs, rotary, dense_attention, lambda index: table)
    with torch.no_grad():
        for index, block in enumerate(dit.blocks):
            h = block(index, h, context)
    return h
