"""Pictures to what Qwen3-VL's vision tower eats, by the release's own rules.

    uint8 [H, W, 3] -> resized to multiples of 32 -> (x - 127.5) / 127.5 -> rows of 2 x 16 x 16 pixels x 3 colours

    +--+--+--+--+      rows come 2 x 2 patches at a time, because the tower merges four rows into one token:
    |0 |1 |4 |5 |      a picture of h x w patches takes h*w rows and h*w/4 places in the prompt.
    +--+--+--+--+      A still picture fills both time slots of a row; a clip puts a pair of frames there.
    |2 |3 |6 |7 |
    +--+--+--+--+

The resize is bicubic with antialiasing on uint8 (both passes rounded and clamped to bytes), as the release's processor
does it; floats in between would differ by up to 24 levels on a noisy picture. Ours, and not transformers', because
the limits there change between versions.

The recipe ``comfy`` resizes as ComfyUI does: bilinear, without antialiasing, in floats; its limits hold for each
picture or pair of frames on its own, so that a long clip never shrinks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..errors import H3Error

PATCH = 16
FRAMES_PER_PATCH = 2
MERGE = 2
SNAP = PATCH * MERGE
PATCH_VALUES = 3 * FRAMES_PER_PATCH * PATCH * PATCH
PICTURE_PIXELS = (65_536, 16_777_216)
CLIP_PIXELS = (4_096, 25_165_824)  # frames * height * width
COMFY_PIXELS = (3_136, 12_845_056)
WIDEST_RATIO = 200
RECIPES = ("reference", "comfy")


@dataclass(frozen=True)
class VisionInput:
    """One picture or clip, ready for the tower.

    patches: float32 [t*h*w, 1536], values in [-1, 1]. grid: (t, h, w) in patches; t counts frame pairs.
    """

    patches: torch.Tensor
    grid: tuple[int, int, int]


def picture_size(height: int, width: int) -> tuple[int, int]:
    """(height, width) a picture is resized to: multiples of 32, 65,536 to 16,777,216 pixels in all."""
    return _fit(height, width, PICTURE_PIXELS, frames=1, even_frames=1)


def clip_size(num_frames: int, height: int, width: int) -> tuple[int, int]:
    """(height, width) of every frame of a clip whose whole volume, frames included, has a budget.

    1344x768 keeps its size up to 25 sampled frames and shrinks from 26 on.
    """
    even_frames = round(num_frames / FRAMES_PER_PATCH) * FRAMES_PER_PATCH
    if height < SNAP or width < SNAP:
        scale = max(SNAP / height, SNAP / width)
        height, width = int(height * scale), int(width * scale)
    return _fit(height, width, CLIP_PIXELS, num_frames, even_frames)


def comfy_size(height: int, width: int) -> tuple[int, int]:
    """(height, width) of a picture or of each frame of a clip by the recipe ``comfy``: 3,136 to 12,845,056 pixels."""
    return _fit(height, width, COMFY_PIXELS, frames=1, even_frames=1)


def preprocess_picture(pixels, recipe: str = "reference") -> VisionInput:
    """uint8 [H, W, 3] (tensor or array) to a ``VisionInput`` with grid (1, h, w)."""
    frames = _checked(pixels, "a picture", "[H, W, 3]", 3)[None]
    size = comfy_size if recipe == "comfy" else picture_size
    values = _values(frames, size(frames.shape[1], frames.shape[2]), recipe)  # [1, 3, H, W]
    return _patchify(values.expand(FRAMES_PER_PATCH, -1, -1, -1))


def preprocess_clip(pixels, recipe: str = "reference") -> VisionInput:
    """uint8 [F, H, W, 3], already sampled at 2 frames a second, to a ``VisionInput`` with grid (ceil(F/2), h, w).

    An odd last frame is shown twice. Fewer than two frames are refused, save by the recipe ``comfy``.
    """
    frames = _checked(pixels, "a clip", "[F, H, W, 3]", 4)
    if recipe == "comfy":
        size = comfy_size(*frames.shape[1:3])
    elif frames.shape[0] < FRAMES_PER_PATCH:
        raise H3Error(f"a clip of {frames.shape[0]} sampled frame(s) is too short; give 2 or more, or use a picture")
    else:
        size = clip_size(*frames.shape[:3])
    values = _values(frames, size, recipe)
    if values.shape[0] % FRAMES_PER_PATCH:
        values = torch.cat([values, values[-1:]])
    return _patchify(values)


def _fit(height: int, width: int, limits: tuple[int, int], frames: int, even_frames: int) -> tuple[int, int]:
    if max(height, width) > WIDEST_RATIO * min(height, width):
        raise H3Error(
            f"a picture of {width}x{height} is more than {WIDEST_RATIO} times as long as it is wide; crop it first"
        )
    smallest, largest = limits
    snapped = (round(height / SNAP) * SNAP, round(width / SNAP) * SNAP)
    volume = even_frames * snapped[0] * snapped[1]
    if volume > largest:
        shrink = math.sqrt(frames * height * width / largest)
        return tuple(max(SNAP, math.floor(side / shrink / SNAP) * SNAP) for side in (height, width))
    if volume < smallest:
        grow = math.sqrt(smallest / (frames * height * width))
        return tuple(math.ceil(side * grow / SNAP) * SNAP for side in (height, width))
    return snapped


def _checked(pixels, what: str, form: str, dims: int) -> torch.Tensor:
    try:
        frames = torch.as_tensor(pixels)
    except (TypeError, ValueError, RuntimeError) as error:
        raise H3Error(f"{what} for the prompt must be uint8 {form}, not {type(pixels).__name__} ({error})") from error
    if frames.dtype != torch.uint8 or frames.ndim != dims or frames.shape[-1] != 3 or 0 in frames.shape:
        raise H3Error(
            f"{what} for the prompt must be uint8 {form} in RGB, not {frames.dtype} {list(frames.shape)}; convert it"
        )
    return frames.cpu()


def _values(frames: torch.Tensor, size: tuple[int, int], recipe: str) -> torch.Tensor:
    """uint8 [F, H, W, 3] -> float32 [F, 3, height, width] in [-1, 1], resized by the recipe's rule."""
    frames = frames.permute(0, 3, 1, 2)
    if recipe == "comfy":
        values = frames.to(torch.float32).div(255)
        if values.shape[2:] != size:
            values = F.interpolate(values, size=size, mode="bilinear", align_corners=False)
        return values.sub(0.5).div(0.5)
    if frames.shape[2:] != size:
        frames = F.interpolate(frames.contiguous(), size=size, mode="bicubic", antialias=True, align_corners=False)
    return frames.to(torch.float32).sub(127.5).div(127.5)


def _patchify(values: torch.Tensor) -> VisionInput:
    """float32 [2t, 3, H, W] to rows; a row holds colour, then time, then the patch's lines."""
    t = values.shape[0] // FRAMES_PER_PATCH
    h, w = values.shape[2] // PATCH, values.shape[3] // PATCH
    blocks = values.reshape(t, FRAMES_PER_PATCH, 3, h // MERGE, MERGE, PATCH, w // MERGE, MERGE, PATCH)
    blocks = blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)  # [t, h/2, w/2, 2, 2, 3, 2, 16, 16]
    return VisionInput(blocks.reshape(t * h * w, PATCH_VALUES), (t, h, w))
