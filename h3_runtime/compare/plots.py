"""Curves and spectra: each as SVG for the page (its colours follow light and dark) and as PNG by Pillow.

values per frame ─▶ Plot ─┬▶ svg(plot)                 spectrogram uint8 [rows, columns] ─▶ coloured PNG
                          └▶ png(plot)
"""

from __future__ import annotations

import base64
import html
import io
import math
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from .letters import font

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 190, 58, 12, 26, 28
POINTS = 640  # columns; longer clips keep each column's lowest and highest value
INKS = ((37, 99, 235), (234, 88, 12))
HEAT = ((0, 0, 8), (60, 15, 95), (150, 40, 110), (225, 90, 60), (250, 180, 60), (252, 255, 200))


@dataclass(frozen=True)
class Plot:
    """``series``: (name, one value per frame; None where there is none). ``mark``: a frame to point at."""

    title: str
    unit: str
    series: tuple[tuple[str, tuple[float | None, ...]], ...]
    mark: int | None = None
    across: str = "frame"

    @property
    def count(self) -> int:
        return max(len(values) for _, values in self.series)

    def limits(self) -> tuple[float, float] | None:
        found = [value for _, values in self.series for value in values if value is not None and math.isfinite(value)]
        if not found:
            return None
        low, high = min(found), max(found)
        room = (high - low) * 0.06 or max(abs(high) * 0.02, 0.01)
        return low - room, high + room


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers between ``low`` and ``high``, about ``count`` of them."""
    step = (high - low) / count
    size = 10 ** math.floor(math.log10(step))
    step = size * next(factor for factor in (1, 2, 2.5, 5, 10) if factor * size >= step)
    first = math.ceil(low / step)
    return [index * step for index in range(first, math.floor(high / step) + 1)]


def tick_words(marks: list[float]) -> list[str]:
    """Each mark in words, with as many digits as tell it from its neighbour."""
    step = marks[1] - marks[0] if len(marks) > 1 else abs(marks[0]) or 1
    digits = max(0, 1 - math.floor(math.log10(step)))
    written = [f"{mark:.{digits}f}" for mark in marks]
    return [text.rstrip("0").rstrip(".") if "." in text else text for text in written]


def thinned(values: tuple[float | None, ...]) -> list[tuple[int, float]]:
    """(frame, value), at most two per column of the picture: its lowest and its highest."""
    known = [(index, value) for index, value in enumerate(values) if value is not None and math.isfinite(value)]
    if len(known) <= 2 * POINTS:
        return known
    each, kept = math.ceil(len(known) / POINTS), []
    for start in range(0, len(known), each):
        part = known[start : start + each]
        kept += sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
    return kept


def _place(plot: Plot, limits: tuple[float, float], index: float, value: float) -> tuple[float, float]:
    across = LEFT + (WIDTH - LEFT - RIGHT) * (index / max(1, plot.count - 1))
    up = (value - limits[0]) / (limits[1] - limits[0])
    return across, TOP + (HEIGHT - TOP - BOTTOM) * (1 - up)


def svg(plot: Plot) -> str:
    """The plot as an SVG element; classes ``s0``, ``s1``, ``grid``, ``axis``, ``mark`` take the page's colours."""
    said = html.escape(f"{plot.title} ({plot.unit})" if plot.unit else plot.title)
    limits = plot.limits()
    parts = [f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{said} per {plot.across}">']
    parts.append(f'<text class="title" x="{LEFT}" y="16">{said}</text>')
    if limits is None:
        parts.append(f'<text class="axis" x="{LEFT}" y="{HEIGHT / 2}">nothing differs, or nothing was measured</text>')
        return "".join([*parts, "</svg>"])
    marks = ticks(*limits)
    for value, words in zip(marks, tick_words(marks)):
        _, y = _place(plot, limits, 0, value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="axis end" x="{LEFT - 6}" y="{y + 4:.1f}">{words}</text>')
    for index in ticks(0, max(1, plot.count - 1), 8):
        x, _ = _place(plot, limits, index, limits[0])
        parts.append(f'<text class="axis mid" x="{x:.1f}" y="{HEIGHT - 10}">{index:g}</text>')
    if plot.mark is not None:
        x, _ = _place(plot, limits, plot.mark, limits[0])
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    for number, (name, values) in enumerate(plot.series):
        points = " ".join("{:.1f},{:.1f}".format(*_place(plot, limits, *point)) for point in thinned(values))
        parts.append(f'<polyline class="s{number}" points="{points}"/>')
        if len(plot.series) > 1:
            x = WIDTH - RIGHT - 60 * (len(plot.series) - number)
            parts.append(f'<text class="key k{number}" x="{x}" y="16">{html.escape(name)}</text>')
    return "".join([*parts, "</svg>"])


@dataclass(frozen=True)
class Scatter:
    """Points (name, across, up; ``up`` infinite: drawn at the top edge). Less across and more up are better."""

    title: str
    across: str
    points: tuple[tuple[str, float, float], ...]
    top: str = "identical"

    def front(self) -> list[tuple[str, float, float]]:
        """The points that no other beats: none is at least as far left and as high, and better in one of both."""
        kept, best = [], -math.inf
        for point in sorted(self.points, key=lambda point: (point[1], -point[2])):
            if point[2] > best:
                kept.append(point)
                best = point[2]
        return kept


def scatter_svg(plot: Scatter, height: int = 380) -> str:
    """The points with their names, joined where no other beats them. Classes ``dot``, ``front``, ``grid``, ``axis``."""
    said = html.escape(plot.title)
    parts = [f'<svg class="plot" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{said}">']
    parts.append(f'<text class="title" x="{LEFT}" y="16">{said}</text>')
    bottom, edge = height - BOTTOM - 16, TOP + 14  # the edge: where infinite values stand
    parts.append(f'<text class="axis mid" x="{(LEFT + WIDTH) / 2}" y="{height - 8}">{html.escape(plot.across)}</text>')
    if not plot.points:
        parts.append(f'<text class="axis" x="{LEFT}" y="{height / 2}">nothing was measured</text>')
        return "".join([*parts, "</svg>"])
    right = max(across for _, across, _ in plot.points) * 1.08 or 1.0
    known = [up for _, _, up in plot.points if math.isfinite(up)] or [0.0]
    room = (max(known) - min(known)) * 0.08 or max(abs(max(known)) * 0.05, 0.5)
    low, high = min(known) - room, max(known) + room

    def place(across: float, up: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * across / right
        if not math.isfinite(up):
            return x, edge
        return x, edge + 20 + (bottom - edge - 20) * (high - up) / (high - low)

    marks = ticks(low, high, 5)
    for value, words in zip(marks, tick_words(marks)):
        y = place(0, value)[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="axis end" x="{LEFT - 6}" y="{y + 4:.1f}">{words}</text>')
    if any(not math.isfinite(up) for _, _, up in plot.points):
        parts.append(f'<text class="axis end" x="{LEFT - 6}" y="{edge + 4}">{html.escape(plot.top)}</text>')
    across_marks = ticks(0, right, 8)
    for value, words in zip(across_marks, tick_words(across_marks)):
        parts.append(f'<text class="axis mid" x="{place(value, low)[0]:.1f}" y="{bottom + 14}">{words}</text>')
    line = " ".join("{:.1f},{:.1f}".format(*place(across, up)) for _, across, up in plot.front())
    parts.append(f'<polyline class="front" points="{line}"/>')
    return "".join([*parts, *_dots(plot, place), "</svg>"])


def _dots(plot: Scatter, place) -> list[str]:
    """Each point with its name beside it, moved down where another name stands."""
    parts, taken, front = [], [], {name for name, _, _ in plot.front()}
    for name, across, up in sorted(plot.points, key=lambda point: place(*point[1:])[1]):
        x, y = place(across, up)
        wide = 6.2 * len(name)  # about what its letters take
        left = x - 9 - wide if x + 9 + wide > WIDTH - RIGHT else x + 9
        at = y
        while any(abs(at - other) < 12 and left < end and begin < left + wide for begin, end, other in taken):
            at += 12
        taken.append((left, left + wide, at))
        kind = "dot best" if name in front else "dot"
        parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>')
        parts.append(f'<text x="{left:.1f}" y="{at + 4:.1f}">{html.escape(name)}</text>')
    return parts


def png(plot: Plot, scale: int = 2) -> Image.Image:
    """The same on white, ``scale`` times larger."""
    picture = Image.new("RGB", (WIDTH * scale, HEIGHT * scale), "white")
    draw, grey, black = ImageDraw.Draw(picture), (200, 200, 205), (50, 50, 55)
    letters = font(11 * scale)

    def text(x: float, y: float, words: str, ink=black, back: float = 0.0) -> None:
        """``words`` above y; ``back`` of their width lies before x."""
        left = x * scale - back * draw.textlength(words, letters)
        draw.text((left, (y - 11) * scale), words, fill=ink, font=letters)

    text(LEFT, 16, f"{plot.title} ({plot.unit})" if plot.unit else plot.title)
    limits = plot.limits()
    if limits is None:
        text(LEFT, HEIGHT / 2, "nothing differs, or nothing was measured")
        return picture
    marks = ticks(*limits)
    for value, words in zip(marks, tick_words(marks)):
        _, y = _place(plot, limits, 0, value)
        draw.line([(LEFT * scale, y * scale), ((WIDTH - RIGHT) * scale, y * scale)], fill=grey)
        text(LEFT - 6, y + 4, words, back=1)
    for index in ticks(0, max(1, plot.count - 1), 8):
        x, _ = _place(plot, limits, index, limits[0])
        text(x, HEIGHT - 10, f"{index:g}", back=0.5)
    for number, (name, values) in enumerate(plot.series):
        points = [tuple(scale * edge for edge in _place(plot, limits, *point)) for point in thinned(values)]
        if len(points) > 1:
            draw.line(points, fill=INKS[number], width=scale)
        if len(plot.series) > 1:
            text(WIDTH - RIGHT - 60 * (len(plot.series) - number), 16, name, INKS[number])
    return picture


def heat(levels: np.ndarray) -> Image.Image:
    """uint8 [rows, columns] -> a picture from black (0) over red to white (255)."""
    stops = np.linspace(0, 255, len(HEAT))
    table = np.stack([np.interp(np.arange(256), stops, [colour[c] for colour in HEAT]) for c in range(3)], axis=1)
    return Image.fromarray(table.astype(np.uint8)[levels])


def data_url(picture: Image.Image) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def spectrogram_svg(title: str, levels: np.ndarray, seconds: float) -> str:
    """A spectrogram with its axes: seconds and kHz."""
    inner = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    said = html.escape(title)
    parts = [f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{said}">']
    parts.append(f'<text class="title" x="{LEFT}" y="16">{said}</text>')
    parts.append(
        f'<image x="{LEFT}" y="{TOP}" width="{inner[0]}" height="{inner[1]}" preserveAspectRatio="none" '
        f'href="{data_url(heat(levels))}"/>'
    )
    for khz in (0, 4, 8, 12, 16):
        y = TOP + inner[1] * (1 - khz / 16)
        parts.append(f'<text class="axis end" x="{LEFT - 6}" y="{y + 4:.1f}">{khz}</text>')
    for second in ticks(0, max(seconds, 1e-3), 8):
        x = LEFT + inner[0] * second / max(seconds, 1e-3)
        parts.append(f'<text class="axis mid" x="{x:.1f}" y="{HEIGHT - 10}">{second:g}</text>')
    return "".join([*parts, "</svg>"])
