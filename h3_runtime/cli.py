"""The command line: python -m h3_runtime COMMAND. Each command is a function that returns results and an exit status.

words for people go to the terminal; with --json, words go to stderr and stdout holds one object:
{"command", "version", "machine", "results": [{"name", "value", "unit", ...}]}, or where nothing came of it
{"command", "version", "results": [], "error": the sentence}
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __version__
from .accelerate_command import accelerate_request, add_acceleration_options, add_paths
from .bench_command import add_bench
from .compare_command import add_compare
from .engine_command import add_engine, add_engine_options, run_remote, without_engine
from .errors import H3Error
from .plan_command import add_plan
from .recover_command import add_recover
from .terminal import Say
from .typed import choose_device, read_pair
from .weight_commands import (
    add_inspect,
    add_loading_options,
    add_quantise_options,
    add_quantize,
    loading_of,
    loras_of,
    model_parts,
    quantised_loading,
)

Results = list[dict]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 done, 1 a check failed, 2 the request could not be used, 130 interrupted."""
    for stream in (sys.stdout, sys.stderr):  # a name that the terminal's encoding lacks must not end a finished render
        if getattr(stream, "errors", None) == "strict":
            stream.reconfigure(errors="backslashreplace")
    parser = build_parser()
    argv = sys.argv[1:] if argv is None else list(argv)
    command = next((word for word in argv if not word.startswith("-")), None)
    try:
        arguments = parser.parse_args(argv)
    except Unusable as error:
        if "--json" in argv:
            _print_object(command, error=str(error))
        return 2
    if arguments.command is None:
        parser.print_help()
        return 2
    say = Say(arguments.json)

    def ended(status: int, words: str, error: str) -> int:
        say(words)
        if arguments.json:
            _print_object(command, error=error)
        return status

    try:
        refuse_empty_paths(arguments)
        results, status = arguments.run(arguments, say)
    except H3Error as error:
        return ended(2, f"error: {error}", str(error))
    except KeyboardInterrupt as stop:
        words = str(stop) or "stopped: nothing half-written was left"
        return ended(130, words, words)
    except BrokenPipeError:  # the reader of a pipe went away; nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (MemoryError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        if not (isinstance(error, MemoryError) or re.search(r"out of memory|can't allocate memory", reason, re.I)):
            raise
        words = f"the memory was not enough ({reason or 'host memory'}): choose a smaller size or fewer frames"
        return ended(2, f"error: {words}", words)
    if arguments.json:
        from .save import machine

        _print_object(command, results, machine=machine())
    return status


def _print_object(command: str | None, results: Results = (), **more) -> None:
    made = {"command": command, "version": __version__, **more, "results": list(results)}
    print(json.dumps(made, indent=1), flush=True)


def refuse_empty_paths(arguments) -> None:
    """H3Error where a file or folder is named by an empty text, which would stand for the current folder."""
    for name in PATHS:
        value = getattr(arguments, name, None)
        given = [value] if isinstance(value, str) else value if isinstance(value, list) else []
        if any(path[1] == "" if isinstance(path, tuple) else path.strip() == "" for path in given):
            raise H3Error(f"{PATHS[name]} is given an empty name: give the name of a file or folder, or leave it out")


PATHS = {name: f"--{name.replace('_', '-')}" for name in (
    "model", "dit", "out", "inputs", "recovery", "state", "embeds", "embeddings", "first_frame", "last_frame",
    "source", "mask", "lora", "converted", "prompts", "weights", "reports",
)} | {
    "manifest": "--from", "references": "--ref-...", "latent": "FILE", "file": "FILE", "folder": "FOLDER",
    "input": "IN", "output": "OUT", "a": "A.mp4", "b": "B.mp4",
}  # fmt: skip


class Unusable(Exception):
    """A command line that cannot be read; usage and sentence were printed already."""


