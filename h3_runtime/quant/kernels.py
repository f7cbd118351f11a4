"""Which implementation computes each quantised operation on this device, why, and how often it did.

    device + installed libraries ──choose──▶ KernelChoice(op, backend, reason)   logged once, listed by ``choices()``

    int8 linear      comfy-kitchen (its CUDA, Triton or HIP kernels)  >  torch._int_mm  >  dequantised matmul
    float8 linear    torch._scaled_mm (compute capability 8.9 and up)  >  dequantised matmul
    nvfp4, mxfp8, GGUF                                                    dequantised matmul: saves memory, not time

A faster path is taken only after it has agreed with plain arithmetic on this device, on a small problem. The library is
imported when first asked for, never at import time; a machine without it works. ``stats()`` counts what ran.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from .convrot import quantise_rows, scratch

LOG = logging.getLogger("h3_runtime.quant")

OPS = ("int8 linear", "float8 linear", "block-scaled float linear", "gguf linear")
INT8, FLOAT8, DEQUANTISED = "int8", "float8", "dequantised"  # arithmetic of a matmul, as counted
INT_MM, SCALED_MM, KITCHEN = "torch._int_mm", "torch._scaled_mm", "comfy-kitchen"

ACCELERATED = ("cuda", "hip")  # kinds of device that comfy-kitchen has kernels for
INT8_CAPABILITY = (7, 5)  # first with int8 tensor cores (Turing)
FLOAT8_CAPABILITY = (8, 9)  # first with float8 tensor cores (Ada)
KITCHEN_CUDA = (13,)  # comfy-kitchen's CUDA kernels need a torch built with at least this
KITCHEN_GROUPS = (None, 16, 64, 256)
TRITON_CAPABILITY = (8, 0)
TRITON_ON_AMD = (3, 7)  # older Triton fails on AMD's int8 path
MATRIX_CORE_AMD = ("gfx11", "gfx12", "gfx908", "gfx90a", "gfx94", "gfx95")  # RDNA2 and older hang there

CPU_SUMS = 1 << 22  # int32 sums held at a time: 16 MiB, below where malloc asks the system for fresh pages each time
DEVICE_SUMS = 1 << 25
PIECE_ROWS = 4096  # rows of a piece of sums
SCALED = 1 << 19  # sums scaled at a time by each CPU thread: they stay in its cache over four passes


# ---- what is here


@dataclass(frozen=True)
class Device:
    """A device as far as the choice needs it. ``kind`` is cpu, cuda, hip, or torch's name of another backend."""

    kind: str
    capability: tuple[int, int] | None = None  # CUDA only
    architecture: str = ""  # AMD only, such as gfx1100
    toolkit: tuple[int, ...] = ()  # CUDA version of this torch

    @staticmethod
    def of(device: torch.device | str) -> Device:
        device = torch.device(device)
        if device.type != "cuda":
            return Device(device.type)
        properties = torch.cuda.get_device_properties(device)
        if torch.version.hip:
            return Device("hip", architecture=properties.gcnArchName.split(":")[0])
        toolkit = tuple(int(part) for part in (torch.version.cuda or "").split(".") if part)
        return Device("cuda", (properties.major, properties.minor), toolkit=toolkit)

    def __str__(self) -> str:
        if self.capability:
            return f"compute capability {self.capability[0]}.{self.capability[1]}"
        return self.architecture or self.kind


@dataclass(frozen=True)
class Kitchen:
    """comfy-kitchen as installed: which of its backends are switched on, or why it cannot be imported."""

    backends: tuple[str, ...] = ()
    missing: str | None = None
    triton: tuple[int, ...] = ()


@dataclass(frozen=True)
class KernelChoice:
    """What runs ``op`` and the reason, as shown to a person."""

    op: str
    backend: str
    reason: str


@lru_cache(maxsize=1)
def kitchen_module() -> ModuleType | str:
    """The module comfy_kitchen, or the sentence that says why there is none."""
    try:
        return importlib.import_module("comfy_kitchen")
    except ModuleNotFoundError as error:
        if error.name == "comfy_kitchen":
            return "comfy-kitchen is not installed"
        return f"comfy-kitchen needs the package {error.name}, which is not installed"
    except Exception as error:  # a broken binary must not take the runtime down
        return f"comfy-kitchen cannot be imported: {error}"


@lru_cache(maxsize=1)
def kitchen() -> Kitchen:
    module = kitchen_module()
    if isinstance(module, str):
        return Kitchen(missing=module)
    on = tuple(name for name, state in module.list_backends().items() if state["available"] and not state["disabled"])
    try:
        version = importlib.import_module("triton").__version__
        triton = tuple(int(part) for part in version.split(".")[:2])
    except Exception:
        triton = ()
    return Kitchen(on, triton=triton)


