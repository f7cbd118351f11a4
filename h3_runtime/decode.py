"""Latents to pixels and sound, chunk by chunk into a sink; nothing holds the whole clip.

video latent ─▶ chunks of 5 latents (+2 overlap), tiles of 256 px ─▶ float [1, 3, f, H, W] ─▶ sink.write
sound latent ─▶ left, right ─▶ [2, A * 800] ─cut or padded─▶ exactly round(N / 24 * 32000) samples
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .errors import H3Error, NonFiniteError
from .geometry import Canvas
from .job import AVLatent
from .media import fit_audio
from .models.precision import exact_float32, is_finite
from .models.video_vae import VideoVAE
from .soundness import WARNING, FrameLevels


class FrameSink(Protocol):
    """Where frames go: an mp4 writer, a list, a node's tensor."""

    def write(self, frames: Tensor) -> None:
        """float32 [1, 3, f, H, W] in [0, 1], in order."""


class Decoder(NamedTuple):
    """One way to decode: ``chunks(latent, start)`` gives the frames of chunk ``start`` and on; ``name`` for the report.

    Ways are tried in order: when one runs out of memory, the next goes on at the chunk that failed.
    """

    name: str
    chunks: Callable[[Tensor, int], Iterator[Tensor]]


@torch.no_grad()
@exact_float32()
def decode_video(
    decoders: Sequence[Decoder],
    latent: AVLatent,
    sink: FrameSink,
    progress: Callable[[int, int], None] | None = None,
) -> list[str]:
    """Decode into ``sink``; ``progress(done, total)`` per chunk. Returns sentences about ways that did not fit, and
    warnings about a picture that cannot be meant (soundness.py).

    Raises NonFiniteError for frames that are not finite, H3Error when the last way runs out of memory.
    """
    total = VideoVAE.decode_chunk_count(latent.video.shape[2])
    done, notes, levels = 0, [], FrameLevels()
    for position, decoder in enumerate(decoders):
        try:
            for chunk in decoder.chunks(latent.video, done):
                if not is_finite(chunk):
                    raise NonFiniteError(
                        f"chunk {done + 1} of {total} decoded to NaN or infinity: no video was saved; the latent is "
                        "finite, so check the video VAE file"
                    )
                levels.add(chunk)
                sink.write(chunk)
                done += 1
                if progress is not None:
                    progress(done, total)
            return notes + [f"{WARNING}{sentence}" for sentence in levels.judge()]
        except torch.OutOfMemoryError as error:
            if position + 1 == len(decoders):
                raise H3Error(
                    f"chunk {done + 1} of {total} did not fit into memory ({decoder.name}): free memory, or decode the "
                    "saved latent on a machine with more"
                ) from error
            following = decoders[position + 1].name
            notes.append(f"chunk {done + 1} of {total} did not fit ({decoder.name}): went on from it with {following}")
    raise AssertionError("a render has at least one way to decode")


@torch.no_grad()
@exact_float32()
def decode_audio(vae, latent: AVLatent, canvas: Canvas) -> tuple[Tensor, str | None]:
    """Sound float32 [2, round(N / 24 * 32000)] of the clip, and a sentence when it was cut or padded."""
    waveform = vae.decode(latent.audio.to(_device(vae)))[0].float().cpu()
    return fit_audio(waveform, canvas.audio_samples)


def _device(module: torch.nn.Module) -> torch.device:
    return next(module.parameters()).device
