"""A safetensors file written tensor by tensor, and seen under its name only when it is whole.

    entries: name -> (dtype word, shape)  ─▶ header ─▶ .OUT.x.part
    tensors, one at a time, in that order ─▶ payload ─▶ .OUT.x.part ─sync, rename─▶ OUT

Host memory holds one tensor. A write that fails or is stopped leaves nothing behind.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..unfinished import drop, part_path
from .reader import DTYPES

WORDS = {getattr(torch, name): word for word, (_, name) in DTYPES.items() if name and hasattr(torch, name)}
ALIGNMENT = 8  # the header is padded with spaces to it, as the format's own writer does

Entries = Mapping[str, tuple[str, tuple[int, ...]]]


def write_safetensors(
    path: str | os.PathLike, entries: Entries, tensors: Iterable[tuple[str, Tensor]], metadata: Mapping[str, str]
) -> int:
    """Write ``path`` and return its bytes. ``tensors`` must give the names of ``entries`` in their order, each in its
    dtype and shape. CheckpointError when the place cannot be written; the old file stays until the new one is whole."""
    path = Path(path)
    header, total = _header(entries, metadata)
    partial = part_path(path)
    try:
        with open(partial, "wb") as file:
            file.write(header)
            written = _write_payload(file, entries, tensors)
            assert written == total, (written, total)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}; choose another place.") from None
    finally:
        drop(partial)
    return len(header) + total


def _header(entries: Entries, metadata: Mapping[str, str]) -> tuple[bytes, int]:
    fields: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, (word, shape) in entries.items():
        stop = position + math.prod(shape) * DTYPES[word][0] // 8
        fields[name] = {"dtype": word, "shape": list(shape), "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text, position


def _write_payload(file, entries: Entries, tensors: Iterable[tuple[str, Tensor]]) -> int:
    expected, written = iter(entries.items()), 0
    for name, tensor in tensors:
        wanted, (word, shape) = next(expected)
        assert (name, WORDS[tensor.dtype], tuple(tensor.shape)) == (wanted, word, shape), (name, wanted, word, shape)
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        file.write(memoryview(data))
        written += data.nbytes
    assert next(expected, None) is None
    return written
