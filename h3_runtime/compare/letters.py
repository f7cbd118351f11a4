"""Text drawn into pictures: each letter by the first font here that has it, and a word about those that none has.

"été 日本.mp4" ─▶ Pillow's own letters (ASCII, a few signs) ─▶ fonts of this system ─▶ the letter without its marks ─▶ ?

Pillow carries a small part of one font. Systems bring others, under names that differ; those that are here are asked in
turn. Letters that need shaping (Arabic, Devanagari) are drawn one by one.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache

from PIL import ImageDraw, ImageFont

# file names; Pillow looks in the system's own folders. Those with most of Latin, Greek, Cyrillic first, then CJK, signs
SYSTEM_FONTS = (
    "DejaVuSans.ttf", "NotoSans-Regular.ttf", "LiberationSans-Regular.ttf", "segoeui.ttf", "arial.ttf", "Arial.ttf",
    "Arial Unicode.ttf", "NotoSansCJK-Regular.ttc", "NotoSansSC-Regular.otf", "msyh.ttc", "simsun.ttc", "meiryo.ttc",
    "YuGothR.ttc", "malgun.ttf", "PingFang.ttc", "Hiragino Sans GB.ttc", "AppleSDGothicNeo.ttc", "wqy-microhei.ttc",
    "wqy-zenhei.ttc", "DroidSansFallbackFull.ttf", "DroidSansFallback.ttf", "seguisym.ttf", "Apple Symbols.ttf",
)  # fmt: skip
NO_LETTER = "\uffff"  # no character: what a font draws for it, it draws for all that it lacks


def font(size: int):
    """Pillow's own letters at ``size`` pixels; a Pillow without FreeType has one small size."""
    try:
        return ImageFont.load_default(size)
    except (TypeError, OSError, ImportError):
        return ImageFont.load_default()


@lru_cache(maxsize=32)
def _fonts(size: int) -> tuple:
    """Pillow's own font, then those of SYSTEM_FONTS that are here."""
    found = [font(size)]
    for name in SYSTEM_FONTS:
        try:
            found.append(ImageFont.truetype(name, size))
        except (OSError, ImportError):
            continue
    return tuple(found)


@lru_cache(maxsize=4096)
def _font_of(size: int, letter: str):
    """The first font that has ``letter``, or None."""
    for candidate in _fonts(size):
        if _has(candidate, letter):
            return candidate
    return None


def _has(candidate, letter: str) -> bool:
    if letter.isascii():
        return letter.isprintable()
    if not isinstance(candidate, ImageFont.FreeTypeFont):
        return False
    return letter.isspace() or bytes(candidate.getmask(letter)) != bytes(candidate.getmask(NO_LETTER))


class Letters:
    """Text at ``size`` pixels. ``replaced``: {letter that no font here has: what was drawn for it}, of all texts."""

    def __init__(self, size: int):
        self.size = size
        self.replaced: dict[str, str] = {}

    def drawable(self, text: str) -> str:
        """``text`` with every letter that no font here has replaced: without its marks, or by ``?``."""
        made = []
        for letter in unicodedata.normalize("NFC", text):
            if _font_of(self.size, letter) is None:
                plain = "".join(c for c in unicodedata.normalize("NFKD", letter) if c.isascii() and c.isprintable())
                self.replaced[letter] = plain or "?"
            made.append(self.replaced.get(letter, letter))
        return "".join(made)

    def runs(self, text: str) -> list[tuple]:
        """[(font, letters in a row that it draws)] of a drawable text."""
        made: list[tuple] = []
        for letter in text:
            chosen = _font_of(self.size, letter)
            if made and made[-1][0] is chosen:
                made[-1] = (chosen, made[-1][1] + letter)
            else:
                made.append((chosen, letter))
        return made

    def width(self, draw: ImageDraw.ImageDraw, text: str) -> float:
        return sum(draw.textlength(part, chosen) for chosen, part in self.runs(text))

    def fitted(self, draw: ImageDraw.ImageDraw, text: str, width: float) -> str:
        """``text`` as drawable, its end cut off where it is wider than ``width`` pixels."""
        text = self.drawable(text)
        if self.width(draw, text) <= width:
            return text
        while text and self.width(draw, text + "...") > width:
            text = text[:-1]
        return text + "..."

    def write(self, draw: ImageDraw.ImageDraw, at: tuple[float, float], text: str, ink) -> None:
        """A drawable ``text`` with its upper left corner ``at``, all fonts on one line."""
        left, top = at
        first = _fonts(self.size)[0]
        line = top + first.getmetrics()[0] if isinstance(first, ImageFont.FreeTypeFont) else None
        for chosen, part in self.runs(text):
            if line is None:
                draw.text((left, top), part, fill=ink, font=chosen)
            else:
                draw.text((left, line), part, fill=ink, font=chosen, anchor="ls")
            left += draw.textlength(part, chosen)


def replaced_note(replaced: dict[str, str]) -> list[str]:
    """A sentence about letters that could not be drawn; [] when all could."""
    if not replaced:
        return []
    marked = [f"{letter} as {plain}" for letter, plain in replaced.items() if plain != "?"]
    lost = "".join(letter for letter, plain in replaced.items() if plain == "?")
    parts = ([f"{', '.join(marked[:12])}"] if marked else []) + ([f"{lost[:24]} as ?"] if lost else [])
    return [
        f"captions: no font here has every letter, drawn were {' and '.join(parts)}; the report has them right (a font "
        "such as DejaVu Sans or Noto Sans CJK, once installed, is used)"
    ]
