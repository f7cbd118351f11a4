"""What this machine has: memory that may really be used, and how fast bytes and numbers move. Probed, not listed.

    host   psutil or the system's own count ─┐
           cgroup v1 / v2, every level above ├─ smallest ─▶ Host(available, pinnable, what limits it)
           Windows' commit limit            ─┘
    card   free VRAM ─────────────────────────────────────▶ Card(free, copy rates, matmul rate)
           copies and a matmul, about a second, once: cached by card, driver and torch
    disk   reads spread over the file in question, half a second, once a disk ─▶ bytes a second

A container's limit is what its killer goes by, whatever the host has free (psutil sees only the host).
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from ..checkpoint.kept import user_cache
from ..checkpoint.pieces import quantise_linear
from ..errors import H3Error
from ..models.precision import exact_float32
from ..unfinished import part_path

GIB = 1 << 30
CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2^63
WINDOWS_PIN_SHARE = 0.4  # of all RAM: past that, native Windows drivers fail
CONTEXT_BYTES = GIB // 2  # what a card's driver takes before the first tensor, where it cannot be asked

# Where nothing can be measured, a plan says "assumed": PCIe 4 x16, a mid-range card, a SATA-to-NVMe disk.
ASSUMED_COPY, ASSUMED_PAGEABLE, ASSUMED_MATMUL, ASSUMED_FLOAT32, ASSUMED_DISK = 24e9, 6e9, 80e12, 20e12, 2e9

COPY_BYTES = 256 << 20
MATMUL_SIZE = 4096
MEASURE_SECONDS = 0.25  # each of the four card figures
RATES = ("copy", "pageable", "matmul", "float32")
DISK_BLOCK = 32 << 20
DISK_SECONDS = 0.5
TRANSFORM_ROWS = 1536  # of a square weight


# ---- host memory


NO_PIN, RESERVE_VRAM = "H3_NO_PIN", "H3_RESERVE_VRAM"


@dataclass(frozen=True)
class Host:
    """Host memory in bytes. ``available``: what may be taken now; ``limit`` names what sets it. ``pinnable``: how much
    of it may be page-locked. ``disk_rate``: bytes a second off the weights' disk, assumed unless ``disk_measured``.
    ``converted``: the folder for converted weights; ``transform_rates``: bytes a second of finished weights, by kind of
    transform (``Pieces.transforms``)."""

    total: int
    available: int
    pinnable: int
    limit: str = "RAM"
    disk_rate: float = ASSUMED_DISK
    disk_measured: bool = False
    converted: str = ""
    transform_rates: tuple[tuple[str, float], ...] = ()

    def transform_seconds(self, kinds: Sequence[str]) -> float:
        """Seconds a byte of finished weights that these transforms take here; those never measured count nothing."""
        rates = dict(self.transform_rates)
        return sum(1 / rates[kind] for kind in kinds if kind in rates)

    def with_transforms(self, kinds: Sequence[str], cache: Path | None = None) -> Host:
        """The same host with the rates of these transforms."""
        return replace(self, transform_rates=tuple(probe_transforms(kinds, cache).items())) if kinds else self

    def with_disk(self, path: str | os.PathLike | None, cache: Path | None = None) -> Host:
        """The same host with the rate of the disk that ``path`` lies on, where it can be told."""
        rate = None if path is None else probe_disk(path, cache)
        return self if rate is None else replace(self, disk_rate=rate, disk_measured=True)

    @staticmethod
    def given(ram_gib: float) -> Host:
        """A host of ``ram_gib`` that does nothing else: about 2 GiB of it are the system's own."""
        _check_gib("--ram", ram_gib)
        total = int(ram_gib * GIB)
        available = max(0, total - 2 * GIB)
        return Host(total, available, _pinnable(total, available, sys.platform), "given")


def probe_host(
    system: str = sys.platform, cgroup: Path = CGROUP, membership: Path = MEMBERSHIP, counts: Callable | None = None
) -> Host:
    """Host memory as far as this process may use it.

    ``counts()`` gives (total, available) of the whole machine. Every argument stands for a part of the system that a
    test replaces.
    """
    total, available = (counts or system_memory)()
    limit = "RAM"
    if system == "win32":
        commit = windows_commit()
        if commit is not None and commit < available:
            available, limit = commit, "the commit limit (page file)"
    else:
        group = cgroup_memory(cgroup, membership)
        if group is not None:
            total = min(total, group[0])
            if group[1] < available:
                available, limit = group[1], group[2]
    return Host(total, available, _pinnable(total, available, system), limit)


