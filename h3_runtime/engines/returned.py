"""A clip that came back: is it whole, and is it what was asked for?

file ─look_at─▶ Returned: every frame and sample decoded and counted        damaged, cut short, no picture: H3Error
                  └─differences(Expected)─▶ sentences: size, frames, rate, sound, codecs
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import av
import torch

from ..errors import H3Error
from ..geometry import AUDIO_CHANNELS, FPS, SAMPLE_RATE
from ..soundness import FrameLevels

AAC_BLOCK = 1024
THINNED = 4  # every fourth pixel of every fourth row tells whether there is a picture


@dataclass(frozen=True)
class Expected:
    """What a request asks of its clip, and what is told of it in the report."""

    width: int
    height: int
    frames: int
    seed: int
    task: str
    forwards: int
    quality: str


@dataclass(frozen=True)
class Returned:
    """What a file holds. ``sound_seconds`` None: it has no sound."""

    container: str
    codec: str
    width: int
    height: int
    frames: int
    fps: float
    sound_codec: str = ""
    sound_rate: int = 0
    sound_channels: int = 0
    sound_seconds: float | None = None
    warnings: tuple[str, ...] = ()


def look_at(path: Path, whose: str) -> Returned:
    """Decode all of a clip; ``whose`` begins the sentence of an H3Error for one that is damaged or cut short."""
    try:
        # the file came from elsewhere: it may not make the library read others
        with av.open(str(path), container_options={"protocol_whitelist": "file"}) as container:
            if not container.streams.video:
                raise H3Error(f"{whose} holds no moving picture")
            names = container.format.name
            if "mp4" not in names.split(","):
                raise H3Error(f"{whose} is no mp4, though the server calls it so")
            picture = container.streams.video[0]
            heard = container.streams.audio[0] if container.streams.audio else None
            told, codec = picture.frames, picture.codec_context
            rate = picture.average_rate or picture.guessed_rate
            frames = samples = 0
            levels = FrameLevels()
            for packet in container.demux([picture] if heard is None else [picture, heard]):
                for frame in packet.decode():
                    if packet.stream is picture:
                        if frame.is_corrupt:
                            raise H3Error(f"{whose} is damaged from frame {frames} on")
                        frames += 1
                        seen = torch.from_numpy(frame.to_ndarray(format="rgb24")[::THINNED, ::THINNED])
                        levels.add(seen.permute(2, 0, 1)[None, :, None].float() / 255)
                    else:
                        samples += frame.samples
            if not frames:
                raise H3Error(f"{whose} holds no frame")
            if told and frames < told:
                raise H3Error(f"{whose} is cut short: it tells {told} frames and holds {frames}")
            sound = {}
            if heard is not None:
                ears = heard.codec_context
                sound = {"sound_codec": ears.name, "sound_rate": ears.sample_rate, "sound_channels": ears.channels}
                sound["sound_seconds"] = samples / ears.sample_rate if ears.sample_rate else 0.0
            return Returned(
                "mp4",
                codec.name,
                codec.width,
                codec.height,
                frames,
                float(rate or 0),
                **sound,
                warnings=tuple(levels.judge()),
            )
    except (av.FFmpegError, EOFError, ValueError) as error:
        if isinstance(error, H3Error):
            raise
        raise H3Error(f"{whose} is damaged or cut short ({type(error).__name__})") from None


def differences(clip: Returned, expected: Expected | None) -> list[str]:
    """What of a clip is not as it was asked for, each a sentence. Without ``expected``: what no clip may be."""
    said = []
    if expected is not None:
        if (clip.width, clip.height) != (expected.width, expected.height):
            said.append(f"the size is {clip.width}x{clip.height}, {expected.width}x{expected.height} was asked for")
        if clip.frames != expected.frames:
            said.append(f"the clip has {clip.frames} frames, {expected.frames} were asked for")
    if abs(clip.fps - FPS) > 1e-3:
        said.append(f"the clip has {clip.fps:.5g} frames a second, {FPS} were asked for")
    if clip.codec != "h264":
        said.append(f"the picture is coded as {clip.codec}, h264 was expected")
    if clip.sound_seconds is None:
        return [*said, "the clip has no sound"]
    if clip.sound_codec != "aac":
        said.append(f"the sound is coded as {clip.sound_codec}, aac was expected")
    if clip.sound_rate != SAMPLE_RATE:
        said.append(f"the sound has {clip.sound_rate} Hz, {SAMPLE_RATE} were expected")
    if clip.sound_channels != AUDIO_CHANNELS:
        said.append(f"the sound has {clip.sound_channels} channel(s), {AUDIO_CHANNELS} were expected")
    length = clip.frames / (clip.fps or FPS)
    slack = 2 * AAC_BLOCK / (clip.sound_rate or SAMPLE_RATE)  # a coder's first and last block
    if abs(clip.sound_seconds - length) > slack:
        said.append(f"the sound lasts {clip.sound_seconds:.3f} s, the picture {length:.3f} s")
    return said
