"""One part of a model, opened: headers checked, layout known, a recipe for every tensor, nothing read yet.

path --open_weights--> names, shapes, number types, metadata
     --find_layers--> quantised layers, each with its own format
     --choose_format--> CheckpointFormat --recipes--> Checkpoint.build(name): one tensor of ours, read on demand
     --config.json, metadata--> settings that no shape tells
     --metadata, folder, file name--> partition (fl2va, ref2va, unknown)
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .formats import OTHER_PARTS, CheckpointFormat, Header, Recipe, choose_format, dit_prefix
from .gguf_file import open_weights
from .quantised import StoredLayer, find_layers
from .reader import TensorSource, listed, refuse_unfilled

CONFIG_KEY = "h3_runtime.config"  # our own files carry their configuration under it, as JSON
PARTITION_KEYS = ("h3_runtime.partition", "partition", "modelspec.title")
DIFFUSERS_SIGNS = ("model_index.json", "modular_model_index.json", "transformer_ref")
PARTITIONS = ("fl2va", "ref2va")
BOTH = "both"  # one file that serves either

# config.json of a diffusers or official folder -> our setting, for what no tensor shape tells
CONFIG_NAMES: dict[str, dict[str, str]] = {
    "dit": {"rope_freq_dim": "rope_frequencies"},
    "video_vae": {
        "decoder_num_attention_heads": "heads",
        "decoder_attention_head_dim": "head_dim",
        "spatial_downsample_factors": "space_strides",
        "temporal_downsample_factors": "time_strides",
        "norm_num_groups": "norm_groups",
        "norm_eps": "norm_eps",
        "decoder_rope_theta": "rope_theta",
        "decoder_rope_dim_ratio": "rope_fraction",
        "decoder_norm_eps": "decoder_eps",
        "heads": "heads",
        "dim_head": "head_dim",
        "space_down": "space_strides",
        "time_down": "time_strides",
        "rope_theta": "rope_theta",
        "rope_dim_ratio": "rope_fraction",
    },
    "audio_vae": {
        "encoder_dim": "encoder_dim",
        "encoder_rates": "encoder_rates",
        "latent_dim": "latent_dim",
        "latent_channels": "latent_channels",
        "num_attention_heads": "heads",
        "decoder_dim": "decoder_dim",
        "decoder_rates": "decoder_rates",
        "decoder_kernel_sizes": "decoder_kernels",
        "resblock_kernel_sizes": "res_kernels",
        "resblock_dilation_sizes": "res_dilations",
    },
}
# settings of config.json that our modules have built in
FIXED_SETTINGS = {
    "dit": {"patch_size": [1, 2, 2], "norm_eps": 1e-5, "qk_norm_eps": 1e-5, "final_norm_eps": 1e-5, "rope_theta": 1e4},
    "video_vae": {
        "spatial_padding_mode": "reflect",
        "clip_length": 17,
        "token_drop": 3,
        "vae_clip_length": 17,
        "vae_token_drop": 3,
    },
    "audio_vae": {"sampling_rate": 32000, "sample_rate": 32000},
}
STATISTICS = ("latents_mean", "latents_std")
COMPONENT_FILES = ("model.", "diffusion_pytorch_model")  # weights whose folder says what they are
CLASS_PARTS = {
    "MiniMaxH3Transformer3DModel": "dit",
    "MiniMaxH3DiTModel": "dit",
    "AutoencoderKLMiniMaxH3": "video_vae",
    "AutoencoderKLLegacy": "video_vae",
    "MiniMaxH3VideoVAE": "video_vae",
    "AutoencoderKLMiniMaxH3Audio": "audio_vae",
    "MiniMaxH3AudioVAE": "audio_vae",
}


@dataclass(frozen=True)
class Checkpoint:
    """One part, opened: headers checked, layout known, a recipe for each of our tensors, no tensor read.

    ``layers`` are the quantised ones by our name (``blocks.0.mlp.fc1``); the recipe of such a weight gives its shape
    and is never built: ``read_layer`` gives its tensors.
    """

    source: TensorSource
    format: CheckpointFormat
    prefix: str
    header: Header
    recipes: Mapping[str, Recipe]
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    layers: Mapping[str, StoredLayer] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes under our names."""
        return {name: recipe.shape for name, recipe in self.recipes.items()}

    @property
    def plain(self) -> list[str]:
        """Our names of the tensors that are not a quantised layer's weight."""
        weights = {f"{layer}.weight" for layer in self.layers}
        return [name for name in self.recipes if name not in weights]

    def stored_as(self, name: str) -> str:
        """The number type our tensor ``name`` is stored in (its first source; F32 when it comes from config.json)."""
        sources = self.recipes[name].sources
        return self.source.dtypes[self.prefix + sources[0]] if sources else "F32"

    def where(self, name: str) -> str:
        """File and stored names behind our tensor ``name``, for messages."""
        sources = self.recipes[name].sources
        return " + ".join(self.source.where(self.prefix + s) for s in sources) or f"{self.source.path}: {name}"

    def build(self, name: str) -> Tensor:
        """Our tensor ``name``, read and transformed, in its stored number type; CheckpointError on NaN or infinity."""
        assert name.removesuffix(".weight") not in self.layers, name
        tensor = self.recipes[name].build(self.source, self.prefix)
        refuse_not_finite(tensor, self.where(name))
        return tensor

    def read_layer(self, name: str) -> dict[str, Tensor]:
        """The stored tensors of the quantised layer ``name`` by role (weight, weight_scale ...); bias not among them.

        NaN or infinity in weights or scales is a CheckpointError.
        """
        tensors = {}
        for role, stored in self.layers[name].roles.items():
            tensors[role] = self.source.read(stored)
            refuse_not_finite(tensors[role], self.source.where(stored))
        return tensors

    def read_rows(self, name: str, rows: Sequence[int]) -> Tensor:
        """``build(name)[rows]`` of a tensor that is stored as it is; ``rows`` rising, and no other byte is read."""
        recipe = self.recipes[name]
        assert recipe.combine is None and len(recipe.sources) == 1, recipe
        tensor = self.source.read_rows(self.prefix + recipe.sources[0], rows)
        refuse_not_finite(tensor, self.where(name))
        return tensor

    def read_layer_rows(self, name: str, rows: Sequence[int], count: int) -> dict[str, Tensor]:
        """``read_layer`` with only ``rows`` (rising) of each tensor that holds a row of bytes for each of the layer's
        ``count`` rows; the others (one scale for all) are whole."""
        tensors = {}
        for role, stored in self.layers[name].roles.items():
            shape = self.source.shapes[stored]
            by_row = len(shape) > 0 and shape[0] == count
            tensors[role] = self.source.read_rows(stored, rows) if by_row else self.source.read(stored)
            refuse_not_finite(tensors[role], self.source.where(stored))
        return tensors


