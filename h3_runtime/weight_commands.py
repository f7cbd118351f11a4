"""The commands on weight files: ``inspect`` and ``quantize``. What they do stands in ``inspection``, imported when it
is asked for, so that the command line starts without torch.
"""

from __future__ import annotations

import argparse


def add_inspect(commands) -> argparse.ArgumentParser:
    command = commands.add_parser("inspect", help="what a weight file is: layout, formats, label, kernels here")
    command.add_argument("file", metavar="FILE", help="a weight file, a shard, an index or a folder of one checkpoint")
    command.add_argument("--layout", help="read it in this layout, where its names leave a choice")
    command.add_argument("--sha256", action="store_true", help="hash the whole file as well (reads all of it)")
    command.set_defaults(run=run_inspect)
    return command


def run_inspect(arguments, say) -> tuple[list[dict], int]:
    from .inspection import inspect_file

    results, lines = inspect_file(arguments.file, arguments.sha256, arguments.layout)
    for line in lines:
        say(line)
    return results, 0


def add_quantize(commands) -> argparse.ArgumentParser:
    command = commands.add_parser("quantize", help="write a checkpoint as one ComfyUI file with its linears quantised")
    command.add_argument("input", metavar="IN", help="DiT, video VAE or text encoder in bf16, fp16 or fp32, any layout")
    command.add_argument("output", metavar="OUT.safetensors")
    method = command.add_mutually_exclusive_group(required=True)
    method.add_argument("--int8-convrot", dest="method", action="store_const", const="int8_convrot",
                        help="INT8, inputs rotated in groups of 256 or the largest that fits")  # fmt: skip
    method.add_argument("--int8", dest="method", action="store_const", const="int8", help="INT8 without rotation")
    method.add_argument("--fp8", dest="method", action="store_const", const="fp8", help="FP8 e4m3, one scale a layer")
    command.add_argument("--exclude", action="append", default=[], metavar="PATTERN",
                         help="layers left as they are, e.g. 'blocks.0.*'; may be repeated")  # fmt: skip
    command.add_argument("--adaln", action="store_true", help="the DiT's AdaLN projections too, as in the full file")
    command.set_defaults(run=run_quantize)
    return command


def run_quantize(arguments, say) -> tuple[list[dict], int]:
    from .inspection import quantize_file

    results, lines = quantize_file(
        arguments.input,
        arguments.output,
        arguments.method,
        arguments.exclude,
        arguments.adaln,
        lambda done, total: say.progress("tensors", done, total),
    )
    for line in lines:
        say(line)
    return results, 0
