"""Files at the door: does it exist, what does it hold, may it be written there.

path --existing--> a file with bytes in it --open_picture--> Pillow     --kind_of--> "image"
                                           --open_media----> PyAV                    "video" | "audio"
path --check_output_path--> checked before the work --unfinished.part_path--> temp beside it --publish--> the file
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import av
from PIL import Image

from ..errors import H3Error
from ..geometry import FPS

PICTURE_FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "BMP", "TIFF", "GIF", "PPM", "AVIF")
PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
TEXT_DEMUXERS = ("tty", "image2", "hls", "concat")  # take a text file for a moving picture, or read further files

ATTACHED_PICTURE = 0x400  # libavformat's disposition flag


def check_fps(fps: float) -> None:
    """Refuse any rate but 24: the model makes 24 frames and 40 sound latents a second, so no other rate fits both."""
    if fps != FPS:
        raise H3Error(
            f"fps is {fps}: only {FPS} is allowed, because the model makes {FPS} frames a second and at another rate "
            f"the sound no longer fits the picture; keep {FPS} and convert the finished file if you need to"
        )


def kind_of(path: str | os.PathLike) -> str:
    """What a file holds, by its content: "image", "video" or "audio". An animated GIF or PNG is a video.

    Raises H3Error for a file that is missing, empty or none of the three.
    """
    path = existing(path)
    with contextlib.suppress(H3Error), open_picture(path) as picture:
        animated = picture.format in ("GIF", "PNG") and getattr(picture, "is_animated", False)
        return "video" if animated else "image"
    with open_media(path) as container:
        if video_stream(container) is not None:
            return "video"
        if container.streams.audio:
            return "audio"
    raise H3Error(f"{path} holds neither a picture nor sound: give a picture, a video or a sound file")


def read_metadata(path: str | os.PathLike) -> dict[str, str]:
    """The tags of a video or sound file. Those of ``Mp4Writer`` come back as they were given."""
    with open_media(path) as container:
        return dict(container.metadata)


def check_output_path(path: str | os.PathLike, suffixes: tuple[str, ...] = (".mp4",)) -> Path:
    """The path, when a file of one of these endings can be made there; else H3Error. Call it before the long work."""
    path = Path(path)
    if path.is_dir():
        raise H3Error(f"{path} is a folder: give a file name that ends in {' or '.join(suffixes)}")
    if path.suffix.lower() not in suffixes:
        raise H3Error(f"{path} ends in {path.suffix or 'nothing'!r}: give a name that ends in {' or '.join(suffixes)}")
    if not path.parent.is_dir():
        raise H3Error(f"{path.parent} is not a folder that exists: create it or choose another one")
    if not os.access(path.parent, os.W_OK):
        raise H3Error(f"{path.parent} cannot be written to: choose another folder or change its rights")
    return path


def publish(part: Path, path: Path) -> Path:
    """Rename a finished temp file to ``path``, replacing what is there, and return where it went.

    A file that another program holds open cannot be replaced on Windows: then the next free name (``clip_1.mp4``)
    is taken, because finished work is worth more than its name.
    """
    target, number = path, 0
    while True:
        try:
            os.replace(part, target)
            return target
        except PermissionError as error:
            number += 1
            if number > 99:
                raise H3Error(f"{path} cannot be replaced ({error}): close what has it open") from error
            target = path.with_name(f"{path.stem}_{number}{path.suffix}")
            while target.exists():
                number += 1
                target = path.with_name(f"{path.stem}_{number}{path.suffix}")


def existing(path: str | os.PathLike) -> Path:
    """The path of a file that is there and not empty; else H3Error."""
    path = Path(path)
    if path.is_dir():
        raise H3Error(f"{path} is a folder: give a file")
    if not path.is_file():
        raise H3Error(f"{path} does not exist: check the name and the folder")
    if path.stat().st_size == 0:
        raise H3Error(f"{path} is empty (0 bytes): give a whole file")
    return path


@contextlib.contextmanager
def open_picture(path: Path) -> Iterator[Image.Image]:
    """A Pillow image of one of PICTURE_FORMATS. What Pillow raises while it is open becomes H3Error."""
    Image.init()
    formats = [name for name in PICTURE_FORMATS if name in Image.OPEN]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            with Image.open(path, formats=formats) as picture:
                yield picture
        except Image.DecompressionBombError as error:
            raise H3Error(f"{path} has too many pixels ({error}): make it smaller first") from error
        except (OSError, SyntaxError, EOFError) as error:
            allowed = "give a whole PNG, JPEG, WebP, BMP, TIFF or GIF file"
            raise H3Error(f"{path} cannot be read as a picture ({error}): {allowed}") from error


@contextlib.contextmanager
def open_media(path: str | os.PathLike) -> Iterator[av.container.InputContainer]:
    """A PyAV container of a local file; nothing is ever fetched. What PyAV raises while it is open becomes H3Error."""
    path = existing(path)
    try:
        options = {"protocol_whitelist": "file"}
        with av.open(str(path.resolve()), metadata_errors="replace", container_options=options) as container:
            if set(container.format.name.split(",")) & set(TEXT_DEMUXERS):
                raise H3Error(f"{path} is not a media file: give a video or a sound file, such as mp4, mkv, wav, mp3")
            yield container
    except av.FFmpegError as error:
        reason = error.strerror or type(error).__name__
        raise H3Error(f"{path} is damaged or not a media file ({reason}): give a whole video or sound file") from error


def video_stream(container: av.container.InputContainer) -> av.VideoStream | None:
    """The first moving picture of a file; the cover picture of a sound file is none."""
    for stream in container.streams.video:
        if not int(stream.disposition) & ATTACHED_PICTURE:
            return stream
    return None


def count_frames(path: str | os.PathLike) -> int:
    """Frames of a file's picture, counted without decoding one. H3Error for a file that cannot be read."""
    with open_media(path) as container:
        picture = video_stream(container)
        if picture is None:
            raise H3Error(f"{path} holds no moving picture: give a video file")
        return sum(packet.size > 0 for packet in container.demux(picture))


