"""``python -m h3_runtime plan``: what a render would take on this machine, or on another one, before it starts.

    plan --size 1344x768 --frames 362 --vram 12 --ram 32 --weights int8
    plan --model DIR --ref-image 1920x1080 --ref-image 1024x1024 --lora style.safetensors

Exit status 1 when it does not fit; the last line says what would. The work is imported when it is asked for, so that
the command line starts without torch.
"""

from __future__ import annotations

import argparse
import re

from .accelerate_command import add_acceleration_options
from .errors import H3Error
from .weight_commands import add_quantise_options, converted_folder

LARGEST = 1e9  # that an edge, a frame or a time may be
MOST_PIXELS = 1e12  # of all frames: 10,000 times the release's longest clip


def add_plan(commands) -> argparse.ArgumentParser:
    command = commands.add_parser("plan", help="what a render takes: memory, what is streamed, time; before it starts")
    what = command.add_argument_group("the render, by its sizes")
    what.add_argument("--size", metavar="WxH", help="pixels, multiples of 32 (default 1344x768)")
    what.add_argument("--frames", type=int, help="raised to the next 17k + 5 (default 124)")
    what.add_argument("--steps", type=int, help="forwards (model evaluations), default 49")
    what.add_argument("--prompt", help="the prompt, for its length")
    what.add_argument("--keyframes", type=int, default=0, choices=(0, 1, 2), help="first and last frame given")
    what.add_argument("--guide", action="append", default=[], metavar="FRAME[+FRAMES]",
                      help="a picture, or a clip of FRAMES, held at FRAME; may be repeated")  # fmt: skip
    what.add_argument("--ref-image", action="append", default=[], metavar="WxH", help="a picture reference")
    what.add_argument("--ref-video", action="append", default=[], metavar="WxH@SECONDS", help="a clip with sound")
    what.add_argument("--ref-audio", action="append", default=[], metavar="SECONDS", help="a sound reference")
    what.add_argument("--mask-levels", type=int, default=0, metavar="N", help="a clip edited under a mask of N values")
    machine = command.add_argument_group("the machine (default: this one)")
    machine.add_argument("--vram", type=float, metavar="GIB", help="plan for a card of this size")
    machine.add_argument("--ram", type=float, metavar="GIB", help="plan for this much host memory")
    model = command.add_argument_group("the model")
    model.add_argument("--weights", metavar="FILE|bf16|int8|fp32", help="the DiT (default: that of --model, or bf16)")
    model.add_argument("--model", metavar="DIR", help="model folder, for the sizes of its other parts too")
    model.add_argument("--layout", help="read the DiT in this layout, where its names leave a choice")
    model.add_argument("--converted", metavar="DIR", help="as for render: transformed blocks are kept in a file there")
    model.add_argument("--lora", action="append", default=[], metavar="FILE", help="a LoRA beside the weights")
    add_quantise_options(model)
    add_acceleration_options(command.add_argument_group("faster: what it holds is counted"))
    command.set_defaults(run=run_plan)
    return command


def run_plan(arguments, say) -> tuple[list[dict], int]:
    from dataclasses import replace

    from .accelerators.presets import accelerate
    from .memory.plan import plan
    from .memory.plan_lines import plan_lines, plan_results

    sizes = sizes_of(arguments, lambda sentence: say(f"note: {sentence}"))
    weights, place = _weights(arguments, "ref2va" if sizes.references else "fl2va" if sizes.guides else "t2va")
    card, host = _machine(arguments, place)
    converted = converted_folder(arguments.converted, None)
    host = replace(host, converted=converted).with_transforms(weights.dit.transforms)
    made = plan(sizes, weights, card, host, accelerate(arguments.accelerate, arguments.preset).built())
    for note in sizes.canvas.notes:
        say(f"note: {note}")
    for line in plan_lines(made):
        say(line)
    return plan_results(made), 0 if made.fits else 1


