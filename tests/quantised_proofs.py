"""The proofs of the labels that quantised weights bring: what ``test_fidelity`` runs for each entry of the registry.

Each proof takes (model, monkeypatch) and says whether the label holds: APPROXIMATE paths differ from the baseline,
EXACT MATH ones stay within 1e-5 of it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from h3_runtime.checkpoint.load import load_dit, load_video_vae
from h3_runtime.checkpoint.pieces import quantise_linear
from h3_runtime.checkpoint.text_layers import TextLayers
from h3_runtime.fidelity import use
from h3_runtime.quant import kernels
from h3_runtime.quant.convrot import quantise_rows_float8
from h3_runtime.quant.linear import linear_from_stored

from .quantised_fixtures import (
    BLOCK_LINEARS,
    ENCODERS,
    GGUF_ENCODERS,
    pruned,
    quantised,
    relative,
    tensors,
    text_linears,
    velocity,
    write_gguf,
)

EXACT_BOUND = 1e-5


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


def _base(folder) -> torch.Tensor:
    path = folder / "q_base.safetensors"
    if not path.exists():
        save_file(tensors(), path)
    return velocity(load_dit(path)[0])


def dit_in(format: str, path: str):
    """A DiT file in ``format`` brings the entry ``path`` and another velocity than the bf16 one."""

    def proof(model, monkeypatch):
        file = model.folder / f"q_{format}.safetensors"
        save_file(quantised(format), file)
        dit, info = load_dit(file)
        file.unlink()
        return path in info.paths and not torch.equal(velocity(dit), _base(model.folder))

    return proof


def dit_gguf(model, monkeypatch):
    found = []
    for kind in GGUF_ENCODERS:
        file = model.folder / f"{kind}.gguf"
        write_gguf(file, tensors(), {f"{name}.weight": kind for name in BLOCK_LINEARS})
        dit, info = load_dit(file)
        file.unlink()
        found.append("dit/gguf" in info.paths and not torch.equal(velocity(dit), _base(model.folder)))
    return all(found)


def dit_pruned(model, monkeypatch):
    file = model.folder / "q_pruned.safetensors"
    save_file(pruned(), file)
    dit, info = load_dit(file)
    file.unlink()
    return "dit/pruned-curve" in info.paths and not torch.equal(velocity(dit), _base(model.folder))


def encoder_in(format: str):
    """A linear of a text encoder file in ``format`` gives other rows than the bf16 one's."""

    def proof(model, monkeypatch):
        plain = model.folder / "text_encoder.safetensors"
        names = text_linears(3)
        if format == "gguf":
            file = model.folder / "q_text.gguf"
            write_gguf(file, load_file(plain), {f"{name}.weight": "Q8_0" for name in names})
        else:
            file = model.folder / "q_text.safetensors"
            save_file(quantised(format, load_file(plain), names), file)
        layers = TextLayers(file, layers=3)
        weight = TextLayers(plain).layer(0)["self_attn.q_proj.weight"]
        linear = layers.layer(0)["self_attn.q_proj"]
        file.unlink()
        x = draw(5, weight.shape[1]).bfloat16()
        word = {"w4a4": "convrot-w4a4", "w4a8": "asym-w4a8"}.get(format, format.replace("_", "-"))
        return f"encoder/{word}" in layers.info.paths and not torch.equal(linear(x), F.linear(x, weight))

    return proof


def encoder_half(model, monkeypatch):
    """The text encoder rounded to half precision has other weights, and its info says so."""
    file = model.folder / "q_text.safetensors"
    plain = model.folder / "text_encoder.safetensors"
    save_file({name: t.half() for name, t in load_file(plain).items()}, file)
    info = TextLayers(file, layers=3).info
    file.unlink()
    return "encoder/file-approximate" in info.paths and "F16" in info.approximate


def vae_online(method: str):
    """The video VAE quantised while loading decodes other pixels."""

    def proof(model, monkeypatch):
        vae, info = load_video_vae(model.folder / "video_vae.safetensors", quantise=method)
        latent = draw(1, 24, 2, 4, 6)
        path = f"video-vae/{method.replace('_', '-')}"
        return path in info.paths and not torch.equal(vae.decode(latent), model.video_vae.decode(latent))

    return proof


# ---- kernels