# ---- the choice: a pure function of the facts and of two probes


def kitchen_backend(device: Device, library: Kitchen) -> tuple[str | None, str]:
    """(backend of comfy-kitchen that is right for the card, "") or (None, why there is none)."""
    if device.kind not in ACCELERATED:
        return None, f"comfy-kitchen has only a plain PyTorch path for {device}, which is slower than ours"
    if library.missing:
        return None, library.missing
    if device.kind == "cuda":
        if "cuda" in library.backends and device.toolkit >= KITCHEN_CUDA:
            return "cuda", ""
        if "triton" in library.backends and device.capability >= TRITON_CAPABILITY:
            return "triton", ""
        if "cuda" in library.backends:
            return None, "comfy-kitchen's CUDA kernels need a PyTorch built with CUDA 13 or newer"
    elif "hip" in library.backends:
        return "hip", ""
    elif "triton" in library.backends and library.triton >= TRITON_ON_AMD:
        if device.architecture.startswith(MATRIX_CORE_AMD):
            return "triton", ""
        return None, f"{device} has no matrix cores for comfy-kitchen's Triton kernels"
    return None, "comfy-kitchen has no kernel switched on for this card"


def choose_int8(
    device: Device, library: Kitchen, int_mm: Callable[[], str], kernel: Callable[[str], str]
) -> KernelChoice:
    """``int_mm()`` and ``kernel(backend)`` try it on the device: "" when it agreed, else what went wrong."""
    op = OPS[0]
    if device.kind == "cuda" and device.capability < INT8_CAPABILITY:
        return KernelChoice(op, DEQUANTISED, f"{device} has no int8 tensor cores (7.5 and up have): memory, not time")
    backend, why = kitchen_backend(device, library)
    if backend:
        why = kernel(backend)
        if not why:
            return KernelChoice(op, f"{KITCHEN}/{backend}", f"fused kernel for {device}, checked on this device")
        why = f"comfy-kitchen's {backend} kernel was tried and failed here ({why})"
    failed = int_mm()
    if not failed:
        return KernelChoice(op, INT_MM, f"int8 matmul with int32 sums on {device}; {why}")
    return KernelChoice(op, DEQUANTISED, f"{why}; torch._int_mm was tried and failed here ({failed}): memory, not time")


def choose_float8(device: Device, scaled_mm: Callable[[], str]) -> KernelChoice:
    """``scaled_mm()`` tries it on the device: "" when it agreed, else what went wrong."""
    op = OPS[1]
    if device.kind != "cuda":
        return KernelChoice(op, DEQUANTISED, f"no float8 matmul is used on {device}: memory, not time")
    if device.capability < FLOAT8_CAPABILITY:
        return KernelChoice(op, DEQUANTISED, f"{device} has no float8 tensor cores (8.9 and up have): memory, not time")
    failed = scaled_mm()
    if failed:
        return KernelChoice(op, DEQUANTISED, f"torch._scaled_mm was tried and failed here ({failed}): memory, not time")
    return KernelChoice(op, SCALED_MM, f"float8 tensor cores of {device}, checked on this device")


@dataclass(frozen=True)
class Allowed:
    """A number type on a device: the arithmetic of its matmul (int8, float8, dequantised) and a note for a person."""

    number_type: str
    arithmetic: str
    note: str


def allowed(device: Device) -> tuple[Allowed, ...]:
    """What each number type gives on ``device``, by its capability alone."""
    capability = device.capability or (0, 0)
    int8 = device.kind != "cuda" or capability >= INT8_CAPABILITY
    float8 = device.kind == "cuda" and capability >= FLOAT8_CAPABILITY
    saves = "saves memory, not time"
    int8_note = "saves memory and time" if int8 else saves
    if int8 and capability[0] == 8 and capability < FLOAT8_CAPABILITY:
        int8_note = "saves memory; on Ampere the time saved depends on the shape"
    rows = [
        (name, INT8 if int8 else DEQUANTISED, int8_note)
        for name in ("int8_tensorwise", "convrot_w4a4", "asym_w4a8_int8")
    ]
    rows.append(("float8_e4m3fn", FLOAT8 if float8 else DEQUANTISED, "saves memory and time" if float8 else saves))
    rows += [(name, DEQUANTISED, saves) for name in ("float8_e5m2", "nvfp4", "mxfp8", "gguf")]
    return tuple(Allowed(*row) for row in rows)


