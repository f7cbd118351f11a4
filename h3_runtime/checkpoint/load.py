"""From files to modules: check everything, then read piece by piece.

    path --open_checkpoint--> shapes --from_shapes--> config --> module on meta --compare--> every problem named
                                                                                  --fill--> read, transform, decode or
                                                                                            quantise, cast, assign, next

Nothing is read before all names, shapes and number types fit. Host memory while loading is what stays resident plus
one tensor and its transform. Weights keep their stored number type, quantised layers their own; the DiT's float32
islands are float32 whatever they are stored in, and what is not quantised in a VAE always is.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, H3Error
from ..models.attention import inverse_frequencies
from ..models.audio_vae import AudioVAE, AudioVAEConfig
from ..models.dit import DiT, DiTConfig
from ..models.video_vae import VideoVAE, VideoVAEConfig
from .info import CheckpointInfo, describe, on_device
from .opening import Checkpoint, find_partition, open_checkpoint, settings_for
from .pieces import Online, Pieces, assign
from .quantised import misfits
from .reader import listed

NUMBER_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}  # what weights are stored in
CAST_TYPES = {**NUMBER_TYPES, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}  # ... and biases, norms
ROPE = "rope.inv_freq"
ROPE_TOLERANCE = 1e-6


@dataclass(frozen=True)
class OpenedPart:
    """A part checked and ready to be read: its module on the meta device (linears not yet replaced), how each piece is
    made, and what is known of it before a weight is read."""

    module: nn.Module
    pieces: Pieces
    info: CheckpointInfo

    def load(self, device: str | torch.device = "cpu") -> tuple[nn.Module, CheckpointInfo]:
        """Fill the module, once. All-zero weights are noted."""
        notes = []
        zeros = self.pieces.fill(self.module, device=device)
        if zeros:
            notes.append(f"all zeros: {listed(zeros)}")
        if isinstance(self.module, DiT):
            notes += settle_rope(self.pieces.checkpoint, self.module, device)
        tensors = (*self.module.named_parameters(), *self.module.named_buffers())
        unfilled = [name for name, tensor in tensors if tensor.is_meta]
        assert not unfilled, unfilled
        return self.module, on_device(replace(self.info, notes=(*self.info.notes, *notes)), device)


def open_dit(
    path: str | os.PathLike,
    dtype: torch.dtype | None = None,
    layout: str | None = None,
    config: Mapping[str, Any] | None = None,
    quantise: str | Online | None = None,
    exclude: Sequence[str] = (),
) -> OpenedPart:
    """Check the DiT at ``path`` (file, shard, index or folder); nothing but headers is read. See ``load_dit``."""
    if dtype not in (None, torch.float32, torch.bfloat16):
        raise H3Error(f"dtype is {dtype}; the DiT runs as stored (None), in torch.bfloat16 or in torch.float32.")
    checkpoint = open_checkpoint(path, "dit", layout, config)
    shapes = checkpoint.shapes
    settings = settings_for(checkpoint)
    if ROPE not in shapes and "rope_frequencies" in settings:
        shapes[ROPE] = (settings["rope_frequencies"],)
    module = _on_meta(checkpoint, lambda: DiTConfig.from_shapes(shapes), DiT)
    wanted = _compare(checkpoint, module, optional=(ROPE,))

    islands = {name for name in checkpoint.recipes if name.startswith(module.float32_islands)}
    target = dtype or _stored_type(checkpoint, islands)
    notes, reasons = _differences(checkpoint, islands, target)
    dtypes = {name: torch.float32 if name in islands else target for name in checkpoint.recipes}
    kept = frozenset(name for name in checkpoint.layers if f"{name}.weight" not in islands and _is_linear(module, name))
    online = online_of(quantise, exclude)
    chosen = dict.fromkeys(online.linears(checkpoint), online.method) if online else {}
    pieces = Pieces(checkpoint, dtypes, wanted, target, kept, chosen)
    partition, said = find_partition(checkpoint.source)
    return OpenedPart(module, pieces, describe(pieces, [*notes, *said], reasons, partition))


def load_dit(
    path: str | os.PathLike,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    layout: str | None = None,
    config: Mapping[str, Any] | None = None,
    quantise: str | Online | None = None,
    exclude: Sequence[str] = (),
) -> tuple[DiT, CheckpointInfo]:
    """The DiT at ``path`` (file, shard, index or folder; safetensors or GGUF).

    ``dtype`` None keeps the stored number type (float32 islands are float32 in any case; beside quantised layers
    bfloat16); float32 casts all weights up. ``layout`` overrides detection: official (interleaved q/k/v), diffusers,
    comfyui. ``config`` takes the place of config.json. ``quantise`` (int8_convrot, int8, fp8) quantises the four
    linears of each block while loading, one at a time, but those that ``exclude`` names. CheckpointError names every
    missing, extra or misshapen tensor before anything is read.
    """
    return open_dit(path, dtype, layout, config, quantise, exclude).load(device)


def open_video_vae(
    path: str | os.PathLike,
    layout: str | None = None,
    config: Mapping[str, Any] | None = None,
    quantise: str | Online | None = None,
    exclude: Sequence[str] = (),
) -> OpenedPart:
    """Check the video VAE at ``path``; nothing but headers and latents_std is read. See ``load_video_vae``."""
    return _open_vae("video_vae", (VideoVAEConfig, VideoVAE), (path, layout, config), online_of(quantise, exclude))


def load_video_vae(
    path: str | os.PathLike,
    device: str | torch.device = "cpu",
    layout: str | None = None,
    config: Mapping[str, Any] | None = None,
    quantise: str | Online | None = None,
    exclude: Sequence[str] = (),
) -> tuple[VideoVAE, CheckpointInfo]:
    """The video VAE at ``path``, in float32 but for quantised linears. ``quantise`` and ``exclude`` as for the DiT, for
    the four linears of each decoder block. A file not in float32 makes renders approximate; the info says so."""
    return open_video_vae(path, layout, config, quantise, exclude).load(device)


def load_audio_vae(
    path: str | os.PathLike,
    device: str | torch.device = "cpu",
    layout: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> tuple[AudioVAE, CheckpointInfo]:
    """The audio VAE at ``path``, in float32, weight norm folded."""
    return open_audio_vae(path, layout, config).load(device)


def open_audio_vae(
    path: str | os.PathLike, layout: str | None = None, config: Mapping[str, Any] | None = None
) -> OpenedPart:
    """Check the audio VAE at ``path``; nothing but headers and latents_std is read."""
    return _open_vae("audio_vae", (AudioVAEConfig, AudioVAE), (path, layout, config), None)


def canonical_tensors(
    path: str | os.PathLike, layout: str | None = None, config: Mapping[str, Any] | None = None
) -> dict[str, Tensor]:
    """Every plain tensor of any part under our names, as stored, all in memory, and the stored tensors of quantised
    layers under ``layer.role``. CheckpointError as for loading."""
    checkpoint = open_checkpoint(path, None, layout, config)
    _refuse_problems(checkpoint, list(checkpoint.problems))
    tensors = {}
    for name in checkpoint.recipes:
        layer = name.removesuffix(".weight")
        if layer in checkpoint.layers and layer != name:
            tensors.update({f"{layer}.{role}": t for role, t in checkpoint.read_layer(layer).items()})
        else:
            tensors[name] = checkpoint.build(name)
    return tensors


def _open_vae(part: str, types: tuple, place: tuple, online: Online | None) -> OpenedPart:
    (config_type, module_type), (path, layout, config) = types, place
    checkpoint = open_checkpoint(path, part, layout, config)
    settings = settings_for(checkpoint)
    module = _on_meta(checkpoint, lambda: config_type.from_shapes(checkpoint.shapes, settings), module_type)
    wanted = _compare(checkpoint, module)
    if not (checkpoint.build("latents_std") > 0).all():
        raise CheckpointError(f"{checkpoint.where('latents_std')} must be above zero; download the file again.")
    halves = Counter(kind for name in checkpoint.plain if (kind := checkpoint.stored_as(name)) != "F32")
    notes, reasons = [], []
    if halves:
        kinds = " and ".join(f"{count} tensors in {kind}" for kind, count in sorted(halves.items()))
        reasons.append(f"stores {kinds} (released in F32)")
        notes.append(f"{kinds} cast up to float32")
    chosen = dict.fromkeys(online.linears(checkpoint), online.method) if online else {}
    kept = frozenset(name for name in checkpoint.layers if _is_linear(module, name))
    dtypes = dict.fromkeys(checkpoint.recipes, torch.float32)
    pieces = Pieces(checkpoint, dtypes, wanted, torch.float32, kept, chosen)
    return OpenedPart(module, pieces, describe(pieces, notes, reasons, "unknown"))


def online_of(quantise: str | Online | None, exclude: Sequence[str] = ()) -> Online | None:
    """A method's name and the layers left out as an ``Online``; H3Error for an exclusion from nothing."""
    if quantise is None and exclude:
        raise H3Error(f"exclude {listed(exclude)} leaves layers out of a quantisation: give quantise as well.")
    return Online(quantise, tuple(exclude)) if isinstance(quantise, str) else quantise


