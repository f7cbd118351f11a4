"""Weights on disk, one tensor at a time.

    file.safetensors    [8 bytes: N][N bytes: JSON header][payload: tensor, tensor, tensor ...]   (+ trailing bytes)
                              |              |                                                       tolerated
                        checked first   name -> dtype, shape, offsets     read(name) reads just these bytes

    folder/             model.safetensors.index.json  {"weight_map": {name: shard file}}
                        model-00001-of-00013.safetensors ...               each shard is a file as above

The header is parsed and checked by our own code before anything is allocated, so that every way of loading gives the
same verdict on a damaged file and names it with expected and found sizes. A file is opened for the length of one
read: no handle and no mapping outlives it, so the file can be renamed or deleted afterwards (Windows), and host
memory holds what was asked for and nothing else.
"""

import hashlib
import itertools
import json
import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the limit of the format itself
PAGE_BYTES = 1 << 20
SAMPLED_PAGES = 64
UNFILLED_FROM, UNFILLED_PLACES, UNFILLED_BYTES, UNFILLED_TAIL = 1 << 19, 16, 4096, 1 << 16
SHOWN = 10  # names listed in one message

# bits per element of every dtype word of the safetensors format; torch's own name where it has one
DTYPES: dict[str, tuple[int, str]] = {
    "BOOL": (8, "bool"),
    "U8": (8, "uint8"),
    "I8": (8, "int8"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "U16": (16, "uint16"),
    "I16": (16, "int16"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "U32": (32, "uint32"),
    "I32": (32, "int32"),
    "F32": (32, "float32"),
    "U64": (64, "uint64"),
    "I64": (64, "int64"),
    "F64": (64, "float64"),
    "C64": (64, "complex64"),
    "F4": (4, ""),
    "F6_E2M3": (6, ""),
    "F6_E3M2": (6, ""),
}

UNFINISHED_SUFFIXES = (".incomplete", ".part", ".partial", ".crdownload", ".download", ".tmp", ".aria2")


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: dtype word of the format, shape, first and one-past-last byte in the FILE."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class TensorSource(Protocol):
    """What a file and a folder of shards have in common. ``shapes`` and ``dtypes`` are keyed by the stored names."""

    path: Path
    files: tuple[Path, ...]
    sharded: bool
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    metadata: Mapping[str, str]
    notes: tuple[str, ...]

    def nbytes(self, name: str) -> int: ...

    def read(self, name: str, out: Tensor | None = None) -> Tensor: ...

    def read_rows(self, name: str, rows: Sequence[int]) -> Tensor: ...

    def where(self, name: str) -> str: ...


def listed(names: Iterable[str], between: str = ", ") -> str:
    """The first ten of a list of names, and how many more there are."""
    names = list(names)
    text = between.join(names[:SHOWN])
    return text if len(names) <= SHOWN else f"{text} and {len(names) - SHOWN} more"


class SafetensorsFile:
    """One safetensors file whose header has been checked. Raises CheckpointError, naming the file, when it is not one.

    Bytes after the payload are tolerated and noted (some published files have them); missing ones never are.
    """

    sharded = False

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.files = (self.path,)
        self.size, self.header, self.metadata = _read_header(self.path)
        self.shapes = {name: entry.shape for name, entry in self.header.items()}
        self.dtypes = {name: entry.dtype for name, entry in self.header.items()}
        extra = self.size - max((entry.stop for entry in self.header.values()), default=self.size)
        self.notes = (f"{self.path.name}: {extra:,} bytes after the payload are ignored",) if extra else ()

    def nbytes(self, name: str) -> int:
        return self._entry(name).nbytes

    def where(self, name: str) -> str:
        return f"{self.path}: {name}"

    def read(self, name: str, out: Tensor | None = None) -> Tensor:
        """The tensor ``name`` as stored, in host memory of its own; into ``out`` (same dtype and shape) if given."""
        entry, dtype = self._entry(name), self._type(name)
        if out is None:
            out = torch.empty(entry.shape, dtype=dtype)
        assert out.dtype == dtype and tuple(out.shape) == entry.shape, (out.dtype, out.shape, entry)
        assert out.is_contiguous() and out.device.type == "cpu"
        if entry.nbytes:
            read_into(self.path, self.size, memoryview(out.view(-1).view(torch.uint8).numpy()), entry.start)
        return out

    def read_rows(self, name: str, rows: Sequence[int]) -> Tensor:
        """``read(name)[rows]``, and no other byte of it is read. ``rows``: rising, each once."""
        entry = self._entry(name)
        out = torch.empty(len(rows), *entry.shape[1:], dtype=self._type(name))
        read_rows_into(self.path, self.size, out, rows, entry.start)
        return out

    def _type(self, name: str) -> torch.dtype:
        entry = self._entry(name)
        dtype = getattr(torch, DTYPES[entry.dtype][1] or "-", None)
        if dtype is None:
            raise CheckpointError(
                f"{self.where(name)} is stored as {entry.dtype}, which this PyTorch ({torch.__version__}) has no type "
                "for; use a bf16, fp16 or fp32 file."
            )
        return dtype

    def _entry(self, name: str) -> TensorEntry:
        try:
            return self.header[name]
        except KeyError:
            raise CheckpointError(f"{self.path} has no tensor {name!r}.") from None


class ShardedFolder:
    """The shards of one checkpoint, through the index that stands beside them.

    ``path`` is the folder (exactly one ``*.safetensors.index.json`` in it) or the index itself. A missing shard, a
    tensor that the index promises and the shard lacks, and a tensor that no index entry names are errors that say so.
    """

    sharded = True

    def __init__(self, path: str | os.PathLike):
        path = Path(path)
        self.index = path if path.is_file() else _only_index(path)
        self.path = self.index.parent
        weight_map = read_weight_map(self.index)
        names = sorted(set(weight_map.values()))
        absent = [name for name in names if not (self.path / name).is_file()]
        if absent:
            raise CheckpointError(
                f"{self.path}: {len(absent)} of {len(names)} shards are missing: {listed(absent)}. "
                f"Download every file that {self.index.name} lists."
            )
        shards = {name: SafetensorsFile(self.path / name) for name in names}
        self.files = tuple(shard.path for shard in shards.values())
        self._shard_of = {name: shards[shard] for name, shard in weight_map.items()}
        self._check_against_index(shards, weight_map)
        self.shapes = {name: shard.shapes[name] for name, shard in self._shard_of.items()}
        self.dtypes = {name: shard.dtypes[name] for name, shard in self._shard_of.items()}
        self.metadata = {key: text for shard in shards.values() for key, text in shard.metadata.items()}
        self.notes = tuple(note for shard in shards.values() for note in shard.notes)

    def _check_against_index(self, shards: dict[str, SafetensorsFile], weight_map: dict[str, str]) -> None:
        promised = [f"{name} ({shard})" for name, shard in weight_map.items() if name not in shards[shard].header]
        unnamed = [
            f"{name} ({file})"
            for file, shard in shards.items()
            for name in shard.header
            if weight_map.get(name) != file
        ]
        if promised or unnamed:
            parts = [f"listed but not in their shard: {listed(promised)}"] if promised else []
            parts += [f"in a shard but not listed there: {listed(unnamed)}"] if unnamed else []
            raise CheckpointError(
                f"{self.index} does not fit its shards; {'; '.join(parts)}. Download index and shards together."
            )

    def nbytes(self, name: str) -> int:
        return self._shard(name).nbytes(name)

    def read(self, name: str, out: Tensor | None = None) -> Tensor:
        """The tensor ``name`` as stored (see SafetensorsFile.read)."""
        return self._shard(name).read(name, out)

    def read_rows(self, name: str, rows: Sequence[int]) -> Tensor:
        """Some rows of the tensor ``name`` (see SafetensorsFile.read_rows)."""
        return self._shard(name).read_rows(name, rows)

    def where(self, name: str) -> str:
        return self._shard(name).where(name)

    def _shard(self, name: str) -> SafetensorsFile:
        try:
            return self._shard_of[name]
        except KeyError:
            raise CheckpointError(f"{self.path} has no tensor {name!r}.") from None


def open_source(path: str | os.PathLike) -> TensorSource:
    """A file, a shard (then all its siblings), an index, or a folder that holds one checkpoint."""
    path = Path(path)
    if path.name.endswith(".safetensors.index.json"):
        if not path.is_file():
            raise CheckpointError(f"{path} does not exist.")
        return ShardedFolder(path)
    if not path.is_dir():
        index = index_of_shard(path)
        return ShardedFolder(index) if index else SafetensorsFile(path)
    if any(path.glob("*.safetensors.index.json")):
        return ShardedFolder(path)
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return open_source(files[0])
    if not files:
        raise CheckpointError(f"{path} holds no .safetensors file; give the file or the folder that holds the weights.")
    if any("-of-" in file.name for file in files):
        raise CheckpointError(
            f"{path} holds shards ({listed(file.name for file in files)}) but no .safetensors.index.json; "
            "download the index file of the same repository into it."
        )
    raise CheckpointError(f"{path} holds {len(files)} files ({listed(f.name for f in files)}); name the one to load.")


def index_of_shard(path: Path) -> Path | None:
    """The index beside ``path`` that lists it as a shard, if there is one."""
    for index in sorted(path.parent.glob("*.safetensors.index.json")):
        if path.name in read_weight_map(index).values():
            return index
    return None


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> shard file name, from an index. Shards must lie beside it: a path to elsewhere is refused."""
    if index.stat().st_size > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{index} is {index.stat().st_size:,} bytes, far too large for an index; download it again."
        )
    try:
        weight_map = json.loads(index.read_bytes().decode("utf-8"))["weight_map"]
        good = bool(weight_map) and all(type(shard) is str for shard in weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not a shard index ({error}); download it again.") from None
    if not good:
        raise CheckpointError(f'{index} has no usable "weight_map"; download it again.')
    outside = sorted(
        {shard for shard in weight_map.values() if not shard or shard in (".", "..") or set(shard) & set("/\\:\0")}
    )
    if outside:
        raise CheckpointError(f"{index} points outside its folder ({listed(outside)}); shards must lie beside it.")
    return weight_map


def _only_index(folder: Path) -> Path:
    found = sorted(folder.glob("*.safetensors.index.json"))
    if len(found) != 1:
        raise CheckpointError(
            f"{folder} holds {len(found)} shard indexes ({listed(f.name for f in found)}); "
            "one is needed: give the index file itself."
        )
    return found[0]


def open_binary(path: Path):
    """``path`` for reading, unbuffered; every failure of the system becomes a CheckpointError."""
    try:
        return open(path, "rb", buffering=0)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; check the path.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror or error}.") from None


def read_into(path: Path, size: int, buffer: memoryview, start: int) -> None:
    """Fill ``buffer`` from byte ``start`` of a file that had ``size`` bytes when its header was checked."""
    read_runs(path, size, [(buffer, start)])


def read_rows_into(path: Path, size: int, out: Tensor, rows: Sequence[int], start: int) -> None:
    """Fill ``out`` [n, ...] with ``rows`` (rising) of a tensor of such rows that begins at byte ``start``. Neighbours
    are read in one go."""
    assert list(rows) == sorted(set(rows)) and len(rows) == len(out) and out.is_contiguous(), rows
    if not out.numel():
        return
    each = out[0].nbytes
    flat = memoryview(out.view(-1).view(torch.uint8).numpy())
    first, runs = 0, []
    for index in range(1, len(rows) + 1):
        if index == len(rows) or rows[index] != rows[index - 1] + 1:
            runs.append((flat[first * each : index * each], start + rows[first] * each))
            first = index
    read_runs(path, size, runs)


def read_runs(path: Path, size: int, runs: Iterable[tuple[memoryview, int]]) -> None:
    """Fill each buffer from its byte of a file that had ``size`` bytes when its header was checked."""
    with open_binary(path) as file:
        found = os.fstat(file.fileno()).st_size
        if found != size:
            raise CheckpointError(
                f"{path} changed while it was being read: {size:,} bytes at first, {found:,} now. "
                "Wait until it is complete and load it again."
            )
        for buffer, start in runs:
            file.seek(start)
            done = 0
            while done < len(buffer):  # one call reads at most 2 GB on some systems
                count = file.readinto(buffer[done:])
                if not count:
                    raise CheckpointError(
                        f"{path}: {len(buffer):,} bytes expected at offset {start:,}, {done:,} could be read. "
                        "Check the disk and download the file again."
                    )
                done += count


def refuse_unfinished(path: Path) -> None:
    """CheckpointError for a file that a download is still writing."""
    if path.suffix.lower() in UNFINISHED_SUFFIXES:
        raise CheckpointError(f"{path} is an unfinished download ({path.suffix}); let it finish, then load the result.")
    if path.with_name(path.name + ".aria2").exists():
        raise CheckpointError(f"{path} is still being downloaded ({path.name}.aria2 stands beside it); let it finish.")


def _read_header(path: Path) -> tuple[int, dict[str, TensorEntry], dict[str, str]]:
    """File size, tensor entries and ``__metadata__`` of a checked file."""
    refuse_unfinished(path)
    with open_binary(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(4096)
        length = struct.unpack("<Q", start[:8])[0] if len(start) >= 9 else 0
        # an opening brace after a length that fits is what only safetensors has: a header length may look like the
        # first bytes of a zip or a pickle
        if start[8:9] != b"{" or length > MAX_HEADER_BYTES or 8 + length > size:
            raise CheckpointError(f"{path} {_what_it_is(start, size, length)}")
        file.seek(8)
        text = file.read(length)
    try:
        entries, metadata = _parse_header(text, 8 + length)
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is damaged ({error}); download the file again.") from None
    expected = max((entry.stop for entry in entries.values()), default=8 + length)
    if expected > size:
        raise CheckpointError(
            f"{path} is truncated: {expected:,} bytes expected, {size:,} found ({expected - size:,} missing). "
            "Download it again."
        )
    return size, entries, metadata


def _what_it_is(start: bytes, size: int, length: int) -> str:
    """The rest of a sentence about a file that is not (a whole) safetensors file."""
    text = start.lstrip()[:64].lower()
    if size == 0:
        return "is empty (0 bytes): the download did not start; download it again."
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return "is a web page, not weights: the link gave a login or error page; download it again."
    if text.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the weights: run `git lfs pull`, or download the file itself."
    if start.startswith(b"GGUF"):
        return "is a GGUF file; a .safetensors file is needed here."
    if start.startswith(b"PK\x03\x04") or (start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05"):
        return "is a pickle (.pt, .pth, .ckpt, .bin), which can run code when opened and is refused; use .safetensors."
    if start[8:9] == b"{" and length <= MAX_HEADER_BYTES:
        return f"is truncated: {8 + length:,} bytes expected for the header alone, {size:,} found. Download it again."
    if not any(start):
        return f"begins with zeros ({size:,} bytes): a download that was reserved and never filled; download it again."
    return f"is not a safetensors file ({size:,} bytes, first bytes {start[:8].hex(' ')}); use .safetensors weights."


def refuse_unfilled(paths: Iterable[str | os.PathLike]) -> None:
    """CheckpointError for a file of weights that ends in zeros, or that is zeros for a quarter: a download that was
    reserved on disk and never filled has its full size and a good header.

    Looked at are a few places, however large the file; smaller ones are left to the checks of values.
    """
    for path in map(Path, paths):
        size = path.stat().st_size
        if size < UNFILLED_FROM:
            continue
        places = places_looked_at(size)
        with open_binary(path) as file:
            empty = [not any(_bytes_at(file, place, UNFILLED_BYTES)) for place in places]
        runs = [len(list(run)) for zeros, run in itertools.groupby(empty[:UNFILLED_PLACES]) if zeros]
        where = "ends in zeros" if all(empty[-2:]) else ""
        if not where and max(runs, default=0) >= UNFILLED_PLACES // 4:
            where = f"is zeros from about byte {places[empty.index(True)]:,} on"
        if where:
            raise CheckpointError(
                f"{path} {where}, though it has its full size ({size:,} bytes): a download that was reserved and never "
                "filled; download it again."
            )


def places_looked_at(size: int) -> list[int]:
    """Where ``refuse_unfilled`` looks: evenly over the file, and twice at its end."""
    spread = [size * index // UNFILLED_PLACES for index in range(UNFILLED_PLACES)]
    return [*spread, size - UNFILLED_TAIL, size - UNFILLED_BYTES]


def _bytes_at(file, place: int, count: int) -> bytes:
    file.seek(place)
    return file.read(count)


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} appears twice")
    return found


def _parse_header(text: bytes, payload_start: int) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Entries in payload order and metadata; ValueError says what is wrong."""
    header = json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates)
    metadata = header.pop("__metadata__", {})
    if type(metadata) is not dict or any(type(value) is not str for value in metadata.values()):
        raise ValueError("__metadata__ must map words to words")
    entries = {name: _parse_entry(name, fields, payload_start) for name, fields in header.items()}
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
    position = payload_start
    for name, entry in entries.items():
        if entry.start != position:
            raise ValueError(f"{name!r} begins at byte {entry.start:,} where {position:,} is expected")
        position = entry.stop
    return entries, metadata


def _parse_entry(name: str, fields: object, payload_start: int) -> TensorEntry:
    if type(fields) is not dict or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name!r} must have dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if type(dtype) is not str or dtype not in DTYPES:
        raise ValueError(f"{name!r} has the unknown dtype {dtype!r}")
    for numbers in (shape, offsets):
        if type(numbers) is not list or any(type(n) is not int or not 0 <= n < 1 << 62 for n in numbers):
            raise ValueError(f"{name!r} has the impossible shape or offsets {shape!r}, {offsets!r}")
    if len(offsets) != 2 or len(shape) > 8:
        raise ValueError(f"{name!r} has the impossible shape or offsets {shape!r}, {offsets!r}")
    bits, span = math.prod(shape) * DTYPES[dtype][0], offsets[1] - offsets[0]
    if bits != 8 * span:
        raise ValueError(f"{name!r}: {dtype} of shape {shape} takes {bits // 8:,} bytes, its offsets span {span:,}")
    return TensorEntry(dtype, tuple(shape), payload_start + offsets[0], payload_start + offsets[1])


