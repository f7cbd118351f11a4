"""A request as it travels: its canvas, and its media as bytes that engines take. packing.py makes it.

    Shipment   request, canvas, quality, outputs
               keyframes   (0 or -1, Thing) ...      PNG on the canvas
               references  Thing ...                 PNG, MP4, WAV
               masks, source                         on the latent grid; MP4 on the canvas

Light to import: the list of servers is read while the host starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import H3Error
from ..geometry import FPS, Canvas

if TYPE_CHECKING:
    from ..job import Masks
    from ..request import RenderRequest


@dataclass(frozen=True)
class Thing:
    """One medium as bytes. ``kind`` image, video, video_audio or audio; ``seconds`` 0 for a picture."""

    kind: str
    name: str
    data: bytes
    mime: str
    size: tuple[int, int] | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Shipment:
    """A request ready to be written down for an engine. ``keyframes``: (0 or -1, picture) in that order."""

    request: RenderRequest
    canvas: Canvas
    quality: str
    outputs: int
    keyframes: tuple[tuple[int, Thing], ...] = ()
    references: tuple[Thing, ...] = ()
    masks: Masks | None = None
    source: Thing | None = None
    notes: tuple[str, ...] = ()

    @property
    def task(self) -> str:
        return task_of(self.request)


def task_of(request: RenderRequest) -> str:
    """ref2va with references, fl2va with a first or last frame, else t2va."""
    keyframes = request.first_frame is not None or request.last_frame is not None
    return "ref2va" if request.references else "fl2va" if keyframes else "t2va"


def seconds_for(canvas: Canvas, shortest: float, longest: float) -> float:
    """The duration that makes an engine choose this canvas's frames (it raises round(24 s) to 17k + 5).

    H3Error, naming the input, for a length outside what the engine takes.
    """
    seconds = min(canvas.num_frames / FPS, longest)
    asked = round(seconds * FPS)
    if seconds < shortest or asked + (5 - asked) % 17 != canvas.num_frames:
        low, high = (n + (5 - n) % 17 for n in (round(shortest * FPS), round(longest * FPS)))
        raise H3Error(
            f"frames {canvas.num_frames} ({canvas.seconds:.3f} s): a server renders {low} to {high} frames "
            f"({low / FPS:.3f} to {high / FPS:.3f} s)"
        )
    return seconds


def count_kinds(things: Sequence[Thing]) -> dict[str, list[Thing]]:
    """Things by image, video (with or without sound) and audio."""
    made: dict[str, list[Thing]] = {"image": [], "video": [], "audio": []}
    for thing in things:
        made["video" if thing.kind == "video_audio" else thing.kind].append(thing)
    return made
