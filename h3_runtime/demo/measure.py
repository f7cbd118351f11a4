"""What a rendered clip shows and plays, measured against the scene that was asked for.

    frames uint8 [F, H, W, 3] ─▶ pixels that differ from the ground ─▶ colour, shape, motion
    sound float32 [2, L]      ─▶ loudest frequency, ears' energy    ─▶ pitch, side

Nothing here knows of models: the world's own clips pass every measure (``tests/test_demo_score.py``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ..geometry import SAMPLE_RATE
from .world import COLOURS, GROUND, SHAPES, THEN_AT, TONES, Scene, cover, pan

DIFFERENT = 60.0  # of 255: how far a pixel is from the ground to belong to the shape
SMALLEST = 0.004  # share of the picture that a shape takes at least
MOVED = 0.15  # share of the width or height that a crossing covers at least
SEMITONE = 2 ** (1 / 12)
SIDE = 0.06  # how far from the middle a side is wanted before it counts as one


@dataclass(frozen=True)
class Look:
    """The shape in one frame: ``colour`` its median, ``x`` and ``y`` its middle and ``area`` as shares of the picture,
    ``taken`` float32 [H, W] how much of each pixel it takes, 0..1."""

    colour: np.ndarray
    x: float
    y: float
    area: float
    taken: np.ndarray


def look(frame: np.ndarray) -> Look | None:
    """uint8 [H, W, 3] -> the shape on the world's grey, or None."""
    away = frame.astype(np.float32) - GROUND
    inside = np.abs(away).max(-1) > DIFFERENT
    if inside.mean() < SMALLEST:
        return None
    rows, columns = np.nonzero(inside)
    height, width = inside.shape
    colour = np.median(frame[inside].astype(np.float32), axis=0)
    along = colour - GROUND
    taken = np.clip(away @ along / (along @ along), 0, 1)
    return Look(colour, (columns.mean() + 0.5) / width, (rows.mean() + 0.5) / height, float(inside.mean()), taken)


def nearest_colour(colour: np.ndarray) -> str:
    return min(COLOURS, key=lambda name: float(((np.array(COLOURS[name]) - colour) ** 2).sum()))


def misfit(found: Look, shape: str) -> float:
    """Mean squared difference between what ``found`` takes and ``shape`` of the same area and middle."""
    height, width = found.taken.shape
    taken = np.where(found.taken > 0.25, found.taken, 0)  # specks of the ground do not count
    area = float(taken.sum())
    y, x = ((np.arange(size) + 0.5) for size in (height, width))
    centre = float((taken.sum(0) * x).sum()) / area, float((taken.sum(1) * y).sum()) / area
    unit = 64.0
    one = cover(shape, 256, 256, (128.0, 128.0), unit).sum() / unit**2
    return float(((cover(shape, width, height, centre, (area / one) ** 0.5) - taken) ** 2).mean())


def nearest_shape(seen: list[Look]) -> str:
    """The shape that fits best over all frames."""
    return min(SHAPES, key=lambda shape: sum(misfit(found, shape) for found in seen))


def judge_picture(frames: np.ndarray, scene: Scene) -> dict[str, bool]:
    """colour, shape and direction, each right or not."""
    looks = [look(frame) for frame in frames]
    if sum(found is not None for found in looks) < 0.8 * len(looks):
        return {"colour": False, "shape": False, "direction": False}
    count = len(looks)
    first = [found for found in looks[: count // 4 + 1] if found]
    last = [found for found in looks[-(count // 4) - 1 :] if found]
    seen = [found for found in looks if found]
    if not first or not last:
        return {"colour": False, "shape": False, "direction": False}
    if scene.motion == "changes":
        colours = (_colour(first) == scene.colour) and (_colour(last) == scene.second)
    else:
        colours = _colour(seen) == scene.colour
    shape = nearest_shape(seen) == scene.shape
    return {"colour": colours, "shape": shape, "direction": _moves(scene, first, last, seen)}


def _colour(looks: list[Look]) -> str:
    return nearest_colour(np.median([found.colour for found in looks], axis=0))


def _moves(scene: Scene, first: list[Look], last: list[Look], seen: list[Look]) -> bool:
    across = np.mean([f.x for f in last]) - np.mean([f.x for f in first])
    down = np.mean([f.y for f in last]) - np.mean([f.y for f in first])
    grown = np.mean([f.area for f in last]) / np.mean([f.area for f in first])
    still = abs(across) < MOVED / 2 and abs(down) < MOVED / 2
    reach = max(f.y for f in seen) - min(f.y for f in seen)
    return bool(
        {
            "right": across > MOVED and abs(down) < MOVED / 2,
            "left": across < -MOVED and abs(down) < MOVED / 2,
            "down": down > MOVED and abs(across) < MOVED / 2,
            "up": down < -MOVED and abs(across) < MOVED / 2,
            "grows": still and grown > 1.3,
            "shrinks": still and grown < 1 / 1.3,
            "bounces": reach > MOVED and abs(across) < MOVED / 2,
            "stays": still and reach < MOVED and 1 / 1.3 < grown < 1.3,
            "changes": still and reach < MOVED and 1 / 1.3 < grown < 1.3,
        }[scene.motion]
    )


def judge_sound(sound: Tensor, scene: Scene) -> dict[str, bool]:
    """pitch (the tone's, within a semitone) and side (where the wave's energy is, at the clip's start and end)."""
    wave = sound.double().numpy()
    part = wave[:, : round(THEN_AT * wave.shape[1])]
    if float((part**2).mean()) < 1e-6:
        return {"pitch": False, "side": False}
    ratio = loudest(part[int((part[1] ** 2).sum() > (part[0] ** 2).sum())]) / TONES[scene.tone]
    thirds = [wave[:, : wave.shape[1] // 3], wave[:, wave.shape[1] // 3 : 2 * wave.shape[1] // 3]]
    times = [1 / 6, 1 / 2]
    if scene.rhythm != "then":
        thirds.append(wave[:, 2 * wave.shape[1] // 3 :])
        times.append(5 / 6)
    sides = all(_side(third, pan(scene.centre(time)[0])) for third, time in zip(thirds, times))
    return {"pitch": 1 / SEMITONE < ratio < SEMITONE, "side": sides}


def loudest(wave: np.ndarray) -> float:
    """Hz of the largest line of the spectrum, between bins by a parabola."""
    size = 1 << 16
    power = np.log(np.abs(np.fft.rfft(wave * np.hanning(len(wave)), size)) + 1e-12)
    peak = int(power[1:-1].argmax()) + 1
    before, at, after = power[peak - 1 : peak + 2]
    bend = before - 2 * at + after
    shift = 0.0 if bend == 0 else 0.5 * (before - after) / bend
    return (peak + shift) * SAMPLE_RATE / size


def _side(wave: np.ndarray, wanted: float) -> bool:
    level = np.sqrt((wave**2).mean(1))
    right = level[1] / max(level.sum(), 1e-9)
    if abs(wanted - 0.5) < SIDE:
        return bool(abs(right - 0.5) < 0.15)
    return bool((right - 0.5) * (wanted - 0.5) > 0)


def psnr(made: np.ndarray, wanted: np.ndarray) -> float:
    """dB between two uint8 pictures or clips; inf where they are equal."""
    error = float(((made.astype(np.float64) - wanted.astype(np.float64)) ** 2).mean())
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)
