"""One LoRA file, opened: which pair goes where, with what scale, for which base. Factors are read pair by pair.

    path ──open_source──▶ names, shapes, metadata ──sort_names──▶ pairs ──alpha rules──▶ scale = alpha / rank
                                                                    │
                                      read(pair) ──▶ LowRank(a [r, in], b [rows, r], scale, start)
                                                     delta of rows start.. = scale * b @ a, in OUR row order

Opening reads the header and the alpha scalars only. What a file does not say is decided by the rules of
``alpha_of_file`` and said in ``notes``; layout and alpha can be given instead. Separate q, k, v pairs and a fused
pair whose B is block-diagonal are the same thing here: three pairs, each on its own third of the rows.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint.opening import find_partition, partition_serves, read_json
from ..checkpoint.reader import TensorSource, fingerprint, listed, open_source
from ..errors import CheckpointError, H3Error
from .keys import LAYOUTS, Factors, Slot, Sorted, sort_names
from .presets import FROM_RANK, Preset, preset_for

ALPHA_KEYS = ("alpha", "lora_alpha")
RANK_KEYS = ("rank", "lora_rank", "r", "ss_network_dim")
SIDECAR = "adapter_config.json"  # what PEFT writes beside adapter_model.safetensors
PEFT_KEY = "lora_adapter_metadata"  # the same, where diffusers writes it into the file
FACTOR_TYPES = ("F32", "BF16", "F16", "F8_E4M3", "F8_E5M2")
ADALN = ".adaln_proj.linear"


@dataclass(frozen=True)
class LowRank:
    """A low-rank update of the rows start.. of one weight: ``scale * b @ a`` with a [r, in], b [rows, r], as stored.

    ``offset`` [r]: a constant that is added to a @ x, for inputs that were projected (see ``adaln``).
    """

    a: Tensor
    b: Tensor
    scale: float
    start: int = 0
    offset: Tensor | None = None

    @property
    def stop(self) -> int:
        return self.start + self.b.shape[0]


@dataclass(frozen=True)
class StoredPair:
    """One pair of the file, not read: stored names and shapes, a [r, in], b [out, r]; scale = alpha / r."""

    slot: Slot
    down: str
    up: str
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]
    alpha: float
    problem: str | None = None  # why it cannot be used whatever the base is

    @property
    def rank(self) -> int:
        return self.a_shape[0]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def outputs(self) -> int:
        """Rows of the target module: for a q, k or v pair three times its own."""
        return self.b_shape[0] * (1 if self.slot.part is None else 3)

    @property
    def is_adaln(self) -> bool:
        return self.slot.module.endswith(ADALN)

    @property
    def is_fused_qkv(self) -> bool:
        return self.slot.part is None and self.slot.module.endswith(".qkv_proj")


@dataclass(frozen=True)
class LoraFile:
    """An opened LoRA. ``alpha_from`` says which rule gave alpha, ``partition`` the base it was made for."""

    source: TensorSource
    names: Sorted
    layout: str
    pairs: tuple[StoredPair, ...]
    alpha_from: str
    partition: str
    preset: Preset | None
    notes: tuple[str, ...]

    @property
    def path(self) -> Path:
        return self.source.path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def interleaved(self) -> bool:
        return self.layout == "diffsynth"

    @property
    def fingerprint(self) -> str:
        """Size and hash of the file, as for checkpoints."""
        return fingerprint(self.source.files)

    def read(self, pair: StoredPair, head_dim: int) -> tuple[LowRank, ...]:
        """The pair in our row order, in host memory. CheckpointError on NaN or infinity.

        A fused q/k/v pair whose B is block-diagonal comes as three.
        """
        a, b = (self._factor(name) for name in (pair.down, pair.up))
        if pair.slot.swapped:
            b = torch.cat(tuple(reversed(b.chunk(2))))
        if pair.slot.part is not None:
            return (LowRank(a, b, pair.scale, pair.slot.part * b.shape[0]),)
        if not pair.is_fused_qkv:
            return (LowRank(a, b, pair.scale),)
        if self.interleaved:
            grouped = b.view(-1, 3, head_dim, b.shape[1])  # [heads, q k v, head_dim, r]
            b = grouped.transpose(0, 1).reshape(b.shape)  # [q heads | k heads | v heads, r]
        return _blocks(a, b, pair.scale)

    def _factor(self, name: str) -> Tensor:
        tensor = self.source.read(name)
        if tensor.dtype.itemsize == 1:
            tensor = tensor.to(torch.bfloat16)  # exact, and float8 has no arithmetic
        low, high = torch.aminmax(tensor)
        if not (torch.isfinite(low) and torch.isfinite(high)):
            raise CheckpointError(f"{self.source.where(name)} holds NaN or infinity; download the file again.")
        return tensor

    def warnings(
        self,
        partition: str = "unknown",
        forwards: int | None = None,
        video_shift: float | None = None,
        audio_shift: float | None = None,
    ) -> list[str]:
        """What does not go together: this LoRA and a base of ``partition``, a step count (model calls) and shifts."""
        said = []
        if not (partition_serves(partition, self.partition) or partition_serves(self.partition, partition)):
            said.append(
                f"{self.name} was made for {self.partition} weights and the base is {partition}: all names fit and the "
                f"result degrades; use a {partition} LoRA or the {self.partition} base"
            )
        if self.preset is not None:
            said += self.preset.differences(forwards, video_shift, audio_shift)
        return said

    def describe(self) -> dict:
        """All of it for a report or ``inspect``, as plain JSON values."""
        source = self.source
        return {
            "path": str(self.path),
            "kind": "lora",
            "layout": self.layout,
            "layout_means": " + ".join(LAYOUTS[part] for part in self.layout.split("+")),
            "pairs": len(self.pairs),
            "modules": len({pair.slot.module for pair in self.pairs}),
            "adaln_pairs": sum(pair.is_adaln for pair in self.pairs),
            "ranks": dict(sorted(Counter(pair.rank for pair in self.pairs if not pair.problem).items())),
            "scales": sorted({pair.scale for pair in self.pairs if not pair.problem}),
            "alpha_from": self.alpha_from,
            "dtypes": dict(Counter(source.dtypes.values())),
            "bytes": sum(source.nbytes(name) for name in source.shapes),
            "partition": self.partition,
            "preset": None if self.preset is None else self.preset.to_dict(),
            "replaces": list(self.names.sets),
            "unknown": list(self.names.unknown),
            "problems": [f"{pair.slot.module}: {pair.problem}" for pair in self.pairs if pair.problem],
            "fingerprint": self.fingerprint,
            "notes": list(self.notes),
        }


def _blocks(a: Tensor, b: Tensor, scale: float) -> tuple[LowRank, ...]:
    """A fused pair as three when b [3n, 3r] is zero outside its diagonal blocks [n, r]; else as it is."""
    rows, rank = b.shape
    if rows % 3 or rank % 3:
        return (LowRank(a, b, scale),)
    n, r = rows // 3, rank // 3
    grid = b.view(3, n, 3, r)
    if any(bool(grid[i, :, j].any()) for i in range(3) for j in range(3) if i != j):
        return (LowRank(a, b, scale),)
    thirds = a.chunk(3)
    return tuple(LowRank(thirds[i].clone(), grid[i, :, i].clone(), scale, i * n) for i in range(3))


def open_lora(path: str | os.PathLike, layout: str | None = None, alpha: float | None = None) -> LoraFile:
    """Open the LoRA at ``path``, a safetensors file or a folder with one.

    ``layout`` (a key of LAYOUTS) settles the order of q/k/v rows, which no name or shape tells for sure; ``alpha``
    takes the place of every rule. CheckpointError for damaged files, pickles, other kinds of adapters and files
    without a single pair; H3Error for options that cannot be.
    """
    if layout is not None and layout not in LAYOUTS:
        raise H3Error(f"LoRA layout is {layout!r}; choose one of {', '.join(LAYOUTS)}, or leave it out.")
    if alpha is not None and not (math.isfinite(alpha) and alpha > 0):
        raise H3Error(f"LoRA alpha is {alpha}; give a number above 0, or leave it out.")
    source = open_source(path)
    where = str(source.path)
    if "hyperflow" in source.path.name.lower() or any(key.startswith("hyperflow") for key in source.metadata):
        raise CheckpointError(
            f"{where} is HyperFlow, which conditions every step on two times and brings its own sigmas: that is no "
            "plain LoRA, and its backbone alone is not what was trained. It cannot be applied here."
        )
    names = sort_names(source.shapes, where)
    if not names.factors:
        raise CheckpointError(
            f"{where} holds no LoRA pair of a MiniMax-H3 DiT; its names are like {listed(list(source.shapes)[:3])}. "
            "Give a LoRA that was trained on MiniMax-H3."
        )
    found, said = _settle_layout(names, layout, source)
    preset = preset_for(source.path, source.metadata)
    own = sum(factors.alpha is not None for factors in names.factors) if alpha is None else 0
    if own == len(names.factors):
        rule, alpha_from, more = None, "alpha tensors in the file", []
    else:
        rule, alpha_from, more = alpha_of_file(source, preset, alpha)
        alpha_from = f"{own} alpha tensors, else {alpha_from}" if own else alpha_from
    trained_rank = _trained_rank(source, names)
    pairs = tuple(_stored_pair(source, factors, rule, alpha, trained_rank) for factors in names.factors)
    partition, signs = find_partition(source)
    if "transformer_ref." in names.prefixes:
        partition, signs = "ref2va", []
    if partition == "unknown" and preset is not None:
        partition, signs = preset.partition, []
    notes = [*source.notes, *said, *more, *(note for note in signs if not note.startswith("partition unknown"))]
    if preset is not None and preset.note:
        notes.append(f"{preset.name}: {preset.note}")
    if names.unknown:
        notes.append(f"{len(names.unknown)} tensors of unknown meaning are left out: {listed(names.unknown)}")
    return LoraFile(source, names, found, pairs, alpha_from, partition, preset, tuple(notes))


def _settle_layout(names: Sorted, asked: str | None, source: TensorSource) -> tuple[str, list[str]]:
    """The layout that is read, and what has to be said about it."""
    found = names.layout
    fused = [f for f in names.factors if f.slot.module.endswith(".qkv_proj") and not f.slot.split]
    if asked is not None and asked != found:
        if "diffusers" in (asked, *found.split("+")):
            raise H3Error(
                f"LoRA layout {asked} was asked for and the names of {source.path} are {found}'s: names decide between "
                "diffusers and the others; leave the layout out."
            )
        order = LAYOUTS[asked].rpartition(", ")[2]
        return asked, [f"layout {asked} as asked ({order}); the names look like {found}"]
    if "diffsynth" not in found.split("+") or not fused:
        return found, []
    kinds = sorted({source.dtypes[f.up] for f in fused if f.up})
    said = (
        "the names carry .default. behind the DiT's own names, as DiffSynth writes them: q/k/v rows are taken as "
        "interleaved per head (layout='native' takes them as stacked)"
    )
    if kinds != ["F32"]:
        said += f"; DiffSynth writes F32 and these are {listed(kinds)}, so look at the result"
    return "diffsynth", [said]


def alpha_of_file(
    source: TensorSource, preset: Preset | None, asked: float | None
) -> tuple[float | None, str, list[str]]:
    """alpha for pairs without a tensor of their own (None: their rank), where it is from, and notes.

    In this order: asked for; the file's metadata; PEFT's own settings; the table of known files; alpha = rank, noted
    unless it is known to be right.
    """
    if asked is not None:
        return asked, "asked for", []
    for key in ALPHA_KEYS:
        if key in source.metadata:
            value = _number(source.metadata[key], f"{source.path}: metadata {key}")
            notes = []
            known = None if preset is None or isinstance(preset.alpha, str) else preset.alpha
            if known not in (None, value):
                notes.append(f"metadata {key} is {value:g}; {preset.name} is known with {known:g}: the file's is used")
            return value, f"metadata {key}", notes
    for where, config in _peft_configs(source):
        bare = {key.rpartition(".")[2]: value for key, value in config.items()}
        if bare.get("use_rslora") or bare.get("alpha_pattern"):
            raise CheckpointError(
                f"{where} asks for use_rslora or alpha_pattern, which is not read; give alpha yourself, or save the "
                "adapter without it."
            )
        if bare.get("lora_alpha") is not None:
            return _number(bare["lora_alpha"], f"{where}: lora_alpha"), f"lora_alpha of {where.name}", []
    resized = "resized" in source.path.name.lower()  # to other ranks, which no known alpha belongs to
    if preset is not None and not isinstance(preset.alpha, str) and not resized:
        return preset.alpha, f"known file {preset.name}", []
    if preset is not None and preset.alpha == FROM_RANK:
        return None, f"alpha = rank, known file {preset.name}", []
    about = "the known-file table" if preset is None else f"what is known of {preset.name}"
    return (
        None,
        "alpha = rank, assumed",
        [
            f"neither {source.path.name} nor {about} gives alpha: alpha = rank (scale 1) is used; if the result is "
            "overdone give alpha (few-step LoRAs of rank 128 with alpha 8 would come out 16 times too strong)"
        ],
    )


def _peft_configs(source: TensorSource) -> list[tuple[Path, dict]]:
    """PEFT's settings with the file they stand in: of a PEFT file beside it, of a diffusers file inside it."""
    file = source.files[0]
    found = []
    beside = file.with_name(SIDECAR)
    if file.name.startswith("adapter_model") and beside.is_file():
        found.append((beside, read_json(beside)))
    if PEFT_KEY in source.metadata:
        try:
            config = json.loads(source.metadata[PEFT_KEY])
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{file}: metadata {PEFT_KEY} is damaged ({error}); give alpha yourself.") from None
        if isinstance(config, dict):
            found.append((file, config))
    return found