@dataclass(frozen=True)
class TrackFacts:
    """What a video file's tracks say of themselves. ``num_frames`` at 24 a second; ``sound_start`` in seconds after
    the picture's; both None where the file does not tell."""

    picture_codec: str
    pixels: str
    rgb: bool
    lossless_h264: bool
    fps: float
    num_frames: int | None
    sound_codec: str | None
    sound_rate: int | None
    sound_start: float | None


def track_facts(path: str | os.PathLike) -> TrackFacts:
    """The codecs, rate and beginnings of a video file. H3Error for a file without a moving picture."""
    with open_media(path) as container:
        picture = video_stream(container)
        if picture is None:
            raise H3Error(f"{path} holds no moving picture: give a video file")
        codec, rate = picture.codec_context, picture.average_rate or picture.guessed_rate or FPS
        length = picture.duration * picture.time_base if picture.duration else (container.duration or 0) / av.time_base
        sound = container.streams.audio[0] if container.streams.audio else None
        start = None
        if sound is not None:
            starts = [(stream.start_time or 0) * stream.time_base for stream in (sound, picture)]
            start = float(starts[0] - starts[1])
        first = next(container.demux(picture))
        return TrackFacts(
            picture_codec=codec.name,
            pixels=codec.pix_fmt or "",
            rgb=codec.format is not None and codec.format.is_rgb,
            lossless_h264=codec.name == "h264" and b" qp=0\0" in bytes(first),  # x264 writes how it coded
            fps=float(rate),
            num_frames=round(length * FPS) or None,
            sound_codec=None if sound is None else sound.codec_context.name,
            sound_rate=None if sound is None else sound.codec_context.sample_rate,
            sound_start=start,
        )
