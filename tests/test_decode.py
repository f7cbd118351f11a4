"""A failed chunk is decoded again another way; what was written before it stands; the frames are the same."""

from __future__ import annotations

import pytest
import torch

from h3_runtime.decode import Decoder, decode_audio, decode_video
from h3_runtime.demo.maker import AUDIO_VAE, VIDEO_VAE, seeded_module
from h3_runtime.errors import H3Error, NonFiniteError
from h3_runtime.geometry import Canvas
from h3_runtime.job import AVLatent
from h3_runtime.models.audio_vae import AudioVAE
from h3_runtime.models.video_vae import VideoVAE

CANVAS = Canvas.fit(73, (96, 64))  # 22 latents, 4 chunks


class Sink:
    def __init__(self):
        self.chunks = []

    def write(self, frames):
        self.chunks.append(frames)


@pytest.fixture(scope="module")
def vae() -> VideoVAE:
    return seeded_module(VideoVAE, VIDEO_VAE)


@pytest.fixture(scope="module")
def latent() -> AVLatent:
    generator = torch.Generator().manual_seed(0)
    shape = (1, 24, CANVAS.latent_t, CANVAS.latent_h, CANVAS.latent_w)
    return AVLatent(torch.randn(shape, generator=generator), torch.randn(1, 32, 2, CANVAS.audio_t, generator=generator))


def whole(vae) -> Decoder:
    return Decoder("resident", lambda z, start: vae.decode_chunks(z, start=start))


def failing(vae, at: int, error: Exception) -> Decoder:
    def chunks(z, start):
        for index, chunk in enumerate(vae.decode_chunks(z, start=start), start=start):
            if index == at:
                raise error
            yield chunk

    return Decoder("resident", chunks)


@pytest.mark.parametrize("at", range(4))
def test_a_chunk_that_does_not_fit_is_decoded_the_next_way(vae, latent, at):
    expected, sink, seen = vae.decode(latent.video), Sink(), []
    layers = vae.decoder.transformer_blocks
    smaller = Decoder("layer-major", lambda z, start: vae.decode_chunks(z, start=start, layers=lambda: iter(layers)))
    notes = decode_video(
        [failing(vae, at, torch.OutOfMemoryError("full")), smaller], latent, sink, lambda d, t: seen.append((d, t))
    )
    assert torch.equal(torch.cat(sink.chunks, 2), expected)
    assert seen == [(done, 4) for done in range(1, 5)]
    assert notes == [f"chunk {at + 1} of 4 did not fit (resident): went on from it with layer-major"]


def test_the_last_way_says_what_to_do(vae, latent):
    with pytest.raises(H3Error, match="chunk 3 of 4 did not fit into memory"):
        decode_video([failing(vae, 2, torch.OutOfMemoryError("full"))], latent, Sink())


def test_other_errors_are_not_taken_for_memory(vae, latent):
    with pytest.raises(ZeroDivisionError):
        decode_video([failing(vae, 1, ZeroDivisionError()), whole(vae)], latent, Sink())


def test_frames_that_are_not_finite_stop_the_decode(vae, latent):
    def black(z, start):
        yield torch.full((1, 3, 17, 64, 96), float("nan"))

    with pytest.raises(NonFiniteError, match="chunk 1 of 4"):
        decode_video([Decoder("x", black)], latent, Sink())


def test_sound_is_cut_to_the_picture(latent):
    sound, note = decode_audio(seeded_module(AudioVAE, AUDIO_VAE), latent, CANVAS)
    assert sound.shape == (2, round(73 / 24 * 32000)) and "dropped" in note
