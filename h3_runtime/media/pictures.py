"""Still pictures: read, written, resized.

file --load_picture--> upright uint8 [H, W, 3]   (or uint16 [H, W] of a 16-bit grey file, for masks)
                       --resize_stretch--> [h, w, 3], ratio not kept      (the reference's first keyframe)
                       --resize_cover----> [h, w, 3], middle part kept    (the reference's last keyframe)
"""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from ..errors import H3Error, NonFiniteError
from ..unfinished import drop, part_path
from .files import PICTURE_SUFFIXES, check_output_path, existing, open_picture, publish

SAVE_OPTIONS = {
    ".jpg": {"quality": 95, "subsampling": 0},
    ".jpeg": {"quality": 95, "subsampling": 0},
    ".webp": {"lossless": True},
}


ORIENTATION = 0x0112  # the EXIF tag; what it asks for, by value
TURNS = {
    2: "mirrored",
    3: "turned by 180 degrees",
    4: "turned upside down and mirrored",
    5: "mirrored and turned by 270 degrees clockwise",
    6: "turned by 90 degrees clockwise",
    7: "mirrored and turned by 90 degrees clockwise",
    8: "turned by 270 degrees clockwise",
}
WORDS_OF_MODE = {"1": "black and white", "L": "grey", "LA": "grey", "La": "grey", "P": "palette colours"}
WORDS_OF_MODE |= {"PA": "palette colours", "CMYK": "CMYK", "LAB": "Lab colours", "HSV": "HSV colours", "YCbCr": "YCbCr"}


def read_image(path: str | os.PathLike, notes: list[str] | None = None) -> np.ndarray:
    """A picture file as uint8 [H, W, 3] RGB; a sentence about each change on the way goes to ``notes``.

    The EXIF orientation is applied, an alpha channel is dropped (the colour below it stays, as in the reference),
    palettes and grey become RGB, 16-bit grey is scaled by 1/257. Of an animated file the first picture is taken.
    Colour profiles are not applied, as in the reference.
    """
    pixels = load_picture(path, notes)
    if pixels.dtype == np.uint16:  # [H, W]
        pixels = np.rint(pixels / 257).astype(np.uint8)[..., None].repeat(3, axis=2)  # [H, W, 3]
        if notes is not None:
            notes.append("16 bits of grey read as 8 of RGB")
    return pixels


def write_image(path: str | os.PathLike, pixels: np.ndarray | torch.Tensor) -> Path:
    """Write [H, W, 3] pixels (uint8, or floats in 0..1) in the format of the path's ending; by atomic rename."""
    path = check_output_path(path, PICTURE_SUFFIXES)
    pixels = to_uint8(pixels)
    if pixels.ndim != 3 or pixels.shape[2] != 3:
        raise H3Error(f"picture has shape {list(pixels.shape)}: give [height, width, 3]")
    part = part_path(path, path.suffix)
    try:
        Image.fromarray(pixels).save(part, **SAVE_OPTIONS.get(path.suffix.lower(), {}))
        return publish(part, path)
    except OSError as error:
        raise H3Error(f"{path} could not be written ({error}): free some space or choose another folder") from error
    finally:
        drop(part)


def to_uint8(pixels: np.ndarray | torch.Tensor) -> np.ndarray:
    """uint8 as it is; floats in 0..1 as round(255 x), clamped. NaN or infinity: NonFiniteError. Any shape."""
    if isinstance(pixels, torch.Tensor):
        pixels = pixels.detach().cpu()
        pixels = (pixels.float() if pixels.is_floating_point() else pixels).numpy()
    if pixels.dtype == np.uint8:
        return pixels
    if not np.issubdtype(pixels.dtype, np.floating):
        raise H3Error(f"pixels are {pixels.dtype}: give uint8, or floats between 0 and 1")
    if not np.isfinite(pixels).all():
        raise NonFiniteError("pixels hold NaN or infinity: such a picture is not saved; check the latents before it")
    return np.rint(np.clip(pixels, 0, 1) * 255).astype(np.uint8)


def resize_stretch(pixels: np.ndarray, width: int, height: int) -> np.ndarray:
    """uint8 [H, W, 3] -> uint8 [height, width, 3] by Pillow's Lanczos; the ratio is not kept."""
    if pixels.shape[:2] == (height, width):
        return pixels
    return np.array(Image.fromarray(pixels).resize((width, height), Image.Resampling.LANCZOS))


def resize_cover(pixels: np.ndarray, width: int, height: int) -> tuple[np.ndarray, tuple[float, float, float, float]]:
    """uint8 [H, W, 3] -> uint8 [height, width, 3] and the box (left, top, right, bottom) of the source that was kept.

    Resized by Lanczos until both edges are covered, then cropped in the middle; edges round to the nearest pixel,
    the middle rounds down (the reference's ``MiniMaxH3ResizeStep``). The box is in pixels of the source.
    """
    source_height, source_width = pixels.shape[:2]
    scale = max(width / source_width, height / source_height)
    full_width = max(width, round(source_width * scale))
    full_height = max(height, round(source_height * scale))
    left, top = (full_width - width) // 2, (full_height - height) // 2
    resized = resize_stretch(pixels, full_width, full_height)
    across, down = source_width / full_width, source_height / full_height
    box = (left * across, top * down, (left + width) * across, (top + height) * down)
    return np.ascontiguousarray(resized[top : top + height, left : left + width]), box


