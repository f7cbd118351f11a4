"""python -m h3_runtime recover: what interrupted runs left, and a finished latent to its clip.

recover              ─▶ temporary files of killed writers are removed, states are listed
recover FILE --out … ─▶ a finished latent, decoded with the VAEs of --model

The work is imported when it is asked for, so that the command line starts without torch.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .errors import H3Error
from .weight_commands import model_parts


def add_recover(commands) -> argparse.ArgumentParser:
    command = commands.add_parser("recover", help="list what interrupted runs left, or decode a finished latent")
    command.add_argument("latent", nargs="?", metavar="FILE", help="a finished latent to decode; without it: the list")
    command.add_argument("--model", metavar="DIR", help="model folder, for its VAEs")
    command.add_argument("--out", metavar="FILE.mp4")
    command.add_argument("--recovery", metavar="DIR", help="folder of the states (default: the user's cache)")
    command.set_defaults(run=run_recover)
    return command


def run_recover(arguments, say) -> tuple[list[dict], int]:
    from .latents import load_latent
    from .model import Models
    from .recovery import RecoveryFolder
    from .save import check_output, decode_latent
    from .unfinished import claimed, sweep_folder

    if arguments.latent is None:
        folder = RecoveryFolder(arguments.recovery)
        rows = []
        for swept in (folder.folder, Path.cwd()):
            for sentence in sweep_folder(swept):
                say(sentence)
                rows.append({"name": "unfinished", "value": sentence, "unit": ""})
        readable = dict(folder.read())
        for path in folder.states():
            if path not in readable:
                say(f"{path}  is damaged: delete it")
                rows.append({"name": str(path), "value": "damaged", "unit": ""})
        for path, saved in readable.items():
            state = "finished" if saved.finished else f"stopped after forward {saved.info.get('stop')}"
            canvas = saved.canvas
            say(f"{path}  {canvas.width}x{canvas.height}, {canvas.num_frames} frames, {state}")
            say(f"    prompt: {saved.info.get('prompt', '')!r}, seed {saved.info.get('seed')}")
            rows.append({"name": str(path), "value": state, "unit": "", **saved.info})
        if not folder.states():
            say(f"nothing is waiting in {folder.folder}")
        return rows, 0
    if arguments.model is None or arguments.out is None:
        raise H3Error("decoding a latent needs --model DIR (for its VAEs) and --out FILE.mp4")
    out = check_output(arguments.out)
    saved = load_latent(arguments.latent)
    if not saved.finished:
        raise H3Error(
            f"{arguments.latent} stopped after forward {saved.info.get('stop')}: run its render command again, or "
            "render --state FILE --start N"
        )
    models = Models(model_parts(arguments), device="cpu")
    with claimed(out):
        video, notes = decode_latent(saved, models, out, say.progress)
    for note in notes:
        say(f"note: {note}")
    say(f"wrote {video}")
    return [{"name": "video", "value": str(video), "unit": "path"}], 0