class Parser(argparse.ArgumentParser):
    """Raises what it would end the process with, so that ``main`` can answer in JSON too."""

    def error(self, message: str):
        self.print_usage(sys.stderr)
        print(f"{self.prog}: error: {message}", file=sys.stderr)
        raise Unusable(message)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m h3_runtime",
        description="MiniMax-H3 Runtime: joint video and sound, exact to the reference.",
    )
    parser.add_argument("--version", action="version", version=f"MiniMax-H3 Runtime {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for add in COMMANDS:
        command = add(commands)
        command.add_argument("--json", action="store_true", help="print one JSON object on stdout, words on stderr")
    return parser


# --- demo ------------------------------------------------------------------------------------------------------------


def _add_demo(commands) -> argparse.ArgumentParser:
    command = commands.add_parser(
        "demo", help="render one prompt exactly and by two shortcuts, and compare them; no download"
    )
    command.add_argument(
        "--out", default="demo_out", metavar="DIR", help="folder for clips and page (default demo_out)"
    )
    command.add_argument("--steps", type=int, default=49, help="forwards of each clip (default 49, the release's)")
    command.set_defaults(run=run_demo)
    return command


def run_demo(arguments, say: Say) -> tuple[Results, int]:
    from .demo.run import demo

    return demo(Path(arguments.out), arguments.steps, say, say.progress), 0


# --- render ----------------------------------------------------------------------------------------------------------


def _add_render(commands) -> argparse.ArgumentParser:
    command = commands.add_parser(
        "render",
        help="render one clip with sound",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=(
            "examples:\n"
            '  render --model DIR --prompt "a cat" --out cat.mp4\n'
            '  render --model DIR --prompt "a cat" --first-frame a.png --guide b.png@60 --guide s.wav@2s --out c.mp4\n'
            '  render --model DIR --prompt "a dog" --source c.mp4 --mask m.png --audio-mask keep --out d.mp4\n'
            "  render --model DIR --from d.mp4 --out again.mp4\n"
            '  render --engine NAME --prompt "a cat" --out cat.mp4'
        ),
    )
    model = _add_model_options(command, required=False)
    model.add_argument("--dit", metavar="FILE", help="DiT file or folder, instead of the one found in --model")
    model.add_argument("--layout", help="read the DiT in this layout, where its names leave a choice")
    add_engine_options(command.add_argument_group("on a server"))
    add_loading_options(command.add_argument_group("weights"))
    what = _add_prompt_options(command)
    what.add_argument("--embeds", metavar="FILE", help="the prompt's states from embed save: no text encoder is needed")
    what.add_argument(
        "--guide", action="append", default=[], metavar="FILE@PLACE[:S]",
        help="picture, clip or sound held at a frame (@12) or second (@2.5s), strength S in (0, 1]; may be repeated",
    )  # fmt: skip
    edit = command.add_argument_group("editing a clip")
    edit.add_argument("--source", metavar="FILE", help="clip that masks keep parts of, or that --denoise starts from")
    edit.add_argument(
        "--mask", metavar="FILE|keep|all", help="white is made anew: one picture, one per frame, or a clip"
    )
    edit.add_argument(
        "--audio-mask", metavar="RANGES|CURVE|keep|all", help="sound made anew: 1-2.5,3-4 or 0=0,1=1,2=.5"
    )
    edit.add_argument("--audio-feather", type=float, metavar="SECONDS", help="ramp at the ranges' edges")
    edit.add_argument("--denoise", type=float, default=None, help="strength in (0, 1]; 1 starts from noise alone")
    run = command.add_argument_group("how")
    run.add_argument("--steps", type=int, help="forwards (model evaluations), default 49")
    run.add_argument("--seed", type=int, help="default 0")
    run.add_argument("--start", type=int, help="first forward to run (needs --state or --source)")
    run.add_argument("--stop", type=int, help="stop before this forward and save the state")
    run.add_argument("--state", metavar="FILE", help="saved state to go on from")
    run.add_argument("--video-shift", type=float, help="sigma shift of the picture, default 12")
    run.add_argument("--audio-shift", type=float, help="sigma shift of the sound, default 3")
    run.add_argument(
        "--tile-batch", type=int, metavar="N", help="tiles decoded at once (default 1): EXACT MATH, more VRAM"
    )
    add_acceleration_options(command.add_argument_group("faster"))
    out = command.add_argument_group("output")
    out.add_argument("--out", required=True, metavar="FILE.mp4")
    out.add_argument(
        "--from", dest="manifest", metavar="MANIFEST", help="repeat a render: its .json, or the mp4 itself"
    )
    out.add_argument("--inputs", metavar="DIR", help="where to look for the files of --from")
    out.add_argument("--keep-frames", action="store_true", help="keep frames and sound as before encoding, for compare")
    out.add_argument("--keep-latent", action="store_true", help="keep the finished latent beside the clip")
    again = out.add_mutually_exclusive_group()
    again.add_argument(
        "--fresh", action="store_true", help="start over: an interrupted run of this job is not taken up"
    )
    again.add_argument(
        "--resume", action="store_true", help="taking it up is the default; this says when there is none"
    )
    out.add_argument("--recovery", metavar="DIR", help="folder for the states of runs (default: the user's cache)")
    out.add_argument("--no-recovery", action="store_true", help="save no state after each forward")
    out.add_argument("--no-metadata", action="store_true", help="write no manifest, neither in the file nor beside it")
    command.set_defaults(run=run_render)
    return command


def _add_model_options(command, required: bool = True):
    model = command.add_argument_group("model")
    model.add_argument(
        "--model", required=required, metavar="DIR", help="model folder: official, diffusers or ComfyUI files"
    )
    model.add_argument("--dtype", choices=["float32"], help="compute in float32 instead of the stored dtype")
    model.add_argument("--device", default=None, help="cuda or cpu (default: cuda when there is one)")
    model.add_argument(
        "--embeddings", action="append", metavar="DIR",
        help="folder of the prompt embeddings (default: embeddings in --model); may be repeated",
    )  # fmt: skip
    model.add_argument("--no-prompt-cache", action="store_true", help="keep no prompt states for the next run")
    model.add_argument("--no-media-cache", action="store_true", help="keep no latents of media for the next run")
    return model


def _add_prompt_options(command):
    what = command.add_argument_group("what to render")
    what.add_argument("--prompt", help="the prompt, verbatim; embedding:NAME puts a prompt embedding in")
    what.add_argument("--size", metavar="WxH", help="pixels, multiples of 32")
    what.add_argument("--ratio", metavar="W:H", help="aspect ratio, 1:4 to 4:1, on the trained canvas")
    what.add_argument("--megapixels", type=float, help="area in 10^6 pixels, with a ratio")
    what.add_argument("--frames", type=int, help="raised to the next 17k + 5 (default 124); 24 a second")
    what.add_argument("--first-frame", metavar="FILE", help="picture of the first frame")
    what.add_argument("--last-frame", metavar="FILE", help="picture of the last frame")
    for option, words in (
        ("--ref-image", "reference picture, <Picture n> in the prompt"),
        ("--ref-video", "reference clip with its sound, <Video n> and <Audio n>"),
        ("--ref-silent-video", "reference clip without its sound, <Video n>"),
        ("--ref-audio", "reference sound (a voice, music), <Audio n>"),
    ):
        what.add_argument(
            option, action=_AddReference, dest="references", default=[], metavar="FILE",
            help=words + "; may be repeated, order counts",
        )  # fmt: skip
    what.add_argument("--recipe", choices=["reference", "comfy"], help="how pictures are prepared (default reference)")
    return what


class _AddReference(argparse.Action):
    """Collects (kind, path, with sound) of all four options in the order they were given."""

    def __call__(self, parser, namespace, values, option_string=None):
        kind = self.option_strings[0].rpartition("-")[2]
        reference = (kind, values, "silent" not in self.option_strings[0])
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), reference])


