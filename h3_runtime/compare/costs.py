"""What each side took and on what, as far as its report and manifest tell; what they do not is "not measured".

clip.report.json ─▶ DiT calls, seconds by stage, memory      clip.json ─▶ checkpoints, request ─▶ what differs
"""

from __future__ import annotations

from typing import Any

from ..manifest import differences
from .measured import Measured, is_number, not_measured
from .sources import Side

GIB = 2**30
NOT_TOLD = not_measured("the report does not tell")
NO_CARD = not_measured("it ran on the CPU")
OF_A_CARD = ("gpu_seconds", "stage_gpu_seconds", "device_bytes_peak")

# title, unit, where it stands in the report, divided by
COSTS = (
    ("DiT calls", "", ("dit_calls",), 1),
    ("end to end", "s", ("end_to_end_seconds",), 1),
    ("load", "s", ("stage_seconds", "load"), 1),
    ("encode", "s", ("stage_seconds", "encode"), 1),
    ("denoise", "s", ("stage_seconds", "denoise"), 1),
    ("decode", "s", ("stage_seconds", "decode"), 1),
    ("first frame", "s", ("stats", "first_frame_seconds"), 1),
    ("CPU time, all threads", "s", ("cpu_seconds",), 1),
    *((f"CPU time of {stage}", "s", ("stage_cpu_seconds", stage), 1) for stage in ("encode", "denoise", "decode")),
    ("GPU time", "s", ("gpu_seconds",), 1),
    *((f"GPU time of {stage}", "s", ("stage_gpu_seconds", stage), 1) for stage in ("encode", "denoise", "decode")),
    ("peak VRAM", "GiB", ("device_bytes_peak",), GIB),
    ("peak host memory of the process", "GiB", ("host_bytes_peak",), GIB),
    ("bytes streamed", "GiB", ("bytes_streamed",), GIB),
    ("OOM retries", "", ("oom_retries",), 1),
)


def costs(side: Side) -> list[dict[str, Any]]:
    """[{title, unit, value}] in the order of COSTS."""
    report = dict(side.report)
    stages = report.get("stage_seconds")
    if isinstance(stages, dict) and "end_to_end_seconds" not in report:
        report["end_to_end_seconds"] = sum(value for value in stages.values() if is_number(value))
    without = (report.get("machine") or {}).get("device") == "cpu"
    made = []
    for title, unit, path, scale in COSTS:
        found: Any = report
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        value: Measured = NO_CARD if without and path[0] in OF_A_CARD else NOT_TOLD
        if is_number(found):
            value = found if scale == 1 else found / scale
        made.append({"title": title, "unit": unit, "value": value})
    return made


def context(side: Side) -> list[dict[str, str]]:
    """[{title, value}]: machine, versions, checkpoints, seed, request; [] where nothing is known."""
    machine, manifest = side.report.get("machine") or {}, side.manifest
    request, environment = manifest.get("request") or {}, manifest.get("environment") or {}
    rows = [
        ("device", machine.get("device") or environment.get("device")),
        ("processor", machine.get("processor")),
        ("driver", machine.get("driver")),
        ("torch", machine.get("torch") or environment.get("torch")),
        ("runtime", environment.get("runtime")),
        ("prompt", request.get("prompt")),
        ("seed", request.get("seed")),
        ("forwards", request.get("num_forwards")),
        ("size", "x".join(map(str, request.get("size") or ())) or side.report.get("size")),
    ]
    for part, model in sorted((manifest.get("models") or {}).items()):
        if isinstance(model, dict):
            rows.append((part, f"{model.get('file')} ({model.get('format')}, {str(model.get('fingerprint'))[:16]})"))
    return [{"title": title, "value": str(value)} for title, value in rows if value is not None]


def what_differs(a: Side, b: Side) -> list[str]:
    """One line per thing that decided the output and is not the same on both sides."""
    if not (a.manifest and b.manifest):
        return []
    parts = ("request", "models", "loras", "environment", "fidelity")
    lines = differences(*({key: side.manifest.get(key) for key in parts} for side in (a, b)))
    return [line for line in lines if not line.startswith("fidelity.parts")]
