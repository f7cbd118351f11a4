"""Writing mp4: H.264 at 24 fps with AAC stereo at 32 kHz.

    write(frames), write(frames), ...    encoded at once into  .clip.mp4.xxxx.part.mp4   (picture only)
    set_audio(sound), set_metadata(tags) at any time before the end
    leaving the ``with`` block           picture packets copied + sound encoded -> second temp -> renamed to clip.mp4
    an exception, Ctrl-C                 both temps removed, whatever stood under that name stays

The sound is joined last, because only then the frame count is known; a sound that cannot be encoded then costs the
sound and not the picture. The same frames, sound and tags give the same bytes with the same libraries.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch

from ..errors import H3Error
from ..geometry import AUDIO_CHANNELS, FPS, SAMPLE_RATE, audio_samples
from ..unfinished import drop, part_path, sweep
from .files import check_fps, check_output_path, publish
from .pictures import to_uint8
from .sound import fit_audio

MIN_AUDIO_BITRATE = 256_000  # below it AAC at 32 kHz loses audibly: 128k 9 dB, 192k 17 dB, 256k 25 dB to noise
MAX_AUDIO_BITRATE = 384_000
MAX_CRF = 51
KEYFRAME_EVERY = FPS
AAC_BLOCK = 1024

WRITE_SCALER = 0x4 | 0x40000  # swscale: bicubic, accurate rounding
BT709 = 1
LIMITED_RANGE = 1


@dataclass(frozen=True)
class Encoding:
    """How an mp4 is coded: ``crf`` of x264 (0..51, lower is better), ``audio_bitrate`` of AAC in bits a second.

    ``lossless`` instead keeps every RGB value (H.264 High 4:4:4) and the sound to 24 bits (ALAC), for comparing; few
    players show such a file.
    """

    crf: int = 16
    audio_bitrate: int = 320_000
    lossless: bool = False

    def __post_init__(self):
        if not 0 <= self.crf <= MAX_CRF:
            raise H3Error(f"crf is {self.crf}: give 0 (largest, best) to {MAX_CRF}; 16 is the default")
        if not MIN_AUDIO_BITRATE <= self.audio_bitrate <= MAX_AUDIO_BITRATE:
            raise H3Error(
                f"audio_bitrate is {self.audio_bitrate}: give {MIN_AUDIO_BITRATE} to {MAX_AUDIO_BITRATE} bits a second"
            )


class CodedFile:
    """A file coded in a ``with`` block: ``_finish`` makes it appear when the block ends well, and ``_discard`` takes
    away what is half-written in any case."""

    _container: av.container.OutputContainer | None

    def __exit__(self, kind, error, trace) -> None:
        try:
            if kind is None:
                self._finish()
        except av.FFmpegError as failure:
            raise self._failed(failure) from failure
        finally:
            self._discard()

    def _close(self) -> None:
        if self._container is not None:
            container, self._container = self._container, None
            try:
                container.close()
            except av.FFmpegError:
                pass  # the file goes anyway


class Mp4Writer(CodedFile):
    """Write one mp4, chunk by chunk, in a ``with`` block; the file appears, whole, when the block ends well.

    After the block: ``path`` (where it went), ``frames_written``, ``notes`` (what was changed, for the report).
    Raises H3Error at once for a path that cannot be written, an odd size, a rate other than 24 or a bad tag; at the
    end when ``num_frames`` was given and another number came.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        width: int,
        height: int,
        num_frames: int | None = None,
        audio: torch.Tensor | np.ndarray | None = None,
        metadata: dict[str, str] | None = None,
        fps: float = FPS,
        encoding: Encoding = Encoding(),
    ):
        check_fps(fps)
        self.path = check_output_path(path)
        if min(width, height) < 2 or width % 2 or height % 2:
            raise H3Error(f"size {width}x{height} cannot be saved as mp4: give an even width and height of at least 2")
        self.width, self.height, self.num_frames, self.encoding = width, height, num_frames, encoding
        self.frames_written = 0
        self.notes: tuple[str, ...] = ()
        self._sound: torch.Tensor | None = None
        self._more: list[tuple[str, torch.Tensor]] = []
        self._title = ""
        self._metadata: dict[str, str] = {}
        if audio is not None:
            self.set_audio(audio)
        self.set_metadata(metadata or {})
        self._parts: list[Path] = []
        self._container = None

    def __enter__(self) -> Mp4Writer:
        self.notes = tuple(sweep(self.path))
        part = self._new_part()
        try:
            self._container = av.open(str(part), "w", format="mp4")
            self._stream = self._picture_stream()
            self._container.start_encoding()
        except av.FFmpegError as failure:
            self._discard()
            raise self._failed(failure) from failure
        except BaseException:
            self._discard()
            raise
        return self

    def write(self, frames: np.ndarray | torch.Tensor) -> None:
        """Add frames: uint8 [f, H, W, 3], or a float tensor [1, 3, f, H, W] in 0..1 (rounded to 1/255)."""
        if self._container is None:
            raise H3Error("frames were written outside the writer's `with` block: open it first")
        pixels = frames
        if frames.ndim == 5 and tuple(frames.shape[:2]) == (1, 3):
            pixels = torch.as_tensor(frames)[0].permute(1, 2, 3, 0)  # [1, 3, f, H, W] -> [f, H, W, 3]
        if pixels.ndim != 4 or tuple(pixels.shape[1:]) != (self.height, self.width, 3):
            raise H3Error(
                f"frames have shape {list(frames.shape)}: give [f, {self.height}, {self.width}, 3] in uint8 or "
                f"[1, 3, f, {self.height}, {self.width}] in floats"
            )
        try:
            for picture in pixels:
                self._encode(to_uint8(picture))
        except av.FFmpegError as failure:
            raise self._failed(failure) from failure

    def set_audio(self, audio: torch.Tensor | np.ndarray | None, title: str = "") -> None:
        """The sound, float [2, L] at 32 kHz from the first frame on; None: no sound track. The last call counts.

        ``title`` is what players call the track.
        """
        self._sound, self._title = None if audio is None else _checked_sound(audio), title

    def add_audio(self, audio: torch.Tensor | np.ndarray, title: str) -> None:
        """One more sound track beside that of ``set_audio``, for a player's menu."""
        self._more.append((title, _checked_sound(audio)))

    def set_metadata(self, metadata: dict[str, str]) -> None:
        """Add tags (any length, any characters but NUL); a tag that was there is replaced."""
        for key, value in metadata.items():
            if not (isinstance(key, str) and isinstance(value, str)):
                raise H3Error(f"metadata {key!r}: {type(value).__name__} cannot be saved: give text, JSON for the rest")
            if not key or "\0" in key + value:
                raise H3Error(f"metadata {key!r} is empty or holds a NUL character: give another name or text")
            try:
                (key + value).encode()
            except UnicodeEncodeError as error:
                raise H3Error(f"metadata {key!r} holds half a character ({error.reason}): give valid text") from error
        self._metadata = {**self._metadata, **metadata}

    def _new_part(self) -> Path:
        self._parts.append(part_path(self.path, self.path.suffix))
        return self._parts[-1]

    def _picture_stream(self) -> av.VideoStream:
        # For equal bytes: x264 codes differently with another number of threads, and its AVX-512 macroblock tree reads
        # memory it never set (other bytes in every run, seen at 1344x768). The cpu-independent path does neither.
        options = {"preset": "medium", "threads": "4", "g": str(KEYFRAME_EVERY), "x264-params": "cpu-independent=1"}
        if self.encoding.lossless:
            stream = self._container.add_stream("libx264rgb", rate=FPS, options={**options, "qp": "0"})
            stream.pix_fmt = "rgb24"
        else:
            stream = self._container.add_stream("libx264", rate=FPS, options={**options, "crf": str(self.encoding.crf)})
            stream.pix_fmt = "yuv420p"
            codec = stream.codec_context
            codec.colorspace = codec.color_primaries = codec.color_trc = BT709
            codec.color_range = LIMITED_RANGE
        stream.codec_context.thread_type = "FRAME"  # PyAV's default cuts every frame into slices: larger files
        stream.width, stream.height = self.width, self.height
        stream.time_base = stream.codec_context.time_base = Fraction(1, FPS)
        return stream

    def _encode(self, picture: np.ndarray) -> None:
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
        if not self.encoding.lossless:
            frame = frame.reformat(
                format="yuv420p", dst_colorspace=BT709, dst_color_range=LIMITED_RANGE, interpolation=WRITE_SCALER
            )
        frame.pts, frame.time_base = self.frames_written, Fraction(1, FPS)
        self._container.mux(self._stream.encode(frame))
        self.frames_written += 1

    def _finish(self) -> None:
        if self.frames_written == 0:
            raise H3Error(f"no frame was written to {self.path}: write at least one")
        if self.num_frames is not None and self.frames_written != self.num_frames:
            raise H3Error(f"{self.frames_written} frames were written to {self.path}, {self.num_frames} were announced")
        self._container.mux(self._stream.encode(None))
        self._container.close()
        self._container = None
        tracks, notes = [], ()
        for title, sound in ([] if self._sound is None else [(self._title, self._sound)]) + self._more:
            ready, said = ready_sound(sound, audio_samples(self.frames_written))
            tracks.append((title, ready))
            notes += said
        try:
            whole = self._join(tracks)
        except (av.FFmpegError, ValueError) as failure:
            if not tracks:
                raise
            whole = self._join([])
            notes = (*notes, f"the sound could not be encoded ({failure}): the video was saved without it")
        target = publish(whole, self.path)
        if target != self.path:
            notes = (*notes, f"{self.path.name} is open in another program: saved as {target.name}")
        self.path, self.notes = target, (*self.notes, *notes)

    def _join(self, tracks: list[tuple[str, torch.Tensor]]) -> Path:
        """Copy the coded picture into a second temp file, with the sounds coded beside it and the tags in front."""
        whole = self._new_part()
        flags = {"movflags": "use_metadata_tags+faststart"}
        with av.open(str(self._parts[0])) as source, av.open(str(whole), "w", format="mp4", options=flags) as target:
            target.metadata.update(self._metadata)
            picture = target.add_stream_from_template(source.streams.video[0])
            streams = [self._sound_stream(target, title) for title, _ in tracks]
            coded = [coded_sound(s, self._samples(sound), s.format.name) for s, (_, sound) in zip(streams, tracks)]
            packets = heapq.merge(*coded, key=_time_of)
            waiting = next(packets, None)
            for packet in source.demux(source.streams.video[0]):
                if packet.dts is None:  # the end mark of demux
                    continue
                now = _time_of(packet)
                while waiting is not None and _time_of(waiting) <= now:
                    target.mux(waiting)
                    waiting = next(packets, None)
                packet.stream = picture
                target.mux(packet)
            while waiting is not None:
                target.mux(waiting)
                waiting = next(packets, None)
        return whole

    def _sound_stream(self, target: av.container.OutputContainer, title: str) -> av.AudioStream:
        if self.encoding.lossless:
            stream = target.add_stream("alac", rate=SAMPLE_RATE, layout="stereo", format="s32p")
        else:
            stream = target.add_stream("aac", rate=SAMPLE_RATE, layout="stereo")
            stream.bit_rate = self.encoding.audio_bitrate
        if title:
            stream.metadata["title"] = stream.metadata["handler_name"] = title
        return stream

    def _samples(self, sound: torch.Tensor) -> np.ndarray:
        return sound_bits(sound) if self.encoding.lossless else sound.numpy()  # [2, L]

    def _failed(self, failure: av.FFmpegError) -> H3Error:
        return H3Error(f"{self.path} could not be written ({failure}): check the free space, or choose another folder")

    def _discard(self) -> None:
        self._close()
        for part in self._parts:
            drop(part)
        self._parts = []


