"""Clips of any frame rate, put on the 24 fps clock; masks, which may come as clips.

source frames (30 fps)  0   1   2   3   4   5   6   7   8   9  10      a frame at t seconds takes slot
slot                    0   1   2   2   3   4   5   6   6   7   8      floor(24 t + 1/2) and stays until
seen at 24 fps          0   1     3     4   5   6     8     9  10      the slot of the next frame
"""

from __future__ import annotations

import fnmatch
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from pathlib import Path

import av
import numpy as np
import psutil
import torch

from ..errors import H3Error
from ..geometry import FPS, SAMPLE_RATE, audio_samples
from .files import ATTACHED_PICTURE, PICTURE_SUFFIXES, check_fps, kind_of, open_media, video_stream
from .pictures import load_picture, luma
from .sound import decode_sound

# swscale: bicubic, accurate rounding, full chroma. Its defaults darken every frame by about 1.5 of 255 levels.
READ_SCALER = 0x4 | 0x40000 | 0x2000
HDR_CURVES = (16, 18)  # PQ and HLG
BT601 = 5
KNOWN_MATRICES = (1, 4, 7, 9)  # BT.709, FCC, SMPTE 240M, BT.2020; all others are read as BT.601
FULL_RANGE = 2
TOLD_REST = 0.1  # seconds of sound past the picture; less is the sound coder's last block


@dataclass(frozen=True)
class Clip:
    """A clip at 24 fps.

    frames: uint8 [F, H, W, 3] RGB. fps: the rate of the file it came from. audio: float32 [2, L] at 32 kHz with
    L <= round(F / 24 * 32000), sample 0 at the first frame, or None. notes: what was changed on the way in.
    """

    frames: np.ndarray
    fps: float
    audio: torch.Tensor | None = None
    notes: tuple[str, ...] = ()


