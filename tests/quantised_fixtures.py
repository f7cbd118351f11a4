"""One small DiT written in every quantised layout in circulation, by encoders of the tests' own.

    tensors()            bf16 with float32 islands, ComfyUI names; every block linear is a multiple of 256 wide
    quantised(format)    the same with its block linears in a format: int8_convrot, int8, fp8, fp8_legacy, fp8_plain,
                         nvfp4, nvfp4_awq, mxfp8, w4a4, w4a8
    pruned()             AdaLN as a curve of 8 values, fp16
    write_gguf(path, tensors, types)   Q8_0, Q4_0, Q6_K, Q4_K, F16, F32

The encoders follow the storage forms, not the runtime's code, so that a mistake in a decoder shows.
"""

from __future__ import annotations

import json
import struct
from functools import cache

import torch
import torch.nn.functional as F

from h3_runtime.accelerators import Accelerator
from h3_runtime.demo.maker import seeded_tensors
from h3_runtime.geometry import Canvas
from h3_runtime.job import RenderJob, TextCondition
from h3_runtime.models.dit import DiT, DiTConfig
from h3_runtime.sampler import Rows, sample

CONFIG = DiTConfig(
    hidden=256, layers=2, refiner_layers=1, heads=4, head_dim=64, ffn=256, text_dim=64,
    time_features=32, time_hidden=64, time_dim=64, rope_frequencies=8,
)  # fmt: skip
LINEARS = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")
BLOCK_LINEARS = tuple(f"blocks.{i}.{leaf}" for i in range(CONFIG.layers) for leaf in LINEARS)
CANVAS = Canvas(64, 64, 5)
CURVE_POINTS, CURVE_WIDTH = 65, 8

Tensors = dict[str, torch.Tensor]


@cache
def _base() -> Tensors:
    made = seeded_tensors(DiT(CONFIG), torch.Generator().manual_seed(7))
    return {name: t if name.startswith(DiT.float32_islands) else t.bfloat16() for name, t in made.items()}


def tensors() -> Tensors:
    return dict(_base())


class _Velocity(Accelerator):
    name = "velocity"

    def wrap_velocity(self, call):
        def kept(rows, step):
            self.rows = call(rows, step)
            return Rows(self.rows.video.clone(), self.rows.audio.clone())

        return kept


def velocity(dit: DiT) -> torch.Tensor:
    """Velocity rows of picture and sound, in one tensor, of the first forward of a small job."""
    text = torch.randn(6, CONFIG.text_dim, generator=torch.Generator().manual_seed(3))
    seen = _Velocity()
    asked = RenderJob(canvas=CANVAS, text=TextCondition(text, torch.ones(6, dtype=torch.int64)), num_forwards=2, stop=1)
    sample(dit, asked, (seen,))
    return torch.cat([seen.rows.video.flatten(), seen.rows.audio.flatten()])


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def as_bytes(marker: dict) -> torch.Tensor:
    return torch.tensor(list(json.dumps(marker).encode()), dtype=torch.uint8)


# ---- encoders: a weight [N, K] -> the layer's tensors, marker among them


def hadamard(size: int) -> torch.Tensor:
    four = torch.tensor([[1.0, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]])
    made = four
    while made.shape[0] < size:
        made = torch.kron(made, four)
    return made / size**0.5


def rotated(weight: torch.Tensor, group: int) -> torch.Tensor:
    return (weight.reshape(-1, group) @ hadamard(group).to(weight.dtype)).view(weight.shape)


def fitting(weight: torch.Tensor) -> int:
    return next(g for g in (256, 64, 16, 4) if weight.shape[1] % g == 0)