def _is_linear(module: nn.Module, name: str) -> bool:
    return isinstance(module.get_submodule(name), nn.Linear)


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


def _compare(checkpoint: Checkpoint, module: nn.Module, optional: tuple[str, ...] = ()) -> dict[str, tuple[int, ...]]:
    """Name every tensor that the module needs and the file lacks, has beyond it, or has in another shape or type.
    Returns the module's shapes."""
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    compare_shapes(checkpoint, wanted, optional)
    return wanted


def compare_shapes(
    checkpoint: Checkpoint, wanted: Mapping[str, tuple[int, ...]], optional: tuple[str, ...] = ()
) -> None:
    """CheckpointError that names every tensor missing, beyond, or of another shape or number type than ``wanted``."""
    recipes, source = checkpoint.recipes, checkpoint.source
    problems = list(checkpoint.problems)
    for name in wanted:
        stored = checkpoint.format.stored_names(name)
        # a tensor that is there in part is among the checkpoint's own problems
        if name not in recipes and name not in optional and not any(s in checkpoint.header.shapes for s in stored):
            problems.append(f"missing {name}" + (f" ({', '.join(stored)})" if stored != (name,) else ""))
    for name, recipe in recipes.items():
        layer = checkpoint.layers.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        if name not in wanted:
            problems.append(f"extra {checkpoint.where(name)}")
        elif layer is not None:
            problems += misfits(layer, source, wanted[name])
        elif recipe.shape != wanted[name]:
            problems.append(f"misshapen {checkpoint.where(name)} {list(recipe.shape)}, needed {list(wanted[name])}")
        if layer is None:
            for stored in (checkpoint.prefix + s for s in recipe.sources):
                if (kind := source.dtypes[stored]) not in CAST_TYPES:
                    known = ", ".join(NUMBER_TYPES)
                    problems.append(f"{source.where(stored)} is stored as {kind}, not as one of {known}")
    _refuse_problems(checkpoint, problems)


