"""The masks as the model sees them, drawn: one square per token, white made anew, dark kept.

frames 0      frames 1-4    frames 5-8   ...     one small board per latent of the picture; a token is 32x32 pixels
[ ][ ][X]     [ ][X][X]     ...
0 s ........................ 1 s ........        two rows of bars, left and right: one bar per sound latent (1/40 s)
"""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from .geometry import AUDIO_CHANNELS, AUDIO_LATENT_RATE, Canvas, frame_groups
from .job import Masks, pool_tokens

WIDTH = 1024
MARGIN = 8
TITLE = 14
BAR_HEIGHT = 28
LARGEST_TOKEN = 24
BACKGROUND, GRID, WORDS = (24, 26, 30), (70, 74, 82), (220, 222, 226)
KEPT, ANEW = (52, 74, 110), (245, 245, 245)


def draw_masks(canvas: Canvas, masks: Masks | None) -> np.ndarray:
    """uint8 [H, WIDTH, 3]: the token grid of ``canvas`` under ``masks``; a stream without a mask is all made anew."""
    tokens = None if masks is None or masks.video is None else pool_tokens(masks.video)  # [T, h/2, w/2]
    rows, columns = canvas.latent_h // 2, canvas.latent_w // 2
    cell = max(2, min(LARGEST_TOKEN, 160 // rows, 240 // columns))
    board = (max(columns * cell, 92) + MARGIN, rows * cell + TITLE + MARGIN)
    across = max(1, (WIDTH - MARGIN) // board[0])
    down = -(-canvas.latent_t // across)
    sound_top = MARGIN + TITLE + down * board[1]
    height = sound_top + TITLE + AUDIO_CHANNELS * (BAR_HEIGHT + 2) + TITLE + MARGIN
    picture = Image.new("RGB", (WIDTH, height), BACKGROUND)
    draw = ImageDraw.Draw(picture)
    draw.text((MARGIN, MARGIN - 2), f"picture: {_share(tokens)}; white = made anew, dark = kept", WORDS)
    for index, group in enumerate(frame_groups(canvas.latent_t)):
        left = MARGIN + index % across * board[0]
        top = MARGIN + TITLE + index // across * board[1]
        span = f"{group.start}" if len(group) == 1 else f"{group.start}-{group.stop - 1}"
        draw.text((left, top), f"frame {span}", WORDS)
        for row in range(rows):
            for column in range(columns):
                value = 1.0 if tokens is None else tokens[index, row, column].item()
                x, y = left + column * cell, top + TITLE + row * cell
                draw.rectangle((x, y, x + cell - 1, y + cell - 1), _shade(value), GRID if cell > 3 else None)
    _draw_sound(draw, canvas, None if masks is None else masks.audio, sound_top)
    return np.asarray(picture)


def _draw_sound(draw: ImageDraw.ImageDraw, canvas: Canvas, mask: Tensor | None, top: int) -> None:
    draw.text((MARGIN, top), f"sound: {_share(mask)}", WORDS)
    scale = (WIDTH - 2 * MARGIN) / canvas.audio_t
    for ear in range(AUDIO_CHANNELS):
        y = top + TITLE + ear * (BAR_HEIGHT + 2)
        for index in range(canvas.audio_t):
            value = 1.0 if mask is None else mask[ear, index].item()
            left, right = MARGIN + index * scale, MARGIN + (index + 1) * scale
            draw.rectangle((left, y, max(left, right - 1), y + BAR_HEIGHT - 1), _shade(value))
    bottom = top + TITLE + AUDIO_CHANNELS * (BAR_HEIGHT + 2)
    for second in range(int(canvas.seconds) + 1):
        draw.text((MARGIN + second * AUDIO_LATENT_RATE * scale, bottom), f"{second} s", WORDS)


def _share(mask: Tensor | None) -> str:
    return "all made anew" if mask is None else f"{(mask > 0).float().mean().item():.1%} made anew"


def _shade(value: float) -> tuple[int, int, int]:
    return tuple(round(kept + (anew - kept) * value) for kept, anew in zip(KEPT, ANEW))
