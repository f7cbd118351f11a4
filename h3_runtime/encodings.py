"""Latents of pictures, clips and sounds kept by what they were made from, so that a new seed reads no VAE to encode.

    pixels or samples, sampled or mean, VAE, versions ──MediaOrigin.key──▶ LatentCache ─▶ latent of an earlier encode
                                                                                       └▶ None: the VAE encodes it

The key covers the pixels as they reach the VAE: placed on the canvas, cut and resized by the recipe. So a changed file,
size, length or recipe gives another key, and a copy under another name the same. Where a VAE's weights lie plays no
part: placement changes no bit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from . import __version__
from .checkpoint.info import CheckpointInfo
from .checkpoint.kept import KeptResults, bytes_sha256, versions
from .checkpoint.reader import SafetensorsFile
from .checkpoint.writer import WORDS, write_safetensors
from .errors import CheckpointError

KIND = "h3_runtime.kept_latent"
SUFFIX = ".h3-latent.safetensors"
MEMORY_BYTES = 256 << 20
DISK_BYTES = 2 << 30


class LatentCache(KeptResults[Tensor]):
    """Encoded latents by key (``MediaOrigin.key``), float32 on the CPU."""

    suffix, words = SUFFIX, "the latents of the pictures and sounds"

    def __init__(
        self, folder: str | Path | None = None, memory_bytes: int = MEMORY_BYTES, disk_bytes: int = DISK_BYTES
    ):
        super().__init__(folder, memory_bytes, disk_bytes)

    def write(self, path: Path, key: str, result: Tensor) -> None:
        entries = {"latent": (WORDS[result.dtype], tuple(result.shape))}
        about = {KIND: json.dumps({"key": key, "sha256": bytes_sha256(result)})}
        write_safetensors(path, entries, [("latent", result)], about)

    def read(self, path: Path, key: str) -> Tensor | None:
        file = SafetensorsFile(path)
        try:
            about = json.loads(file.metadata[KIND])
            kept_key, digest = about["key"], about["sha256"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path.name} is no kept latent ({error!r})") from None
        if kept_key != key:
            return None
        latent = file.read("latent")
        if bytes_sha256(latent) != digest:
            raise CheckpointError(f"{path.name} holds other bytes than were written")
        return latent

    def nbytes(self, result: Tensor) -> int:
        return result.nbytes


@dataclass(frozen=True)
class MediaOrigin:
    """What beside its pixels or samples decides a latent: the VAE by content, library versions and kind of device."""

    vae: str
    made_with: tuple[tuple[str, str], ...]

    @staticmethod
    def of(vae: CheckpointInfo, device: str | torch.device) -> MediaOrigin:
        """The origin of what this ``vae`` encodes on ``device``."""
        made_with = versions(device, kernels=vae.kernels)
        return MediaOrigin(vae.fingerprint, (("runtime", __version__), *made_with))

    def key(self, medium: np.ndarray | Tensor, how: str) -> str:
        """SHA-256 over everything that decides the latent of ``medium``; ``how``: posterior sampled, or mean."""
        values = medium if isinstance(medium, np.ndarray) else medium.cpu().numpy()
        values = np.ascontiguousarray(values)
        about = [how, self.vae, self.made_with, str(values.dtype), values.shape]
        digest = hashlib.sha256(json.dumps(about).encode())
        digest.update(memoryview(values.reshape(-1)).cast("B"))
        return digest.hexdigest()


@dataclass(frozen=True)
class Encode:
    """One encode that a job needs: ``medium`` (uint8 [f, H, W, 3] or float32 [2, L]) ``how`` by ``run(vae)``."""

    medium: np.ndarray | Tensor
    how: str
    run: Callable[[torch.nn.Module], Tensor]


def encode_each(
    wanted: Iterable[Encode],
    load: Callable[[], torch.nn.Module],
    cache: LatentCache,
    origin: MediaOrigin | None,
    notes: list[str],
) -> list[Tensor]:
    """The latent of each, in order; ``load`` gives the VAE and is called only when one is not kept.

    ``origin`` None: nothing is known of the VAE, so nothing is kept. A folder that refuses a latent is told in
    ``notes``, once.
    """
    latents, vae = [], None
    for one in wanted:
        key = None if origin is None else origin.key(one.medium, one.how)
        latent = None if key is None else cache.look_up(key)
        if latent is None:
            vae = load() if vae is None else vae
            latent = one.run(vae)
            if key is None or getattr(vae, "fell_back", False):  # the key names the device it did not run on
                refused = None
            else:
                refused = cache.keep(key, latent)
            if refused and refused not in notes:
                notes.append(refused)
        latents.append(latent)
    return latents
