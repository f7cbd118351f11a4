"""A page that sets several paths side by side: what each costs and changes, their clips, and where to look on.

rows, plots, clips ─▶ page.html (relative links only; opens without network, light and dark)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import zip_longest
from pathlib import Path

from ..errors import H3Error
from .page import POLICY, THEME, escaped, write_text


@dataclass(frozen=True)
class Link:
    """A cell that leads to a file, relative to the page."""

    words: str
    to: str


Cell = str | Link | tuple[Link, ...]


@dataclass(frozen=True)
class Shown:
    """A clip on the page: an mp4 relative to it, and what is said below."""

    file: str
    name: str
    words: str = ""


@dataclass(frozen=True)
class TablePage:
    """``said``: sentences above the table; ``after``: below it. ``figures``: SVG elements. ``wide``: for a table of
    many columns."""

    title: str
    said: Sequence[str]
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    after: Sequence[str] = ()
    clips: Sequence[Shown] = ()
    figures: Sequence[str] = ()
    wide: bool = False

    def html(self) -> str:
        """The whole page as text."""
        style = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
        left = (' class="left"', ' class="left"')
        head = "".join(
            f'<th scope="col"{kind}>{escaped(words)}</th>'
            for words, kind in zip_longest(self.head, left[: len(self.head)], fillvalue="")
        )
        wide = ' class="wide"' if self.wide else ""
        rows = "".join(f"<tr>{''.join(map(_cell, row, range(len(row))))}</tr>" for row in self.rows)
        return "\n".join(
            [
                "<!DOCTYPE html>",
                f'<html lang="en"><head><meta charset="utf-8"><title>{escaped(self.title)}</title>',
                f'<meta http-equiv="Content-Security-Policy" content="{escaped(POLICY)}">',
                '<meta name="viewport" content="width=device-width, initial-scale=1">',
                f"<style>{style}</style></head><body><main{wide}>",
                f"<header><h1>{escaped(self.title)}</h1>",
                '<button id="theme" type="button" aria-label="Light or dark">Light / dark (T)</button></header>',
                *(f"<p>{escaped(sentence)}</p>" for sentence in self.said),
                f'<section class="many">{"".join(map(_clip, self.clips))}</section>' if self.clips else "",
                f"<section><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></section>",
                *(f"<figure>{figure}</figure>" for figure in self.figures),
                f"<ul>{''.join(f'<li>{escaped(sentence)}</li>' for sentence in self.after)}</ul>" if self.after else "",
                f'</main><script type="module">{THEME}</script></body></html>\n',
            ]
        )

    def write(self, path: Path) -> Path:
        """H3Error where it cannot be written."""
        try:
            write_text(path, self.html())
        except OSError as error:
            raise H3Error(f"{path} could not be written ({error}): check the free space") from None
        return path


def _cell(cell: Cell, column: int) -> str:
    kind = ' class="name left"' if column < 2 or not isinstance(cell, str) else ""
    links = (cell,) if isinstance(cell, Link) else cell
    words = escaped(cell) if isinstance(cell, str) else " ".join(map(_anchor, links))
    return f"<td{kind}>{words}</td>"


def _anchor(link: Link) -> str:
    return f'<a href="{escaped(link.to)}">{escaped(link.words)}</a>'


def _clip(clip: Shown) -> str:
    return (
        f'<figure><video src="{escaped(clip.file)}" controls loop preload="auto" aria-label="{escaped(clip.name)}">'
        f"</video><figcaption><b>{escaped(clip.name)}</b><br>{escaped(clip.words)}</figcaption></figure>"
    )
