"""Media to measure comparisons with: a picture of shades and a sound of several tones, so that every shift shows.

    picture  a disc on a sky              clip   the disc crossing, one turn per clip
    sound    three tones and their echo   mask   white where the disc is on its way

All from the size and length alone: the same numbers give the same bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from h3_runtime.geometry import FPS, SAMPLE_RATE, Canvas, audio_samples

SKY, GROUND, DISC = (96, 150, 220), (60, 90, 50), (230, 90, 40)
TONES = (261.63, 329.63, 392.0)  # Hz: C, E, G
LEVEL = 0.25


@dataclass(frozen=True)
class DrawnMedia:
    """``picture`` uint8 [H, W, 3], ``clip`` uint8 [F, H, W, 3] at 24 fps, ``sound`` float32 [2, L] at 32 kHz,
    ``mask`` float32 [F, H, W] (1 where the disc moves)."""

    picture: np.ndarray
    clip: np.ndarray
    sound: Tensor
    mask: Tensor


def drawn_media(width: int, height: int, frames: int) -> DrawnMedia:
    """Media of a canvas's size and length; both are fitted as a render's are (H3Error for what cannot be)."""
    canvas = Canvas.fit(frames, (width, height))
    ground = _ground(canvas.width, canvas.height)
    clip, mask = [], []
    for index in range(canvas.num_frames):
        inside = _disc(canvas, index / canvas.num_frames)
        clip.append(np.where(inside[..., None], np.array(DISC, np.uint8), ground))
        mask.append(inside)
    return DrawnMedia(clip[0], np.stack(clip), _melody(canvas), torch.from_numpy(np.stack(mask)).float())


def _ground(width: int, height: int) -> np.ndarray:
    """uint8 [H, W, 3]: a sky that lightens towards the horizon, and ground below it."""
    y = np.linspace(0, 1, height)[:, None, None]
    sky = np.array(SKY) + (255 - np.array(SKY)) * y * 0.6
    pixels = np.where(y < 0.7, sky, np.array(GROUND) * (1.6 - y))
    return np.broadcast_to(pixels.astype(np.uint8), (height, width, 3)).copy()


def _disc(canvas: Canvas, at: float) -> np.ndarray:
    """bool [H, W]: the disc at ``at`` (0..1) of its way from left to right."""
    y, x = np.mgrid[: canvas.height, : canvas.width]
    radius = canvas.height / 5
    centre = (0.2 + 0.6 * at) * canvas.width, (0.5 - 0.2 * math.sin(math.pi * at)) * canvas.height
    return (x - centre[0]) ** 2 + (y - centre[1]) ** 2 < radius**2


def _melody(canvas: Canvas) -> Tensor:
    """float32 [2, L]: three tones one after another, the right ear a tenth of a second later."""
    length = audio_samples(canvas.num_frames)
    time = torch.arange(length, dtype=torch.float64) / SAMPLE_RATE
    ears = []
    for late in (0.0, 0.1):
        at = (time - late).clamp(min=0)
        note = (at / (canvas.num_frames / FPS) * len(TONES)).long().clamp(max=len(TONES) - 1)
        pitch = torch.tensor(TONES, dtype=torch.float64)[note]
        ears.append(LEVEL * torch.sin(2 * math.pi * pitch * at))
    return torch.stack(ears).float()
