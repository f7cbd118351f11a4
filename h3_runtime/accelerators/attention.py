"""Attention kernels: one table of everything that can stand in for SDPA, and the accelerator that runs one of them.

    q, k, v ──refusal? (device, dtype, rows, strides, offsets)──▶ SDPA, counted and told
            └─▶ kernel ─▶ out            with ``protect``: text, condition and sound rows ask by SDPA, exactly

    exact        sdpa-flash, sdpa-efficient, sdpa-cudnn, sdpa-math     torch.nn.attention
                 flash-2, flash-3, flash-4                             arXiv 2307.08691, 2407.08608; flash_attn.cute
                 flash-eager                                           their eager twin: online softmax by key tiles
    quantised    sage-1, sage-2                                        arXiv 2410.02367, 2411.10958
                 kitchen-int8                                          comfy-kitchen's INT8 attention
                 int8-eager                                            their eager twin: int8 q and k, smoothed k

The twins run anywhere, slowly; they are what tests compare and what shows the size of a kernel's error where the kernel
cannot run. A kernel that this machine lacks is refused when it is asked for by name; ``auto`` takes the first exact one
that is proven here. Limits known from the field are in the table: fp8 values give noise above about 160,000 rows, and
32-bit offsets wrap on long strided tensors.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import H3Error
from ..fidelity import Label, use
from ..models.attention import HEAD_GROUP, Where
from .base import TAIL, WARMUP, Accelerator, Options, Window, option

OFFSETS = 2**31  # elements: beyond, a kernel's 32-bit offsets wrap
ALIGNMENT = 8  # elements that a kernel loads at once
FP8_ROWS = 160_000  # above, fp8 values (SageAttention 2 from compute capability 8.9 on) give noise
HALF = (torch.float16, torch.bfloat16)
TILE = 1024  # keys of a tile of the eager twins
QUERIES = 4096  # queries that a twin works on at one time
INT8_BLOCK = 128  # query rows that share a scale
INT8_KEYS = 64  # key rows that share a scale


# --- the kernels: q, k, v [S, G, D] -> [S, G, D]; q may have fewer rows than k and v ---------------------------------


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1)


def _flash(module: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = importlib.import_module(module).flash_attn_func(q[None], k[None], v[None])
    return (out[0] if isinstance(out, tuple) else out)[0]


def _sage_1(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    package = importlib.import_module("sageattention")
    call = getattr(package, "sageattn_qk_int8_pv_fp16_triton", package.sageattn)
    return call(q[None], k[None], v[None], tensor_layout="NHD", is_causal=False)[0]


def sage_2_function(capability: tuple[int, int]) -> tuple[str, dict]:
    """SageAttention 2's function for a compute capability, and its options: fp8 values where the card has them."""
    if capability == (9, 0):
        return "sageattn_qk_int8_pv_fp8_cuda_sm90", {"pv_accum_dtype": "fp32+fp32"}
    if capability >= (8, 9):
        return "sageattn_qk_int8_pv_fp8_cuda", {"pv_accum_dtype": "fp32+fp32"}
    return "sageattn_qk_int8_pv_fp16_cuda", {"pv_accum_dtype": "fp32"}


def _sage_2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    name, options = sage_2_function(torch.cuda.get_device_capability(q.device))
    call = getattr(importlib.import_module("sageattention"), name)
    return call(q[None], k[None], v[None], tensor_layout="NHD", is_causal=False, **options)[0]


def _kitchen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return importlib.import_module("comfy_kitchen").int8_attention(q, k, v)[0].transpose(0, 1)


def flash_eager(q: Tensor, k: Tensor, v: Tensor, scores: Callable | None = None) -> Tensor:
    """The twin of FlashAttention: softmax(q k^T / sqrt(D)) v, the running maximum and sum kept by key tiles, float32.

    ``scores(queries [G, n, D], first, last) -> [G, n, last - first]`` stands in for the plain product.
    """
    queries, keys, values = (x.transpose(0, 1) for x in (q, k, v))  # [G, rows, D]
    out = torch.empty_like(q)
    scale = q.shape[2] ** -0.5
    for start in range(0, q.shape[0], QUERIES):
        part = queries[:, start : start + QUERIES]
        total = part.new_zeros(part.shape, dtype=torch.float32)
        peak = part.new_full((*part.shape[:2], 1), float("-inf"), dtype=torch.float32)
        norm = torch.zeros_like(peak)
        for first in range(0, k.shape[0], TILE):
            last = min(first + TILE, k.shape[0])
            if scores is None:
                logits = (part.float() @ keys[:, first:last].float().transpose(1, 2)) * scale
            else:
                logits = scores(part, first, last) * scale
            higher = torch.maximum(peak, logits.amax(-1, keepdim=True))
            weights = (logits - higher).exp_()
            shrink = (peak - higher).exp_()
            norm = norm * shrink + weights.sum(-1, keepdim=True)
            total = total * shrink + weights.to(v.dtype).float() @ values[:, first:last].float()
            peak = higher
        out[start : start + QUERIES] = (total / norm).to(q.dtype).transpose(0, 1)
    return out


