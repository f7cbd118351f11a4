"""Results of slow work, kept by what they were made from: the last ones in memory, and with a folder in files too.

    key (SHA-256 of everything that decides the result)
        get ─▶ memory ─▶ file, checked as it is read (a damaged one counts as none and leaves) ─▶ None
        put ─▶ memory (bounded in bytes) ─▶ file, whole under its name at once (the oldest leave)

A cache can only spare work: whatever goes wrong with its folder costs another run of the work, and a sentence.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ..errors import CheckpointError, H3Error
from ..unfinished import sweep_folder

Result = TypeVar("Result")


class KeptResults(Generic[Result]):
    """Results by key, bounded in bytes in memory and in ``folder``. A kind of result says how it is written and read.

    ``hits`` and ``misses`` count what was asked for.
    """

    suffix: str
    words: str  # what is kept, for sentences: "the prompt's states"

    def __init__(self, folder: str | Path | None, memory_bytes: int, disk_bytes: int):
        self.folder = None if folder is None else Path(folder)
        self.memory_bytes, self.disk_bytes = memory_bytes, disk_bytes
        self.hits = self.misses = 0
        self._kept: OrderedDict[str, Result] = OrderedDict()

    def write(self, path: Path, key: str, result: Result) -> None:
        """Write ``result``, whole under its name at once: two runs may keep the same."""
        raise NotImplementedError

    def read(self, path: Path, key: str) -> Result | None:
        """What ``write`` wrote; None for another key's; H3Error for a damaged file."""
        raise NotImplementedError

    def nbytes(self, result: Result) -> int:
        raise NotImplementedError

    def look_up(self, key: str) -> Result | None:
        """The result of exactly this key, or None."""
        found = self._kept.get(key)
        if found is None:
            found = self._read_file(key)
        if found is None:
            self.misses += 1
            return None
        self.hits += 1
        self._remember(key, found)
        return found

    def keep(self, key: str, result: Result) -> str | None:
        """Keep a result; a sentence when the folder refuses it."""
        self._remember(key, result)
        if self.folder is None or self.nbytes(result) > self.disk_bytes:
            return None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.write(self._path(key), key, result)
            self._trim(self._path(key))
        except (OSError, CheckpointError) as error:
            return f"{self.words} could not be kept in {self.folder.name} ({error}): another run encodes again"
        return None

    def _path(self, key: str) -> Path:
        return self.folder / (key[:32] + self.suffix)

    def _remember(self, key: str, result: Result) -> None:
        self._kept[key] = result
        self._kept.move_to_end(key)
        while len(self._kept) > 1 and sum(map(self.nbytes, self._kept.values())) > self.memory_bytes:
            self._kept.popitem(last=False)

    def _read_file(self, key: str) -> Result | None:
        if self.folder is None or not self._path(key).is_file():
            return None
        path = self._path(key)
        try:
            found = self.read(path, key)
        except H3Error:
            with suppress(OSError):  # open in another program
                path.unlink(missing_ok=True)
            return None
        if found is not None:
            with suppress(OSError):
                os.utime(path)
        return found

    def _trim(self, keep: Path) -> None:
        total, ages = 0, []
        sweep_folder(self.folder)
        for path in self.folder.glob("*" + self.suffix):
            with suppress(OSError):  # another process may trim at the same time
                status = path.stat()
                ages.append((status.st_mtime, path, status.st_size))
        for _, path, size in sorted(ages, key=lambda entry: (entry[1] == keep, entry[0]), reverse=True):
            total += size
            if total > self.disk_bytes and path != keep:
                with suppress(OSError):
                    path.unlink(missing_ok=True)


def cache_folder(name: str, variable: str) -> Path:
    """Where results are kept when nobody says otherwise: the folder that the environment's ``variable`` names, else
    ``name`` in the user's cache folder."""
    if os.environ.get(variable):
        return Path(os.environ[variable])
    return user_cache() / name


def user_cache() -> Path:
    """The user's cache folder for this package."""
    windows = sys.platform == "win32"
    named = Path(os.environ.get("LOCALAPPDATA" if windows else "XDG_CACHE_HOME", ""))
    if not named.is_absolute():  # unset, empty, or a place that moves with the working folder
        named = Path.home() / ("AppData/Local" if windows else ".cache")
    return named / "h3_runtime"


def bytes_sha256(*tensors: Tensor) -> str:
    """SHA-256 over the bytes of tensors, in hex."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()


def versions(
    device: str | torch.device, *packages: str, kernels: Mapping[str, str] | None = None
) -> tuple[tuple[str, str], ...]:
    """What decides bits beside weights and inputs: the libraries (torch, and ``packages`` where they are installed),
    the kind of device, on a CPU its instructions and threads (they order the sums), and the ``kernels`` of quantised
    layers (of a CheckpointInfo), by operation."""
    made_with = {"torch": torch.__version__}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):  # asked of the installation: importing it takes seconds
            made_with[package] = metadata.version(package)
    if torch.device(device).type == "cuda":
        made_with["device"] = torch.cuda.get_device_name(device)
    else:
        made_with["device"] = "cpu"
        made_with["cpu"] = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    made_with |= {op: told.partition(":")[0] for op, told in (kernels or {}).items()}
    return tuple(sorted(made_with.items()))
