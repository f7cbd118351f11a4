"""What the command line says about acceleration: ``--accelerate``, ``--preset`` and ``--solver``, and ``paths``, which
lists every path with its label and every preset with its parts. The work is imported when it is asked for.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from .errors import H3Error


def add_acceleration_options(group) -> None:
    """How render may be made faster; without any of them it is the baseline."""
    group.add_argument("--accelerate", action="append", default=[], metavar="NAME[:OPTION=VALUE,...]",
                       help="e.g. forecast:calls=0.5, block-cache, attention:kernel=sage-2, sparse, compile, "
                       "second-order, few-step; may be repeated (paths lists all)")  # fmt: skip
    group.add_argument("--preset", help="lossless, extra-high, high, fast or draft: a set of accelerators")
    group.add_argument("--solver", help="euler (default) or second-order")


def accelerate_request(arguments, request):
    """(the request with what the command line asks for, sentences about what a preset left out)."""
    from .accelerators.presets import accelerate
    from .solvers import SOLVERS

    asked = accelerate(arguments.accelerate, arguments.preset)
    if arguments.solver is not None:
        if arguments.solver not in SOLVERS:
            raise H3Error(f"--solver {arguments.solver!r} is not built: choose one of {', '.join(SOLVERS)}")
        asked = replace(asked, solver=arguments.solver)
    return asked.on_request(request)


def add_paths(commands) -> argparse.ArgumentParser:
    command = commands.add_parser("paths", help="every path of the runtime with its label and reason, and the presets")
    command.set_defaults(run=run_paths)
    return command


def run_paths(arguments, say) -> tuple[list[dict], int]:
    from .accelerators.presets import PRESETS
    from .fidelity import BASELINE, REGISTRY

    rows = []
    width = max(map(len, REGISTRY))
    for entry in REGISTRY.values():
        unproven = entry.unproven()
        mark = f"  UNPROVEN HERE: {unproven}" if unproven else ""
        if not arguments.json:
            say(f"{entry.name:<{width}}  {entry.label!s:<11}  {entry.reason}{mark}")
        rows.append(
            {"name": entry.name, "value": str(entry.label), "unit": "label", "label": str(entry.label),
             "reason": entry.reason, "unproven_here": unproven}
        )  # fmt: skip
    for preset in PRESETS.values():
        for line in preset.lines():
            say(f"preset {line}" if not line.startswith(" ") else line)
    say(f"baseline: {BASELINE}")
    return rows, 0