# 8-bit floats have no arithmetic: bits without the sign, and the largest that are a finite number
FLOAT8_BITS = {torch.float8_e4m3fn: (0x7F, 0x7E), torch.float8_e5m2: (0x7F, 0x7B)}
if hasattr(torch, "float8_e8m0fnu"):
    FLOAT8_BITS[torch.float8_e8m0fnu] = (0xFF, 0xFE)


def refuse_not_finite(tensor: Tensor, where: str) -> None:
    """CheckpointError, naming the place, when a tensor of floats holds NaN or infinity."""
    finite = True
    if tensor.dtype in (torch.float32, torch.bfloat16, torch.float16) and tensor.numel():
        low, high = torch.aminmax(tensor)  # NaN carries through; no mask of the tensor's size is made
        finite = bool(torch.isfinite(low) and torch.isfinite(high))
    elif tensor.dtype in FLOAT8_BITS and tensor.numel():
        mask, largest = FLOAT8_BITS[tensor.dtype]
        finite = int((tensor.view(torch.uint8) & mask).max()) <= largest
    if not finite:
        raise CheckpointError(f"{where} holds NaN or infinity; download the file again.")


@dataclass(frozen=True)
class Sorted:
    """The names of a source: prefix, plain tensors and sizes of quantised weights (``header``), quantised layers."""

    prefix: str
    header: Header
    layers: dict[str, StoredLayer]
    problems: tuple[str, ...]


