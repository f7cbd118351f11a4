"""One low-rank update of a tiny DiT, written out by hand in every layout that LoRA files come in.

The update is made once, per module and for q, k and v apart. Nothing of the package's own reading takes part in
writing it.
"""

from __future__ import annotations

import copy
import math

import torch
from safetensors.torch import save_file

from h3_runtime.lora import apply, plan
from h3_runtime.lora.applying import linears
from h3_runtime.models.dit import DiT, DiTConfig

CONFIG = DiTConfig(
    hidden=64,
    layers=2,
    refiner_layers=1,
    heads=3,
    head_dim=32,
    ffn=48,
    text_dim=40,
    video_channels=24,
    audio_channels=32,
    time_features=16,
    time_hidden=64,
    time_dim=56,
    rope_frequencies=4,
)
INNER = CONFIG.heads * CONFIG.head_dim
BLOCKS = ("blocks.0", "blocks.1", "token_refiner.blocks.0")
BACKBONE = [f"{block}.{leaf}" for block in BLOCKS for leaf in ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")]
ADALN = ["blocks.0.adaln_proj.linear", "blocks.1.adaln_proj.linear", "final_layer.adaln_proj.linear"]
OTHERS = ["condition_proj", "video_patch_proj", "audio_patch_proj", "final_layer.video_out", "time_embedder.proj_in"]
RANK = 6
ALPHA = 1.5  # what layouts with an alpha write; the delta is the same in all


def make_dit(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    dit = DiT(CONFIG).requires_grad_(False)
    for name, tensor in dit.named_parameters():
        if not name.startswith(DiT.float32_islands):
            tensor.data = tensor.data.to(dtype)
    return dit


def ranks():
    """Another rank for every module, as resized files have."""
    return {name: 3 + i % 5 for i, name in enumerate((*BACKBONE, *ADALN, *OTHERS))}


def make_delta(dit):
    """Module -> list of (A [r, in], B [rows, r]): one pair, or three for q, k and v; delta = B @ A."""
    generator = torch.Generator().manual_seed(7)

    def pair(outputs, inputs, rank):
        a = torch.randn(rank, inputs, generator=generator) / math.sqrt(inputs)
        return a, torch.randn(outputs, rank, generator=generator) / 8

    shapes = {name: tuple(module.weight.shape) for name, module in linears(dit).items()}
    made = {}
    for name, rank in ranks().items():
        outputs, inputs = shapes[name]
        count = 3 if name.endswith("qkv_proj") else 1
        made[name] = [pair(outputs // count, inputs, rank) for _ in range(count)]
    return made


def fused(pairs):
    """q, k, v pairs as one with a block-diagonal B."""
    return torch.cat([a for a, _ in pairs]), torch.block_diag(*(b for _, b in pairs))


def interleaved(b):
    """Rows q; k; v -> per head q, k, v."""
    return b.view(3, CONFIG.heads, CONFIG.head_dim, -1).transpose(0, 1).reshape(b.shape)


DIFFUSERS = {
    "attn.out_proj": "attn.to_out.0",
    "mlp.fc1": "ff.net.0.proj",
    "mlp.fc2": "ff.net.2",
    "condition_proj": "context_embedder",
    "video_patch_proj": "proj_in",
    "audio_patch_proj": "audio_proj_in",
    "final_layer.video_out": "proj_out",
    "final_layer.adaln_proj.linear": "norm_out.linear",
    "time_embedder.proj_in": "time_embedder.linear_1",
}


def diffusers_name(name):
    for ours, theirs in DIFFUSERS.items():
        if name == ours or name.endswith(f".{ours}"):
            name = name.removesuffix(ours) + theirs
            break
    if name.startswith("token_refiner."):
        return name.replace("token_refiner.blocks.", "token_refiner.refiner_blocks.")
    return name.replace("blocks.", "transformer_blocks.") if name.startswith("blocks.") else name


def native(delta, form, order=lambda b: b, alpha=None):
    """Tensors under names of ``form``: {m} module, {u} module with underscores, {ab} A or B, {du} down or up."""
    tensors = {}
    for name, pairs in delta.items():
        a, b = fused(pairs) if len(pairs) == 3 else pairs[0]
        b = order(b) if len(pairs) == 3 else b
        if alpha is not None:
            b = b * (a.shape[0] / alpha)
            stem = form.format(m=name, u=name.replace(".", "_"), ab="", du="").split(".lora")[0]
            tensors[f"{stem}.alpha"] = torch.tensor(alpha)
        for tensor, ab, du in ((a, "A", "down"), (b, "B", "up")):
            key = form.format(m=name, u=name.replace(".", "_"), ab=ab, du=du)
            tensors[key.replace("lora_A", "lora_a").replace("lora_B", "lora_b") if key[-1] in "AB" else key] = tensor
    return tensors


def peft(delta, form, factor=1.0):
    """diffusers names, q, k and v apart, the rows of fc1 as value; gate. B times ``factor`` per rank."""
    tensors = {}
    for name, pairs in delta.items():
        stem = diffusers_name(name)
        names = [stem.replace("qkv_proj", f"to_{x}") for x in "qkv"] if len(pairs) == 3 else [stem]
        for stored, (a, b) in zip(names, pairs):
            if name.endswith("fc1"):
                b = torch.cat((b[b.shape[0] // 2 :], b[: b.shape[0] // 2]))
            tensors[form.format(m=stored, ab="A")] = a
            tensors[form.format(m=stored, ab="B")] = b * factor * (a.shape[0] if factor != 1 else 1)
    return tensors


def write(path, tensors, metadata=None):
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path, metadata)
    return path


EXPRESSIONS = {
    "a": ("native", "native.safetensors", lambda d: native(d, "{m}.lora_{ab}.weight"), None),
    "b": ("comfyui", "c.safetensors", lambda d: native(d, "diffusion_model.{m}.lora_{du}.weight", alpha=ALPHA), None),
    "b prefix": (
        "comfyui",
        "c.safetensors",
        lambda d: native(d, "base_model.model.model.diffusion_model.{m}.lora_{ab}.weight"),
        None,
    ),
    "c": ("diffusers", "p.safetensors", lambda d: peft(d, "transformer.{m}.lora_{ab}.default.weight"), None),
    "c bare": ("diffusers", "p.safetensors", lambda d: peft(d, "{m}.lora_{ab}.weight"), None),
    "c alpha": (
        "diffusers",
        "p.safetensors",
        lambda d: peft(d, "{m}.lora_{ab}.default.weight", 1 / ALPHA),
        {"alpha": str(ALPHA)},
    ),
    "c known": (
        "diffusers",
        "minimax_h3_fl2v_turbo_4step_v0.1.safetensors",
        lambda d: peft(d, "{m}.lora_{ab}.default.weight", 1 / 8),
        None,
    ),
    "d": ("kohya", "k.safetensors", lambda d: native(d, "lora_unet_{u}.lora_{du}.weight", alpha=ALPHA), None),
    "e": ("diffsynth", "s.safetensors", lambda d: native(d, "{m}.lora_{ab}.default.weight", interleaved), None),
    "f": ("taomate", "t.safetensors", lambda d: native(d, "{m}.lora_{ab}"), None),
}


def merged(dit, *loras, **options):
    """The weights of a copy of ``dit`` with the LoRAs merged."""
    dit = copy.deepcopy(dit)
    apply(dit, plan(dit, loras, **options), "merge")
    return {name: module.weight for name, module in linears(dit).items()}


def expected(dit, delta, strength=1.0):
    weights = {name: module.weight.clone() for name, module in linears(dit).items()}
    for name, pairs in delta.items():
        weights[name] = weights[name] + strength * torch.cat([b @ a for a, b in pairs])
    return weights


def furthest(one, other):
    assert one.keys() == other.keys()
    return max((one[name].float() - other[name].float()).abs().max().item() for name in one)


FIRST = "blocks.0.mlp.fc2"


def one_pair(rank=128, name=FIRST, dtype=torch.float32):
    return {
        f"{name}.lora_A.weight": torch.randn(rank, 48).to(dtype),
        f"{name}.lora_B.weight": torch.randn(64, rank).to(dtype),
    }