def int8_convrot(weight: torch.Tensor) -> Tensors:
    group = fitting(weight)
    return {**_int8(rotated(weight, group)), "comfy_quant": as_bytes(
        {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": group}
    )}  # fmt: skip


def int8(weight: torch.Tensor) -> Tensors:
    return {**_int8(weight), "comfy_quant": as_bytes({"format": "int8_tensorwise"})}


def _int8(weight: torch.Tensor) -> Tensors:
    scale = weight.abs().amax(1, keepdim=True).float() / 127
    return {"weight": (weight / scale.to(weight.dtype)).round().clamp(-128, 127).to(torch.int8), "weight_scale": scale}


def fp8(weight: torch.Tensor) -> Tensors:
    return {**_fp8(weight), "comfy_quant": as_bytes({"format": "float8_e4m3fn"})}


def _fp8(weight: torch.Tensor) -> Tensors:
    scale = weight.abs().max().float() / 448
    values = (weight * (1 / scale).to(weight.dtype)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(1.0)}


def fp8_legacy(weight: torch.Tensor) -> Tensors:
    made = _fp8(weight)
    return {"weight": made["weight"], "scale_weight": made["weight_scale"], "scale_input": made["input_scale"]}


def fp8_plain(weight: torch.Tensor) -> Tensors:
    return {"weight": weight.to(torch.float8_e4m3fn)}


def padded(weight: torch.Tensor, step: int) -> torch.Tensor:
    return F.pad(weight.float(), (0, -weight.shape[1] % step, 0, -weight.shape[0] % step))


def tiled(scales: torch.Tensor) -> torch.Tensor:
    """[R, C] -> cuBLAS's tiles of 128 x 4, [ceil128, ceil4]: row 32 q + p, column c of a tile at 16 p + 4 q + c."""
    rows, columns = -(-scales.shape[0] // 128) * 128, -(-scales.shape[1] // 4) * 4
    r, c = torch.arange(scales.shape[0])[:, None], torch.arange(scales.shape[1])[None]
    tile = r // 128 * (columns // 4) + c // 4
    out = torch.zeros(rows * columns)
    out[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scales
    return out.view(rows, columns)


def nvfp4(weight: torch.Tensor) -> Tensors:
    w = padded(weight, 16)
    whole = w.abs().max() / (448 * 6)
    blocks = w.view(w.shape[0], -1, 16)
    scales = (blocks.abs().amax(-1) / 6 / whole).clamp(2**-9, 448).to(torch.float8_e4m3fn).float()
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    scaled = blocks / (scales * whole)[..., None]
    codes = (scaled.abs()[..., None] - levels).abs().argmin(-1) + 8 * (scaled < 0)
    codes = codes.view(w.shape).to(torch.uint8)
    return {
        "weight": codes[:, ::2] << 4 | codes[:, 1::2],
        "weight_scale": tiled(scales).to(torch.float8_e4m3fn),
        "weight_scale_2": whole,
        "comfy_quant": as_bytes({"format": "nvfp4"}),
    }


def nvfp4_awq(weight: torch.Tensor) -> Tensors:
    smooth = torch.linspace(0.5, 2.0, weight.shape[1])
    return {**nvfp4(weight.float() / smooth), "pre_quant_scale": smooth}


def mxfp8(weight: torch.Tensor) -> Tensors:
    w = padded(weight, 32)
    blocks = w.view(w.shape[0], -1, 32)
    exponents = (blocks.abs().amax(-1).clamp(min=2**-100) / 448).log2().ceil()
    values = (blocks / 2 ** exponents[..., None]).view(w.shape).to(torch.float8_e4m3fn)
    scales = tiled(exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    return {"weight": values, "weight_scale": scales, "comfy_quant": as_bytes({"format": "mxfp8"})}


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """Signed or unsigned 4-bit codes [N, K] -> int8 [N, K / 2], the even column in the low nibble."""
    codes = codes.to(torch.int32) & 15
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8)


def w4a4(weight: torch.Tensor) -> Tensors:
    turned = rotated(weight.float(), fitting(weight))
    scale = turned.abs().amax(1) / 7
    codes = (turned / scale[:, None]).round().clamp(-7, 7)
    marker = {"format": "convrot_w4a4", "convrot_groupsize": fitting(weight), "linear_dtype": "int8"}
    return {"weight": _packed(codes), "weight_scale": scale, "comfy_quant": as_bytes(marker)}


def w4a8(weight: torch.Tensor) -> Tensors:
    turned = rotated(weight.float(), fitting(weight))
    book = torch.linspace(-1, 1, 16)
    channel = turned.abs().amax(1) / 127
    blocks = (turned / channel[:, None]).view(turned.shape[0], -1, 16)
    group = blocks.abs().amax(-1).clamp(min=1).to(torch.float8_e4m3fn)
    codes = (blocks[..., None] / group.float()[..., None, None] - book).abs().argmin(-1).view(turned.shape)
    marker = {"format": "asym_w4a8_int8", "group_size": 16, "convrot_groupsize": fitting(weight)}
    return {
        "weight": _packed(codes),
        "weight_s_rel": group,
        "weight_s_channel": channel,
        "weight_codebook": book,
        "comfy_quant": as_bytes(marker),
    }


ENCODERS = {
    "int8_convrot": int8_convrot,
    "int8": int8,
    "fp8": fp8,
    "fp8_legacy": fp8_legacy,
    "fp8_plain": fp8_plain,
    "nvfp4": nvfp4,
    "nvfp4_awq": nvfp4_awq,
    "mxfp8": mxfp8,
    "w4a4": w4a4,
    "w4a8": w4a8,
}


def text_linears(layers: int) -> tuple[str, ...]:
    """The linears of a text encoder's layers under ComfyUI's names."""
    leaves = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    return tuple(f"model.layers.{i}.{leaf}" for i in range(layers) for leaf in leaves)


def quantised(format: str, given: Tensors | None = None, linears: tuple[str, ...] = BLOCK_LINEARS) -> Tensors:
    """``given`` (the small DiT) with ``linears`` in ``format``, markers as that kind of file has them."""
    made = dict(given or tensors())
    for name in linears:
        weight = made.pop(f"{name}.weight")
        made.update({f"{name}.{role}": t.contiguous() for role, t in ENCODERS[format](weight).items()})
    if format == "fp8_legacy":
        made["scaled_fp8"] = torch.empty(0, dtype=torch.float8_e4m3fn)
    return made


def pruned(given: Tensors | None = None) -> Tensors:
    """The small DiT with its AdaLN as a curve: the best 8 directions of SiLU(time embedding) over the grid."""
    made = dict(given or tensors())
    dit = DiT(CONFIG)
    dit.time_embedder.load_state_dict({k[14:]: v.float() for k, v in made.items() if k.startswith("time_embedder.")})
    with torch.no_grad():
        grid = dit.time_embedding(torch.linspace(0, 1, CURVE_POINTS))  # [G, time_dim]
    u, s, v = torch.linalg.svd(grid, full_matrices=False)
    table, basis = u[:, :CURVE_WIDTH] * s[:CURVE_WIDTH], v[:CURVE_WIDTH]
    for name in [name for name in made if name.startswith("time_embedder.")]:
        del made[name]
    for name in [name for name in made if ".adaln_proj." in name]:
        value = made[name].float()
        made[name] = (value @ basis.T if value.dim() > 1 else value).half()
    made["adaln_t_table"] = table.contiguous()
    return made


# ---- GGUF


def q8_0(rows: torch.Tensor) -> torch.Tensor:
    """float32 [N, K] -> uint8 [N, bytes]; the encoders below alike."""
    blocks = rows.view(rows.shape[0], -1, 32)
    d = (blocks.abs().amax(-1, keepdim=True) / 127).half()
    codes = (blocks / d.float().clamp(min=1e-8)).round().clamp(-127, 127).to(torch.int8)
    return torch.cat((d.view(torch.uint8), codes.view(torch.uint8)), -1).flatten(1)


def q4_0(rows: torch.Tensor) -> torch.Tensor:
    blocks = rows.view(rows.shape[0], -1, 32)
    d = (blocks.abs().amax(-1, keepdim=True) / 7).half()
    codes = ((blocks / d.float().clamp(min=1e-8)).round() + 8).clamp(0, 15).to(torch.uint8)
    return torch.cat((d.view(torch.uint8), codes[..., :16] | codes[..., 16:] << 4), -1).flatten(1)


def q4_k(rows: torch.Tensor) -> torch.Tensor:
    """256 values: d, dmin, 6-bit scales and minima of 8 groups of 32, 4-bit codes; value = d*s*code - dmin*m."""
    groups = rows.view(rows.shape[0], -1, 8, 32)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1)
    step, floor = (high - low) / 15, -low
    d, dmin = step.amax(-1, keepdim=True) / 63, floor.amax(-1, keepdim=True) / 63
    s = (step / d.clamp(min=1e-8)).round().clamp(0, 63).to(torch.uint8)
    m = (floor / dmin.clamp(min=1e-8)).round().clamp(0, 63).to(torch.uint8)
    scaled = (d.half().float() * s.float())[..., None].clamp(min=1e-8)
    codes = ((groups + (dmin.half().float() * m.float())[..., None]) / scaled).round().clamp(0, 15).to(torch.uint8)
    packed = torch.cat((
        s[..., :4] | s[..., 4:] >> 4 << 6,
        m[..., :4] | m[..., 4:] >> 4 << 6,
        s[..., 4:] & 15 | (m[..., 4:] & 15) << 4,
    ), -1)  # fmt: skip
    pairs = codes[..., ::2, :] | codes[..., 1::2, :] << 4  # [N, blocks, 4, 32]
    return torch.cat(
        (d.half().view(torch.uint8), dmin.half().view(torch.uint8), packed, pairs.flatten(-2)), -1
    ).flatten(1)


def q6_k(rows: torch.Tensor) -> torch.Tensor:
    """256 values: low nibbles, high two bits, 16 signed scales, d; value = d * s * (code - 32)."""
    groups = rows.view(rows.shape[0], -1, 16, 16)
    step = groups.abs().amax(-1) / 31
    d = (step.amax(-1, keepdim=True) / 127).half()
    s = (step / d.float().clamp(min=1e-8)).round().clamp(0, 127)
    scaled = (d.float() * s)[..., None].clamp(min=1e-8)
    codes = ((groups / scaled).round() + 32).clamp(0, 63).to(torch.uint8).flatten(-2)  # [N, blocks, 256]
    halves = codes.unflatten(-1, (2, 4, 32))
    low = (halves[..., :2, :] & 15 | (halves[..., 2:, :] & 15) << 4).flatten(-2)  # [N, blocks, 2, 64]
    high = (
        halves[..., 0, :] >> 4 | halves[..., 1, :] >> 4 << 2 | halves[..., 2, :] >> 4 << 4 | halves[..., 3, :] >> 4 << 6
    )
    scales = s.to(torch.int8).view(torch.uint8)
    return torch.cat((low.flatten(-2), high.flatten(-2), scales, d.view(torch.uint8)), -1).flatten(1)


GGUF_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14, "BF16": 30}
GGUF_ENCODERS = {"Q8_0": q8_0, "Q4_0": q4_0, "Q4_K": q4_k, "Q6_K": q6_k}
GGUF_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def words(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def write_gguf(path, given: Tensors, types: dict[str, str], pairs: dict[str, object] | None = None, shapes=None):
    """``given`` as GGUF: ``types`` names the type of some tensors, the rest are F32; ``pairs`` holds words or lists of
    int32; ``shapes`` other dims (slowest first) to store for a tensor."""
    head, payload, infos = b"", b"", b""
    for key, value in (pairs or {}).items():
        if isinstance(value, str):
            head += words(key) + struct.pack("<I", 8) + words(value)
        else:
            head += words(key) + struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)
    for name, tensor in given.items():
        kind = types.get(name, "F32")
        dims = list((shapes or {}).get(name, tensor.shape))
        if kind in GGUF_PLAIN:
            data = tensor.to(GGUF_PLAIN[kind]).contiguous().reshape(-1).view(torch.uint8)
        else:
            data = GGUF_ENCODERS[kind](tensor.float().reshape(-1, dims[-1]))
        offset = len(payload)
        infos += words(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims[::-1])
        infos += struct.pack("<IQ", GGUF_TYPES[kind], offset)
        payload += data.numpy().tobytes()
        payload += bytes(-len(payload) % 32)
    start = b"GGUF" + struct.pack("<IQQ", 3, len(given), len(pairs or {})) + head + infos
    path.write_bytes(start + bytes(-len(start) % 32) + payload)
    return path