def quantise_blocks(x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """[G, S, D] -> int8-valued float32 of the same shape and the scale of each row [G, S, 1]: one per ``rows`` rows."""
    heads, length, width = x.shape
    padded = F.pad(x.float(), (0, 0, 0, -length % rows)).view(heads, -1, rows, width)
    scale = padded.abs().amax(dim=(2, 3), keepdim=True).clamp_min(1e-12) / 127
    values = (padded / scale).round_().view(heads, -1, width)[:, :length]
    return values, scale.expand(-1, -1, rows, 1).reshape(heads, -1, 1)[:, :length]


def int8_eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The twin of SageAttention: k less its mean over the rows (which softmax does not see), then q and k rounded to
    int8 with one scale per block; their product has integer sums, values stay as they are."""
    keys = k.transpose(0, 1).float()
    keys, key_scale = quantise_blocks(keys - keys.mean(1, keepdim=True), INT8_KEYS)

    def scores(queries: Tensor, first: int, last: int) -> Tensor:
        whole, scale = quantise_blocks(queries, INT8_BLOCK)
        product = whole @ keys[:, first:last].transpose(1, 2)  # integers below 2^24: exact in float32
        return product * scale * key_scale[:, first:last].transpose(1, 2)

    return flash_eager(q, k, v, scores)


# --- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """One way to compute attention. Its registry path is ``attention/NAME``, whose ``unproven`` says why it cannot run
    here. ``dtypes``, ``most_rows`` and ``widths`` are what it is allowed for; ``native``: it has its own rules for
    strides and offsets, and runs on a card."""

    name: str
    run: Callable[[Tensor, Tensor, Tensor], Tensor]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, *HALF)
    most_rows: Callable[[], int | None] = lambda: None
    widths: tuple[int, ...] = ()
    native: bool = False

    @property
    def path(self) -> str:
        return f"attention/{self.name}"

    @property
    def exact(self) -> bool:
        return use(self.path).label < Label.APPROXIMATE

    def missing(self) -> str | None:
        """Why this machine cannot run it, or None."""
        return use(self.path).unproven()

    def refusal(self, rows: int, dtype: torch.dtype, width: int) -> str | None:
        """Why a render of this many rows cannot use it, or None."""
        most = self.most_rows()
        if most is not None and rows > most:
            return f"{self.name} is not safe above {most:,} rows, and there are {rows:,}"
        if dtype not in self.dtypes:
            return f"{self.name} does not take {str(dtype).removeprefix('torch.')}"
        if self.widths and width not in self.widths:
            return f"{self.name} takes heads of {' or '.join(map(str, self.widths))}, not {width}"
        return None


def sage_2_rows() -> int | None:
    """Rows up to which SageAttention 2 is safe on this card."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9):
        return FP8_ROWS
    return None


KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel("flash-4", partial(_flash, "flash_attn.cute"), HALF, native=True),
        Kernel("flash-3", partial(_flash, "flash_attn_interface"), HALF, native=True),
        Kernel("flash-2", partial(_flash, "flash_attn"), HALF, native=True),
        Kernel("sdpa-cudnn", partial(_sdpa, SDPBackend.CUDNN_ATTENTION), HALF),
        Kernel("sdpa-flash", partial(_sdpa, SDPBackend.FLASH_ATTENTION)),
        Kernel("sdpa-efficient", partial(_sdpa, SDPBackend.EFFICIENT_ATTENTION)),
        Kernel("sdpa-math", partial(_sdpa, SDPBackend.MATH), most_rows=lambda: 16_384),
        Kernel("flash-eager", flash_eager),
        Kernel("sage-2", _sage_2, HALF, sage_2_rows, (64, 128), True),
        Kernel("sage-1", _sage_1, HALF, lambda: FP8_ROWS, (64, 128), True),
        Kernel("kitchen-int8", _kitchen, most_rows=lambda: FP8_ROWS, native=True),
        Kernel("int8-eager", int8_eager),
    )
}
AUTO = ("flash-4", "flash-3", "flash-2", "sdpa-cudnn")  # exact ones, fastest first; else the baseline's SDPA


