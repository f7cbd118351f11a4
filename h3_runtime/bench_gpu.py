"""The one run for a real card: ``python -m h3_runtime bench gpu``; what it prints belongs into ``docs/gpu.md``.

    selftest         this device against the CPU
    bench card       placements bit-equal, peaks under a 24 GiB cap, cost of streaming, disk ring
    bench quant      INT8 and FP8 steps against bf16, with the share of each kernel
    bench attention  every kernel that runs here against SDPA, at the rows of 124 frames of 1344x768

``bench attention`` also runs alone, and on a CPU with few rows: there it shows that it works, not how a card does.
"""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any

import torch

from .accelerators.attention import KERNELS, QUERIES
from .bench import relative_l2, take_turns
from .bench_card import bench_card
from .bench_quant import bench_card as bench_quant_card
from .models.attention import HEAD_GROUP
from .selftest import selftest

Results = list[dict[str, Any]]

ROWS, WIDTH = 38_222, 128  # packed rows of 124 frames at 1344x768 with 512 of text; numbers of a head
CPU_ROWS = 1024
SHOWN_QUERIES = 256  # rows whose result is compared with float64
BASELINE = "sdpa"


def bench_gpu() -> Results:
    """All of it on this machine's card; without one the rows that cannot be had say so."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = torch.cuda.get_device_name(device) if device.type == "cuda" else "no CUDA card: PROOF INCOMPLETE"
    results: Results = [{"name": "gpu/device", "value": None, "unit": f"{about}, torch {torch.__version__}"}]
    results += [{**check.to_dict(), "name": f"selftest/{check.name}"} for check in selftest(device)]
    results += bench_card(device)
    if device.type == "cuda":
        results += bench_quant_card(device)
    return results + bench_attention(device)


def bench_attention(device: torch.device | None = None, rows: int | None = None, repeat: int = 5) -> Results:
    """Seconds of one head group [rows, 8, 128] in bf16 by each kernel, its ratio to SDPA's in the same round (median,
    lowest, highest), and the relative L2 of ``SHOWN_QUERIES`` rows to float64; a kernel that cannot run says why."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = rows or (ROWS if device.type == "cuda" else CPU_ROWS)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(rows, HEAD_GROUP, WIDTH, generator=generator).to(device, torch.bfloat16) for _ in range(3))
    exact = _attend(*(x.double() for x in (q[:SHOWN_QUERIES], k, v)))
    runs, results = {BASELINE: lambda: _attend(q, k, v)}, []
    for name, kernel in KERNELS.items():
        refusal = kernel.missing() or kernel.refusal(rows, q.dtype, WIDTH)
        if refusal is None and name.endswith("-eager") and rows > QUERIES:
            refusal = "a twin for tests, slow at this size"
        if refusal is None:
            runs[name] = functools.partial(kernel.run, q, k, v)
        else:
            results.append({"name": f"attention/{name}", "value": None, "unit": f"not here: {refusal}"})

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    seconds = take_turns(runs, repeat, clock)
    for name, taken in seconds.items():
        ratios = [one / other for one, other in zip(taken, seconds[BASELINE])]
        row = {"name": f"attention/{name}", "value": statistics.median(ratios), "unit": f"of {BASELINE}"}
        row |= {"low": min(ratios), "high": max(ratios), "milliseconds": 1000 * statistics.median(taken)}
        error = relative_l2(runs[name]()[:SHOWN_QUERIES].cpu(), exact.cpu())
        results.append({**row, "relative_l2": f"{error:.2g}", "rows": rows})
    return results


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """PyTorch's choice of kernel, as the baseline has it: [S, G, D] -> [S, G, D]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1)