RENDER_INPUTS = (
    "prompt", "size", "ratio", "megapixels", "frames", "first_frame", "last_frame", "references", "recipe", "embeds",
    "guide", "lora", "quantise", "exclude", "source", "mask", "audio_mask", "audio_feather",
    "denoise", "steps", "seed", "start", "stop", "state", "video_shift", "audio_shift", "tile_batch",
    "accelerate", "preset", "solver",
)  # fmt: skip


def run_render(arguments, say: Say) -> tuple[Results, int]:
    from .save import check_output
    from .unfinished import claimed

    if arguments.engine is None:
        without_engine(arguments)
    out = check_output(arguments.out)
    with claimed(out):
        if arguments.engine is not None:
            return run_remote(arguments, say, lambda a: accelerate_request(a, request_of(a))[0], RENDER_INPUTS)
        return _render_here(arguments, say, out)


def _render_here(arguments, say: Say, out: Path) -> tuple[Results, int]:
    from . import manifest as manifests
    from .recovery import RecoveryFolder
    from .render import render_request
    from .save import keep_inputs, save_clip

    old, said = None, []
    if arguments.inputs is not None and arguments.manifest is None:
        raise H3Error("--inputs says where the files of --from lie: add --from MANIFEST, or leave it out")
    for option, does in (("resume", "takes up"), ("fresh", "drops")):
        if getattr(arguments, option) and arguments.no_recovery:
            raise H3Error(f"--{option} {does} a saved state and --no-recovery uses none: leave one of them out")
    if arguments.manifest is not None:
        given = [name for name in RENDER_INPUTS if getattr(arguments, name) not in (None, [])]
        if given:
            option = "--ref-..." if given[0] == "references" else f"--{given[0].replace('_', '-')}"
            raise H3Error(f"--from repeats a render, so {option} cannot change it: leave it out")
        old = manifests.load_manifest(arguments.manifest)
        folders = [Path(arguments.inputs)] if arguments.inputs else []
        request, notes = manifests.request_from(old, [*folders, Path(arguments.manifest).parent, Path.cwd()])
        for note in notes:
            say(f"differs: {note}")
        if arguments.dtype not in (None, request.dtype):
            raise H3Error(f"--from repeats a render in the dtype it had, so --dtype {arguments.dtype} must be left out")
    else:
        request, said = accelerate_request(arguments, request_of(arguments))
    keep_inputs(out, [medium.path for medium in request.media.values()] + ([arguments.manifest] if old else []))
    models = _models(arguments, request.dtype, loading_of(arguments, request))
    recovery = None if arguments.no_recovery else RecoveryFolder(arguments.recovery)
    resume = True if arguments.resume else False if arguments.fresh else None
    told: list[str] = []

    def tell(sentence: str) -> None:
        told.append(sentence)
        say(f"note: {sentence}")

    try:
        result = render_request(request, models, say.progress, recovery=recovery, resume=resume, tell=tell, said=said)
    except KeyboardInterrupt:
        cure = "" if recovery is None else "; the same command goes on after the last forward"
        raise KeyboardInterrupt(f"stopped: nothing half-written was left{cure}") from None
    saved = save_clip(
        result, models, out, not arguments.no_metadata, arguments.keep_latent, say.progress, arguments.keep_frames
    )
    for note in saved.notes:
        if note not in told:  # the plan and what was changed stand above the progress already
            say(f"note: {note}")
    say(f"label: {result.fidelity.title}")
    for cause in result.fidelity.causes:
        say(f"  {cause.label}: {cause.reason}")
    say(f"wrote {saved.video or saved.latent}")
    changed = []
    if old is not None:
        changed = manifests.differences(old, manifests.make_manifest(result))
        for line in changed or ["nothing"]:
            say(f"differs: {line}")
    return [*describe_result(result, saved), *({"name": "differs", "value": line, "unit": ""} for line in changed)], 0


