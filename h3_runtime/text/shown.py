"""What stands before the prompt, as pixels: keyframes first, then the references in the user's order.

    keyframe, picture  <Picture 1>   uint8 [1, H, W, 3]
    clip with sound    <Audio 1> <Video 1>   uint8 [n, H, W, 3], sampled at 2 frames a second, a time per pair
    sound              <Audio 2>     nothing to see: its label stands alone

    Shown ... ──present_shown──▶ items for the presentation, patches for the vision tower
          └──identity──▶ kind, size and SHA-256: which pixels a condition was made from

Numbers count per kind from 1 over the whole request, so a keyframe takes <Picture 1> before any reference.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .presentation import Clip, Picture, Sound
from .vision import VisionInput, preprocess_clip, preprocess_picture

KINDS = ("picture", "clip", "clip with sound", "sound")
NAMED = {"picture": "Picture", "clip": "Video", "clip with sound": "Video", "sound": "Audio"}
WRITTEN_NAME = re.compile(r"[<＜]\s*(picture|video|audio)\s*(\d+)\s*[>＞]", re.IGNORECASE)


@dataclass(frozen=True)
class Shown:
    """One thing before the prompt: ``kind`` of ``KINDS``, ``pixels`` uint8 [n, H, W, 3] as the encoder gets them.

    timestamps: seconds, one per frame pair of a clip. sound_sha256: of a sound that has a label here; the encoder hears
    nothing, but a condition must tell which sound its label stood for. keyframe: it also stands in the target.
    """

    kind: str
    name: str
    pixels: np.ndarray | None = field(default=None, compare=False)
    timestamps: tuple[float, ...] = ()
    sound_sha256: str = ""
    keyframe: bool = False

    def __post_init__(self):
        assert self.kind in KINDS and (self.pixels is None) == (self.kind == "sound"), self

    def identity(self) -> dict[str, Any]:
        """Kind, size and content: equal for two things that give the same rows in the same place."""
        digest = hashlib.sha256(f"{self.timestamps}{self.sound_sha256}".encode())
        size: list[int] = []
        if self.pixels is not None:
            count, height, width = self.pixels.shape[:3]
            size = [width, height, count]
            digest.update(np.ascontiguousarray(self.pixels))
        return {"kind": self.kind, "size": size, "sha256": digest.hexdigest()}


def labels(shown: Sequence[Shown]) -> list[tuple[str, ...]]:
    """The labels of each thing as the presentation writes them; a clip's soundtrack has its own, before the clip's."""
    counts = {"Picture": 0, "Video": 0, "Audio": 0}
    found = []
    for thing in shown:
        words = ("Audio", "Video") if thing.kind == "clip with sound" else (NAMED[thing.kind],)
        for word in words:
            counts[word] += 1
        found.append(tuple(f"<{word} {counts[word]}>" for word in words))
    return found


def present_shown(
    shown: Sequence[Shown], recipe: str = "reference"
) -> tuple[list[Picture | Sound | Clip], list[VisionInput]]:
    """Items for ``TextEncoder.encode_items`` and the vision tower's input of each picture and clip among them."""
    items, inputs = [], []
    for thing in shown:
        if thing.kind == "sound":
            items.append(Sound())
        elif thing.kind == "picture":
            inputs.append(preprocess_picture(thing.pixels[0], recipe))
            items.append(Picture(inputs[-1].grid[1:]))
        else:
            inputs.append(preprocess_clip(thing.pixels, recipe))
            items.append(Clip(inputs[-1].grid[1:], thing.timestamps, thing.kind == "clip with sound"))
    return items, inputs


def lint_names(prompt: str, shown: Sequence[Shown]) -> list[str]:
    """Notes about references that the prompt does not name, and names that stand for nothing; nothing is rewritten.

    The model ties a reference to what is said of it through its label alone. Keyframes need no name.
    """
    notes = []
    known = labels(shown)
    written = {f"<{match[1].capitalize()} {int(match[2])}>" for match in WRITTEN_NAME.finditer(prompt)}
    for thing, names in zip(shown, known):
        if not thing.keyframe and not written & set(names):
            places = " or ".join(names)
            notes.append(f"{thing.name} is not named in the prompt: write {places} where it is meant")
    connected = {name for names in known for name in names}
    for match in WRITTEN_NAME.finditer(prompt):
        word = match[1].capitalize()
        name, at = f"<{word} {int(match[2])}>", f"at character {match.start() + 1}"
        if name not in connected:
            count = sum(f"<{word} " in label for label in connected)
            notes.append(f"{match[0]} {at} stands for nothing: this request has {count or 'no'} {word.lower()}(s)")
        elif match[0] != name:
            notes.append(f"{match[0]} {at} is not the label: write {name} exactly")
    return notes