_fingerprints: dict[tuple[str, int, int, int], str] = {}


def fingerprint(paths: Iterable[str | os.PathLike]) -> str:
    """``<bytes>-<sha256>`` of a checkpoint: its size, and the SHA-256 of its headers and of 64 sampled 1 MiB pages.

    The pages are spread evenly, first and last included, over the files of the checkpoint; a small file is hashed
    whole. Names and dates play no part, so a renamed copy has the same fingerprint. Cached in this process by path,
    size and date of change.
    """
    paths = [Path(path) for path in paths]
    assert paths
    pages = -(-SAMPLED_PAGES // len(paths))
    total, digests = 0, []
    for path in paths:
        with open_binary(path) as file:
            status = os.fstat(file.fileno())
            key = (os.path.abspath(path), status.st_size, status.st_mtime_ns, pages)
            if key not in _fingerprints:
                _fingerprints[key] = _sampled_sha256(file, status.st_size, pages)
        total += status.st_size
        digests.append(_fingerprints[key])
    return f"{total}-{hashlib.sha256(' '.join(sorted(digests)).encode()).hexdigest()}"


def _sampled_sha256(file, size: int, pages: int) -> str:
    digest = hashlib.sha256(struct.pack("<Q", size))
    if size <= pages * PAGE_BYTES:
        while block := file.read(PAGE_BYTES):
            digest.update(block)
        return digest.hexdigest()
    header = min(struct.unpack("<Q", file.read(8))[0], MAX_HEADER_BYTES)
    digest.update(file.read(header))
    for page in range(pages):
        file.seek(page * (size - PAGE_BYTES) // (pages - 1))
        digest.update(file.read(PAGE_BYTES))
    return digest.hexdigest()


def full_sha256(path: str | os.PathLike) -> str:
    """SHA-256 of a whole file, in hex."""
    digest = hashlib.sha256()
    with open_binary(Path(path)) as file:
        while block := file.read(8 * PAGE_BYTES):
            digest.update(block)
    return digest.hexdigest()