def describe_result(result, saved) -> Results:
    """The results block of a render."""
    from .manifest import latent_hash

    reasons = [cause.reason for cause in result.fidelity.causes]
    rows = [
        {"name": "video", "value": None if saved.video is None else str(saved.video), "unit": "path"},
        {"name": "label", "value": result.fidelity.title, "unit": "", "reasons": reasons},
        {"name": "frames", "value": result.canvas.num_frames, "unit": "frames"},
        {"name": "size", "value": f"{result.canvas.width}x{result.canvas.height}", "unit": "px"},
        {"name": "dit_calls", "value": result.dit_calls, "unit": "forwards"},
        {"name": "latent", "value": latent_hash(result.latent), "unit": "sha256"},
    ]
    if saved.latent is not None:
        rows.append({"name": "latent_file", "value": str(saved.latent), "unit": "path"})
    rows += [{"name": f"seconds/{stage}", "value": value, "unit": "s"} for stage, value in result.seconds.items()]
    rows += [{"name": "note", "value": note, "unit": ""} for note in saved.notes]
    return rows


def _models(arguments, dtype: str | None, loading=None):
    """The model folder with everything that the options say about it."""
    import torch

    from .model import Caches, Models

    folders = [Path(folder) for folder in arguments.embeddings or ()]
    for folder in folders:
        if not folder.is_dir():
            raise H3Error(f"--embeddings {folder} is not a folder: give the one that holds the embedding files")
    own = Path(arguments.model) / "embeddings"
    if not folders and own.is_dir():
        folders = [own]
    return Models(
        model_parts(arguments),
        torch.float32 if dtype == "float32" else None,
        choose_device(arguments.device),
        getattr(arguments, "layout", None),
        embedding_folders=folders,
        caches=Caches.of_user(not arguments.no_prompt_cache, not arguments.no_media_cache),
        loading=loading,
    )


