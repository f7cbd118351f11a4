"""IMAGE, AUDIO and VIDEO as the runtime's media, and back; the node that makes media to try things with.

IMAGE [F, H, W, C] 0..1 ─▶ uint8 [F, H, W, 3]          AUDIO {waveform [B, C, L], rate} ─▶ float32 [2, L] at 32 kHz
VIDEO of the host, a file or components ─▶ frames at 24 fps with sound
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from . import host
from .sockets import CATEGORY, Node, io

FPS = 24.0
SAMPLE_RATE = 32000


def take_frames(images: Tensor, name: str, notes: list[str]):
    """uint8 [F, H, W, 3] of an IMAGE. H3Error for NaN."""
    from ..h3_runtime import H3Error, to_uint8

    if images.ndim != 4:
        raise H3Error(f"{name} has shape {list(images.shape)}: give an IMAGE [frames, height, width, channels]")
    if images.shape[-1] > 3:
        notes.append(f"{name}: its alpha channel is left out")
    elif images.shape[-1] == 1:
        images = images.expand(*images.shape[:-1], 3)
        notes.append(f"{name}: grey read as RGB")
    return to_uint8(images[..., :3])


def take_sound(audio: dict | None, name: str, notes: list[str]) -> Tensor | None:
    """float32 [2, L] at 32 kHz of an AUDIO; None for none."""
    from ..h3_runtime import H3Error, resample_sound

    if audio is None:
        return None
    waveform, rate = audio.get("waveform"), audio.get("sample_rate")
    shape = list(getattr(waveform, "shape", ()))
    if len(shape) not in (2, 3) or 0 in shape[:-1] or not isinstance(rate, (int, float)) or not rate >= 1:
        raise H3Error(
            f"{name}: the sound has shape {shape} at {rate} Hz: give an AUDIO [1, channels, samples] at 1 Hz or more"
        )
    waveform, rate = waveform.detach().to("cpu", torch.float32, copy=True), int(rate)
    waveform = waveform[None] if waveform.ndim == 2 else waveform
    if waveform.shape[0] > 1:
        notes.append(f"{name}: the first of {waveform.shape[0]} sounds is used")
    sound = waveform[0]  # [C, L]
    if sound.shape[0] > 2:
        notes.append(f"{name}: {sound.shape[0]} channels mixed down to one on both ears")
        sound = sound.mean(dim=0, keepdim=True)
    elif sound.shape[0] == 1:
        notes.append(f"{name}: mono sound repeated on both channels")
    if sound.shape[0] == 1:
        sound = sound.expand(2, -1)
    if rate != SAMPLE_RATE:
        notes.append(f"{name}: sound resampled from {rate} to {SAMPLE_RATE} Hz")
        sound = resample_sound(sound.contiguous(), rate)
    return sound.contiguous()


def take_clip(frames: Tensor, fps: float, name: str, notes: list[str]):
    """uint8 [F', H, W, 3] at 24 fps of IMAGE frames at ``fps``."""
    from ..h3_runtime import resample_slots

    pixels = take_frames(frames, name, notes)
    if fps == FPS or len(pixels) == 1:
        return pixels
    slots = resample_slots(len(pixels), fps)
    notes.append(f"{name}: {len(pixels)} frames at {fps:g} fps put on {len(slots)} at {FPS:g} fps")
    return pixels[slots]


def video_file(video) -> Path | None:
    """The whole file behind a VIDEO; None when it is in memory, or a part of a file."""
    if isinstance(video, (str, Path)):
        return Path(video)
    source = getattr(video, "get_stream_source", lambda: None)()
    window = getattr(video, "get_active_trim_window", lambda: (0.0, 0.0))()
    if isinstance(source, (str, Path)) and not any(window) and Path(source).is_file():
        return Path(source)
    return None


def take_media(video, name: str, notes: list[str]):
    """A VIDEO (or IMAGE frames at 24 fps) as the runtime's Media."""
    from ..h3_runtime import Media

    if isinstance(video, Tensor):
        return Media(frames=take_frames(video, name, notes), name=name)
    path = video_file(video)
    if path is not None:
        return Media(str(path))
    parts = video.get_components()
    if getattr(parts, "alpha", None) is not None:
        notes.append(f"{name}: its alpha channel is left out")
    frames = take_clip(parts.images, float(parts.frame_rate), name, notes)
    return Media(frames=frames, audio=take_sound(parts.audio, name, notes), name=name)


def give_images(frames) -> Tensor:
    """uint8 [F, H, W, 3] as IMAGE."""
    return torch.as_tensor(frames).float() / 255


def give_audio(sound: Tensor) -> dict:
    """[2, L] at 32 kHz as AUDIO."""
    return {"waveform": sound[None], "sample_rate": SAMPLE_RATE}


class SampleMedia(Node):
    """Media to try every input with."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3RuntimeSampleMedia",
            display_name="H3 Sample Media",
            category=f"{CATEGORY}/media",
            description="Makes a picture, a clip, a sound and a mask of one size, so that a workflow runs with nothing "
            "in the input folder: a red circle on grey and its tone, which the small carried model knows. Put Load "
            "Image, Load Video, Load Audio in its place.",
            search_aliases=["test image", "example video", "placeholder"],
            inputs=[
                io.Int.Input(
                    "width",
                    optional=True,
                    default=128,
                    min=32,
                    max=4096,
                    step=32,
                    tooltip="Width in pixels, a multiple of 32.",
                ),
                io.Int.Input(
                    "height",
                    optional=True,
                    default=128,
                    min=32,
                    max=4096,
                    step=32,
                    tooltip="Height in pixels, a multiple of 32.",
                ),
                io.Int.Input(
                    "frames",
                    optional=True,
                    default=22,
                    min=5,
                    max=3600,
                    step=17,
                    tooltip="Frames at 24 a second; raised to the next 17k + 5.",
                ),
            ],
            outputs=[
                io.Image.Output("picture", display_name="picture", tooltip="One picture: a red circle on the left."),
                io.Image.Output("clip", display_name="clip", tooltip="The circle moves to the right, at 24 fps."),
                io.Audio.Output(
                    "sound", display_name="sound", tooltip="A low tone that goes along, as long as the clip."
                ),
                io.Mask.Output("mask", display_name="mask", tooltip="White where the circle is, one mask per frame."),
                io.Image.Output("last", display_name="last", tooltip="The clip's last frame, as one picture."),
                io.Image.Output("middle", display_name="middle", tooltip="The clip's middle frame, as one picture."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    @host.runtime_mode
    def execute(cls, width=128, height=128, frames=22):
        from ..h3_runtime import sample_media

        made = sample_media(width, height, frames)
        count = len(made.clip)
        return cls.report(
            [f"{width}x{height}, {count} frames ({count / FPS:.3f} s)"],
            give_images(made.picture[None]),
            give_images(made.clip),
            give_audio(made.sound),
            made.mask,
            give_images(made.clip[-1:]),
            give_images(made.clip[count // 2 : count // 2 + 1]),
        )


NODES = [SampleMedia]