@lru_cache(maxsize=64)
def _choice(op: str, name: str) -> KernelChoice:
    place, device = torch.device(name), Device.of(name)
    if op == OPS[0]:
        library = kitchen() if device.kind in ACCELERATED else Kitchen()  # its import takes seconds
        made = choose_int8(
            device, library, lambda: _attempt(_probe_int_mm, place), lambda on: _attempt(_probe_kitchen, place, on)
        )
    elif op == OPS[1]:
        made = choose_float8(device, lambda: _attempt(_probe_scaled_mm, place))
    else:
        made = KernelChoice(op, DEQUANTISED, "decoded on use in blocks of rows, on the device: memory, not time")
    LOG.info("%s on %s: %s (%s)", made.op, name, made.backend, made.reason)
    return made


def choice(op: str, device: torch.device | str) -> KernelChoice:
    """What runs ``op`` (one of ``OPS``) on ``device``; found once, then remembered."""
    return _choice(op, str(device))


def choices(device: torch.device | str = "cpu") -> list[KernelChoice]:
    """All choices on ``device``, for ``inspect`` and the report."""
    return [choice(op, device) for op in OPS]


# ---- probes: a path must agree with plain arithmetic before it is taken


def _attempt(probe: Callable[..., str], *arguments: object) -> str:
    try:
        return probe(*arguments)
    except Exception as error:  # whatever a driver or library raises: the path is not usable
        return f"{type(error).__name__}: {error}".splitlines()[0]


def _probe_int_mm(device: torch.device) -> str:
    """Full-range integers: an int8 matmul that saturates between its steps is not exact, and not used."""
    signs = torch.ones(64, 96, dtype=torch.int8)
    signs[::2, ::3] = -1
    a, b = signs[:32] * 127, signs[16:] * -127
    a[0], b[0] = 127, 127
    expected = a.long() @ b.long().T
    found = int8_matmul(a.to(device), b.to(device)).cpu().long()
    return "" if torch.equal(found, expected) else "its sums are not exact"


def _example(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 512, generator=generator)
    weight = torch.randint(-127, 128, (64, 512), generator=generator, dtype=torch.int8)
    scale = torch.rand(64, 1, generator=generator) + 0.5
    return x.to(device, torch.bfloat16), weight.to(device), scale.to(device)


def _probe_kitchen(device: torch.device, backend: str) -> str:
    x, weight, scale = _example(device)
    found = kitchen_int8(x, weight, scale, None, 256, backend)
    if found is None:
        return "it does not take this shape"
    found = found.float().cpu()
    values, rows = quantise_rows(x.cpu(), 256)
    expected = (values.long() @ weight.cpu().long().T).float() * rows * scale.cpu().T
    error = ((found - expected).norm() / expected.norm()).item()
    return "" if error < 0.02 else f"off by {error:.2g}"


def _probe_scaled_mm(device: torch.device) -> str:
    x, weight, _ = _example(device)
    x, weight = x.to(torch.float8_e4m3fn), weight.float().to(torch.float8_e4m3fn)
    found = float8_matmul(x, weight).float().cpu()
    expected = x.cpu().float() @ weight.cpu().float().T
    error = ((found - expected).norm() / expected.norm()).item()
    return "" if error < 0.01 else f"off by {error:.2g}"


# ---- the operations


