"""A RenderRequest made ready to travel: what no server takes is refused by its name, media become bytes.

    RenderRequest ─refuse─▶ guides.place (canvas, cuts, masks, sentences) ─▶ Shipment
        first, last frame   on the canvas, as the local render has them      PNG
        reference picture   upright, at its own size                         PNG
        reference clip      24 fps, no larger than the canvas, cut to it     MP4 (H.264, AAC)
        reference sound     cut to the render                                WAV (16 bit, 32 kHz)
        source, masks       on the canvas; masks on the latent grid          MP4, numbers

Nothing of a file but its pixels and samples leaves this machine: no name, no path, no tags.
"""

from __future__ import annotations

import io
import tempfile
import wave
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..errors import H3Error
from ..geometry import AUDIO_CHANNELS, FPS, SAMPLE_RATE, Canvas, audio_samples
from ..guides import Placed, place
from ..media import Encoding, Mp4Writer
from ..references import (
    check_clip_length,
    check_clips_together,
    describe_names,
    read_reference_clip,
    read_reference_picture,
    read_reference_sound,
    read_soundtrack,
)
from ..request import ReferenceRequest, RenderRequest
from ..text.embeddings import names_embeddings
from ..text.shown import Shown
from .shipment import Shipment, Thing, count_kinds

SENT = Encoding(crf=6)
MAX_SEED = (1 << 63) - 1
MAX_OUTPUTS = 10
QUALITIES = ("lossless", "high")


def refuse(request: RenderRequest, quality: str, outputs: int) -> None:
    """H3Error, naming the input, for what neither engine can do."""
    default = RenderRequest("")
    for given, name, why in (
        (request.guides, "guides", "a server holds pictures at the first and the last frame only"),
        (request.embeds, "embeds", "a server encodes the prompt itself"),
        (names_embeddings(request.prompt), "embedding: in the prompt", "the file lies on this machine"),
        (request.state, "state", "a saved state goes on with the runtime that made it"),
        (request.start or request.stop is not None, "start and stop", "a server runs the whole schedule"),
        (request.denoise < 1, "denoise", "a server starts from pure noise"),
        (request.loras, "LoRA", "the file lies on this machine; a server uses those it was started with"),
        (request.quantise or request.exclude, "quantise", "a server holds its own weights"),
        (request.tile_batch != default.tile_batch, "tile batch", "a server decodes its own way"),
        (request.accelerators or request.few_step, "accelerate", "a server has its own ways: choose its quality"),
        (request.solver != default.solver, "solver", "a server samples with Euler"),
        (request.dtype, "dtype", "a server computes as it was started"),
        (request.recipe != default.recipe, "recipe", "a server prepares pictures its own way, near the reference's"),
    ):
        if given:
            raise H3Error(f"{name}: {why}; leave it out, or render here")
    if not request.prompt.strip():
        raise H3Error("prompt: it is empty, and a server takes none without words")
    if request.source is not None and request.mask is None and request.sound_mask is None:
        raise H3Error(
            "source: without a mask nothing of it would be kept; give a mask or a sound mask, or leave it out"
        )
    if quality not in QUALITIES:
        raise H3Error(f"quality {quality!r}: give {' or '.join(QUALITIES)}")
    if not 1 <= outputs <= MAX_OUTPUTS:
        raise H3Error(f"outputs {outputs}: give 1 to {MAX_OUTPUTS}")
    if request.seed + outputs - 1 > MAX_SEED:
        raise H3Error(f"seed {request.seed}: a server takes 0 to {MAX_SEED}; choose a smaller one")


