"""Layers as they are computed from, in one file: transformed once, then read straight into the ring.

    layouts, read(layer) ─once, atomic─▶ FOLDER/KEY.h3-layers.safetensors   layer.0 ... layer.n  uint8, and their sums
    the same key again   ─reused──────▶ read(layer, out): one read into the slot; each layer's sum is checked once

The key covers all that decides the bytes: the checkpoint, how each tensor is made of it, LoRA factors, the layout of
a slot, this version. A file that is damaged is refused and never repaired in silence. A folder of these may be deleted
at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from pathlib import Path

import torch
from torch import Tensor

from .. import __version__
from ..checkpoint.reader import SafetensorsFile
from ..checkpoint.writer import write_safetensors
from ..errors import CheckpointError, H3Error
from .streaming import LayerLayout

SUFFIX = ".h3-layers.safetensors"
KEY = "h3_runtime.layers"
SUMS = "sums"  # int64 [layers], crc32 of each layer
MARGIN = 1 << 26  # bytes of disk left free

Read = Callable[[int, dict[str, Tensor]], None]


def layers_key(
    fingerprint: str, how: Sequence, layouts: Sequence[LayerLayout], extras: Sequence[dict[str, Tensor]]
) -> str:
    """Hex digest that names the bytes of these layers. ``fingerprint`` of the checkpoint, ``how`` each layer's pieces
    are made of it, ``extras`` tensors of each layer that no checkpoint holds."""
    digest = hashlib.sha256(json.dumps([__version__, fingerprint, how], default=str).encode())
    for layout, extra in zip(layouts, extras):
        digest.update(repr([astuple(entry) for entry in layout.entries]).encode())
        for name, tensor in extra.items():
            digest.update(name.encode())
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


class ConvertedStore:
    """The layers of a converted file from ``first`` on: the interface of ``streaming.DiskStore``. ``notes``: one
    sentence."""

    def __init__(self, path: Path, key: str, layouts: Sequence[LayerLayout], first: int, note: str):
        self.path, self.layouts, self.first, self.notes = path, list(layouts), first, (note,)
        try:
            self.file = SafetensorsFile(path)
            self._check_header(key)
            self.sums = self.file.read(SUMS).tolist()
        except CheckpointError as error:
            raise self._damaged(str(error)) from error
        self.checked: set[int] = set()
        self.lock = threading.Lock()

    def layout(self, layer: int) -> LayerLayout:
        return self.layouts[layer + self.first]

    def read(self, layer: int, out: Tensor) -> None:
        layer += self.first
        flat = self.file.read(f"layer.{layer}", out[: self.layouts[layer].nbytes])
        if layer not in self.checked:
            if zlib.crc32(memoryview(flat.numpy())) != self.sums[layer]:
                raise self._damaged(f"layer {layer} is not what was written")
            with self.lock:
                self.checked.add(layer)

    def _check_header(self, key: str) -> None:
        wanted = {f"layer.{index}": (layout.nbytes,) for index, layout in enumerate(self.layouts)}
        if self.file.metadata.get(KEY) != key or self.file.shapes != {**wanted, SUMS: (len(self.layouts),)}:
            raise CheckpointError("it holds other layers than its name says")

    def _damaged(self, reason: str) -> H3Error:
        return H3Error(f"the converted file {self.path} is damaged ({reason}): delete it, and it is made again")


def converted_store(
    folder: str | os.PathLike, key: str, layouts: Sequence[LayerLayout], read: Read, first: int = 0
) -> ConvertedStore:
    """The converted file of ``key`` in ``folder``, written by ``read`` where it is not there.

    H3Error for a folder or disk that has no place for it, and for a damaged file. Host memory holds one layer.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise H3Error(f"{folder} is not a folder that exists: make it, or choose another one for the converted file")
    path = folder / (key + SUFFIX)
    size = sum(layout.nbytes for layout in layouts)
    if path.is_file():
        return ConvertedStore(path, key, layouts, first, f"converted weights are reused from {path}")
    free = shutil.disk_usage(folder).free
    if size + MARGIN > free:
        raise H3Error(
            f"the converted weights take {size:,} bytes and {folder} has {free:,} free: choose another folder, or "
            "leave it out"
        )
    entries = {f"layer.{index}": ("U8", (layout.nbytes,)) for index, layout in enumerate(layouts)}
    entries[SUMS] = ("I64", (len(layouts),))
    write_safetensors(path, entries, _tensors(layouts, read), {KEY: key})
    return ConvertedStore(path, key, layouts, first, f"weights were converted once into {path} ({size / 1e9:.1f} GB)")


def _tensors(layouts: Sequence[LayerLayout], read: Read) -> Iterator[tuple[str, Tensor]]:
    sums = []
    for layer, layout in enumerate(layouts):
        flat = torch.zeros(layout.nbytes, dtype=torch.uint8)  # zeros between tensors: the same bytes every time
        read(layer, layout.views(flat))
        sums.append(zlib.crc32(memoryview(flat.numpy())))
        yield f"layer.{layer}", flat
    yield SUMS, torch.tensor(sums, dtype=torch.int64)
