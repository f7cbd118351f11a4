"""Latents in a file: a finished clip, or a run stopped part-way that can be taken up again.

    latent.safetensors   video, audio              the clip, or the noisy state
                         source_video, source_audio   the clean source (masks, denoise), where there is one
                         metadata: frames, size, forwards done, sigmas, fingerprint of the job

All tensors are float32: 0..k then k..end through a file equals the unsplit run bit for bit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from .checkpoint.kept import bytes_sha256
from .checkpoint.reader import SafetensorsFile
from .errors import CheckpointError, H3Error
from .geometry import Canvas
from .job import AVLatent
from .unfinished import drop, part_path

KIND = "h3_runtime.latent"
HASHED = ("video", "audio", "source_video", "source_audio")


@dataclass(frozen=True)
class PartialLatent:
    """What a latent file holds. ``info`` is its metadata: ``done`` forwards, ``finished`` and more."""

    canvas: Canvas
    latent: AVLatent
    source: AVLatent | None = None
    info: dict = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return bool(self.info.get("finished"))


def save_latent(
    path: str | Path,
    canvas: Canvas,
    latent: AVLatent,
    source: AVLatent | None = None,
    extra: Mapping[str, Tensor] | None = None,
    **info,
) -> Path:
    """Write ``latent`` (and ``source``) atomically; ``extra`` are further tensors, ``info`` is JSON metadata.

    H3Error when the disk refuses.
    """
    path = Path(path)
    tensors = {"video": latent.video, "audio": latent.audio, **(extra or {})}
    if source is not None:
        tensors |= {"source_video": source.video, "source_audio": source.audio}
    info = {"width": canvas.width, "height": canvas.height, "num_frames": canvas.num_frames, **info}
    info["sha256"] = bytes_sha256(*(tensors[name] for name in HASHED if name in tensors))
    part = part_path(path)
    try:
        part.write_bytes(save({k: v.contiguous() for k, v in tensors.items()}, {KIND: json.dumps(info)}))
        os.replace(part, path)
    except OSError as error:
        raise H3Error(
            f"{path} could not be written ({error.strerror}): free some space or choose another folder"
        ) from None
    finally:
        drop(part)
    return path


def load_latent(path: str | Path) -> PartialLatent:
    """Read a latent file. CheckpointError where it is not one, H3Error where its shapes do not fit its size."""
    file = SafetensorsFile(path)
    if KIND not in (file.metadata or {}):
        raise CheckpointError(f"{Path(path).name} is not a latent saved by this runtime: its metadata lacks {KIND}")
    try:
        info = json.loads(file.metadata[KIND])
        canvas = Canvas.fit(info["num_frames"], (info["width"], info["height"]))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{Path(path).name} does not tell its size ({error}): save it again") from None
    missing = [name for name in ("video", "audio") if name not in file.shapes]
    if missing:
        raise CheckpointError(f"{Path(path).name} lacks the tensor {missing[0]}: save it again")
    latent = AVLatent(file.read("video"), file.read("audio"))
    source = None
    if "source_video" in file.shapes:
        source = AVLatent(file.read("source_video"), file.read("source_audio"))
    for part in (latent, source):
        if part is not None and not part.fits(canvas):
            raise H3Error(f"{Path(path).name}: its tensors do not fit its own size {canvas.width}x{canvas.height}")
    held = [tensor for part in (latent, source) if part is not None for tensor in (part.video, part.audio)]
    if info.get("sha256", digest := bytes_sha256(*held)) != digest:
        raise CheckpointError(f"{Path(path).name} is damaged: it holds other bytes than were written; save it again")
    return PartialLatent(canvas, latent, source, info)