def may_pin() -> bool:
    """Whether host memory may be page-locked: not where H3_NO_PIN is set, by the user or by the host's own flags."""
    return os.environ.get(NO_PIN, "0") in ("", "0")


def reserved_vram() -> int:
    """Bytes of the card that are left to others: H3_RESERVE_VRAM, in GiB. H3Error for what is no number."""
    told = os.environ.get(RESERVE_VRAM) or "0"
    try:
        gib = float(told)
    except ValueError:
        gib = -1.0
    if not 0 <= gib <= 1 << 20:
        raise H3Error(f"{RESERVE_VRAM} is {told!r}: give gibibytes, 0 or more")
    return int(gib * GIB)


def _pinnable(total: int, available: int, system: str) -> int:
    if not may_pin():
        return 0
    return min(available, int(total * WINDOWS_PIN_SHARE)) if system == "win32" else available


def system_memory() -> tuple[int, int]:
    """(total, available) bytes of the machine: psutil's, else the system's own count."""
    try:
        import psutil

        memory = psutil.virtual_memory()
        return memory.total, memory.available
    except ImportError:
        pass
    if sys.platform == "win32":
        status = _windows_status()
        if status is not None:
            return status.ullTotalPhys, status.ullAvailPhys
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        return found["MemTotal"], found["MemAvailable"]
    except (OSError, KeyError, ValueError, IndexError):
        raise H3Error("this system does not tell its free memory: give --ram GIB, or pip install psutil") from None


class _WindowsStatus(ctypes.Structure):
    _fields_ = [
        ("dwLength", ctypes.c_uint32),
        ("dwMemoryLoad", ctypes.c_uint32),
        *((name, ctypes.c_ulonglong) for name in ("ullTotalPhys", "ullAvailPhys", "ullTotalPageFile")),
        *((name, ctypes.c_ulonglong) for name in ("ullAvailPageFile", "ullTotalVirtual", "ullAvailVirtual")),
        ("ullAvailExtendedVirtual", ctypes.c_ulonglong),
    ]


def _windows_status() -> _WindowsStatus | None:
    try:
        status = _WindowsStatus()
        status.dwLength = ctypes.sizeof(status)
        return status if ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)) else None
    except (AttributeError, OSError):
        return None


def windows_commit() -> int | None:
    """Bytes that this process may still commit on Windows; None where it cannot be told.

    Every allocation and every pinned buffer counts against it, touched or not: with a small page file it ends before
    the RAM does.
    """
    status = _windows_status()
    return None if status is None else status.ullAvailPageFile


def cgroup_memory(root: Path = CGROUP, membership: Path = MEMBERSHIP) -> tuple[int, int, str] | None:
    """(limit, still available, which cgroup version) of the tightest group this process is in; None without a limit.

    Every level from the process's own group up to the root counts. Page cache that can be dropped is not in use.
    """
    found = []
    for version, folder in _groups(root, membership):
        reading = _read_group(version, folder)
        if reading is not None:
            limit, used = reading
            found.append((limit, max(0, limit - used), f"cgroup {version} limit"))
    if not found:
        return None
    tightest = min(found, key=lambda item: item[1])
    return min(item[0] for item in found), tightest[1], tightest[2]


