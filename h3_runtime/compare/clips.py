"""The videos that go with a report: both clips for the page, side by side, and their difference.

A frame ┐            ┌─ label A ──────┬─ label B ──────┐
        ├──────────▶ │                │                │  side_by_side.mp4, sound tracks A and B
B frame ┘            └─ frame 12, 31.4 dB ─────────────┘
        └─ |A - B| x 8 ─▶ difference.mp4
a.mp4, b.mp4: the clip's own coded pictures and sound without its tags where a browser plays them, else made here
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from ..media import Encoding, Mp4Writer, copy_tracks, resize_stretch
from .letters import Letters, replaced_note
from .sources import Side

GAIN = 8
WIDEST = 4096  # pixels of a side-by-side picture; players and cards stop there
BAND, INK, PAPER = 34, (240, 240, 240), (24, 24, 27)
SIDE_BY_SIDE, DIFFERENCE = "side_by_side.mp4", "difference.mp4"
COLOURS = ((96, 165, 250), (251, 146, 60))  # of A and B


class Clips:
    """Writes the videos while the frames pass, in a ``with`` block: ``write(a, b, words)`` for each pair."""

    def __init__(self, folder: Path, a: Side, b: Side, width: int, height: int):
        self.folder, self.sides = folder, (a, b)
        self.width, self.height = width - width % 2, height - height % 2
        shrink = min(1.0, (WIDEST - 8) / (2 * self.width))
        self.each = int(self.width * shrink) // 2 * 2, int(self.height * shrink) // 2 * 2
        made = [_caption(f"{letter}  {side.name}", side.label, self.each[0], COLOURS[index])
                for index, (letter, side) in enumerate(zip("AB", (a, b)))]  # fmt: skip
        self.captions = [caption for caption, _ in made]
        self.notes = replaced_note({**made[0][1], **made[1][1]})
        self.band = self.captions[0].shape[0]
        self.proxies: list[Path] = []

    def __enter__(self) -> Clips:
        self._stack = ExitStack()
        a, b = self.sides
        self.wide = self._open(SIDE_BY_SIDE, 2 * self.each[0] + 8, self.each[1] + self.band + BAND)
        for side, letter, put in ((a, "A", self.wide.set_audio), (b, "B", self.wide.add_audio)):
            if side.sound is not None:
                put(side.sound, f"{letter}: {side.name}")
        self.apart = self._open(DIFFERENCE, self.width, self.height + BAND)
        self.own = [None if side.playable else self._open(f"{letter}.mp4", self.width, self.height)
                    for letter, side in zip("ab", self.sides)]  # fmt: skip
        for writer, side in zip(self.own, self.sides):
            if writer is not None and side.sound is not None:
                writer.set_audio(side.sound)
        return self

    def _open(self, name: str, width: int, height: int) -> Mp4Writer:
        return self._stack.enter_context(Mp4Writer(self.folder / name, width, height, encoding=Encoding(crf=18)))

    def write(self, a: np.ndarray, b: np.ndarray, words: str) -> None:
        """One frame of each, uint8 [H, W, 3] of one size; ``words`` are burnt in below."""
        pair = [frame[: self.height, : self.width] for frame in (a, b)]
        for writer, frame in zip(self.own, pair):
            if writer is not None:
                writer.write(frame[None])
        small = [resize_stretch(np.ascontiguousarray(frame), *self.each) for frame in pair]
        gap = np.full((self.each[1] + self.band, 8, 3), PAPER, np.uint8)
        sides = [np.concatenate([caption, frame]) for caption, frame in zip(self.captions, small)]
        whole = np.concatenate([sides[0], gap, sides[1]], axis=1)
        self.wide.write(np.concatenate([whole, _line(words, whole.shape[1])])[None])
        apart = np.abs(pair[0].astype(np.int16) - pair[1])
        apart = np.minimum(apart * GAIN, 255).astype(np.uint8)
        self.apart.write(np.concatenate([apart, _line(f"|A - B| x {GAIN}   {words}", self.width)])[None])

    def __exit__(self, kind, error, trace) -> None:
        self._stack.__exit__(kind, error, trace)
        if kind is None:
            self.proxies = [
                copy_tracks(side.playable, self.folder / f"{letter}.mp4") if writer is None else writer.path
                for letter, side, writer in zip("ab", self.sides, self.own)
            ]


def _caption(name: str, label: str, width: int, colour: tuple[int, int, int]) -> tuple[np.ndarray, dict[str, str]]:
    """uint8 [band, width, 3]: two lines, the second smaller; and what was drawn in place of letters that lack here."""
    band = Image.new("RGB", (width, 52), PAPER)
    draw, replaced = ImageDraw.Draw(band), {}
    draw.rectangle((0, 0, width, 3), fill=colour)
    for text, top, size in ((name, 8, 18), (label, 31, 14)):
        letters = Letters(size)
        letters.write(draw, (10, top), letters.fitted(draw, text, width - 20), INK)
        replaced |= letters.replaced
    return np.asarray(band), replaced


def _line(words: str, width: int) -> np.ndarray:
    """uint8 [BAND, width, 3]: one line of text."""
    band = Image.new("RGB", (width, BAND), PAPER)
    draw, letters = ImageDraw.Draw(band), Letters(15)
    letters.write(draw, (10, 8), letters.fitted(draw, words, width - 20), INK)
    return np.asarray(band)
