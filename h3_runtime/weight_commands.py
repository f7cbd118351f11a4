"""What the command line says about weights: ``inspect``, ``quantize``, and how ``render`` brings them in. The work is
imported when it is asked for, so that the command line starts without torch.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from .errors import H3Error


def add_inspect(commands) -> argparse.ArgumentParser:
    command = commands.add_parser("inspect", help="what a weight file is: layout, formats, label, kernels here")
    command.add_argument(
        "file", metavar="FILE", help="a file, a shard, an index, a folder of one checkpoint or of a model"
    )
    command.add_argument("--layout", help="read it in this layout, where its names leave a choice")
    command.add_argument("--sha256", action="store_true", help="hash the whole file as well (reads all of it)")
    command.set_defaults(run=run_inspect)
    return command


def run_inspect(arguments, say) -> tuple[list[dict], int]:
    from .inspection import UNUSABLE, inspect_file

    results, lines = inspect_file(arguments.file, arguments.sha256, arguments.layout)
    for line in lines:
        say(line)
    return results, int(any(row["name"] == UNUSABLE for row in results))


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


def add_quantise_options(group) -> None:
    """Which parts are quantised while they load."""
    group.add_argument("--quantise", metavar="METHOD|PART=METHOD,...",
                       help="quantise the DiT while loading, or the parts named: int8_convrot, int8 or fp8; "
                       "dit, text or video_vae, e.g. dit=int8_convrot,text=fp8")  # fmt: skip
    group.add_argument("--exclude", action="append", default=[], metavar="[PART:]PATTERN",
                       help="layers of the DiT, or of PART, that --quantise leaves as they are, e.g. 'blocks.0.*'; "
                       "may be repeated")  # fmt: skip


def add_loading_options(group) -> None:
    """How render brings in the weights; what stands from --place on changes no result."""
    group.add_argument("--lora", action="append", default=[], metavar="FILE[@STRENGTH]",
                       help="LoRA in any circulated layout, with a strength (default 1); may be repeated")  # fmt: skip
    add_quantise_options(group)
    group.add_argument("--place", choices=["resident", "ram", "disk"], help="blocks stay on the device, "
                       "or come from RAM or disk: the same bits (default: the plan chooses)")  # fmt: skip
    group.add_argument("--resident-layers", type=int, metavar="N", help="with --place: blocks that stay")
    group.add_argument("--ahead", type=int, metavar="N", help="with --place: blocks copied in advance (1)")
    group.add_argument("--converted", metavar="DIR", help="blocks from disk whose bytes need work first (quantised, "
                       "reordered) are kept ready in a file in DIR: large, see plan --converted")  # fmt: skip


def loras_of(arguments) -> tuple:
    """The LoRAs of the command line."""
    from .request import LoraRequest

    loras = tuple(LoraRequest.parse(text) for text in arguments.lora)
    for lora in loras:
        if not Path(lora.media.path).exists():
            raise H3Error(f"--lora {lora.media.path} does not exist: give a file that does")
    return loras


def quantised_loading(arguments):
    """Loading that quantises as the command line says."""
    from .model import Loading
    from .quant.online import by_part

    by_part(arguments.quantise, arguments.exclude)
    return Loading(arguments.quantise, tuple(arguments.exclude))


def loading_of(arguments, request):
    """How the request and the command line want the parts loaded."""
    from .lora import Lora
    from .memory.placement import Placement
    from .model import Loading

    if request is None:
        return None
    loras = tuple(Lora(lora.media.path, lora.strength) for lora in request.loras)
    rung, placement = arguments.place, None
    converted = converted_folder(arguments.converted, rung)
    kept, ahead = arguments.resident_layers, arguments.ahead
    if rung in (None, "resident") and (kept, ahead) != (None, None):
        raise H3Error("--resident-layers and --ahead go with --place ram or --place disk: add one of them")
    if rung is not None:
        placement = Placement(rung, kept or 0, 1 if ahead is None else ahead, rung, converted=converted)
    return Loading(request.quantise, request.exclude, loras, placement, converted=converted)


def converted_folder(folder: str | None, rung: str | None) -> str:
    """--converted, "" for none. H3Error where it is no folder that takes files, or goes with another --place."""
    if folder is None:
        return ""
    if rung not in (None, "disk"):
        raise H3Error(f"--converted keeps transformed weights for --place disk, not {rung}: leave one of them out")
    if not (Path(folder).is_dir() and os.access(folder, os.W_OK)):
        raise H3Error(f"--converted {folder} is not a folder that can be written to: make it, or choose another one")
    return folder


def model_parts(arguments):
    """The parts in --model, with --dit in place of the DiT found there."""
    from dataclasses import replace

    from .checkpoint.opening import find_partition
    from .checkpoint.parts import DiTPath, find_parts
    from .checkpoint.reader import open_source

    if not Path(arguments.model).is_dir():
        raise H3Error(f"--model {arguments.model} is not a folder: give the folder that holds the model's files")
    parts = find_parts(arguments.model)
    if getattr(arguments, "dit", None) is not None:
        if not Path(arguments.dit).exists():
            raise H3Error(f"--dit {arguments.dit} does not exist: give a file or folder that does")
        partition, _ = find_partition(open_source(arguments.dit))
        parts = replace(parts, dits=(DiTPath(Path(arguments.dit), partition),))
    return parts