def _groups(root: Path, membership: Path):
    """(version, folder) of the process's groups and of all above them."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = ["0::/", "1:memory:/"]
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            version, base = "v2", root
        elif "memory" in controllers.split(","):
            version, base = "v1", root / "memory"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):  # a container may not see its own path: then its root is the limit
            folder = base.joinpath(*parts[:depth])
            if folder.is_dir():
                yield version, folder


def _read_group(version: str, folder: Path) -> tuple[int, int] | None:
    """(limit, used) of one group, None where it has no limit."""
    names = ("memory.max", "memory.current") if version == "v2" else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    try:
        text = (folder / names[0]).read_text().strip()
        limit = UNLIMITED if text == "max" else int(text)
        if limit >= UNLIMITED:
            return None
        used = int((folder / names[1]).read_text())
    except (OSError, ValueError):
        return None
    try:
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        used -= int(stat.get("inactive_file" if version == "v2" else "total_inactive_file", 0))
    except (OSError, ValueError):
        pass
    return limit, max(0, used)


# ---- the card


@dataclass(frozen=True)
class Card:
    """A card: VRAM in bytes, rates in bytes and floating-point operations (bf16, float32 without TF32) a second.
    ``measured`` False: rates are assumed, and a plan says so. ``is_host``: the CPU itself, whose memory is the host's.
    """

    name: str
    total: int
    free: int
    copy_rate: float = ASSUMED_COPY
    pageable_rate: float = ASSUMED_PAGEABLE
    matmul_rate: float = ASSUMED_MATMUL
    float32_rate: float = ASSUMED_FLOAT32
    measured: bool = False
    is_host: bool = False

    @staticmethod
    def given(vram_gib: float, rates: Card | None = None) -> Card:
        """A card of ``vram_gib`` with nothing on it but its driver; the rates of ``rates`` where there is one."""
        _check_gib("--vram", vram_gib)
        total = int(vram_gib * GIB)
        made = Card(f"a card of {vram_gib:g} GiB", total, max(0, total - CONTEXT_BYTES))
        if rates is None:
            return made
        return replace(rates, name=made.name, total=made.total, free=made.free, is_host=False)


def _check_gib(option: str, value: float) -> None:
    if not 0 < value <= 1 << 20:
        raise H3Error(f"{option} is {value!r}: give gibibytes above 0, e.g. 12")


def probe_card(device: str | torch.device = "cuda", cuda=torch.cuda, cache: Path | None = None) -> Card | None:
    """The card behind ``device`` with its free VRAM as of now; None where there is none.

    The first call measures its rates for about a second; they are kept in the user's cache folder (``cache``), keyed
    by card, driver and torch. ``cuda`` is torch.cuda or what stands for it in a test.
    """
    if not cuda.is_available():
        return None
    free, total = cuda.mem_get_info(device)
    free = max(0, free - reserved_vram())
    name = cuda.get_device_properties(device).name
    key = f"{name} | driver {driver_version(cuda)} | torch {torch.__version__}"
    rates = Rates(cache).get(key, RATES, lambda: _measure_card(device, cuda, free))
    return Card(name, total, free, *(rates[kind] for kind in RATES), measured=True)


def probe_cpu(host: Host) -> Card:
    """The CPU as the place that computes: its memory is the host's, and nothing is copied to it."""
    side = 256
    left = torch.ones(side, side)
    rate = _repeated(lambda: left @ left, _NoCuda, "cpu", 0.02) * 2 * side**3
    return Card("CPU", host.total, host.available, 1e12, 1e12, rate, rate, measured=True, is_host=True)


class _NoCuda:
    """What ``_repeated`` needs of torch.cuda where there is nothing to wait for."""

    @staticmethod
    def synchronize(device) -> None:
        pass


def driver_version(cuda) -> str:
    """The driver's CUDA version as torch tells it."""
    try:
        return str(torch._C._cuda_getDriverVersion()) if cuda is torch.cuda else cuda.driver
    except (AttributeError, RuntimeError):
        return "unknown"