def _refuse_problems(checkpoint: Checkpoint, problems: list[str]) -> None:
    if problems:
        raise CheckpointError(
            f"{checkpoint.source.path} is no complete {checkpoint.format.title}: {listed(problems, '; ')}. "
            "Download the file again, or give its layout if it is another one."
        )


def _bulk(checkpoint: Checkpoint, islands: set[str]) -> Counter:
    """Stored number type -> values, of everything that is neither an island nor quantised."""
    bulk = Counter()
    for name in checkpoint.plain:
        if name not in islands:
            bulk[checkpoint.stored_as(name)] += torch.Size(checkpoint.recipes[name].shape).numel()
    return bulk


def _stored_type(checkpoint: Checkpoint, islands: set[str]) -> torch.dtype:
    """The number type most values are stored in; bfloat16 beside quantised layers, whatever the rest is stored in
    (GGUF files keep norms in float32)."""
    bulk = _bulk(checkpoint, islands)
    if checkpoint.layers or not bulk:
        return torch.bfloat16
    return NUMBER_TYPES.get(bulk.most_common(1)[0][0], torch.bfloat16)


def _differences(checkpoint: Checkpoint, islands: set[str], target: torch.dtype) -> tuple[list[str], list[str]]:
    """Notes on number types, and why the weights are approximate (empty: they are not)."""
    bulk = _bulk(checkpoint, islands)
    notes, reasons = [], []
    rounded = sorted(
        name
        for name in islands
        if checkpoint.stored_as(name) != "F32" and name != ROPE and ".adaln_proj." not in name  # pruned: fp16 as made
    )
    if rounded:
        notes.append(f"cast up to float32, but stored in half precision: {listed(rounded)}")
        reasons.append(f"stores {len(rounded)} tensors released in F32 in half precision")
    if len(bulk) > 1:
        others = {kind: count for kind, count in bulk.items() if NUMBER_TYPES.get(kind) != target}
        notes.append(
            f"the weights come in {' and '.join(sorted(bulk))}; {sum(others.values()):,} values cast to {target}"
        )
    if bulk["F16"]:
        reasons.append("stores weights in F16 (released in BF16)")
    if bulk["F32"] and target is torch.bfloat16 and not checkpoint.layers:
        reasons.append("stores weights in F32, which were rounded to bfloat16")
    return notes, reasons


def settle_rope(checkpoint: Checkpoint, module: DiT, device: str | torch.device) -> list[str]:
    """The rotary frequencies: the file's float32 ones once they agree with the formula, else computed. Gives notes."""
    computed = inverse_frequencies(module.config.rope_frequencies)
    if ROPE not in checkpoint.recipes:
        assign(module, ROPE, computed.to(device))
        return []
    stored = module.rope.inv_freq.cpu()
    rounded = checkpoint.stored_as(ROPE) != "F32"
    error = ((stored - computed).abs() / computed).max().item()
    if rounded and error <= 2**-7:
        assign(module, ROPE, computed.to(device))
        return [f"{ROPE} is stored in half precision; the computed frequencies are used"]
    if not error <= ROPE_TOLERANCE:
        raise CheckpointError(
            f"{checkpoint.where(ROPE)} is off by {error:.1e} from 1/10000^(i/{len(computed)}), at most "
            f"{ROPE_TOLERANCE:.0e} is allowed: the file is damaged or another model's."
        )
    return []