def _media(path: str | None):
    from .request import Media

    if path is None:
        return None
    if not Path(path).exists():
        raise H3Error(f"{path} does not exist: give a file that does")
    return Media(path)


def _conditioning_of(arguments) -> dict:
    """The fields of RenderRequest that decide what the text encoder is shown."""
    from .request import ReferenceRequest
    from .text.conditions import load_condition

    prompt, recipe, embeds = arguments.prompt, arguments.recipe, _media(getattr(arguments, "embeds", None))
    if embeds is not None and (prompt is None or recipe is None):
        record = load_condition(embeds.path).record
        prompt = record.prompt if prompt is None else prompt
        recipe = record.recipe if recipe is None else recipe
    if prompt is None:
        raise H3Error("no prompt was given: add --prompt TEXT (or --from MANIFEST to repeat a render)")
    return {
        "prompt": prompt,
        "size": None if arguments.size is None else read_pair(arguments.size, "x", int, "--size", "WxH, e.g. 1344x768"),
        "ratio": None
        if arguments.ratio is None
        else read_pair(arguments.ratio, ":", float, "--ratio", "W:H, e.g. 16:9"),
        "megapixels": arguments.megapixels,
        "frames": arguments.frames,
        "first_frame": _media(arguments.first_frame),
        "last_frame": _media(arguments.last_frame),
        "references": tuple(ReferenceRequest(kind, _media(path), sound) for kind, path, sound in arguments.references),
        "embeds": embeds,
        "dtype": arguments.dtype,
        "recipe": recipe or "reference",
    }


def request_of(arguments):
    """RenderRequest from the command line. H3Error names the option that cannot be read."""
    from .request import WORD_MASKS, GuideRequest, RenderRequest, SoundMask
    from .schedule import AUDIO_SHIFT, DEFAULT_FORWARDS, VIDEO_SHIFT

    conditioning = _conditioning_of(arguments)
    guides = [GuideRequest.parse(text) for text in arguments.guide]
    for guide in guides:
        _media(guide.media.path)
    mask = arguments.mask if arguments.mask in WORD_MASKS else None
    sound = arguments.audio_mask
    if sound is not None and sound not in WORD_MASKS:
        sound = SoundMask.parse(sound, arguments.audio_feather or 0.0)
    elif arguments.audio_feather is not None:
        raise H3Error("--audio-feather softens the ranges of --audio-mask: give ranges (1-2.5), or leave it out")

    def default(value, otherwise):
        return otherwise if value is None else value

    return RenderRequest(
        **conditioning,
        guides=tuple(guides),
        mask=mask or _media(arguments.mask),
        sound_mask=sound,
        source=_media(arguments.source),
        state=_media(arguments.state),
        seed=default(arguments.seed, 0),
        num_forwards=default(arguments.steps, DEFAULT_FORWARDS),
        start=default(arguments.start, 0),
        stop=arguments.stop,
        denoise=default(arguments.denoise, 1.0),
        video_shift=default(arguments.video_shift, VIDEO_SHIFT),
        audio_shift=default(arguments.audio_shift, AUDIO_SHIFT),
        loras=loras_of(arguments),
        quantise=arguments.quantise,
        exclude=tuple(arguments.exclude),
        tile_batch=default(arguments.tile_batch, 1),
    )