def _measure_card(device: str | torch.device, cuda, free: int) -> dict[str, float]:
    """Bytes a second from pinned and from pageable memory, and bf16 operations a second of a large matmul."""
    size = max(1 << 20, min(COPY_BYTES, free // 8))
    side = MATMUL_SIZE if free > 8 * MATMUL_SIZE**2 * 2 else 512
    there = torch.empty(size, dtype=torch.uint8, device=device)
    here = torch.zeros(size, dtype=torch.uint8)  # zeroed, so touched: a page that does not exist yet is no source
    pageable = _repeated(lambda: there.copy_(here), cuda, device) * size
    pinned = _pinned(here)
    copy = _repeated(lambda: there.copy_(pinned, non_blocking=True), cuda, device) * size
    rates = [copy, pageable]
    for dtype in (torch.bfloat16, torch.float32):
        left, right = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
        with exact_float32():
            rates.append(_repeated(partial(torch.mm, left, right), cuda, device) * 2 * side**3)
    return dict(zip(RATES, rates))


def _pinned(buffer: torch.Tensor) -> torch.Tensor:
    if not may_pin():
        return buffer
    try:
        return buffer.pin_memory()
    except RuntimeError:  # the system refuses to pin: renders copy from pageable memory then, and so is measured
        return buffer


def _repeated(work: Callable[[], object], cuda, device, seconds: float = MEASURE_SECONDS) -> float:
    """How often a second ``work`` runs on the card: in batches that grow until one takes half of ``seconds``."""
    work()
    cuda.synchronize(device)
    count, spent = 1, 0.0
    deadline = time.perf_counter() + 2 * seconds
    while True:
        began = time.perf_counter()
        for _ in range(count):
            work()
        cuda.synchronize(device)
        ended = time.perf_counter()
        spent = max(ended - began, 1e-9)
        if spent >= seconds / 2 or ended >= deadline:
            return count / spent
        count *= 2


# ---- the disk


def probe_disk(path: str | os.PathLike, cache: Path | None = None, clock: Callable[[], float] = time.perf_counter):
    """Bytes a second that files beside ``path`` (a file, or a folder: its largest file) are read at; None for files too
    small to tell. Measured for half a second, once a disk."""
    file = _largest_file(Path(path))
    if file is None or file.stat().st_size < 4 * DISK_BLOCK:
        return None
    key = f"disk {file.stat().st_dev}"
    return Rates(cache).get(key, ("read",), lambda: {"read": _measure_disk(file, clock)})["read"]


def _largest_file(path: Path) -> Path | None:
    if path.is_file():
        return path
    files = [file for file in path.rglob("*.safetensors") if file.is_file()] if path.is_dir() else []
    return max(files, key=lambda file: file.stat().st_size, default=None)


def _measure_disk(file: Path, clock: Callable[[], float]) -> float:
    """Whole blocks from all over the file, its pages dropped from the cache first where the system lets us."""
    size = file.stat().st_size
    blocks = size // DISK_BLOCK
    order = [index * 37 % blocks for index in range(blocks)] if blocks % 37 else list(range(blocks))
    buffer = memoryview(bytearray(DISK_BLOCK))
    read, spent = 0, 0.0
    with open(file, "rb", buffering=0) as stream:
        for index in order:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(stream.fileno(), index * DISK_BLOCK, DISK_BLOCK, os.POSIX_FADV_DONTNEED)
            began = clock()
            stream.seek(index * DISK_BLOCK)
            read += stream.readinto(buffer) or 0
            spent += clock() - began
            if spent >= DISK_SECONDS:
                break
    return read / max(spent, 1e-9)


# ---- what is done to weights between file and device


def probe_transforms(
    kinds: Sequence[str], cache: Path | None = None, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Bytes of finished weights a second that each of ``kinds`` gives on this processor. Measured for a quarter of a
    second each, once for a number of threads."""
    rates = {}
    for kind in kinds:
        key = f"transform {kind} torch {torch.__version__} threads {torch.get_num_threads()}"
        measure = partial(_measure_transform, kind, clock)
        rates[kind] = Rates(cache).get(key, ("rate",), lambda measure=measure: {"rate": measure()})["rate"]
    return rates


def _measure_transform(kind: str, clock: Callable[[], float]) -> float:
    weight = torch.randn(TRANSFORM_ROWS, TRANSFORM_ROWS).to(torch.bfloat16)

    def work() -> list[torch.Tensor]:
        if kind == "reorder":
            return [weight.view(-1, 3, 2, TRANSFORM_ROWS).transpose(0, 1).contiguous()]
        if kind == "cast":
            return [weight.float().to(torch.bfloat16)]
        made = quantise_linear(weight, None, kind, torch.bfloat16)
        return [*made.parameters(), *made.buffers()]

    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in work())
    done, began = 0, clock()
    while done == 0 or clock() - began < MEASURE_SECONDS:
        work()
        done += nbytes
    return done / max(clock() - began, 1e-9)


# ---- figures measured once


class Rates:
    """Measured rates in one small JSON file, key -> {name: rate}. A file that cannot be read or written is no error:
    the figures are measured again."""

    def __init__(self, path: Path | None = None):
        self.path = user_cache() / "rates.json" if path is None else path

    def get(self, key: str, names: tuple[str, ...], measure: Callable[[], dict[str, float]]) -> dict[str, float]:
        """The rates ``names`` of ``key``: those kept, else ``measure()``'s, which are kept."""
        kept = self._read()
        found = kept.get(key)
        if isinstance(found, dict) and all(_is_rate(found.get(name)) for name in names):
            return found
        kept[key] = measure()
        self._write(kept)
        return kept[key]

    def _read(self) -> dict:
        try:
            kept = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return kept if isinstance(kept, dict) else {}

    def _write(self, kept: dict) -> None:
        part = part_path(self.path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(kept, indent=1), encoding="utf-8")
            os.replace(part, self.path)
        except OSError:
            with suppress(OSError):
                part.unlink()


def _is_rate(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