def load_shipment(request: RenderRequest, quality: str, outputs: int) -> Shipment:
    """Read and place all media. H3Error for what cannot be used, before anything is sent."""
    placement = place(replace(request, references=()))
    notes = list(placement.notes)
    keyframes = tuple(
        (0 if guide.frame_index == 0 else -1, picture(guide.name, guide.frames[0])) for guide in placement.guides
    )
    references = tuple(_reference(asked, placement.canvas, notes) for asked in request.references)
    check_clips_together([round(thing.seconds * FPS) for thing in count_kinds(references)["video"]])
    source = None
    if placement.masks is not None:
        source = _source(placement.source)
        kept = "what is kept of it comes back through two encoders and the server's VAEs"
        notes.append(f"{source.name} is sent as H.264: {kept}")
    elif request.source is not None:
        notes.append("the masks make all of the picture and sound anew: the source is not sent")
    seen = [_shown(thing.kind, thing.name) for thing in references]
    if not seen:
        seen = [_shown("image", thing.name, True) for _, thing in keyframes]
    elif keyframes:
        notes.append(
            "beside references a server gives first and last frame no <Picture n>; rendered here they have one"
        )
    notes += describe_names(request.prompt, seen)
    if any(thing.kind in ("video", "video_audio") for thing in references):
        notes.append("reference clips are sent as H.264 at 24 fps")
    return Shipment(
        request, placement.canvas, quality, outputs, keyframes, references, placement.masks, source, tuple(notes)
    )


def _shown(kind: str, name: str, keyframe: bool = False) -> Shown:
    words = {"image": "picture", "video": "clip", "video_audio": "clip with sound", "audio": "sound"}[kind]
    return Shown(words, name, None if words == "sound" else np.zeros((1, 1, 1, 3), np.uint8), keyframe=keyframe)


def _reference(asked: ReferenceRequest, canvas: Canvas, notes: list[str]) -> Thing:
    name = asked.media.name
    if asked.kind == "image":
        return picture(name, read_reference_picture(asked.media, notes))
    if asked.kind == "audio":
        return sound(name, read_reference_sound(asked.media, canvas, "reference", notes))
    frames, _ = read_reference_clip(asked, "comfy", notes)  # at its own size where that is smaller than the canvas
    check_clip_length(name, len(frames))
    if len(frames) > canvas.num_frames:
        notes.append(f"{name}: the first {canvas.num_frames} of {len(frames)} frames are sent, as long as the render")
    heard = read_soundtrack(asked, canvas, "reference", notes)
    return clip(name, frames[: canvas.num_frames], heard)


def _source(source) -> Thing:
    if not isinstance(source, Placed):
        raise H3Error("source: a server takes a clip, and this is a saved latent; give the clip that it was saved from")
    return clip(source.name, source.frames, source.audio)


def picture(name: str, pixels: np.ndarray) -> Thing:
    """uint8 [H, W, 3] as PNG."""
    stream = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(stream, "PNG")
    return Thing("image", name, stream.getvalue(), "image/png", (pixels.shape[1], pixels.shape[0]))


def sound(name: str, samples: Tensor) -> Thing:
    """float [2, L] at 32 kHz as WAV of 16 bits."""
    whole = (samples.clamp(-1, 1) * 32767).round().to(torch.int16).t().contiguous().numpy()  # [L, 2]
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(AUDIO_CHANNELS)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes(whole.astype("<i2").tobytes())
    return Thing("audio", name, stream.getvalue(), "audio/wav", seconds=samples.shape[1] / SAMPLE_RATE)


def clip(name: str, frames: np.ndarray, samples: Tensor | None) -> Thing:
    """uint8 [F, H, W, 3] at 24 fps, with its sound where there is one, as MP4."""
    height, width = frames.shape[1:3]
    with tempfile.TemporaryDirectory(prefix="h3_clip_") as folder:
        path = Path(folder) / "clip.mp4"
        heard = None if samples is None else samples[:, : audio_samples(len(frames))]
        with Mp4Writer(path, width, height, len(frames), heard, encoding=SENT) as writer:
            writer.write(frames)
        data = path.read_bytes()
    kind = "video" if samples is None else "video_audio"
    return Thing(kind, name, data, "video/mp4", (width, height), len(frames) / FPS)
