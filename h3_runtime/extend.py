"""Clips made longer, latent by latent: the next clip begins with the last latents of the one before.

    clip A   0 ........ 85 | 85 .. 107 ]          17 frames are 5 latents, so the end of A fits the beginning of B
    clip B                 [ 0 ... 22 | 22 ............. 124 ]
                             kept       made anew (masks)
    joined   0 ........ 85 [ B as it is                      ]     one latent, decoded in one stream

The overlap is handed over as it stands: nothing goes through pixels and back, so neither colour nor loudness drifts.
17 frames last 28 1/3 sound latents: where the sound has to meet exactly, B begins at a multiple of 51 frames (85
sound latents), which the overlap is chosen for; over any number of clips picture and sound stay together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from .errors import H3Error
from .geometry import (
    AUDIO_CHANNELS,
    CLIP_FRAMES,
    CLIP_LATENTS,
    FPS,
    Canvas,
    audio_latents,
    latent_frames,
    pixel_frames,
    snap_frames,
)
from .job import AUDIO_LATENT_CHANNELS, VIDEO_CHANNELS, AVLatent, Masks

MEETING_FRAMES = 3 * CLIP_FRAMES  # both streams have whole latents here: 15 of the picture, 85 of the sound


@dataclass(frozen=True)
class Continuation:
    """The clip that follows another: ``source`` holds the overlap and zeros, ``masks`` keep the overlap.

    ``begins``: the frame of the earlier clip where this one starts. ``overlap``: frames they share.
    """

    canvas: Canvas
    source: AVLatent
    masks: Masks
    begins: int
    overlap: int
    notes: tuple[str, ...] = ()


def continue_clip(clip: AVLatent, frames: int, overlap: int) -> Continuation:
    """A canvas for ``frames`` more frames after ``clip``, its beginning filled with about ``overlap`` of its last ones.

    Both are raised to what the grid allows. ``overlap`` at least as long as the clip keeps all of it: one longer clip.
    H3Error for a clip that cannot be continued.
    """
    count, notes = clip_frames(clip), []
    if frames < 1:
        raise H3Error(f"{frames} more frames were asked for: give at least 1")
    if overlap < 1:
        raise H3Error(f"an overlap of {overlap} frames was asked for: give at least 1; 22 (0.9 s) is usual")
    begins, shared, total = continued_frames(count, frames, overlap)
    if shared != overlap:
        notes.append(
            f"overlap of {shared} frames ({shared / FPS:.3f} s) instead of {overlap}: this is where latents of the "
            "picture and of the sound begin together"
        )
    if total - shared != frames:
        notes.append(
            f"{total - shared} new frames ({(total - shared) / FPS:.3f} s) instead of {frames}: 17k + 5 in all"
        )
    height, width = clip.video.shape[3:]
    canvas = Canvas.fit(total, (width * 16, height * 16))
    notes += canvas.notes
    kept_t, kept_a = latent_frames(shared), clip.audio.shape[3] - _sound_start(begins)
    video = torch.zeros(1, VIDEO_CHANNELS, canvas.latent_t, height, width)
    audio = torch.zeros(1, AUDIO_LATENT_CHANNELS, AUDIO_CHANNELS, canvas.audio_t)
    video[:, :, :kept_t] = clip.video[:, :, -kept_t:]
    audio[..., :kept_a] = clip.audio[..., -kept_a:]
    video_mask = torch.ones(canvas.latent_t, height, width)
    audio_mask = torch.ones(AUDIO_CHANNELS, canvas.audio_t)
    video_mask[:kept_t] = 0
    audio_mask[:, :kept_a] = 0
    masks = Masks.make(video_mask, audio_mask)
    return Continuation(canvas, AVLatent(video, audio), masks, begins, shared, tuple(notes))


class Continued(NamedTuple):
    """Frames of a continuation: where it ``begins`` in the clip before, how many are ``shared``, its ``total``."""

    begins: int
    shared: int
    total: int


def continued_frames(count: int, frames: int, overlap: int) -> Continued:
    """The frames of a clip that follows one of ``count`` frames: see ``continue_clip``."""
    begins = max(0, (count - overlap) // MEETING_FRAMES * MEETING_FRAMES)
    return Continued(begins, count - begins, snap_frames(count - begins + frames))


def join_clips(first: AVLatent, second: AVLatent, begins: int) -> AVLatent:
    """One latent of both: ``first`` up to its frame ``begins``, then all of ``second``. H3Error where they do not fit.

    ``begins`` is that of the ``Continuation`` which ``second`` was rendered from, a multiple of 51.
    """
    if first.video.shape[3:] != second.video.shape[3:]:
        sizes = [f"{clip.video.shape[4] * 16}x{clip.video.shape[3] * 16}" for clip in (first, second)]
        raise H3Error(f"the clips are {sizes[0]} and {sizes[1]}: only clips of one size can be joined")
    count = clip_frames(first)
    if begins % MEETING_FRAMES or not 0 <= begins < count:
        places = ", ".join(str(at) for at in range(0, count, MEETING_FRAMES))
        raise H3Error(f"the second clip begins at frame {begins} of the first: it can begin at {places}")
    video = torch.cat([first.video[:, :, : begins // CLIP_FRAMES * CLIP_LATENTS], second.video], dim=2)
    audio = torch.cat([first.audio[..., : _sound_start(begins)], second.audio], dim=3)
    assert audio.shape[3] == audio_latents(pixel_frames(video.shape[2]))
    return AVLatent(video, audio)


def clip_frames(clip: AVLatent) -> int:
    """Frames of a latent clip. H3Error for a single frame, or a sound of another length than the picture's."""
    frames = whole_frames(clip.video.shape[2])
    if clip.audio.shape[3] != audio_latents(frames):
        raise H3Error(
            f"the clip has {frames} frames and {clip.audio.shape[3]} latents of sound: {audio_latents(frames)} are "
            "needed; join picture and sound of one clip"
        )
    return frames


def whole_frames(latent_t: int) -> int:
    """Frames of ``latent_t`` latents of picture. H3Error where they are no whole clip."""
    if latent_t < 2 or (latent_t - 2) % CLIP_LATENTS:
        raise H3Error(f"the clip has {latent_t} latents of picture: whole clips have 5k + 2 (2, 7, 12, ... 37)")
    return pixel_frames(latent_t)


def _sound_start(begins: int) -> int:
    return begins // MEETING_FRAMES * audio_latents(MEETING_FRAMES)