# --- embed -----------------------------------------------------------------------------------------------------------


def _add_embed(commands) -> argparse.ArgumentParser:
    command = commands.add_parser("embed", help="save a prompt's states to a file, or tell what such a file holds")
    actions = command.add_subparsers(dest="action", metavar="save|show", required=True)
    save = actions.add_parser("save", help="encode a prompt with its keyframes and references")
    _add_model_options(save)
    _add_prompt_options(save)
    add_quantise_options(save)
    save.add_argument("--out", required=True, metavar="FILE.safetensors")
    save.set_defaults(run=run_embed_save)
    show = actions.add_parser("show", help="tell what a saved condition holds")
    show.add_argument("file", metavar="FILE.safetensors")
    show.set_defaults(run=run_embed_show)
    for action in (save, show):
        action.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return command


def run_embed_save(arguments, say: Say) -> tuple[Results, int]:
    from .embed import save_prompt
    from .request import RenderRequest
    from .save import keep_inputs

    request = RenderRequest(**_conditioning_of(arguments))
    keep_inputs(Path(arguments.out), [medium.path for medium in request.media.values()])
    models = _models(arguments, request.dtype, quantised_loading(arguments))
    made, notes = save_prompt(request, models, arguments.out)
    for note in notes:
        say(f"note: {note}")
    say(f"wrote {arguments.out} ({len(made.text.tags)} rows, {made.source})")
    rows = [{"name": "condition", "value": str(arguments.out), "unit": "path"}]
    rows.append({"name": "rows", "value": len(made.text.tags), "unit": "rows"})
    rows.append({"name": "source", "value": made.source, "unit": ""})
    return [*rows, *({"name": "note", "value": note, "unit": ""} for note in notes)], 0


def run_embed_show(arguments, say: Say) -> tuple[Results, int]:
    from .embed import show_condition

    return show_condition(arguments.file, say), 0


# --- selftest --------------------------------------------------------------------------------------------------------


def _add_selftest(commands) -> argparse.ArgumentParser:
    command = commands.add_parser("selftest", help="compare this device with the CPU on a tiny model, in seconds")
    command.add_argument("--device", default=None, help="cuda or cpu (default: cuda when there is one)")
    command.set_defaults(run=run_selftest)
    return command


def run_selftest(arguments, say: Say) -> tuple[Results, int]:
    from .selftest import selftest

    device = choose_device(arguments.device)
    checks = selftest(device)
    for check in checks:
        say(check.line())
    return [check.to_dict() for check in checks], 0 if all(check.passed for check in checks) else 1


# --- verify ----------------------------------------------------------------------------------------------------------


def _add_verify(commands) -> argparse.ArgumentParser:
    command = commands.add_parser("verify", help="run a folder of reference vectors against the runtime")
    command.add_argument("folder", metavar="FOLDER", help="folder with an index.json of the golden form")
    command.add_argument("--only", metavar="TEXT", help="only cases whose id contains this")
    command.set_defaults(run=run_verify)
    return command


def run_verify(arguments, say: Say) -> tuple[Results, int]:
    from .verify import format_lines, to_results, verify_folder

    cases = verify_folder(Path(arguments.folder), arguments.only)
    for line in format_lines(cases):
        say(line)
    return to_results(cases), 0 if cases and all(case.passed for case in cases) else 1


COMMANDS = (
    _add_demo, _add_render, _add_embed, add_recover, add_plan, add_compare, add_inspect, add_quantize,
    _add_selftest, add_paths, add_engine, _add_verify, add_bench,
)  # fmt: skip