def _time_of(packet: av.Packet) -> Fraction:
    return packet.dts * packet.time_base


def _checked_sound(audio: torch.Tensor | np.ndarray) -> torch.Tensor:
    audio = torch.as_tensor(audio).detach().cpu().float()
    if audio.ndim != 2 or audio.shape[0] != AUDIO_CHANNELS:
        raise H3Error(f"sound has shape {list(audio.shape)}: give [2, samples] at {SAMPLE_RATE} Hz")
    return audio


def sound_bits(sound: torch.Tensor) -> np.ndarray:
    """float [2, L] in -1..1 as int32 [2, L] whose upper 24 bits are used."""
    return (sound.double() * 2**23).round().clamp(-(2**23), 2**23 - 1).to(torch.int32).numpy() * 256


def coded_sound(stream: av.AudioStream, samples: np.ndarray, kind: str) -> Iterator[av.Packet]:
    """``samples`` [2, L] in the sample format ``kind`` (planar or interleaved), block by block, as packets."""
    for start in range(0, samples.shape[1], AAC_BLOCK):
        block = samples[:, start : start + AAC_BLOCK]
        block = block if kind.endswith("p") else block.T.reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(block), format=kind, layout="stereo")
        frame.sample_rate, frame.pts, frame.time_base = SAMPLE_RATE, start, Fraction(1, SAMPLE_RATE)
        yield from stream.encode(frame)
    yield from stream.encode(None)


def ready_sound(sound: torch.Tensor, samples: int) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Sound that an encoder takes, exactly ``samples`` long, and what was done to it."""
    notes = []
    broken = ~torch.isfinite(sound)
    if broken.any():
        notes.append(f"{int(broken.sum())} of {sound.numel()} sound samples were NaN or infinite: made silent")
        sound = sound.masked_fill(broken, 0.0)
    loud = int((sound.abs() > 1).sum())
    if loud:
        notes.append(f"{loud} of {sound.numel()} sound samples passed 1 (peak {sound.abs().max():.3f}): clipped")
        sound = sound.clamp(-1, 1)
    sound, note = fit_audio(sound, samples)
    return sound.contiguous(), (*notes, note) if note else tuple(notes)
