"""``python -m h3_runtime bench``: what is measured, and what ``bench paths`` may be told. The work is imported when it
is asked for.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .errors import H3Error
from .typed import choose_device, read_pair

WHAT = ("step", "memory", "load", "text", "quant", "card", "attention", "gpu", "accelerators", "paths")


def add_bench(commands) -> argparse.ArgumentParser:
    command = commands.add_parser(
        "bench",
        help="measure step time, memory, loading or whole paths",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=(
            "examples:\n"
            "  bench step\n"
            "  bench paths --out bench_out                        the small carried model, a few minutes\n"
            '  bench paths --model DIR --prompt "a cat" --prompt "rain" --seeds 0 1 --out night\n'
            "  bench paths --model DIR --paths lossless int8_convrot forecast:calls=0.5+int8_convrot --out night\n"
            "A run of paths that was stopped goes on where it stood when it is started again with the same words."
        ),
    )
    command.add_argument("what", choices=WHAT)
    paths = command.add_argument_group("bench paths")
    paths.add_argument("--model", metavar="DIR", help="model folder (default: the small carried model)")
    paths.add_argument("--dit", metavar="FILE", help="DiT file or folder, instead of the one found in --model")
    paths.add_argument("--paths", nargs="+", metavar="PATH", help="lossless, int8_convrot, int8, fp8, steps=N, a "
                       "preset, an accelerator as after --accelerate, lora, or several joined by +")  # fmt: skip
    paths.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be repeated")
    paths.add_argument("--prompts", metavar="FILE", help="text file, one prompt a line")
    paths.add_argument("--seeds", nargs="+", type=int, metavar="N", help="default 0; the carried model 0 and 1")
    paths.add_argument("--size", metavar="WxH", help="default 1344x768; the carried model 128x128")
    paths.add_argument("--frames", type=int, help="default 124; the carried model 22")
    paths.add_argument("--steps", type=int, help="forwards of the lossless path (49)")
    paths.add_argument("--lora", metavar="FILE", help="the LoRA of the paths lora and few-step")
    paths.add_argument("--dtype", choices=["float32"], help="compute in float32 instead of the stored dtype")
    paths.add_argument("--device", help="cuda or cpu (default: cuda when there is one)")
    paths.add_argument("--out", metavar="DIR", help="folder for cells, clips, pages and the table")
    paths.add_argument("--no-pages", action="store_true", help="figures only, no page of each comparison")
    paths.add_argument("--again", action="store_true", help="try once more what failed")
    command.set_defaults(run=run_bench)
    return command


def run_bench(arguments, say) -> tuple[list[dict], int]:
    if arguments.what == "paths":
        return _run_paths(arguments, say)
    given = [name for name in PATHS_ONLY if not any(getattr(arguments, name) is no for no in (None, False))]
    given = [name for name in given if getattr(arguments, name) != []]
    if given:
        raise H3Error(f"--{given[0].replace('_', '-')} belongs to bench paths: leave it out of bench {arguments.what}")
    from . import bench, bench_accelerators, bench_card, bench_gpu, bench_quant, bench_text

    functions = {
        "step": bench.bench_step,
        "memory": bench.bench_memory,
        "load": bench.bench_load,
        "text": bench_text.bench_text,
        "quant": bench_quant.bench_quant,
        "card": bench_card.bench_card,
        "attention": bench_gpu.bench_attention,
        "gpu": bench_gpu.bench_gpu,
        "accelerators": bench_accelerators.bench_accelerators,
    }
    results = functions[arguments.what]()
    for line in bench.format_lines(results):
        say(line)
    return results, 1 if any(row.get("pass") is False for row in results) else 0


PATHS_ONLY = (
    "model", "dit", "paths", "prompt", "prompts", "seeds", "size", "frames", "steps", "lora", "dtype", "device",
    "out", "no_pages", "again",
)  # fmt: skip


def _run_paths(arguments, say) -> tuple[list[dict], int]:
    from .bench_paths import Cells, run_paths
    from .demo.run import warm_up
    from .paths_table import FILES, cells_of, results, rows_of, write_tables

    bench = bench_of(arguments)
    if any(Cells(bench).wanted(way, *take) for way in bench.ways for take in bench.takes):
        warm_up(bench.bed.device, bench.bed.dtype)
    cells = run_paths(bench, write_tables, say, say.progress)
    rows = rows_of(bench, cells)
    for row in rows:
        say("  ".join(cell for cell in cells_of(row) if cell))
    say(str((bench.out / FILES[0]).resolve()))
    return results(bench, cells), 1 if any(row.failed for row in rows) else 0


def bench_of(arguments):
    """The bench that the command line asks for. H3Error names what cannot be used, before anything is rendered."""
    import torch

    from .bench_paths import PATHS, Bench, read_ways
    from .checkpoint.parts import find_parts
    from .demo.carried import CARRIED_MODEL, FEW_STEP_LORA
    from .demo.run import FRAMES, SIZE
    from .geometry import DEFAULT_FRAMES, Canvas
    from .guides import check_room
    from .model import Caches
    from .render import check_options
    from .request import RenderRequest
    from .schedule import DEFAULT_FORWARDS, check_seed
    from .ways import Bed
    from .weight_commands import model_parts

    if arguments.out is None:
        raise H3Error("bench paths writes clips and a table: add --out DIR (the same DIR goes on with it)")
    carried = arguments.model is None
    if carried and arguments.dit is not None:
        raise H3Error("--dit takes the place of a part of --model: add --model DIR")
    lora = arguments.lora or (str(FEW_STEP_LORA) if carried else None)
    if lora is not None and not Path(lora).is_file():
        raise H3Error(f"--lora {lora} does not exist: give a file that does")
    names = arguments.paths or default_paths(PATHS, carried, lora)
    seeds = tuple(dict.fromkeys(arguments.seeds or ((0, 1) if carried else (0,))))
    for seed in seeds:
        check_seed(seed)
    size = SIZE if carried else (1344, 768)
    if arguments.size is not None:
        size = read_pair(arguments.size, "x", int, "--size", "WxH, e.g. 1344x768")
    request = RenderRequest(
        "",
        size,
        frames=(FRAMES if carried else DEFAULT_FRAMES) if arguments.frames is None else arguments.frames,
        num_forwards=DEFAULT_FORWARDS if arguments.steps is None else arguments.steps,
        dtype="float32" if carried else arguments.dtype,
    )
    check_options(request)
    check_room(Canvas.fit(request.frames, request.size))
    bed = Bed(
        find_parts(CARRIED_MODEL) if carried else model_parts(arguments),
        torch.float32 if request.dtype else None,
        choose_device(arguments.device),
        Caches(),
        lora,
    )
    return Bench(
        bed, Path(arguments.out), read_ways(names), prompts_of(arguments, carried), seeds, request,
        not arguments.no_pages, arguments.again,
    )  # fmt: skip


def default_paths(paths, carried: bool, lora: str | None) -> list[str]:
    """Those that this model can go: few steps by the settings of a known LoRA, or, with the carried one's, by four."""
    few, four = ("few-step",), ("steps=4", "lora+steps=4")
    without = few if carried else four if lora else few + four
    return [path for path in paths if path not in without]


CARRIED_PROMPTS = ("a red circle moves left to right, low tone", "a square changes from green to purple, high beeps")


def prompts_of(arguments, carried: bool) -> tuple[str, ...]:
    """The prompts in the order given, each once. H3Error where there is none."""
    prompts = list(arguments.prompt)
    if arguments.prompts is not None:
        try:
            lines = Path(arguments.prompts).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise H3Error(f"--prompts {arguments.prompts} cannot be read ({error}): give a text file") from None
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise H3Error(f"--prompts {arguments.prompts} holds no prompt: write one a line")
        prompts += found
    if not prompts and carried:
        prompts = list(CARRIED_PROMPTS)
    if not prompts:
        raise H3Error('no prompt was given: add --prompt "TEXT" or --prompts FILE')
    return tuple(dict.fromkeys(prompts))
