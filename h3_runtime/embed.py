"""Prompt conditions made without a render: what ``embed save`` writes and ``embed show`` tells.

    RenderRequest (prompt, keyframes, references, size) ──place──▶ what the encoder is shown ──▶ condition.safetensors
    condition.safetensors ──describe_condition──▶ sentences: prompt, rows, encoder, and what it was made with, in order

Only the text encoder is read, neither a DiT nor a VAE. Size and length count: they decide how keyframes and clips look.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from .errors import H3Error
from .guides import place
from .job import MODALITY_TEXT
from .model import Models
from .quant.online import PARTS, by_part
from .render import condition_text
from .request import RenderRequest
from .text.conditions import MadeCondition, load_condition, save_condition
from .unfinished import part_path


def save_prompt(request: RenderRequest, models: Models, out: str | os.PathLike) -> tuple[MadeCondition, list[str]]:
    """Encode (or take from the cache) the condition of ``request`` and write it to ``out``; returns it and notes."""
    out = Path(out)
    if out.suffix.lower() != ".safetensors":
        raise H3Error(f"{out.name} must end in .safetensors: that is what a condition is saved as")
    if not out.absolute().parent.is_dir():
        raise H3Error(f"the folder of {out} does not exist: make it, or choose another place")
    check_place(out)
    if models.parts.text_encoder is None:
        raise H3Error("no text encoder was found in the model folder: add its file")
    quantised = by_part(models.loading.quantise, models.loading.exclude)
    idle = [word for word, part in PARTS.items() if part in quantised and part != "text_encoder"]
    if idle:
        raise H3Error(
            f"quantising {', '.join(idle)} has no effect on a prompt's states, only the text encoder is read: "
            "give text=METHOD, or leave it out"
        )
    placement = place(request)
    made = condition_text(request, placement, models)
    save_condition(out, made)
    return made, [*placement.notes, *made.text.notes]


def check_place(out: Path) -> None:
    """H3Error, before anything is encoded, where no file of this name can be made."""
    try:
        if out.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        probe = part_path(out)
        open(probe, "x").close()
        probe.unlink()
    except OSError as error:
        raise H3Error(f"{out} cannot be written ({error.strerror}): choose another place") from None


def show_condition(path: str | os.PathLike, say: Callable[[str], None]) -> list[dict]:
    """Tell what a saved condition holds; returns the results block of the command."""
    made = load_condition(path)
    for line in describe_condition(made):
        say(line)
    hidden, record = made.text.hidden, made.record
    return [
        {"name": "prompt", "value": record.prompt, "unit": ""},
        {"name": "rows", "value": hidden.shape[0], "unit": "rows"},
        {"name": "width", "value": hidden.shape[1], "unit": "values"},
        {"name": "dtype", "value": str(hidden.dtype).removeprefix("torch."), "unit": ""},
        {"name": "record", "value": record.key, "unit": "sha256", **record.to_dict()},
    ]


def describe_condition(made: MadeCondition) -> list[str]:
    """Sentences about a condition, its items in their order."""
    hidden, tags, record = made.text.hidden, made.text.tags, made.record
    text = int((tags == MODALITY_TEXT).sum())
    lines = [
        f"prompt: {record.prompt!r}",
        f"rows: {len(tags)} ({text} of text, {len(tags) - text} of pictures), {hidden.shape[1]} wide, "
        f"{str(hidden.dtype).removeprefix('torch.')}",
        f"encoder: {record.encoder}, fingerprint {record.fingerprint}, computed as {record.dtype}",
        f"recipe: {record.recipe}",
    ]
    for number, item in enumerate(record.items, start=1):
        size = " {}x{}, {} frame(s) seen".format(*item["size"]) if item["size"] else ""
        lines.append(f"{number}. {item['kind']} {item['name']}{size}, sha256 {item['sha256']}")
    lines += [f"embedding {e.name}: {e.rows} rows of {e.file}, sha256 {e.sha256}" for e in record.embeddings]
    return lines