def read_clip(
    path: str | os.PathLike,
    fps: float = FPS,
    max_frames: int | None = None,
    start_seconds: float = 0.0,
    sound: bool = True,
    fit: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Clip:
    """Read a clip of any frame rate onto 24 fps, with its sound, from ``start_seconds`` on, at most ``max_frames``.

    A frame at t seconds after the first takes slot floor(24 t + 1/2) and stays until the slot of the next frame; the
    last one stays until the slot of the clip's end. That is the reference's rule for reference videos (its
    ``_normalize_video_condition``, after ffmpeg's ``fps`` filter), here with every frame's own timestamp, so that a
    variable rate keeps its timing. Rotation tags are applied; pixel aspect ratios are not (as in the reference).
    Reading stops once ``max_frames`` are there. Sound that reaches past the last frame is cut at its end. ``fit`` is
    applied to each picture as it arrives, so that a large clip wanted small never stands in memory at its own size.
    """
    check_fps(fps)
    if max_frames is not None and max_frames < 1:
        raise H3Error(f"max_frames is {max_frames}: give at least 1")
    with open_media(path) as container:
        reel = _Reel(container, Path(path), start_seconds)
        frames = _gather(reel, max_frames, fit)
        notes = reel.notes(len(frames), max_frames)
        has_sound = bool(container.streams.audio)
        rest = reel.sound_past_end() if sound and has_sound and len(frames) != max_frames else 0.0
    audio = None
    if sound and has_sound:
        samples = audio_samples(len(frames))
        audio, sound_notes = decode_sound(path, reel.origin, reel.start, Fraction(samples, SAMPLE_RATE))
        audio = audio[:, :samples].contiguous()
        notes += sound_notes
        if audio.shape[1] == 0:
            audio, notes = None, (*notes, "the sound ends before this part of the clip")
        elif rest > TOLD_REST:
            notes = (*notes, f"its sound lasts {rest:.3f} s longer than its picture: that part is left out")
    return Clip(frames, float(reel.rate), audio, notes)


def stream_frames(
    path: str | os.PathLike,
    max_frames: int | None = None,
    start_seconds: float = 0.0,
    notes: list[str] | None = None,
) -> Iterator[np.ndarray]:
    """The frames of ``read_clip`` one by one, uint8 [H, W, 3]: memory stays at a few frames, however long the clip.

    ``notes`` gets what was changed on the way, once the last frame was given.
    """
    left, given = math.inf if max_frames is None else max_frames, 0
    with open_media(path) as container:
        reel = _Reel(container, Path(path), start_seconds)
        for count, picture in reel.slots():
            for _ in range(int(min(count, left))):
                given += 1
                yield picture
            left -= count
            if left <= 0:
                break
        if notes is not None:
            notes += reel.notes(given, max_frames)


def read_mask(source: str | os.PathLike, max_frames: int | None = None, notes: list[str] | None = None) -> torch.Tensor:
    """A mask as float32 [F, H, W], 0 (black) to 1 (white), from the luma 0.299 R + 0.587 G + 0.114 B.

    ``source``: one picture (F = 1); several, as a folder, a glob pattern (``mask_*.png``) or a numbered pattern
    (``mask_%04d.png``), in order of their numbers; or a clip, read at 24 fps. An alpha channel is not looked at.
    ``notes`` gets what was changed or left out on the way, each sentence once.
    """
    paths = _mask_files(Path(source))
    found: list[str] = []
    if paths is None:
        frames = [luma(frame) for frame in stream_frames(source, max_frames, notes=found)]
        _tell_once(notes, found)
        return torch.from_numpy(np.stack(frames))
    frames = []
    for path in paths[:max_frames]:
        pixels = load_picture(path, found)
        if pixels.ndim == 3 and bool((pixels != pixels[..., :1]).any()):
            found.append("colours read by their luma")
        frames.append(luma(pixels))
        if frames[-1].shape != frames[0].shape:
            here, first = (f"{frame.shape[1]}x{frame.shape[0]}" for frame in (frames[-1], frames[0]))
            raise H3Error(f"{path} is {here}, the first mask is {first}: make all masks one size")
    _tell_once(notes, (note for note in found if not note.endswith("read as RGB")))  # a mask's grey stays grey
    return torch.from_numpy(np.stack(frames))  # [F, H, W]


def _tell_once(notes: list[str] | None, found: Iterable[str]) -> None:
    if notes is not None:
        notes += dict.fromkeys(found)


class _Reel:
    """One video stream, played forward once onto the 24 fps slots, counting what passes."""

    def __init__(self, container: av.container.InputContainer, path: Path, start_seconds: float):
        self.path, self.container, self.stream = path, container, video_stream(container)
        if self.stream is None:
            raise H3Error(f"{path} holds no moving picture: give a video file")
        if not (math.isfinite(start_seconds) and start_seconds >= 0):
            raise H3Error(f"start_seconds is {start_seconds}: give 0 or more")
        self.start = Fraction(start_seconds).limit_denominator(1_000_000)
        self.rate = Fraction(self.stream.average_rate or self.stream.guessed_rate or FPS)
        self.tick = Fraction(self.stream.time_base)
        self.source_frames, self.uneven, self.resampled, self.turned, self.curve = 0, False, False, 0, 0
        self.odd: dict[str, None] = {}  # sentences about the pictures themselves, in order, each once
        self.translucent, self.damaged = False, 0
        self.decoded = container.decode(self.stream)
        self.first = next(self.decoded, None)
        if self.first is None:
            raise H3Error(f"{path} holds no frame that can be decoded: give a whole video file")
        self.origin = Fraction(0) if self.first.pts is None else self.first.pts * self.tick

    def seconds_expected(self) -> float | None:
        """Length after ``start`` by the header, in seconds; None when the file does not tell."""
        if self.stream.duration:
            length = float(self.stream.duration * self.tick)
        elif self.container.duration:
            length = self.container.duration / av.time_base
        else:
            return None
        return max(0.0, length - float(self.start))

    def slots(self) -> Iterator[tuple[int, np.ndarray]]:
        """(number of slots it fills, picture uint8 [H, W, 3]) of each frame that fills any."""
        held, held_slot, end, filled = None, 0, Fraction(0), 0
        for time, length, frame in self._timed():
            slot = _slot(time - self.start)
            if held is not None:
                slot = max(slot, held_slot)
                count = self._count(held_slot, slot)
                if count:
                    filled += count
                    yield count, self._upright(held)
            held, held_slot, end = frame, slot, time + length
        if held is None or end <= self.start:
            raise H3Error(f"{self.path} ends before start_seconds {float(self.start):g}: start earlier")
        count = max(self._count(held_slot, max(held_slot, _slot(end - self.start))), 0 if filled else 1)
        if count:
            yield count, self._upright(held)

    def notes(self, count: int, max_frames: int | None) -> tuple[str, ...]:
        """What was changed on the way to ``count`` frames."""
        notes = []
        if self.resampled:
            rate = f"{float(self.rate):.5g} fps" + (" on average (variable rate)" if self.uneven else "")
            if count == max_frames:
                notes.append(f"{rate} clip resampled to {FPS} fps and read for {count} frames")
            else:
                notes.append(f"{rate} clip of {self.source_frames} frames resampled to {count} frames at {FPS} fps")
        if self.turned:
            notes.append(f"turned by {self.turned} degrees clockwise, as the file's rotation tag asks")
        if self.stream.sample_aspect_ratio not in (None, 0, 1):
            notes.append(f"pixel aspect ratio {self.stream.sample_aspect_ratio} is not corrected")
        if self.curve in HDR_CURVES:
            notes.append("HDR brightness curve is not converted: the picture may look flat")
        streams = [s for s in self.container.streams.video if not int(s.disposition) & ATTACHED_PICTURE]
        if len(streams) > 1:
            notes.append(f"the first of its {len(streams)} moving pictures is used")
        notes += self.odd
        if self.translucent or self.stream.metadata.get("alpha_mode") == "1":
            notes.append("its alpha channel is left out: transparent pixels show the colour below")
        if self.damaged:
            notes.append(f"{self.damaged} of its frames are damaged in the file and may look broken")
        return tuple(notes)

    def sound_past_end(self) -> float:
        """Seconds by which the first sound track outlasts the picture, by their headers; 0 where they do not tell."""
        sound = self.container.streams.audio[0]
        if not sound.duration or not self.stream.duration:
            return 0.0
        ends = [(s.start_time or 0) * s.time_base + s.duration * s.time_base for s in (sound, self.stream)]
        return float(ends[0] - ends[1])

    def _count(self, slot: int, next_slot: int) -> int:
        if slot >= 0 or next_slot > 0:
            self.source_frames += 1
            self.resampled |= next_slot - slot != 1
        return max(next_slot, 0) - max(slot, 0)

    def _timed(self) -> Iterator[tuple[Fraction, Fraction, av.VideoFrame]]:
        """(seconds after the first frame, length in seconds, frame) in order of time."""
        decoded = chain([self.first], self.decoded)
        if self.start > 2 and self.first.pts is not None:
            with suppress(av.FFmpegError):
                target = int((self.origin + self.start) / self.tick)
                self.container.seek(target, stream=self.stream, backward=True)
                decoded = self.container.decode(self.stream)
        # Containers round times (Matroska to 1 ms). A time that lies on the rate's own grid but for that rounding is
        # put back on it, so that a constant rate gives exactly the reference's indices.
        slack = min(self.tick, Fraction(1, 1000))
        step = 1 / self.rate
        time = -step
        for frame in decoded:
            exact = time + step if frame.pts is None else frame.pts * self.tick - self.origin
            nearest = round(exact * self.rate) / self.rate
            on_grid = abs(exact - nearest) <= slack
            self.uneven |= not on_grid
            time = nearest if on_grid else exact
            length = (frame.duration or 0) * self.tick
            yield time, step if length <= 0 or abs(length - step) <= slack else length, frame

    def _upright(self, frame: av.VideoFrame) -> np.ndarray:
        pixels = _rgb(frame)  # [H, W, 3]
        self._look_at(frame)
        self.curve = getattr(frame, "color_trc", 0)
        # ``rotation``: how far the picture is to be turned counterclockwise to stand upright, in degrees.
        quarters = round(frame.rotation / 90) % 4
        self.turned = -quarters * 90 % 360
        return np.ascontiguousarray(np.rot90(pixels, quarters)) if quarters else pixels

    def _look_at(self, frame: av.VideoFrame) -> None:
        """Notice what of a frame does not reach its RGB bytes."""
        parts = frame.format.components
        bits = max(part.bits for part in parts)
        if bits > 8:
            self.odd[f"{bits} bits a channel read as 8"] = None
        if frame.interlaced_frame:
            self.odd["its pictures are interlaced and stay so"] = None
        see_through = frame.format.name == "pal8" or any(part.is_alpha for part in parts)
        if see_through and not self.translucent:
            self.translucent = bool((frame.to_ndarray(format="rgba")[..., 3] < 255).any())
        self.damaged += bool(frame.is_corrupt)


def _rgb(frame: av.VideoFrame) -> np.ndarray:
    """uint8 [H, W, 3]. Matrix and range are named, because PyAV before 17 does not take them from the frame."""
    if frame.format.is_rgb:
        return frame.to_ndarray(format="rgb24")
    return frame.to_ndarray(
        format="rgb24",
        src_colorspace=frame.colorspace if frame.colorspace in KNOWN_MATRICES else BT601,
        dst_colorspace=BT601,  # of no effect on RGB, but without it the source's is not looked at
        src_color_range=frame.color_range,
        dst_color_range=FULL_RANGE,
        interpolation=READ_SCALER,
    )


def _slot(seconds: Fraction) -> int:
    return math.floor(seconds * FPS + Fraction(1, 2))


def _gather(reel: _Reel, max_frames: int | None, fit: Callable[[np.ndarray], np.ndarray] | None) -> np.ndarray:
    """All slots of a reel (at most ``max_frames``) in one array, grown in place so that no second copy is held."""
    expected = reel.seconds_expected()
    capacity = 64 if expected is None else math.ceil(expected * FPS) + 2
    capacity = max(1, capacity if max_frames is None else min(capacity, max_frames))
    frames, count = None, 0
    for repeat, picture in reel.slots():
        picture = picture if fit is None else fit(picture)
        if frames is None:
            _check_memory(reel.path, capacity, picture.nbytes)
            frames = np.empty((capacity, *picture.shape), dtype=np.uint8)
        elif picture.shape != frames.shape[1:]:
            raise H3Error(f"{reel.path} changes its picture size at frame {count}: re-encode it at one size")
        repeat = repeat if max_frames is None else min(repeat, max_frames - count)
        if count + repeat > len(frames):
            grown = max(count + repeat, len(frames) * 3 // 2)
            _check_memory(reel.path, grown - len(frames), picture.nbytes)
            frames.resize((grown, *picture.shape), refcheck=False)
        frames[count : count + repeat] = picture
        count += repeat
        if count == max_frames:
            break
    frames.resize((count, *frames.shape[1:]), refcheck=False)
    return frames  # [F, H, W, 3]


def _check_memory(path: Path, frames: int, frame_bytes: int) -> None:
    need, free = frames * frame_bytes, psutil.virtual_memory().available
    if need > free:
        raise H3Error(
            f"{path} needs {need / 2**30:.1f} GiB for {frames} frames and {free / 2**30:.1f} GiB are free: "
            "set max_frames or use a shorter or smaller clip"
        )


def _mask_files(path: Path) -> list[Path] | None:
    """The picture files that a mask source names, in order; None when it is a clip."""
    if path.is_file():
        return [path] if kind_of(path) == "image" else None
    if path.is_dir():
        files = [file for file in path.iterdir() if file.suffix.lower() in PICTURE_SUFFIXES and file.is_file()]
    elif re.search(r"%0?\d*d", path.name) and path.parent.is_dir():
        return _numbered_files(path)
    elif re.search(r"[*?\[]", path.name) and path.parent.is_dir():
        files = [file for file in path.parent.iterdir() if fnmatch.fnmatch(file.name, path.name)]
    else:
        raise H3Error(f"{path} does not exist: give a mask picture, a folder, a pattern (mask_%04d.png) or a clip")
    if not files:
        raise H3Error(f"{path} names no mask picture: give a folder or pattern with at least one")
    return sorted(files, key=_by_number)


def _by_number(path: Path) -> list[tuple[int, int, str]]:
    """Sort key that puts mask_2 before mask_10."""
    parts = re.split(r"(\d+)", path.name)
    return [(1, int(part), part) if part.isdecimal() else (0, 0, part) for part in parts]


def _numbered_files(pattern: Path) -> list[Path]:
    before, after = re.split(r"%0?\d*d", pattern.name, maxsplit=1)
    matcher = re.compile(re.escape(before) + r"(\d+)" + re.escape(after))
    matches = ((matcher.fullmatch(file.name), file) for file in pattern.parent.iterdir())
    found = {int(match[1]): file for match, file in matches if match}
    if not found:
        raise H3Error(f"{pattern} names no file: give a pattern that at least one mask picture matches")
    missing = sorted(set(range(min(found), max(found))) - set(found))
    if missing:
        raise H3Error(f"{pattern} has no file number {missing[0]} ({len(missing)} missing): add it, or renumber them")
    return [found[number] for number in sorted(found)]