def _number(value: object, where: str) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise CheckpointError(f"{where} is {value!r}, not a number above 0; give alpha yourself.")
    return number


def _stored_pair(
    source: TensorSource, factors: Factors, rule: float | None, asked: float | None, trained_rank: int | None
) -> StoredPair:
    shapes = source.shapes
    down, up, slot = factors.down, factors.up, factors.slot
    a_shape, b_shape = shapes.get(down, ()), shapes.get(up, ())
    problem = None
    if down is None or up is None:
        problem = f"{'A (lora_A, lora_down)' if down is None else 'B (lora_B, lora_up)'} is not in the file"
    elif len(a_shape) != 2 or len(b_shape) != 2 or a_shape[0] != b_shape[1] or 0 in (*a_shape, *b_shape):
        problem = f"A {list(a_shape)} and B {list(b_shape)} do not multiply to a matrix (A is [r, in], B [out, r])"
    elif kinds := {source.dtypes[name] for name in (down, up)} - set(FACTOR_TYPES):
        problem = f"stored as {listed(sorted(kinds))}, not as one of {', '.join(FACTOR_TYPES)}"
    elif slot.swapped and b_shape[0] % 2:
        problem = f"B {list(b_shape)} has no halves to swap"
    if problem:
        return StoredPair(slot, down or "", up or "", a_shape or (0, 0), b_shape or (0, 0), 0.0, problem)
    rank = a_shape[0]
    if factors.alpha is not None and asked is None:
        alpha = _number(_scalar(source, factors.alpha), source.where(factors.alpha))
    else:
        alpha = float(rank) if rule is None else rule
        if rule is not None and slot.part is None and trained_rank is not None and rank == 3 * trained_rank:
            alpha *= 3  # q, k and v were trained apart and stacked to 3 r: the scale is that of one of them
    return StoredPair(slot, down, up, a_shape, b_shape, alpha)


def _scalar(source: TensorSource, name: str) -> object:
    if math.prod(source.shapes[name]) != 1:
        raise CheckpointError(f"{source.where(name)} is {list(source.shapes[name])}; alpha is one number.")
    return source.read(name).view(-1).float().item()


def _trained_rank(source: TensorSource, names: Sorted) -> int | None:
    """The rank that a file-wide alpha belongs to: as stated, else that of most pairs other than fused q/k/v."""
    for key in RANK_KEYS:
        text = source.metadata.get(key, "")
        if text.isdigit() and int(text) > 0:
            return int(text)
    downs = (f.down for f in names.factors if f.down and not f.slot.module.endswith((".qkv_proj", ADALN)))
    ranks = Counter(source.shapes[name][0] for name in downs if source.shapes[name])
    return ranks.most_common(1)[0][0] if ranks else None
