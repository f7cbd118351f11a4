"""Latents to pixels and sound, chunk by chunk into a sink; nothing holds the whole clip.

video latent ─▶ chunks of 5 latents (+2 overlap), tiles of 256 px ─▶ float [1, 3, f, H, W] ─▶ sink.write
sound latent ─▶ left, right ─▶ [2, A * 800] ─cut or padded─▶ exactly round(N / 24 * 32000) samples
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from .errors import NonFiniteError
from .geometry import Canvas
from .job import AVLatent
from .media import fit_audio
from .models.precision import exact_float32


class FrameSink(Protocol):
    """Where frames go: an mp4 writer, a list, a node's tensor."""

    def write(self, frames: Tensor) -> None:
        """float32 [1, 3, f, H, W] in [0, 1], in order."""


@torch.no_grad()
@exact_float32()
def decode_video(vae, latent: AVLatent, sink: FrameSink, progress: Callable[[int, int], None] | None = None) -> int:
    """Decode into ``sink``; ``progress(done, total)`` per chunk. Returns the number of frames written."""
    total = vae.decode_chunk_count(latent.video.shape[2])
    frames = 0
    for done, chunk in enumerate(vae.decode_chunks(latent.video.to(_device(vae))), start=1):
        if not bool(torch.isfinite(chunk).all()):
            raise NonFiniteError(
                f"chunk {done} of {total} decoded to NaN or infinity: no video was saved; the latent is finite, so "
                "check the video VAE file"
            )
        frames += chunk.shape[2]
        sink.write(chunk)
        if progress is not None:
            progress(done, total)
    return frames


@torch.no_grad()
@exact_float32()
def decode_audio(vae, latent: AVLatent, canvas: Canvas) -> tuple[Tensor, str | None]:
    """Sound float32 [2, round(N / 24 * 32000)] of the clip, and a sentence when it was cut or padded."""
    waveform = vae.decode(latent.audio.to(_device(vae)))[0].float().cpu()
    return fit_audio(waveform, canvas.audio_samples)


def _device(module: torch.nn.Module) -> torch.device:
    return next(module.parameters()).device