def sizes_of(arguments, tell):
    """RenderSizes from the command line; ``tell`` is given what was cut. H3Error names the option that cannot be
    read."""
    from .geometry import DEFAULT_FRAMES, FPS, Canvas
    from .memory.rows import (
        DEFAULT_PROMPT_ROWS,
        GuideSize,
        RenderSizes,
        clip_reference,
        gradient_levels,
        picture_reference,
        prompt_rows,
        sound_reference,
    )
    from .request import check_reference_kinds
    from .schedule import DEFAULT_FORWARDS, check_forwards

    frames = DEFAULT_FRAMES if arguments.frames is None else arguments.frames
    canvas = Canvas.fit(frames, _edges("--size", "1344x768" if arguments.size is None else arguments.size))
    if canvas.width * canvas.height * canvas.num_frames > MOST_PIXELS:
        raise H3Error(
            f"{canvas.width}x{canvas.height} with {canvas.num_frames} frames is beyond any machine: choose a smaller "
            "size or fewer frames"
        )
    forwards = DEFAULT_FORWARDS if arguments.steps is None else arguments.steps
    check_forwards(forwards)
    guides = [GuideSize(index, keyframe=True) for index in (0, canvas.num_frames - 1)[: arguments.keyframes]]
    guides += [_guide(text, canvas, tell) for text in arguments.guide]
    kinds = (("image", arguments.ref_image), ("video", arguments.ref_video), ("audio", arguments.ref_audio))
    check_reference_kinds([kind for kind, given in kinds for _ in given])
    references = [picture_reference(*_edges("--ref-image", text)) for text in arguments.ref_image]
    for text in arguments.ref_video:
        width, height, length = _numbers("--ref-video", text, r"(\d+)x(\d+)@([\d.]+)s?", "WxH@SECONDS, e.g. 1280x720@5")
        _tell_cut(f"--ref-video {text}", length, canvas, tell)
        references.append(clip_reference(int(width), int(height), round(length * FPS), canvas, length))
    for text in arguments.ref_audio:
        (length,) = _numbers("--ref-audio", text, r"([\d.]+)s?", "SECONDS, e.g. 4.5")
        _tell_cut(f"--ref-audio {text}", length, canvas, tell)
        references.append(sound_reference(length, canvas))
    levels = gradient_levels(arguments.mask_levels) if arguments.mask_levels else ()
    return RenderSizes(
        canvas=canvas,
        prompt_rows=DEFAULT_PROMPT_ROWS if arguments.prompt is None else prompt_rows(arguments.prompt),
        guides=tuple(guides),
        references=tuple(references),
        video_levels=levels,
        sound_levels=levels,
        has_source=bool(levels),
        num_forwards=forwards,
    )


def _guide(text: str, canvas, tell):
    """GuideSize of FRAME or FRAME+FRAMES: as many frames as can be encoded and are left in the clip."""
    from .geometry import floor_frames
    from .memory.rows import GuideSize

    index, held = map(int, _numbers("--guide", text, r"(\d+)(?:\+([1-9]\d*))?", "FRAME or FRAME+FRAMES, e.g. 12+22"))
    if index >= canvas.num_frames:
        raise H3Error(f"--guide {text}: the clip has frames 0 to {canvas.num_frames - 1}")
    asked = held or 1
    frames = floor_frames(min(asked, canvas.num_frames - index))
    if frames != asked:
        tell(f"--guide {text}: {frames} of the {asked} frames are held (17k + 5 or one, as far as the clip goes)")
    return GuideSize(index, frames)


def _tell_cut(option: str, seconds: float, canvas, tell) -> None:
    if seconds > canvas.seconds:
        tell(f"{option} is cut to the clip's {canvas.seconds:.1f} s")


def _weights(arguments, task: str):
    """(ModelWeights, a file on the disk they are read from or None)."""
    from .checkpoint.parts import find_parts
    from .checkpoint.pieces import Online
    from .lora import Lora
    from .memory.weights import NAMED_WEIGHTS, parts_of, released, weights_of
    from .quant.online import PARTS

    loras = [Lora(path) for path in arguments.lora]
    parts = None if arguments.model is None else find_parts(arguments.model)
    named = arguments.weights
    if named is None:
        named = "bf16" if parts is None else str(parts.dit_for(task).path)
    online = {part: Online.of(part, arguments.quantise, arguments.exclude) for part in PARTS.values()}
    dit = weights_of(named, loras, arguments.layout, online["dit"])
    place = named if named not in NAMED_WEIGHTS else arguments.model
    unread = [word for word, part in PARTS.items() if part != "dit" and online[part] and parts is None]
    if unread:
        raise H3Error(f"--quantise {unread[0]}=... needs that part's file: add --model DIR, or leave it out")
    return released(dit) if parts is None else parts_of(parts, dit, online), place


def _machine(arguments, place: str | None):
    """(Card, Host): given, or probed here."""
    from .memory.probe import Card, Host, probe_card, probe_cpu, probe_host

    host = probe_host() if arguments.ram is None else Host.given(arguments.ram)
    host = host.with_disk(place)
    card = probe_card()
    if arguments.vram is not None:
        return Card.given(arguments.vram, card), host
    return card or probe_cpu(host), host


def _edges(option: str, text: str) -> tuple[int, int]:
    width, height = _numbers(option, text, r"(\d+)x(\d+)", "WxH, e.g. 1344x768")
    if not (width and height):
        raise H3Error(f"{option} {text!r} has no pixels: give WxH, e.g. 1344x768")
    return int(width), int(height)


def _numbers(option: str, text: str, pattern: str, form: str) -> list[float]:
    match = re.fullmatch(pattern, text.strip().lower())
    try:
        found = [float(group or 0) for group in match.groups()]
        if any(number > LARGEST for number in found):
            raise ValueError
    except (AttributeError, ValueError):
        raise H3Error(f"{option} {text[:40]!r} cannot be read: give {form}") from None
    return found