def sort_names(source: TensorSource, part: str | None = None, forced: bool = False) -> Sorted:
    """What detection sees of a source. Reads nothing but the small markers of quantised layers."""
    prefix = dit_prefix(source.shapes) if part in (None, "dit") else ""
    layers, taken, problems = find_layers(source, prefix)
    own = {name: shape for name, shape in source.shapes.items() if name.startswith(prefix)}
    shapes = {name[len(prefix) :]: shape for name, shape in own.items() if name not in taken}
    shapes.update({f"{name}.weight": layer.size for name, layer in layers.items()})
    return Sorted(prefix, Header(shapes, source.sharded, forced=forced), layers, tuple(problems))


def open_checkpoint(
    path: str | os.PathLike,
    part: str | None = None,
    layout: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Open the weights at ``path`` (file, shard, index or folder) as ``part``: dit, video_vae, audio_vae, None: any.

    ``layout`` (official, diffusers, comfyui) overrides detection; ``config`` takes the place of config.json. Reads
    headers, and a few bytes that must not be zeros. CheckpointError when it is another part or no layout fits; what is
    missing or does not fit inside the layout is in ``problems``.
    """
    source = open_weights(path)
    found = sort_names(source, part, forced=layout is not None)
    prefix, header = found.prefix, found.header
    chosen = choose_format(header, part, layout, str(source.path))
    refuse_unfilled(source.files)
    _refuse_quantised(source, chosen, found.layers)
    settings = _settings_in(config, chosen.part, "config") if config else config_of(source, chosen.part)
    header = replace(header, config=settings)
    recipes, problems = chosen.recipes(header)
    problems += found.problems
    outside = [name for name in source.shapes if not name.startswith(prefix)]
    foreign = [name for name in outside if name.startswith(OTHER_PARTS)]
    problems += [f"extra {name}" for name in outside if name not in foreign]
    notes = source.notes
    if foreign:
        notes += (f"{len(foreign)} tensors of other parts in the same file were left alone",)
    return Checkpoint(source, chosen, prefix, header, recipes, tuple(problems), notes, found.layers)


def _refuse_quantised(source: TensorSource, chosen: CheckpointFormat, layers: Mapping[str, StoredLayer]) -> None:
    """CheckpointError where a quantised layer cannot be: another layout than ComfyUI's, and the audio VAE."""
    if not layers:
        return
    if chosen.part == "audio_vae":
        raise CheckpointError(
            f"{source.path} is a quantised audio VAE ({len(layers)} layers); sound is computed in float32 only: "
            "use the fp32 file."
        )
    if chosen.key_map:
        kinds = listed(dict.fromkeys(layer.title for layer in layers.values()))
        raise CheckpointError(
            f"{source.path} is a {chosen.title} with {len(layers)} quantised layers ({kinds}); quantised files are "
            "read in the ComfyUI layout only: use ComfyUI's file, or bf16 here and quantise while loading."
        )


def config_of(source: TensorSource, part: str) -> dict[str, Any]:
    """Settings of config.json beside the weights, {} without one or when it is another part's.

    The official video VAE keeps its weights in ``source/`` and a second config.json one folder up: both are read.
    """
    folder = source.path if source.path.is_dir() else source.path.parent
    files = [folder.parent / "config.json"] if folder.name == "source" else []
    settings: dict[str, Any] = {}
    for file in (*files, folder / "config.json"):
        if not file.is_file():
            continue
        found = read_json(file)
        owner = CLASS_PARTS.get(str(found.get("_class_name")))
        # without a class of ours it may be a neighbour's (a text encoder's), unless the weights' name says folder
        nameless = source.sharded or source.path.name.startswith(COMPONENT_FILES)
        if owner == part or (owner is None and nameless and "model_type" not in found):
            settings.update(_settings_in(found, part, str(file)))
    return settings


def _settings_in(config: Mapping[str, Any], part: str, where: str) -> dict[str, Any]:
    """The settings of ``part`` in a config.json's content, nested ones lifted; CheckpointError on impossible values."""
    known = {*CONFIG_NAMES[part], *FIXED_SETTINGS[part], *STATISTICS}
    settings: dict[str, Any] = {}
    for level in (*(value for value in config.values() if isinstance(value, Mapping)), config):
        settings.update({key: value for key, value in level.items() if key in known and value is not None})
    for key, value in settings.items():
        fixed = FIXED_SETTINGS[part].get(key, value)
        if value != fixed:
            raise CheckpointError(f"{where}: {key} is {value!r}; only {fixed!r} can be run.")
        if key not in FIXED_SETTINGS[part] and not _all_numbers(value, positive=key not in STATISTICS):
            raise CheckpointError(f"{where}: {key} is {value!r}, which is no size; download it again.")
    return settings


def _all_numbers(value: Any, positive: bool) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(_all_numbers(item, positive) for item in value)
    return type(value) in (int, float) and (0 if positive else -1e9) < value < 1e9


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a small file; CheckpointError names the file when it is none."""
    try:
        found = json.loads(path.read_bytes().decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); download it again.") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds no JSON object; download it again.")
    return found


def settings_for(checkpoint: Checkpoint) -> dict[str, Any]:
    """What shapes cannot tell, under our modules' names: from config.json, and from the file's own metadata."""
    names = CONFIG_NAMES[checkpoint.format.part]
    found = {names[key]: _tupled(value) for key, value in checkpoint.header.config.items() if key in names}
    text = checkpoint.source.metadata.get(CONFIG_KEY, "{}")
    try:
        return {**{key: _tupled(value) for key, value in json.loads(text).items()}, **found}
    except (ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{checkpoint.source.path}: the metadata {CONFIG_KEY} is damaged ({error}); download the file again."
        ) from None


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


def find_partition(source: TensorSource) -> tuple[str, list[str]]:
    """fl2va, ref2va, both or unknown, and notes. The two have the same tensors: only what is written around them tells.

    A file whose metadata names both serves either. In this order: the file's metadata; model_index.json of the official
    folder; folder names; the file's name. A later sign that contradicts an earlier one is noted.
    """
    path = Path(os.path.abspath(source.path))
    folder = path if path.is_dir() else path.parent
    signs: list[tuple[str, str]] = []
    if any(source.metadata.get(key, "").split() == list(PARTITIONS) for key in PARTITION_KEYS):
        return BOTH, []
    for key in PARTITION_KEYS:
        signs += [(word, f"metadata {key}") for word in _partitions_in(source.metadata.get(key, ""))]
    index = folder.parent / "model_index.json"
    if index.is_file():
        release = read_json(index).get("_minimax_h3")
        if isinstance(release, dict):
            signs += [(word, index.name) for word in _partitions_in(str(release.get("partition", "")))]
    for name in (folder.name, folder.parent.name):
        if name == "transformer_ref":
            signs.append(("ref2va", f"folder {name}"))
        signs += [(word, f"folder {name}") for word in _partitions_in(name)]
    if not path.is_dir():
        signs += [(word, f"file name {path.name}") for word in _partitions_in(path.name)]
    if folder.name == "transformer" and not signs and any((folder.parent / name).exists() for name in DIFFUSERS_SIGNS):
        signs.append(("fl2va", "folder transformer"))  # the reference keeps ref2va weights in transformer_ref
    if not signs:
        return "unknown", ["partition unknown (fl2va or ref2va): nothing in metadata, folder or file name tells"]
    partition, sign = signs[0]
    against = [other for word, other in signs if word != partition]
    return partition, [f"{partition} by {sign}, against {listed(against)}"] if against else []


def partition_serves(partition: str, needed: str) -> bool:
    """Whether weights of ``partition`` go with what needs ``needed`` (fl2va, ref2va), or nothing tells."""
    return partition in (needed, BOTH, "unknown")


def wrong_partition(partition: str, task: str) -> str | None:
    """What to say when ``task`` (t2va, fl2va, ref2va) runs on weights of another partition; None when they go together
    or nothing tells."""
    needed = "ref2va" if task == "ref2va" else "fl2va"
    if partition_serves(partition, needed):
        return None
    return (
        f"the task {task} needs {needed} weights and these are {partition}: all tensors fit, but they were trained for "
        f"another kind of input and the result degrades; use the {needed} file"
    )


def _partitions_in(text: str) -> list[str]:
    """The one partition that ``text`` names; [] when it names none or both."""
    text = text.lower()
    found = [name for name in PARTITIONS if name[:-1] in text]  # file names say fl2v and ref2v as well
    return found if len(found) == 1 else []
