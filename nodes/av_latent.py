"""LATENT both ways: the host's dictionary and the runtime's clip in latent space.

{"samples": NestedTensor(video [1,24,T,h,w], audio [1,32,2,A])}   a clip
{"samples": zeros of any model}                                   an empty latent: replaced by one of that pixel size
{"samples": video [1,24,T,h,w] alone}                             a picture without sound: the sound is made anew
"noise_mask"   1 made anew, 0 kept: video alone or nested, per cell, per pixel or in any other size
"h3_runtime"   ``Carried``: what we know of these very tensors (the render, whether it is finished)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .sockets import intermediate, make_pair, samples_of, streams_of

KEY = "h3_runtime"
OTHER_RATIO = 8  # pixels per cell of most models' latents, where a latent does not say


@dataclass(frozen=True)
class Carried:
    """Rides in a LATENT of ours. ``video`` and ``audio`` are the tensors it speaks of: when another node has put others
    in their place, nothing of it holds.

    result: the render. finished False: the noisy state after ``stop`` forwards. overlap: frames at its beginning that
    are the end of the clip before (extend). source: the clip that masks keep, of an unfinished run. fidelity: the label
    of what was put together from several renders.
    """

    video: Tensor
    audio: Tensor
    result: Any = None
    finished: bool = True
    stop: int = 0
    overlap: int | None = None
    source: Any = None
    fidelity: Any = None
    info: dict = field(default_factory=dict)


@dataclass(frozen=True)
class TakenLatent:
    """A LATENT as the runtime takes it. ``clip`` None: an empty one, only the size counts."""

    canvas: Any
    clip: Any
    masks: Any = None
    carried: Carried | None = None
    notes: tuple[str, ...] = ()


def give_latent(clip, masks=None, **carried) -> dict:
    """An AVLatent as LATENT, with its masks, and what is known of it."""
    video, audio = intermediate(clip.video), intermediate(clip.audio)
    latent = {"samples": make_pair(video, audio), KEY: Carried(video, audio, **carried)}
    if masks is not None:
        latent["noise_mask"] = give_masks(masks, clip)
    return latent


def give_masks(masks, clip):
    """Masks per latent cell as the host's samplers take them: [1, 1, T, h, w] and [1, 1, 2, A]."""
    video, audio = masks.video, masks.audio
    video = torch.ones(clip.video.shape[2:]) if video is None else video
    audio = torch.ones(clip.audio.shape[2:]) if audio is None else audio
    return make_pair(video[None, None].clone(), audio[None, None].clone())


def empty_clip(canvas):
    """The clip of zeros that stands for an empty latent."""
    from ..h3_runtime import AVLatent

    video = torch.zeros(1, 24, canvas.latent_t, canvas.latent_h, canvas.latent_w)
    return AVLatent(video, torch.zeros(1, 32, 2, canvas.audio_t))


def take_latent(latent: dict, frames: int = 124) -> TakenLatent:
    """A LATENT of any of the shapes above. ``frames`` is the length of a plain latent that has none.

    H3Error for another model's latent that is not empty, for several clips at once, and for streams that do not belong
    together.
    """
    from ..h3_runtime import AVLatent, Canvas, H3Error

    notes: list[str] = []
    streams = samples_of(latent)
    if len(streams) == 1:
        clip, canvas = _take_plain(streams[0], latent, frames, notes)
    elif len(streams) == 2:
        video, audio = (stream.float() for stream in streams)
        _refuse_batch(video)
        if video.ndim == 4 and audio.ndim == 5:
            raise H3Error("the latent holds sound first and picture second: join them in the other order")
        clip = AVLatent(video, audio)
        canvas = _canvas_of(clip)
    else:
        raise H3Error(f"the latent holds {len(streams)} streams: picture and sound are needed")
    carried = latent.get(KEY)
    if carried is not None and not _speaks_of(carried, clip):
        if not carried.finished:
            notes.append(
                "the latent was changed after a sampler that stopped part-way: it is taken as a clip, not as its state"
            )
        carried = None
    masks = None
    if latent.get("noise_mask") is not None:
        masks = take_masks(latent["noise_mask"], canvas, notes)
    empty = clip is None or not (clip.video.any() or clip.audio.any())
    assert isinstance(canvas, Canvas)
    return TakenLatent(canvas, None if empty else clip, masks, carried, tuple(notes))


def _speaks_of(carried: Carried, clip) -> bool:
    if clip is None:
        return False
    same = ((carried.video, clip.video), (carried.audio, clip.audio))
    return all(a.shape == b.shape and torch.equal(a.cpu().float(), b) for a, b in same)


def _refuse_batch(tensor: Tensor) -> None:
    from ..h3_runtime import H3Error

    if tensor.shape[0] != 1:
        raise H3Error(
            f"the latent holds {tensor.shape[0]} clips: one render makes one clip; give a batch of 1 and queue several "
            "seeds instead"
        )


def _canvas_of(clip):
    """The canvas of a whole clip. H3Error for a length that is none, or a sound of another length."""
    from ..h3_runtime import Canvas, clip_frames

    frames = clip_frames(clip)
    height, width = clip.video.shape[3] * 16, clip.video.shape[4] * 16
    return Canvas.fit(frames, (width, height))


