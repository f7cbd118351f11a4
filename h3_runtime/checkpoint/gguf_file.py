"""GGUF files as one more source of tensors: header parsed and checked here, blocks handed out as they are stored.

    file.gguf   [GGUF][version][tensors n][pairs m][m key-value pairs][n tensor entries][padding][payload]
                                                 |                  |
                                tolerated, none in the files of     name, dims (fastest first), type, offset
                                the two public makers

        read("blocks.0.attn.qkv_proj.weight")  F32, F16, BF16 -> the tensor
                                               Q8_0, Q4_K ... -> uint8 [rows, bytes of a row], still quantised

Shapes are the logical ones, in PyTorch's order. City96's ``comfy.gguf.orig_shape.NAME`` replaces a shape that was
folded for the format. What the file says it is (``general.architecture``: wan, minimax_h3, nothing) decides nothing:
tensors tell. Reading the header needs no library; decoding the blocks is quant/gguf.py's.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..quant.gguf import BLOCK_TYPES, block_type
from .reader import (
    TensorEntry,
    TensorSource,
    listed,
    open_binary,
    open_source,
    read_into,
    read_rows_into,
    refuse_unfinished,
)

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT_KEY, DEFAULT_ALIGNMENT = "general.alignment", 32
SHAPE_KEY = "comfy.gguf.orig_shape."
MAX_DIMS = 8
MAX_TEXT = 1 << 20  # bytes of one string
MAX_HEADER_BYTES = 100_000_000

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
PLAIN |= {"I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64}

# value types of key-value pairs: struct code of the scalars
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, LIST = 8, 9
SHOWN_LIST = 16  # longer lists (tokenisers) are walked over, not kept


def is_quantised_type(dtype: str) -> bool:
    """Whether ``dtype`` is the word of a GGUF type whose values stand in blocks (Q8_0, Q4_K ...)."""
    return dtype not in PLAIN and any(block.name == dtype and block.values > 1 for block in BLOCK_TYPES.values())


class GGUFFile:
    """One GGUF file whose header has been checked; a ``TensorSource``. CheckpointError names the file when it is none.

    ``dtypes`` holds F32, F16, BF16 or the word of a quantised type (Q8_0, Q4_K ...). ``metadata`` holds the key-value
    pairs as words (lists as JSON, long ones left out).
    """

    sharded = False

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.files = (self.path,)
        refuse_unfinished(self.path)
        with open_binary(self.path) as file:
            self.size = os.fstat(file.fileno()).st_size
            head = _Head(self.path, file, self.size)
            self.header, self.metadata = _parse(head)
        if not self.header:
            raise CheckpointError(f"{self.path} is a GGUF file without tensors; download it again.")
        self.dtypes = {name: entry.dtype for name, entry in self.header.items()}
        self.shapes = {name: self._shape(name, entry) for name, entry in self.header.items()}
        extra = self.size - max((entry.stop for entry in self.header.values()), default=self.size)
        self.notes = (f"{self.path.name}: {extra:,} bytes after the payload are ignored",) if extra > 0 else ()

    def _shape(self, name: str, entry: TensorEntry) -> tuple[int, ...]:
        told = self.metadata.get(SHAPE_KEY + name)
        if told is None:
            return entry.shape
        try:
            shape = tuple(json.loads(told))
            good = 0 < len(shape) <= MAX_DIMS and all(type(n) is int and n > 0 for n in shape)
        except (ValueError, TypeError):
            good = False
        if not good or math.prod(shape) != math.prod(entry.shape):
            raise CheckpointError(
                f"{self.where(name)} has {list(entry.shape)} values and the metadata {SHAPE_KEY}{name} says {told}; "
                "download the file again."
            )
        return shape

    def nbytes(self, name: str) -> int:
        return self._entry(name).nbytes

    def where(self, name: str) -> str:
        return f"{self.path}: {name}"

    def read(self, name: str, out: Tensor | None = None) -> Tensor:
        """The tensor ``name`` in host memory: plain types as they are, quantised ones as uint8 [rows, bytes of a row].

        A row is the last axis as the file stores it. ``out`` takes the values if given (same type and shape).
        """
        entry = self._entry(name)
        if entry.dtype in PLAIN:
            shape, dtype = self.shapes[name], PLAIN[entry.dtype]
        else:
            block = block_type(entry.dtype)
            row = entry.shape[-1] // block.values * block.nbytes
            shape, dtype = (math.prod(entry.shape[:-1]), row), torch.uint8
        if out is None:
            out = torch.empty(shape, dtype=dtype)
        assert out.dtype == dtype and tuple(out.shape) == shape, (out.dtype, out.shape, entry)
        assert out.is_contiguous() and out.device.type == "cpu"
        if entry.nbytes:
            buffer = memoryview(out.view(-1).view(torch.uint8).numpy())
            read_into(self.path, self.size, buffer, entry.start)
        return out

    def read_rows(self, name: str, rows: Sequence[int]) -> Tensor:
        """Some rows of the first axis of ``shapes[name]``, as ``read`` gives their bytes, and no other byte is read.

        ``rows``: rising, each once. A row must be whole blocks: a table that the file has folded is cut anew.
        """
        entry, shape, dtype = self._entry(name), self.shapes[name], PLAIN.get(self._entry(name).dtype)
        if dtype is None:
            block, values = block_type(entry.dtype), math.prod(shape[1:])
            if values % block.values:
                raise CheckpointError(f"{self.where(name)} has rows of {values} values, which are no whole blocks.")
            shape, dtype = (shape[0], values // block.values * block.nbytes), torch.uint8
        out = torch.empty(len(rows), *shape[1:], dtype=dtype)
        read_rows_into(self.path, self.size, out, rows, entry.start)
        return out

    def _entry(self, name: str) -> TensorEntry:
        try:
            return self.header[name]
        except KeyError:
            raise CheckpointError(f"{self.path} has no tensor {name!r}.") from None


def is_gguf(path: str | os.PathLike) -> bool:
    """Whether the file at ``path`` begins as a GGUF file does."""
    path = Path(path)
    if not path.is_file():
        return False
    with open_binary(path) as file:
        return file.read(4) == MAGIC


def open_weights(path: str | os.PathLike) -> TensorSource:
    """Any weights: safetensors file, shards, index, GGUF file, or a folder that holds one checkpoint of any kind."""
    path = Path(path)
    if path.is_dir() and not any(path.glob("*.safetensors*")):
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return GGUFFile(files[0])
        if files:
            raise CheckpointError(
                f"{path} holds {len(files)} files ({listed(f.name for f in files)}); name the one to load."
            )
    return GGUFFile(path) if is_gguf(path) else open_source(path)


class _Head:
    """The header, read front to back; every read is checked against the end of the file."""

    def __init__(self, path: Path, file, size: int):
        self.path, self.file, self.size, self.place = path, file, size, 0
        self.text = bytearray()

    def take(self, count: int, what: str) -> bytes:
        stop = self.place + count
        if stop > self.size:
            raise CheckpointError(
                f"{self.path} is truncated: {stop:,} bytes expected up to its {what}, {self.size:,} found. "
                "Download it again."
            )
        if stop > MAX_HEADER_BYTES:
            raise self.damaged(f"its {what} lies {stop:,} bytes in, past any header")
        while len(self.text) < stop:
            piece = self.file.read(max(stop - len(self.text), 1 << 16))
            if not piece:
                raise CheckpointError(f"{self.path} cannot be read past byte {len(self.text):,}. Check the disk.")
            self.text += piece
        piece = bytes(self.text[self.place : stop])
        self.place = stop
        return piece

    def number(self, code: str, what: str):
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def count(self, what: str, smallest: int) -> int:
        """A count of things that take at least ``smallest`` bytes each."""
        number = self.number("Q", what)
        if number * smallest > self.size - self.place:
            raise self.damaged(f"{number:,} {what} do not fit in {self.size:,} bytes")
        return number

    def words(self, what: str) -> str:
        length = self.number("Q", what)
        if length > MAX_TEXT:
            raise self.damaged(f"{what} of {length:,} bytes")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            raise self.damaged(f"{what} that is no UTF-8") from None

    def damaged(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: the GGUF header is damaged ({reason}); download the file again.")


def _parse(head: _Head) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Entries in payload order, and the key-value pairs in words."""
    if head.take(4, "first bytes") != MAGIC:
        raise CheckpointError(f"{head.path} is not a GGUF file.")
    version = head.number("I", "version")
    if version not in VERSIONS:
        raise CheckpointError(
            f"{head.path} is GGUF version {version}; versions {listed(map(str, VERSIONS))} can be read; convert it."
        )
    tensors, pairs = head.count("tensors", 24), head.count("key-value pairs", 13)
    metadata: dict[str, str] = {}
    for _ in range(pairs):
        key = head.words("a key")
        value = _value(head, head.number("I", "type of a value"), key, 0)
        if value is not None:
            metadata[key] = value if isinstance(value, str) else json.dumps(value)
    infos = [_info(head) for _ in range(tensors)]
    try:
        alignment = int(metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT))
    except ValueError:
        alignment = 0
    if alignment < 1 or alignment % 8 or alignment > 1 << 20:
        raise head.damaged(f"alignment {metadata[ALIGNMENT_KEY]}")
    return _placed(head, infos, -(-head.place // alignment) * alignment), metadata


def _value(head: _Head, kind: int, key: str, depth: int):
    """One value: number, words, or a list (None where it is too long to keep)."""
    if kind in SCALARS:
        return head.number(SCALARS[kind], key)
    if kind == TEXT:
        return head.words(key)
    if kind != LIST or depth > 2:
        raise head.damaged(f"{key!r} has the unknown type {kind}")
    inner = head.number("I", key)
    count = head.count(f"items of {key!r}", 1)
    if inner in SCALARS:
        size = struct.calcsize("<" + SCALARS[inner])
        items = head.take(count * size, key)
        return list(struct.unpack(f"<{count}{SCALARS[inner]}", items)) if count <= SHOWN_LIST else None
    items = [_value(head, inner, key, depth + 1) for _ in range(count)]
    return items if count <= SHOWN_LIST else None


def _info(head: _Head) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape (slowest axis first), type and offset into the payload."""
    name = head.words("a tensor's name")
    axes = head.number("I", f"axes of {name!r}")
    if not 0 <= axes <= MAX_DIMS:
        raise head.damaged(f"{name!r} has {axes} axes")
    sizes = [head.number("Q", f"shape of {name!r}") for _ in range(axes)]
    kind, offset = head.number("I", f"type of {name!r}"), head.number("Q", f"offset of {name!r}")
    if any(not 0 <= n < 1 << 40 for n in sizes) or math.prod(sizes) >= 1 << 50:
        raise head.damaged(f"{name!r} has the impossible shape {sizes[::-1]}")
    return name, tuple(reversed(sizes)), kind, offset


def _placed(head: _Head, infos: list, start: int) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    for name, shape, kind, offset in infos:
        if name in entries:
            raise head.damaged(f"{name!r} appears twice")
        block = BLOCK_TYPES.get(kind)
        if block is None:
            raise CheckpointError(
                f"{head.path}: {name} has the GGUF type {kind}, which this version does not know; use a file of a "
                f"known one ({listed(known.name for known in BLOCK_TYPES.values())})."
            )
        width = shape[-1] if shape else 1
        if width % block.values:
            raise head.damaged(f"{name!r} has rows of {width:,} values, which are no {block.name} blocks")
        first = start + offset
        entries[name] = TensorEntry(block.name, shape, first, first + math.prod(shape) // block.values * block.nbytes)
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
    _check_extent(head, entries)
    return entries


def _check_extent(head: _Head, entries: dict[str, TensorEntry]) -> None:
    """No two tensors overlap and the last one ends inside the file."""
    before, stop = "", 0
    for name, entry in entries.items():
        if entry.start < stop:
            raise head.damaged(f"{name!r} begins at byte {entry.start:,}, inside {before!r}")
        before, stop = name, entry.stop
    if stop > head.size:
        raise CheckpointError(
            f"{head.path} is truncated: {stop:,} bytes expected, {head.size:,} found ({stop - head.size:,} missing). "
            "Download it again."
        )
