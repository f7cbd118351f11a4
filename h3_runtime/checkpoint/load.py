"""From files to modules: check everything, then read tensor by tensor.

    path --open_checkpoint--> shapes --from_shapes--> config --> module on meta --compare--> every problem named
                                                                                  --fill--> read, transform, check,
                                                                                            cast, assign, next

Nothing is read before all names, shapes and number types fit. Host memory while loading is what stays resident plus
one tensor and its transform. Weights keep their stored number type; the DiT's float32 islands are float32 whatever
they are stored in, and both VAEs always are.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, H3Error
from ..models.attention import inverse_frequencies
from ..models.audio_vae import AudioVAE, AudioVAEConfig
from ..models.dit import DiT, DiTConfig
from ..models.video_vae import VideoVAE, VideoVAEConfig
from .formats import PARTS
from .opening import Checkpoint, find_partition, open_checkpoint, settings_for
from .reader import fingerprint, listed

NUMBER_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}  # what weights are stored in
ROPE = "rope.inv_freq"
ROPE_TOLERANCE = 1e-6


@dataclass(frozen=True)
class CheckpointInfo:
    """What was loaded. ``dtypes`` counts tensors by stored number type; ``approximate`` says why a render from these
    weights cannot be exact (None: it can)."""

    path: str
    format: str
    part: str
    partition: str  # fl2va, ref2va or unknown (VAEs: unknown)
    dtypes: dict[str, int]
    nbytes: int
    fingerprint: str
    notes: tuple[str, ...] = ()
    approximate: str | None = None


def load_dit(
    path: str | os.PathLike,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    layout: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> tuple[DiT, CheckpointInfo]:
    """The DiT at ``path`` (file, shard, index or folder).

    ``dtype`` None keeps the stored number type (float32 islands are float32 in any case); float32 casts all weights
    up. ``layout`` overrides detection: official (interleaved q/k/v), diffusers, comfyui. ``config`` takes the place of
    config.json. CheckpointError names every missing, extra or misshapen tensor before anything is read.
    """
    if dtype not in (None, torch.float32, torch.bfloat16):
        raise H3Error(f"dtype is {dtype}; the DiT runs as stored (None), in torch.bfloat16 or in torch.float32.")
    checkpoint = open_checkpoint(path, "dit", layout, config)
    shapes = checkpoint.shapes
    settings = settings_for(checkpoint)
    if ROPE not in shapes and "rope_frequencies" in settings:
        shapes[ROPE] = (settings["rope_frequencies"],)
    module = _on_meta(checkpoint, lambda: DiTConfig.from_shapes(shapes), DiT)
    _compare(checkpoint, module, optional=(ROPE,))

    islands = {name for name in checkpoint.recipes if name.startswith(module.float32_islands)}
    plan, notes, approximate = _dit_number_types(checkpoint, islands, dtype)
    notes += _fill(checkpoint, module, plan, device)
    notes += _settle_rope(checkpoint, module, device)
    partition, said = find_partition(checkpoint.source)
    return module, _describe(checkpoint, [*notes, *said], approximate, partition)


def load_video_vae(
    path: str | os.PathLike,
    device: str | torch.device = "cpu",
    layout: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> tuple[VideoVAE, CheckpointInfo]:
    """The video VAE at ``path``, in float32. A half-precision file makes renders approximate; the info says so."""
    return _load_vae("video_vae", VideoVAEConfig, VideoVAE, (path, layout, config), device)


def load_audio_vae(
    path: str | os.PathLike,
    device: str | torch.device = "cpu",
    layout: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> tuple[AudioVAE, CheckpointInfo]:
    """The audio VAE at ``path``, in float32, weight norm folded."""
    return _load_vae("audio_vae", AudioVAEConfig, AudioVAE, (path, layout, config), device)


def canonical_tensors(
    path: str | os.PathLike, layout: str | None = None, config: Mapping[str, Any] | None = None
) -> dict[str, Tensor]:
    """Every tensor of any part under our names, as stored, all in memory. CheckpointError as for loading."""
    checkpoint = open_checkpoint(path, None, layout, config)
    _refuse_problems(checkpoint, list(checkpoint.problems))
    return {name: checkpoint.build(name) for name in checkpoint.recipes}


def _load_vae(part: str, config_type, module_type, place: tuple, device: str | torch.device):
    path, layout, config = place
    checkpoint = open_checkpoint(path, part, layout, config)
    settings = settings_for(checkpoint)
    module = _on_meta(checkpoint, lambda: config_type.from_shapes(checkpoint.shapes, settings), module_type)
    _compare(checkpoint, module)
    if not (checkpoint.build("latents_std") > 0).all():
        raise CheckpointError(f"{checkpoint.where('latents_std')} must be above zero; download the file again.")
    notes = _fill(checkpoint, module, dict.fromkeys(checkpoint.recipes, torch.float32), device)
    halves = Counter(kind for name in checkpoint.recipes if (kind := checkpoint.stored_as(name)) != "F32")
    approximate = None
    if halves:
        kinds = " and ".join(f"{count} tensors in {kind}" for kind, count in sorted(halves.items()))
        approximate = f"the {PARTS[part]} file {checkpoint.source.path.name} stores {kinds} (released in F32)"
        notes.append(f"{kinds} cast up to float32")
    return module, _describe(checkpoint, notes, approximate, "unknown")


def _on_meta(checkpoint: Checkpoint, make_config, module_type) -> nn.Module:
    """The module of these shapes without memory; whatever the shapes make impossible is a CheckpointError."""
    count = len(checkpoint.recipes)
    try:
        config = make_config()
        deepest = max(getattr(config, field, 0) for field in ("layers", "refiner_layers"))
        if deepest > count:
            raise CheckpointError(f"{deepest} layers are named, but only {count} tensors are there")
        with torch.device("meta"):
            return module_type(config).eval().requires_grad_(False)
    except (ValueError, LookupError, TypeError, ArithmeticError, AssertionError, RuntimeError) as error:
        reason = str(error)
    _refuse_problems(checkpoint, list(checkpoint.problems) or [reason])


def _compare(checkpoint: Checkpoint, module: nn.Module, optional: tuple[str, ...] = ()) -> None:
    """Name every tensor that the module needs and the file lacks, has beyond it, or has in another shape or type."""
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    recipes, source = checkpoint.recipes, checkpoint.source
    problems = list(checkpoint.problems)
    for name in wanted:
        stored = checkpoint.format.stored_names(name)
        # a tensor that is there in part is among the checkpoint's own problems
        if name not in recipes and name not in optional and not any(s in checkpoint.header.shapes for s in stored):
            problems.append(f"missing {name}" + (f" ({', '.join(stored)})" if stored != (name,) else ""))
    for name, recipe in recipes.items():
        if name not in wanted:
            problems.append(f"extra {checkpoint.where(name)}")
        elif recipe.shape != wanted[name]:
            problems.append(f"misshapen {checkpoint.where(name)} {list(recipe.shape)}, needed {list(wanted[name])}")
        for stored in (checkpoint.prefix + s for s in recipe.sources):
            if source.dtypes[stored] not in NUMBER_TYPES:
                kinds = ", ".join(NUMBER_TYPES)
                problems.append(f"{source.where(stored)} is stored as {source.dtypes[stored]}, not as one of {kinds}")
    _refuse_problems(checkpoint, problems)


def _refuse_problems(checkpoint: Checkpoint, problems: list[str]) -> None:
    if problems:
        raise CheckpointError(
            f"{checkpoint.source.path} is no complete {checkpoint.format.title}: {listed(problems, '; ')}. "
            "Download the file again, or give its layout if it is another one."
        )


def _dit_number_types(
    checkpoint: Checkpoint, islands: set[str], dtype: torch.dtype | None
) -> tuple[dict[str, torch.dtype], list[str], str | None]:
    """Target number type of each tensor, notes, and why the weights are approximate (None: they are not)."""
    bulk = Counter()
    for name, recipe in checkpoint.recipes.items():
        if name not in islands:
            bulk[checkpoint.stored_as(name)] += torch.Size(recipe.shape).numel()
    common = bulk.most_common(1)[0][0]
    target = dtype or NUMBER_TYPES[common]
    plan = {name: torch.float32 if name in islands else target for name in checkpoint.recipes}
    notes, reasons = [], []
    rounded = sorted(name for name in islands if checkpoint.stored_as(name) != "F32" and name != ROPE)
    if rounded:
        notes.append(f"cast up to float32, but stored in half precision: {listed(rounded)}")
        reasons.append(f"{len(rounded)} tensors released in F32 are stored in half precision")
    if len(bulk) > 1:
        others = {kind: count for kind, count in bulk.items() if NUMBER_TYPES[kind] != target}
        notes.append(
            f"the weights come in {' and '.join(sorted(bulk))}; {sum(others.values()):,} values cast to {target}"
        )
    if bulk["F16"]:
        reasons.append("weights are stored in F16 (released in BF16)")
    if bulk["F32"] and target is torch.bfloat16:
        reasons.append("weights stored in F32 were rounded to bfloat16")
    return plan, notes, f"the DiT file {checkpoint.source.path.name}: {'; '.join(reasons)}" if reasons else None


def _fill(
    checkpoint: Checkpoint, module: nn.Module, plan: Mapping[str, torch.dtype], device: str | torch.device
) -> list[str]:
    """Read, check, cast and assign tensor by tensor. Returns notes."""
    zeros = []
    for name, dtype in plan.items():
        tensor = checkpoint.build(name)
        if tensor.dim() > 1 and name.endswith(".weight") and not tensor[0].any() and not tensor.any():
            zeros.append(name)
        _assign(module, name, tensor.to(device=device, dtype=dtype))
    tensors = (*module.named_parameters(), *module.named_buffers())
    unfilled = [name for name, tensor in tensors if tensor.is_meta and name != ROPE]
    assert not unfilled, unfilled
    return [f"all zeros: {listed(zeros)}"] if zeros else []


def _assign(module: nn.Module, name: str, tensor: Tensor) -> None:
    owner_name, _, leaf = name.rpartition(".")
    owner = module.get_submodule(owner_name)
    is_buffer = leaf in dict(owner.named_buffers(recurse=False))
    setattr(owner, leaf, tensor if is_buffer else nn.Parameter(tensor, requires_grad=False))


def _settle_rope(checkpoint: Checkpoint, module: DiT, device: str | torch.device) -> list[str]:
    """The rotary frequencies: the file's float32 ones once they agree with the formula, else computed."""
    computed = inverse_frequencies(module.config.rope_frequencies)
    if ROPE not in checkpoint.recipes:
        _assign(module, ROPE, computed.to(device))
        return []
    stored = module.rope.inv_freq.cpu()
    rounded = checkpoint.stored_as(ROPE) != "F32"
    error = ((stored - computed).abs() / computed).max().item()
    if rounded and error <= 2**-7:
        _assign(module, ROPE, computed.to(device))
        return [f"{ROPE} is stored in half precision; the computed frequencies are used"]
    if not error <= ROPE_TOLERANCE:
        raise CheckpointError(
            f"{checkpoint.where(ROPE)} is off by {error:.1e} from 1/10000^(i/{len(computed)}), at most "
            f"{ROPE_TOLERANCE:.0e} is allowed: the file is damaged or another model's."
        )
    return []


def _describe(checkpoint: Checkpoint, notes: list[str], approximate: str | None, partition: str) -> CheckpointInfo:
    source = checkpoint.source
    names = [checkpoint.prefix + stored for recipe in checkpoint.recipes.values() for stored in recipe.sources]
    return CheckpointInfo(
        path=str(source.path),
        format=checkpoint.format.name,
        part=checkpoint.format.part,
        partition=partition,
        dtypes=dict(Counter(source.dtypes[name] for name in names)),
        nbytes=sum(source.nbytes(name) for name in names),
        fingerprint=fingerprint(source.files),
        notes=(*checkpoint.notes, *notes),
        approximate=approximate,
    )