def _take_plain(tensor: Tensor, latent: dict, frames: int, notes: list[str]):
    """(clip or None, canvas) of a latent with one tensor."""
    from ..h3_runtime import AVLatent, H3Error, audio_latents, whole_frames

    _refuse_batch(tensor)
    if tensor.any():
        if tensor.ndim != 5 or tensor.shape[1] != 24:
            raise H3Error(
                f"the latent has shape {list(tensor.shape)}: it is another model's, or one stream alone; give an H3 "
                "latent (video and sound), a video latent [1, 24, T, h, w], or an empty one"
            )
        count = whole_frames(tensor.shape[2])
        notes.append("the latent holds a picture without sound: the sound is made anew")
        clip = AVLatent(tensor.float(), torch.zeros(1, 32, 2, audio_latents(count)))
        return clip, _canvas_of(clip)
    if tensor.ndim not in (4, 5):
        shape = list(tensor.shape)
        raise H3Error(f"the empty latent has shape {shape}: 4 or 5 dimensions are read; connect H3 Empty Latent")
    return None, _canvas_of_empty(tensor, latent, frames, notes)


def _canvas_of_empty(tensor: Tensor, latent: dict, frames: int, notes: list[str]):
    from ..h3_runtime import Canvas, pixel_frames, snap_frames

    ratio = latent.get("downscale_ratio_spacial")
    ratio = ratio if isinstance(ratio, (int, float)) and 1 <= ratio <= 256 else OTHER_RATIO
    height, width = (round(side * ratio) for side in tensor.shape[-2:])
    if tensor.ndim == 4:
        count = snap_frames(frames)
    else:
        count = pixel_frames(max(0, -(-(tensor.shape[2] - 2) // 5)) * 5 + 2)  # the next 5k + 2 latents
    size = tuple(max(32, round(side / 32) * 32) for side in (width, height))
    canvas = Canvas.fit(count, size)
    said = f"an empty latent of another form ({list(tensor.shape)}, {width}x{height} pixels) was replaced by an H3 one"
    notes.append(f"{said}: {size[0]}x{size[1]}, {count} frames ({canvas.seconds:.3f} s)")
    return canvas


# --- masks -----------------------------------------------------------------------------------------------------------


def take_masks(noise_mask, canvas, notes: list[str]):
    """The runtime's Masks of a ``noise_mask`` in any shape the host's samplers take; None when all is made anew."""
    from ..h3_runtime import Masks

    streams = streams_of(noise_mask)
    video = _video_mask(streams[0].float(), canvas, notes)
    audio = None if len(streams) < 2 else _audio_mask(streams[1].float(), canvas, notes)
    if len(streams) < 2:
        notes.append("the mask is for the picture alone: all of the sound is made anew")
    return Masks.make(video.clamp(0, 1), None if audio is None else audio.clamp(0, 1))


def _video_mask(mask: Tensor, canvas, notes: list[str]) -> Tensor:
    """Any of [h, w], [F, H, W], [F, 1, H, W], [1, C, T, h, w] -> latent cells [T, h, w]; 1 made anew."""
    from ..h3_runtime import pool_pixels

    if mask.ndim == 5:
        mask = mask[0].amax(dim=0)
    else:
        mask = mask.reshape(-1, *mask.shape[-2:])
    cells = (canvas.latent_t, canvas.latent_h, canvas.latent_w)
    if tuple(mask.shape) == cells:
        return mask
    if tuple(mask.shape[1:]) == (canvas.height, canvas.width) and mask.shape[0] in (1, canvas.num_frames):
        return pool_pixels(mask, canvas.latent_t)
    if mask.shape[0] > 1 and mask.shape[0] != canvas.num_frames:
        notes.append(f"the mask has {mask.shape[0]} frames and the clip {canvas.num_frames}: it was stretched in time")
    if mask.shape[0] == canvas.num_frames:  # right in time, another size: fitted to the pixels, then pooled exactly
        fitted = F.interpolate(mask[:, None], size=(canvas.height, canvas.width), mode="bilinear")[:, 0]
        return pool_pixels(fitted, canvas.latent_t)
    return F.interpolate(mask[None, None], size=cells, mode="trilinear")[0, 0]


def _audio_mask(mask: Tensor, canvas, notes: list[str]) -> Tensor:
    """Any of [A], [2, A], [1, 1, 2, A], [1, 32, 2, A] -> [2, A]."""
    if mask.ndim == 4:
        mask = mask[0].amax(dim=0)
    mask = mask.reshape(-1, mask.shape[-1]) if mask.ndim > 1 else mask[None]
    if mask.shape == (2, canvas.audio_t):
        return mask
    if mask.shape[-1] != canvas.audio_t:
        notes.append(f"the sound mask has {mask.shape[-1]} steps and the clip {canvas.audio_t}: it was stretched")
    return F.interpolate(mask[None, None], size=(2, canvas.audio_t), mode="bilinear")[0, 0]