def _linear(method: str):
    return quantise_linear(draw(96, 256).bfloat16(), None, method, torch.float32)


def _decoded(linear, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, linear.dequantised())


def int8_arithmetic(model, monkeypatch):
    """Integers are multiplied, and the rounded inputs show against the decoded weights."""
    linear, x = _linear("int8_convrot"), draw(7, 256)
    y = linear(x)
    return linear.ran[kernels.INT8] == 1 and not torch.equal(y, _decoded(linear, x))


def int8_kitchen(model, monkeypatch):
    """On a card comfy-kitchen has a kernel for: that kernel. Elsewhere its twin here, the integer path."""
    if use("kernel/int8-comfy-kitchen").unproven():
        return int8_arithmetic(model, monkeypatch)
    linear, x = _linear("int8_convrot").cuda(), draw(48, 256).cuda().bfloat16()
    backend, why = kernels.kitchen_backend(kernels.Device.of("cuda"), kernels.kitchen())
    if backend is None:
        return bool(why)
    y = kernels.kitchen_int8(x, linear.weight, linear.weight_scale, None, linear.group, backend)
    return y is None or not torch.equal(y.float(), _decoded(linear, x.float()))


def float8_arithmetic(model, monkeypatch):
    """On a card with float8 tensor cores: the linear. Elsewhere its inputs rounded alike, multiplied plainly."""
    linear, x = _linear("fp8"), draw(16, 256)
    if use("kernel/float8-scaled-mm").unproven():
        values, scale = quantise_rows_float8(x)
        return not torch.equal(_decoded(linear, values.float() * scale), _decoded(linear, x))
    return not torch.equal(linear.cuda()(x.cuda()).cpu(), _decoded(linear.cpu(), x))


def decoded_matmul(method: str):
    """The matmul on decoded weights is the ordinary one."""

    def proof(model, monkeypatch):
        op = kernels.OPS[0] if method.startswith("int8") else kernels.OPS[1]
        monkeypatch.setattr(kernels, "choice", lambda o, d: kernels.KernelChoice(op, kernels.DEQUANTISED, "asked for"))
        linear, x = _linear(method), draw(7, 256)
        y = linear(x)
        return set(linear.ran) == {kernels.DEQUANTISED} and relative(y, _decoded(linear, x)) <= EXACT_BOUND

    return proof


def decoded_file(format: str):
    """The same for a layer of a file in ``format`` (one of the fixtures'), or GGUF."""

    def proof(model, monkeypatch):
        weight, x = draw(96, 256), draw(7, 256)
        if format == "gguf":
            given = {"weight": GGUF_ENCODERS["Q6_K"](weight)}
            linear = linear_from_stored(given, {"format": "gguf", "type": "Q6_K"}, torch.float32)
        else:
            linear = linear_from_stored(ENCODERS[format](weight), None, torch.float32, (96, 256))
        return relative(linear(x), _decoded(linear, x)) <= EXACT_BOUND

    return proof


STORED = {"int8_convrot": "int8-convrot", "int8": "int8", "fp8": "fp8", "nvfp4": "nvfp4", "mxfp8": "mxfp8"}
STORED |= {"w4a4": "convrot-w4a4", "w4a8": "asym-w4a8"}

PROOFS = {f"dit/{word}": dit_in(format, f"dit/{word}") for format, word in STORED.items()}
PROOFS |= {f"encoder/{word}": encoder_in(format) for format, word in STORED.items()}
PROOFS |= {f"video-vae/{STORED[method]}": vae_online(method) for method in ("int8_convrot", "int8", "fp8")}
PROOFS |= {
    "dit/gguf": dit_gguf,
    "encoder/gguf": encoder_in("gguf"),
    "dit/pruned-curve": dit_pruned,
    "encoder/file-approximate": encoder_half,
    "kernel/int8-int-mm": int8_arithmetic,
    "kernel/int8-comfy-kitchen": int8_kitchen,
    "kernel/int8-dequantised": decoded_matmul("int8_convrot"),
    "kernel/float8-scaled-mm": float8_arithmetic,
    "kernel/float8-dequantised": decoded_matmul("fp8"),
    "kernel/block-scaled-float-dequantised": decoded_file("nvfp4"),
    "kernel/gguf-dequantised": decoded_file("gguf"),
}
