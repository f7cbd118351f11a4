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
from .plots import font
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
        self.captions = [_caption(f"{letter}  {side.name}", side.label, self.each[0], COLOURS[index])
                         for index, (letter, side) in enumerate(zip("AB", (a, b)))]  # fmt: skip
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


def _fitted(draw: ImageDraw.ImageDraw, text: str, width: int, letters) -> str:
    """``text``, its end cut off where it is wider than ``width`` pixels."""
    if draw.textlength(text, letters) <= width:
        return text
    while text and draw.textlength(text + "...", letters) > width:
        text = text[:-1]
    return text + "..."


def _caption(name: str, label: str, width: int, colour: tuple[int, int, int]) -> np.ndarray:
    """uint8 [band, width, 3]: two lines, the second smaller."""
    band = Image.new("RGB", (width, 52), PAPER)
    draw = ImageDraw.Draw(band)
    draw.rectangle((0, 0, width, 3), fill=colour)
    for text, top, size in ((name, 8, 18), (label, 31, 14)):
        letters = font(size)
        draw.text((10, top), _fitted(draw, _plain(text), width - 20, letters), fill=INK, font=letters)
    return np.asarray(band)


def _line(words: str, width: int) -> np.ndarray:
    """uint8 [BAND, width, 3]: one line of text."""
    band = Image.new("RGB", (width, BAND), PAPER)
    draw, letters = ImageDraw.Draw(band), font(15)
    draw.text((10, 8), _fitted(draw, _plain(words), width - 20, letters), fill=INK, font=letters)
    return np.asarray(band)


def _plain(text: str) -> str:
    """What the built-in font can write; other letters become question marks."""
    return text.encode("latin-1", "replace").decode("latin-1")
