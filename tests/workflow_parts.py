"""What the descriptions of the bundled workflows are made of: boxes, frames, notes, and the nodes that most have.

    Box(name, type, column, row, widgets, links) ... ─▶ Workflow.described() ─▶ canvas.js

Columns run left to right, rows top to bottom; a link is ("name of the box", "name of its output"). Sizes and words are
those of the small carried model's world (h3_runtime/demo/world.py); everything else stands at the nodes' own defaults.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, replace

Link = tuple[str, str]
ROOMS = {
    "weights": "#3f789e",
    "what": "#88AA88",
    "render": "#b06634",
    "a": "#2f7d4f",
    "b": "#b06634",
    "c": "#8a6d3b",
    "d": "#7a5a86",
    "e": "#8f4a4a",
    "plan": "#5a6f8a",
    "save": "#a1309b",
}
NOTE = ("#432", "#653")
SMALL = {"width": 128, "height": 128, "seconds": 0.9}
PROMPT = "a red circle moves left to right, low tone"  # what H3 Sample Media shows too
SEED = {"seed": 1, "control_after_generate": "fixed"}
GROUPS = {
    "weights": "1 Weights",
    "what": "2 What is seen and heard, and how long",
    "render": "3 Render",
    "save": "4 Watch",
}


@dataclass(frozen=True)
class Box:
    """One node: where it stands and what it is given. ``group`` is the frame it lies in."""

    name: str
    type: str
    column: int
    row: int
    group: str = ""
    title: str = ""
    widgets: dict = field(default_factory=dict)
    links: dict[str, Link] = field(default_factory=dict)
    rows: int = 1
    size: tuple[int, int] | None = None
    muted: bool = False


@dataclass(frozen=True)
class Workflow:
    """A canvas file: its name, its boxes, and the frames by the key that boxes name."""

    name: str
    boxes: tuple[Box, ...]
    groups: dict[str, str]

    def described(self) -> dict:
        """What canvas.js takes, and the id that the file keeps however often it is made."""
        nodes = [
            {
                "name": box.name,
                "type": box.type,
                "title": box.title,
                "column": box.column,
                "row": box.row,
                "rows": box.rows,
                "widgets": box.widgets,
                "links": {name: list(link) for name, link in box.links.items()},
                **({"size": list(box.size)} if box.size else {}),
                **({"muted": True} if box.muted else {}),
                **({"colour": list(NOTE)} if box.type == "MarkdownNote" else {}),
            }
            for box in self.boxes
        ]
        groups = [
            {"title": title, "colour": ROOMS[key], "members": [box.name for box in self.boxes if box.group == key]}
            for key, title in self.groups.items()
        ]
        identity = str(uuid.uuid5(uuid.NAMESPACE_URL, f"minimax-h3-runtime/{self.name}"))
        return {"name": self.name, "id": identity, "nodes": nodes, "groups": groups}


# ---- notes

CARRIED_NOTE = (
    "**As it stands** it runs without a download and with an empty input folder, in seconds. The small carried model "
    "knows one world: a red, yellow, green, cyan, blue or purple circle, square or triangle on grey that moves left to "
    "right, moves right to left, moves up, moves down, grows, shrinks, bounces, stays still or changes from one "
    "colour to another, with a low, middle or high tone, beeps, or a tone and then a beep. Other words give a smear."
)
WEIGHTS_NOTE = """
**Real weights.** In the frame *1 Weights*, choose your files in place of *small carried model*: {pickers}. {size} \
Nothing else changes.

**The label.** {label}
"""
PICKERS = "in *H3 Load Model*, *H3 Load Text Encoder* and *H3 Load VAEs*"
TRAINED = "In *H3 Empty Latent* set width and height to 0 (the trained size, 1344x768) and seconds to 5.167."
CLIPS = "Size and length are those of your clip, as near as the model allows; the node says what it made of them."
LABEL = (
    "As it stands: LOSSLESS, because the steps and shifts are the release's own and nothing is quantised. BEYOND THE "
    "REFERENCE stands beside it as long as the clip is shorter or smaller than what the model was trained on."
)


def note(text: str, size: str = TRAINED, label: str = LABEL, pickers: str = PICKERS, rows: int = 9) -> Box:
    tail = WEIGHTS_NOTE.format(size=size, label=label, pickers=pickers)
    words = f"{text.strip()}\n\n{CARRIED_NOTE}\n{tail}".strip()
    return Box("note", "MarkdownNote", 0, 0, title="Read me", widgets={"text": words}, rows=rows, size=(420, 600))


def boxes(words: str, *more: Box, **notes) -> tuple[Box, ...]:
    return (note(words, **notes), *more)


# ---- nodes that most workflows have


def model(row: int = 0, choice: str = "small carried model", title: str = "", **widgets) -> Box:
    return Box("model", "H3RuntimeLoadModel", 1, row, "weights", title, {"model": choice, **widgets})


def encoder(row: int) -> Box:
    return Box("encoder", "H3RuntimeLoadTextEncoder", 1, row, "weights")


def vaes(row: int) -> Box:
    return Box("vaes", "H3RuntimeLoadVaes", 1, row, "weights")


def empty(row: int, column: int = 2) -> Box:
    return Box("empty", "H3RuntimeEmptyLatent", column, row, "what", "", SMALL)


def media(row: int, column: int = 2, **widgets) -> Box:
    return Box("media", "H3RuntimeSampleMedia", column, row, "what", "H3 Sample Media (yours here)", widgets)


def prompt(row: int, column: int = 2, words: str = PROMPT) -> Box:
    links = {"clip": ("encoder", "clip")}
    return Box("prompt", "H3RuntimeEncodePrompt", column, row, "what", "", {"prompt": words}, links, size=(360, 190))


def sampler(column: int, row: int, positive: Link, latent: Link = ("empty", "latent"), name: str = "sampler") -> Box:
    links = {"model": ("model", "model"), "positive": positive, "latent": latent}
    return Box(name, "H3RuntimeSampler", column, row, "render", "", SEED, links, 2, (360, 430))


def save(column: int, row: int, prefix: str, latent: Link = ("sampler", "latent")) -> Box:
    links = {"latent": latent, "video_vae": ("vaes", "video vae"), "audio_vae": ("vaes", "audio vae")}
    return Box(
        "save", "H3RuntimeDecodeAndSave", column, row, "save", "", {"filename_prefix": prefix}, links, 2, (340, 640)
    )


def encoded(column: int = 3, row: int = 2) -> Box:
    links = {
        "video_vae": ("vaes", "video vae"),
        "audio_vae": ("vaes", "audio vae"),
        "images": ("media", "clip"),
        "audio": ("media", "sound"),
    }
    return Box("encoded", "H3RuntimeEncodeClip", column, row, "what", "", {}, links)


def changed(box: Box, **fields) -> Box:
    """A box with other fields; ``widgets`` and ``links`` are added to its own."""
    merged = {key: {**getattr(box, key), **fields.pop(key, {})} for key in ("widgets", "links")}
    return replace(box, **merged, **fields)