def crop_then_resize(
    pixels: np.ndarray, width: int, height: int
) -> tuple[np.ndarray, tuple[float, float, float, float]]:
    """Like ``resize_cover``, but cropped to the target's ratio first and resized after (the recipe ``comfy``)."""
    source_height, source_width = pixels.shape[:2]
    ratio, wanted = source_width / source_height, width / height
    left = round((source_width - source_width * (wanted / ratio)) / 2) if ratio > wanted else 0
    top = round((source_height - source_height * (ratio / wanted)) / 2) if ratio < wanted else 0
    kept = np.ascontiguousarray(pixels[top : source_height - top, left : source_width - left])
    return resize_stretch(kept, width, height), (left, top, source_width - left, source_height - top)


def load_picture(path: str | os.PathLike, notes: list[str] | None = None) -> np.ndarray:
    """uint8 [H, W, 3], or uint16 [H, W] for 16-bit grey; upright. What was changed or left out goes to ``notes``."""
    path = existing(path)
    with open_picture(path) as picture:
        if notes is not None:
            notes += _changes(picture)
        picture = ImageOps.exif_transpose(picture)
        mode = picture.mode
        if mode not in ("F", "I") and not mode.startswith("I;16"):
            return np.array(picture.convert("RGB"))
        values = np.array(picture)
    if mode == "F" or values.min() < 0 or values.max() > 65535:
        raise H3Error(f"{path} holds pixels of {mode} mode, wider than 16 bits: save it with 8 or 16 bits a channel")
    return values.astype(np.uint16)


def _changes(picture: Image.Image) -> list[str]:
    """Sentences about what of an opened picture does not become [H, W, 3] bytes as it stands."""
    notes = []
    count = getattr(picture, "n_frames", 1)
    if count > 1:
        notes.append(f"the first of its {count} pictures is used")
    deep = _is_deep(picture)  # before the pixels are read, which forgets it
    turn = TURNS.get(picture.getexif().get(ORIENTATION))
    if turn:
        notes.append(f"{turn}, as its EXIF orientation asks")
    if deep:
        notes.append("16 bits a channel read as 8")
    if picture.mode in WORDS_OF_MODE:
        notes.append(f"{WORDS_OF_MODE[picture.mode]} read as RGB")
    if "transparency" in picture.info and picture.mode.startswith("I"):  # 16-bit grey: Pillow makes no alpha of it
        notes.append("its transparent grey is read as any other")
    elif picture.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in picture.info:
        alpha = np.asarray(picture.convert("RGBA").getchannel("A"))
        share = (alpha < 255).mean()
        seen = f": {share:.1%} of its pixels are not opaque and show the colour below" if share else ""
        notes.append(f"its alpha channel is left out{seen}")
    profile = _profile_name(picture)
    if profile is not None:
        notes.append(f"its colour profile ({profile}) is not applied")
    return notes


def _is_deep(picture: Image.Image) -> bool:
    """Whether Pillow reads a file of 16 bits a channel into 8; 16-bit grey stays as it is."""
    if picture.mode in ("I", "F") or picture.mode.startswith("I;16"):
        return False
    for tile in picture.tile:
        coder, given = tile[0], tile[3] if isinstance(tile[3], tuple) else (tile[3],)
        if any(isinstance(word, str) and ";16" in word for word in given):
            return True
        if coder.startswith("ppm") and any(type(word) is int and word > 255 for word in given):  # the largest value
            return True
    return False


def _profile_name(picture: Image.Image) -> str | None:
    """The name of an embedded colour profile that is not sRGB; None for none."""
    data = picture.info.get("icc_profile")
    if not data:
        return None
    try:
        from PIL import ImageCms

        name = ImageCms.getProfileDescription(ImageCms.getOpenProfile(io.BytesIO(data))).strip()
    except Exception:  # no colour library in this Pillow, or a damaged profile
        return "unnamed"
    return None if "srgb" in name.lower() else name or "unnamed"


def luma(pixels: np.ndarray) -> np.ndarray:
    """What ``load_picture`` gives as float32 [H, W], 0..1: 0.299 R + 0.587 G + 0.114 B."""
    if pixels.dtype == np.uint16:
        return pixels.astype(np.float32) / np.float32(65535)
    # In integers, so that white is exactly 1 and a grey g exactly g / 255.
    thousandths = pixels.astype(np.int32) @ np.array([299, 587, 114], dtype=np.int32)  # [H, W]
    return (thousandths / 255000).astype(np.float32)