def span(x: Tensor) -> int:
    """Elements from the first to the last that ``x`` reaches, gaps included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))


def laid_out(x: Tensor) -> Tensor:
    """``x`` [S, G, D] as kernels can read it: rows of heads side by side, aligned, offsets below 2^31; copied where it
    is not. Tensors that are too large even so stay as they are (``too_long``)."""
    aligned = x.stride(-1) == 1 and all(stride % ALIGNMENT == 0 for stride in x.stride()[:-1])
    return x if aligned and span(x) < OFFSETS else x.contiguous()


def too_long(x: Tensor) -> bool:
    """Whether ``x`` is beyond 32-bit offsets even when it is contiguous."""
    return x.numel() >= OFFSETS


@dataclass(frozen=True)
class AttentionOptions(Options):
    kernel: str = option("auto", "auto: the fastest exact kernel here.", choices=("auto", *KERNELS))
    protect: bool = option(True, "Text, condition and sound rows ask by SDPA where the kernel is not exact.")
    warmup: int = option(0, WARMUP, 0, 100)
    tail: int = option(0, TAIL, 0, 100)
    missing: str = option("refuse", "Where the kernel is missing: refuse, or run SDPA.", choices=("refuse", "sdpa"))


class AttentionKernel(Accelerator):
    """See the module's picture."""

    name = "attention"
    words = "Computes attention with another kernel than SDPA."
    Options = AttentionOptions
    excludes = {"sparse": "both replace the attention kernel, and only one can"}  # noqa: RUF012
    leaves_out_blocks = False

    def __init__(self, options: Options | None = None):
        super().__init__(options)
        self.kernel, self.why = choose_kernel(self.options)
        self.calls = self.plain = 0

    @classmethod
    def missing(cls, options: AttentionOptions) -> str | None:
        if options.kernel != "auto":
            return KERNELS[options.kernel].missing()
        return choose_kernel(options)[1]

    def prepare(self, dit, job, layout, steps) -> None:
        self.calls = self.plain = 0
        self.kernel, self.why = choose_kernel(self.options)
        self.first = layout.target_video.start
        self.window = Window.of(job, steps, self.options.warmup, self.options.tail)
        if self.kernel is not None:
            self._let_go(self.kernel.refusal(layout.num_rows, dit.dtype, dit.config.head_dim))
        if self.kernel is not None and dit.device.type != "cuda" and self.kernel.native:
            self._let_go(f"{self.kernel.name} runs on the card, and this render is on {dit.device.type}")

    def _let_go(self, reason: str | None) -> None:
        if reason is not None:
            self.kernel, self.why = None, reason

    def wrap_attention(self, call: Callable) -> Callable:
        def attention(q: Tensor, k: Tensor, v: Tensor, where: Where) -> Tensor:
            kernel = self.kernel
            if kernel is None or self.window.full(where.forward):
                self.plain += 1
                return call(q, k, v, where)
            if kernel.native:
                if any(too_long(x) for x in (q, k, v)):
                    self.plain += 1
                    self.why = f"{kernel.name} cannot address {k.numel():,} elements of keys"
                    return call(q, k, v, where)
                q, k, v = laid_out(q), laid_out(k), laid_out(v)
            self.calls += 1
            if kernel.exact or not self.options.protect or not self.first:
                return kernel.run(q, k, v)
            out = torch.empty_like(v)
            out[: self.first] = call(q[: self.first], k, v, where)
            out[self.first :] = kernel.run(q[self.first :], k, v)
            return out

        return attention

    def paths(self) -> tuple[str, ...]:
        return () if self.kernel is None else (self.kernel.path,)

    def bytes(self, layout, config, item: int = 2) -> int:
        """What a kernel takes beside q, k, v and its output, for one group of heads: int8 copies, a twin's tiles."""
        if self.kernel is None:
            return 0
        heads, rows = min(HEAD_GROUP, config.heads), layout.num_rows
        one = rows * heads * config.head_dim
        if self.kernel.name.endswith("-eager"):
            part = min(QUERIES, rows)
            tile = part * min(TILE, rows) * 4
            return heads * (4 * tile + 3 * part * config.head_dim * 4) + 2 * one * 4
        if self.kernel.name == "sdpa-math":
            return 3 * heads * rows * rows * 4
        return 0 if self.kernel.exact else one * (3 + item)  # int8 q, k, v, and the output once more

    def state(self) -> dict[str, Tensor]:
        return {"counts": torch.tensor([self.calls, self.plain])}

    def restore(self, state: dict[str, Tensor]) -> None:
        if "counts" in state:
            self.calls, self.plain = state["counts"].tolist()

    def stats(self) -> dict:
        ran = "sdpa" if self.kernel is None else self.kernel.name
        return {"kernel": ran, "calls": self.calls, "calls_by_sdpa": self.plain, "why_sdpa": self.why}

    def notes(self) -> list[str]:
        if self.kernel is None or not self.calls:
            return [f"attention did not engage, SDPA ran: {self.why or 'warm-up and tail cover all forwards'}"]
        said = [f"attention: {self.kernel.name} ran {self.calls} of {self.calls + self.plain} calls"]
        return said + ([f"the rest ran by SDPA: {self.why}"] if self.plain and self.why else [])


def choose_kernel(options: AttentionOptions) -> tuple[Kernel | None, str | None]:
    """(the kernel, None), or (None, why SDPA runs). H3Error for one asked for by name that this machine lacks."""
    if options.kernel == "auto":
        reasons = {name: KERNELS[name].missing() for name in AUTO}
        for name, reason in reasons.items():
            if reason is None:
                return KERNELS[name], None
        return None, "no faster exact kernel here (" + "; ".join(f"{n}: {r}" for n, r in reasons.items()) + ")"
    kernel = KERNELS[options.kernel]
    reason = kernel.missing()
    if reason is None:
        return kernel, None
    if options.missing == "sdpa":
        return None, f"{kernel.name}: {reason}"
    raise H3Error(
        f"attention kernel {kernel.name} cannot run here ({reason}): choose auto, or missing=sdpa to render by SDPA"
    )
