"""Frames and sound as they were before encoding, kept beside an mp4 until they have been compared.

clip.mp4 (H.264, AAC)  beside it  clip.kept.mkv: FFV1 (every RGB value) + FLAC (24 bits), tags: what of the sound
                                                 did not fit into it (samples past 1, NaN)

Measured on the mp4 alone, a comparison measures its encoder too: INT8 against float32 on the small model, 256x192, 39
frames, 6 forwards, is 57.1 dB before encoding and 39.6 dB after it.
"""

from __future__ import annotations

import json
import os
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch

from ..errors import H3Error
from ..geometry import FPS, SAMPLE_RATE, audio_samples
from ..unfinished import drop, part_path
from .files import open_media, publish
from .pictures import to_uint8
from .write import CodedFile, coded_sound, ready_sound, sound_bits

SUFFIX = ".kept.mkv"
TAG = "H3_KEPT"


def kept_path(clip: str | os.PathLike) -> Path:
    """Where the frames of ``clip`` (an mp4) are kept."""
    return Path(clip).with_suffix(SUFFIX)


class KeptWriter(CodedFile):
    """A frame sink that keeps every value; in a ``with`` block, and the file appears whole when the block ends well.

    ``sound`` float [2, L] at 32 kHz or None. Frames as ``Mp4Writer.write`` takes them. H3Error when it cannot be
    written.
    """

    def __init__(self, path: str | os.PathLike, width: int, height: int, sound: torch.Tensor | None = None):
        self.path, self.width, self.height, self.sound = Path(path), width, height, sound
        self.frames_written = 0
        self._part = part_path(self.path, self.path.suffix)
        self._container = None

    def __enter__(self) -> KeptWriter:
        try:
            self._container = av.open(str(self._part), "w", format="matroska")
            options = {"level": "3", "slicecrc": "1", "slices": "4"}
            self._picture = self._container.add_stream("ffv1", rate=FPS, options=options)
            self._picture.pix_fmt, self._picture.width, self._picture.height = "bgr0", self.width, self.height
            self._picture.time_base = self._picture.codec_context.time_base = Fraction(1, FPS)
            self._ears = None
            if self.sound is not None:
                self._ears = self._container.add_stream("flac", rate=SAMPLE_RATE, layout="stereo", format="s32")
            self._container.metadata[TAG] = json.dumps(describe_sound(self.sound))
        except av.FFmpegError as failure:
            self._discard()
            raise self._failed(failure) from failure
        return self

    def write(self, frames: np.ndarray | torch.Tensor) -> None:
        """Add frames: uint8 [f, H, W, 3], or a float tensor [1, 3, f, H, W] in 0..1 (rounded to 1/255)."""
        pixels = frames[0].permute(1, 2, 3, 0) if frames.ndim == 5 else frames  # [f, H, W, 3]
        try:
            for picture in pixels:
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(to_uint8(picture)), format="rgb24")
                frame = frame.reformat(format="bgr0")
                frame.pts, frame.time_base = self.frames_written, Fraction(1, FPS)
                self._container.mux(self._picture.encode(frame))
                self.frames_written += 1
        except av.FFmpegError as failure:
            raise self._failed(failure) from failure

    def _finish(self) -> None:
        self._container.mux(self._picture.encode(None))
        if self._ears is not None:
            sound, _ = ready_sound(self.sound, audio_samples(self.frames_written))
            for packet in coded_sound(self._ears, sound_bits(sound), "s32"):
                self._container.mux(packet)
        container, self._container = self._container, None
        container.close()
        self.path = publish(self._part, self.path)

    def _failed(self, failure: av.FFmpegError) -> H3Error:
        return H3Error(
            f"the frames could not be kept in {self.path.name} ({failure}): check the free space, or render without "
            "keeping them"
        )

    def _discard(self) -> None:
        self._close()
        drop(self._part)


class Tee:
    """One sink of two: what is decoded once goes to both."""

    def __init__(self, *sinks):
        self.sinks = sinks

    def write(self, frames: torch.Tensor) -> None:
        for sink in self.sinks:
            sink.write(frames)


def describe_sound(sound: torch.Tensor | None) -> dict:
    """What of a sound no file of whole numbers can tell: its peak, and how many samples are NaN or infinite."""
    if sound is None:
        return {"sound": False}
    finite = torch.isfinite(sound)
    peak = sound[finite].abs().max().item() if bool(finite.any()) else 0.0
    return {"sound": True, "peak": peak, "not_finite": int((~finite).sum()), "samples": sound.numel()}


def read_kept_tag(path: str | os.PathLike) -> dict:
    """What ``KeptWriter`` said of the sound; {} for a file that it did not write."""
    with open_media(path) as container:
        text = next((value for key, value in container.metadata.items() if key.upper() == TAG), "{}")
    try:
        told = json.loads(text)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}
