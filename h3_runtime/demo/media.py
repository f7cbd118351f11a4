"""A picture, a clip, a sound and a mask to try every input with: one scene of the carried model's own world.

    picture  a red circle on grey, on its left      clip   it moves left to right
    sound    a low tone that goes along with it     mask   white where the circle is, and around it

All from the size and length alone: the same numbers give the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..geometry import Canvas
from .world import Scene, cover

SCENE = Scene("red", "circle", "right", tone="low", across=-0.6)
AROUND = 1.35  # the mask's radius over the circle's: its soft edge is inside


@dataclass(frozen=True)
class SampleMedia:
    """``picture`` uint8 [H, W, 3], ``clip`` uint8 [F, H, W, 3] at 24 fps, ``sound`` float32 [2, L] at 32 kHz,
    ``mask`` float32 [F, H, W] (1 where the circle is)."""

    picture: np.ndarray
    clip: np.ndarray
    sound: Tensor
    mask: Tensor


def sample_media(width: int, height: int, frames: int) -> SampleMedia:
    """Media of a canvas's size and length; both are fitted as a render's are (H3Error for what cannot be)."""
    canvas = Canvas.fit(frames, (width, height))
    clip = SCENE.frames(canvas.width, canvas.height, canvas.num_frames)
    times = [index / max(canvas.num_frames - 1, 1) for index in range(canvas.num_frames)]
    mask = torch.from_numpy(np.stack([_around(canvas, time) for time in times]))
    return SampleMedia(clip[0], clip, SCENE.sound(canvas.num_frames), mask)


def _around(canvas: Canvas, time: float) -> np.ndarray:
    """float32 [H, W], 0 or 1: the circle at ``time`` (0..1) with what is close to it."""
    x, y = SCENE.centre(time)
    radius = AROUND * SCENE.radius(time) * min(canvas.width, canvas.height)
    inside = cover("circle", canvas.width, canvas.height, (x * canvas.width, y * canvas.height), radius)
    return (inside > 0).astype(np.float32)