def int8_matmul(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """int8 [M, K] and [N, K] -> int32 [M, N], exact sums of products. Padded to what the device's kernel takes."""
    if a.device.type == "cpu":
        return torch._int_mm(a, b.T) if out is None else torch._int_mm(a, b.T, out=out)
    rows, columns = a.shape[0], b.shape[0]
    a = _padded(_padded(a, 0, 32 if rows < 32 else 8), 1, 8)  # cuBLAS: more than 16 rows, all sizes multiples of 8
    b = _padded(_padded(b, 0, 32), 1, 8)
    if out is not None and (a.shape[0], b.shape[0]) == tuple(out.shape):
        return torch._int_mm(a, b.T, out=out)
    sums = torch._int_mm(a, b.T)[:rows, :columns]
    return sums if out is None else out.copy_(sums)


def _padded(x: Tensor, axis: int, multiple: int) -> Tensor:
    short = -x.shape[axis] % multiple
    if not short:
        return x
    shape = list(x.shape)
    shape[axis] = short
    return torch.cat((x, x.new_zeros(shape)), dim=axis)


def int8_linear(
    values: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """int8 [M, K] (row scales [M, 1]) by int8 [N, K] (scales [1, N] or [1, 1]) -> [M, N] in ``dtype``.

    sum * weight_scale * scale + bias in float32, rounded once. Done in pieces, so the int32 sums stay small.
    """
    rows, columns = values.shape[0], weight.shape[0]
    out = torch.empty(rows, columns, dtype=dtype, device=values.device)
    on_cpu = values.device.type == "cpu"
    budget = CPU_SUMS if on_cpu else DEVICE_SUMS
    height = max(1, min(rows, PIECE_ROWS))
    width = min(columns, max(64, budget // height // 64 * 64))  # tall pieces: the weight is repacked per call
    store = scratch("sums", (height * width,), torch.int32, values.device)
    for top in range(0, rows, height):
        bottom = min(top + height, rows)
        for left in range(0, columns, width):
            right = min(left + width, columns)
            sums = store[: (bottom - top) * (right - left)].view(bottom - top, right - left)
            int8_matmul(values[top:bottom], weight[left:right], sums)
            per_column = weight_scale[:, left:right] if weight_scale.shape[1] > 1 else weight_scale
            added = None if bias is None else bias[left:right].float()
            scale_into(out[top:bottom, left:right], sums, scale[top:bottom], per_column, added)
    return out


def scale_into(out: Tensor, sums: Tensor, scale: Tensor, per_column: Tensor, added: Tensor | None) -> None:
    """out <- sums * per_column * scale + added; the float32 values overwrite the int32 sums, which are spent."""
    step = max(1, sums.shape[0])
    if sums.device.type == "cpu":
        step = max(1, SCALED * torch.get_num_threads() // sums.shape[1])
    floats = sums.view(torch.float32)
    for start in range(0, sums.shape[0], step):
        rows = slice(start, start + step)
        y = floats[rows].copy_(sums[rows]).mul_(per_column).mul_(scale[rows])
        if added is not None:
            y.add_(added)
        out[rows].copy_(y)


def kitchen_int8(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, group: int | None, backend: str
) -> Tensor | None:
    """comfy-kitchen's fused int8 linear: x [M, K] in a float dtype -> [M, N] in the same; rotates and quantises x.

    None where ``backend`` does not take this shape or group.
    """
    module = kitchen_module()
    assert isinstance(module, ModuleType), module
    if group not in KITCHEN_GROUPS:
        return None
    try:
        with module.use_backend(backend):
            return module.int8_linear(
                x.contiguous(),
                weight.contiguous(),
                weight_scale.reshape(-1),
                None if bias is None else bias.to(x.dtype),
                x.dtype,
                convrot=group is not None,
                convrot_groupsize=group or 256,
            )
    except module.NoCapableBackendError:
        return None


def float8_matmul(a: Tensor, b: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """float8 [M, K] and [N, K] -> [M, N]; K and N are multiples of 16 (the kernel's rule)."""
    one = torch.ones((), dtype=torch.float32, device=a.device)
    return torch._scaled_mm(a, b.T, scale_a=one, scale_b=one, out_dtype=dtype, use_fast_accum=False)


def float8_linear(
    values: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """float8 [M, K] (row scales [M, 1]) by float8 [N, K] (scales [1, N] or [1, 1]) -> [M, N] in ``dtype``."""
    rows, columns = values.shape[0], weight.shape[0]
    out = torch.empty(rows, columns, dtype=dtype, device=values.device)
    width = max(64, DEVICE_SUMS // max(rows, 1) // 64 * 64)
    for left in range(0, columns, width):
        part = slice(left, min(left + width, columns))
        per_column = weight_scale[:, part] if weight_scale.shape[1] > 1 else weight_scale
        y = float8_matmul(values, weight[part]).mul_(per_column).mul_(scale)
        if bias is not None:
            y.add_(bias[part].float())
        out[:, part] = y
    return out


# ---- what ran


class Counts:
    """Matmuls of quantised linears by (number type, arithmetic); safe under threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counter: Counter[tuple[str, str]] = Counter()

    def add(self, number_type: str, arithmetic: str) -> None:
        with self._lock:
            self._counter[number_type, arithmetic] += 1

    def snapshot(self) -> dict[str, dict[str, int]]:
        """{number type: {arithmetic: matmuls}}."""
        with self._lock:
            found: dict[str, dict[str, int]] = {}
            for (number_type, arithmetic), number in sorted(self._counter.items()):
                found.setdefault(number_type, {})[arithmetic] = number
            return found

    def reset(self) -> None:
        with self._lock:
            self._counter.clear()


COUNTS = Counts()


def stats() -> dict[str, dict[str, int]]:
    """Matmuls that ran so far, {number type: {int8 | float8 | dequantised: number}}; ``COUNTS.reset()`` starts anew."""
    return COUNTS.snapshot()


def forget_choices() -> None:
    """Choose anew: after a backend of comfy-kitchen was switched on or off, and in tests."""
    _choice.cache_clear()
    kitchen.cache_clear()
    kitchen_module.cache_clear()
