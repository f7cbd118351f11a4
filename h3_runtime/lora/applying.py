"""LoRAs onto a DiT: planned from headers, then merged into the weights or run beside them.

    Lora(path, strength) ..  ──plan(dit)──▶ LoraPlan: applied | skipped | mismatched, each with its reason
                                              │
                          mode="merge"        ▼          mode="side", and quantised or absent weights in any mode
        weight + sum strength * scale * B @ A     ◀─apply─▶     LoraLinear(base, pairs)
        in float32, rounded once                                the base untouched
                                              │
                                              ▼
                            Applied.remove(): the base, bit for bit

Merging frees the original weights unless ``keep=True`` asks for a copy (as many bytes again as the adapted weights);
without it ``remove`` refuses. Side branches always come out exactly.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..checkpoint.reader import listed
from ..errors import H3Error
from ..models.dit import CURVE, DiT
from ..models.precision import exact_float32
from .adaln import GRID_FILE, Projection, find_grid, fit_projection, read_grid
from .opening import LoraFile, LowRank, StoredPair, open_lora
from .side import LoraLinear

MODES = ("merge", "side")
FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
MERGE_ROWS = 4096  # rows of a weight whose float32 delta exists at one time
MARK = "lora_merged"  # set on a linear whose weight holds a LoRA


@dataclass(frozen=True)
class Lora:
    """A LoRA that is asked for. ``layout`` and ``alpha`` take the place of detection (see ``open_lora``)."""

    path: str | os.PathLike
    strength: float = 1.0
    layout: str | None = None
    alpha: float | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.strength):
            raise H3Error(
                f"LoRA strength is {self.strength} for {self.path}; give a number (1 is as trained, 0 is off)."
            )


@dataclass(frozen=True)
class Placed:
    """A pair that goes onto ``module``: of which LoRA of the plan, and whether by way of the AdaLN curve."""

    lora: int
    pair: StoredPair
    projected: bool = False


@dataclass(frozen=True)
class Left:
    """A pair or tensor that is not applied, and why."""

    lora: int
    name: str
    reason: str


@dataclass(frozen=True)
class LoraPlan:
    """What applying would do. ``skipped``: this base has no use for it; ``mismatched``: it should fit and does not.

    ``nbytes`` is what the pairs take beside the model in the compute dtype: resident for side branches, for a merge
    only one module's at a time. ``partial``: something of a LoRA is not applied, and a render has to say so.
    """

    loras: tuple[Lora, ...]
    files: tuple[LoraFile, ...]
    applied: tuple[Placed, ...]
    skipped: tuple[Left, ...]
    mismatched: tuple[Left, ...]
    projection: Projection | None
    nbytes: int
    notes: tuple[str, ...]

    @property
    def partial(self) -> bool:
        return bool(self.skipped or self.mismatched)

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(placed.pair.slot.module for placed in self.applied))

    def summary(self, lora: int) -> str:
        """One line for LoRA number ``lora``: what is applied of it, and why the rest is not."""
        counts = [sum(row.lora == lora for row in rows) for rows in (self.applied, self.skipped, self.mismatched)]
        line = f"{self.files[lora].name} at {self.loras[lora].strength:g}: {counts[0]} of {sum(counts)} applied"
        for count, word, rows in (
            (counts[1], "skipped", self.skipped),
            (counts[2], "mismatched", self.mismatched),
        ):
            if count:
                reasons = dict.fromkeys(row.reason for row in rows if row.lora == lora)
                line += f"; {count} {word}: {listed(reasons, '; ')}"
        return line

    def warnings(
        self,
        partition: str = "unknown",
        forwards: int | None = None,
        video_shift: float | None = None,
        audio_shift: float | None = None,
    ) -> list[str]:
        """What does not go together in a request: see ``LoraFile.warnings``; LoRAs of strength 0 are left out."""
        used = [file for file, lora in zip(self.files, self.loras) if lora.strength]
        said = [line for file in used for line in file.warnings(partition, forwards, video_shift, audio_shift)]
        few = [file.preset.name for file in used if file.preset is not None]
        if len(few) > 1:
            said.append(f"{len(few)} few-step LoRAs are stacked ({listed(few)}): each was trained on the base alone")
        return said

    def describe(self) -> dict:
        """All of it as plain JSON values, for reports and manifests."""
        return {
            "loras": [
                {**file.describe(), "strength": lora.strength, "summary": self.summary(index)}
                for index, (file, lora) in enumerate(zip(self.files, self.loras))
            ],
            "applied": len(self.applied),
            "skipped": [{"lora": row.lora, "name": row.name, "reason": row.reason} for row in self.skipped],
            "mismatched": [{"lora": row.lora, "name": row.name, "reason": row.reason} for row in self.mismatched],
            "modules": len(self.modules),
            "projected": sum(placed.projected for placed in self.applied),
            "projection_residual": None if self.projection is None else self.projection.residual,
            "partial": self.partial,
            "bytes": self.nbytes,
            "notes": list(self.notes),
        }


@dataclass
class Applied:
    """LoRAs that are on a DiT. ``merged`` and ``side`` name its modules; ``nbytes`` is held by side branches."""

    dit: DiT
    plan: LoraPlan
    merged: tuple[str, ...]
    side: tuple[str, ...]
    originals: dict[str, tuple[Tensor, Tensor | None]] | None
    removed: bool = False

    @property
    def nbytes(self) -> int:
        modules = [self.dit.get_submodule(name) for name in self.side] if not self.removed else []
        return sum(b.nbytes for module in modules for branch in module.branches for b in branch.buffers())

    def remove(self) -> None:
        """Take everything out again: the base's bits. H3Error where weights were merged and not kept."""
        if self.removed:
            return
        if self.merged and self.originals is None:
            raise H3Error(
                f"LoRAs are merged into {len(self.merged)} weights whose originals were not kept; load the checkpoint "
                "again, or apply with keep=True or mode='side'."
            )
        _take_out(self.dit, self.side, self.originals or {})
        self.removed = True


def linears(dit: nn.Module) -> dict[str, nn.Module]:
    """Our name -> linear of the DiT, whatever it is made of (plain or quantised)."""
    return {
        name: module
        for name, module in dit.named_modules()
        if hasattr(module, "in_features") and hasattr(module, "out_features")
    }


def plan(dit: DiT, loras: Iterable[Lora], grid: Tensor | None = None) -> LoraPlan:
    """Find the place of every pair of every LoRA, from headers.

    ``grid`` [G, n] is SiLU(time embedding) over the rows of a pruned base's curve, for AdaLN pairs of the full model;
    without it the file beside the LoRA is used, else they are skipped. H3Error when a LoRA of any strength has not
    one pair that fits, and when LoRAs are on this DiT already.
    """
    loras = tuple(loras)
    targets = linears(dit)
    if any(isinstance(module, LoraLinear) or hasattr(module, MARK) for module in targets.values()):
        raise H3Error("LoRAs are applied to this DiT already; remove them first and plan all of them together.")
    files = tuple(open_lora(lora.path, lora.layout, lora.alpha) for lora in loras)
    projection, said = _find_projection(files, getattr(dit, CURVE, None), grid, targets)
    applied: list[Placed] = []
    skipped: list[Left] = []
    mismatched: list[Left] = []
    notes = list(said)
    for index, file in enumerate(files):
        before = len(applied)
        for pair in file.pairs:
            module = targets.get(pair.slot.module)
            reason, kind = _misfit(pair, module, file, dit, projection)
            if reason is None:
                applied.append(Placed(index, pair, projected=_needs_grid(pair, targets)))
            else:
                (skipped if kind == "skipped" else mismatched).append(Left(index, _shown(pair), reason))
        skipped += [
            Left(index, name, "replaces a tensor of the AdaLN curve, which is not applied") for name in file.names.sets
        ]
        skipped += [Left(index, name, "its meaning is unknown") for name in file.names.unknown]
        if len(applied) == before:
            reasons = [f"{row.name}: {row.reason}" for row in (*mismatched, *skipped) if row.lora == index]
            raise H3Error(
                f"{file.path}: none of {len(reasons)} entries can be applied to this base ({listed(reasons, '; ')}). "
                "Use a LoRA of this model, or the base it was made for."
            )
        notes += file.notes
    size = sum(_side_bytes(dit, targets[p.pair.slot.module], p) for p in applied)
    return LoraPlan(
        loras, files, tuple(applied), tuple(skipped), tuple(mismatched), projection, size, tuple(dict.fromkeys(notes))
    )


def _find_projection(
    files: Sequence[LoraFile], curve: Tensor | None, grid: Tensor | None, targets: dict[str, nn.Module]
) -> tuple[Projection | None, list[str]]:
    """The way from the full model's AdaLN input to the base's curve, where pairs need one and a grid is at hand."""
    if curve is None or not any(_needs_grid(pair, targets) for file in files for pair in file.pairs):
        return None, []
    where = "the grid that was given"
    if grid is None:
        found = next((found for file in files if (found := find_grid(file.path)) is not None), None)
        if found is None:
            return None, []
        grid, where = read_grid(found), found.name
    projection = fit_projection(curve, grid)
    left = f"the fit leaves {projection.residual:.2%} of it"
    return projection, [f"AdaLN pairs of the full model are projected onto the base's curve by {where}; {left}"]


def _shown(pair: StoredPair) -> str:
    return pair.slot.module + ("" if pair.slot.part is None else f" ({'qkv'[pair.slot.part]})")


def _needs_grid(pair: StoredPair, targets: dict[str, nn.Module]) -> bool:
    """Whether the pair is an AdaLN one of another width than this base's; only a pruned base makes use of it."""
    module = targets.get(pair.slot.module)
    return not pair.problem and pair.is_adaln and module is not None and pair.a_shape[1] != module.in_features


def _misfit(
    pair: StoredPair, module: nn.Module | None, file: LoraFile, dit: DiT, projection: Projection | None
) -> tuple[str | None, str]:
    """Why the pair cannot go onto ``module`` (None: it can), and whether that is skipped or mismatched."""
    pruned = getattr(dit, CURVE, None) is not None
    if pair.problem:
        return pair.problem, "mismatched"
    if module is None:
        gone = pruned and pair.slot.module.startswith("time_embedder.")
        return "a pruned base has no time embedder" if gone else "this base has no such module", "skipped"
    inputs = pair.a_shape[1]
    if inputs != module.in_features and pair.is_adaln:
        if not pruned:
            return (
                f"made for an AdaLN of width {inputs} (a pruned base), and this base has {module.in_features}",
                "skipped",
            )
        if projection is None:
            return (
                f"AdaLN pair of the full model (width {inputs}) on a pruned base (width {module.in_features}), and no "
                f"grid to project it by: put {GRID_FILE} beside the LoRA or give the grid of a full checkpoint"
            ), "skipped"
        if inputs != projection.constant.shape[0]:
            return (
                f"AdaLN pair of width {inputs}, and the grid to project it by has {projection.constant.shape[0]}",
                "mismatched",
            )
    elif inputs != module.in_features:
        return f"A reads {inputs} inputs and the module has {module.in_features}", "mismatched"
    if pair.outputs != module.out_features:
        return f"B writes {pair.outputs} outputs and the module has {module.out_features}", "mismatched"
    return None, ""


def apply(dit: DiT, plan: LoraPlan, mode: str = "merge", keep: bool = False) -> Applied:
    """Put the plan's LoRAs onto the DiT they were planned for.

    ``mode`` merge: added to float weights, the sum of all LoRAs in float32 and rounded once; quantised weights, and
    weights that are not in memory, get a side branch whatever the mode. side: side branches everywhere. ``keep``
    saves the originals of merged weights, so that ``remove`` can put them back. LoRAs of strength 0 are left out.

    All factors are read and checked before the first weight changes; an error on the way takes everything out again.
    """
    if mode not in MODES:
        raise H3Error(f"LoRA mode is {mode!r}; choose one of {', '.join(MODES)}.")
    targets = linears(dit)
    work: dict[str, list[Placed]] = {}
    for placed in plan.applied:
        if plan.loras[placed.lora].strength:
            work.setdefault(placed.pair.slot.module, []).append(placed)
    merging = [name for name in work if mode == "merge" and can_merge(targets[name])]
    for name in merging:  # a damaged factor is met here, not between two changed weights
        _updates(dit, plan, work[name])
    merged: list[str] = []
    side: list[str] = []
    originals: dict[str, tuple[Tensor, Tensor | None]] = {}
    try:
        for name, placed in work.items():
            module, updates = targets[name], _updates(dit, plan, placed)
            if name in merging:
                if keep:
                    originals[name] = (module.weight, module.bias)
                merge_into(module, updates)
                merged.append(name)
            else:
                side.append(name)
                device = module.weight.device if can_merge(module) else dit.device
                if device.type == "meta":  # a module whose weights come later: the factors wait on the CPU
                    device = torch.device("cpu")
                _put(dit, name, LoraLinear(module, updates, _side_dtype(dit, name, module), device))
    except Exception as error:
        _take_out(dit, side, originals)
        if merged and not keep:
            raise H3Error(
                f"applying LoRAs failed after {len(merged)} weights were changed ({error}); load the checkpoint again."
            ) from error
        raise
    return Applied(dit, plan, tuple(merged), tuple(side), originals if keep else None)


def can_merge(module: nn.Module) -> bool:
    """Whether the module has a float weight [out, in] in memory that a delta can be added to."""
    weight = getattr(module, "weight", None)
    return (
        isinstance(module, nn.Linear)
        and isinstance(weight, Tensor)
        and weight.dtype in FLOAT_TYPES
        and not weight.is_meta
        and tuple(weight.shape) == (module.out_features, module.in_features)
    )


@torch.no_grad()
@exact_float32()
def merge_into(module: nn.Linear, updates: Sequence[LowRank]) -> None:
    """module.weight <- weight + sum of scale * b @ a, summed in float32 and rounded once, into a new tensor.

    Offsets go into the bias likewise. The old tensors are left as they are.
    """
    weight = module.weight
    new = torch.empty_like(weight)
    on_device = [replace(low, a=_float(low.a, weight), b=_float(low.b, weight)) for low in updates]
    for start in range(0, weight.shape[0], MERGE_ROWS):
        stop = min(start + MERGE_ROWS, weight.shape[0])
        delta = torch.zeros(stop - start, weight.shape[1], dtype=torch.float32, device=weight.device)
        for low in on_device:
            first, last = max(start, low.start), min(stop, low.stop)
            if first < last:
                delta[first - start : last - start].addmm_(
                    low.b[first - low.start : last - low.start], low.a, alpha=low.scale
                )
        new[start:stop] = delta.add_(weight[start:stop])
    constants = [low for low in on_device if low.offset is not None]
    if constants:
        bias = weight.new_zeros(weight.shape[0]) if module.bias is None else module.bias
        total = torch.zeros(bias.shape[0], dtype=torch.float32, device=bias.device)
        for low in constants:
            total[low.start : low.stop] += low.scale * (low.b @ _float(low.offset, weight))
        module.bias = nn.Parameter(total.add_(bias).to(bias.dtype), requires_grad=False)
    module.weight = nn.Parameter(new, requires_grad=False)
    setattr(module, MARK, True)


def _float(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.to(device=like.device, dtype=torch.float32)


def _updates(dit: DiT, plan: LoraPlan, placed: Sequence[Placed]) -> list[LowRank]:
    """The pairs of one module read, strength inside their scale."""
    updates: list[LowRank] = []
    for one in placed:
        read = plan.files[one.lora].read(one.pair, dit.config.head_dim)
        turn: Callable[[LowRank], LowRank] = plan.projection.pair if one.projected else (lambda low: low)
        updates += [replace(low, scale=low.scale * plan.loras[one.lora].strength) for low in map(turn, read)]
    return updates


def _side_dtype(dit: DiT, name: str, module: nn.Module) -> torch.dtype:
    if can_merge(module):
        return module.weight.dtype
    return torch.float32 if f"{name}.".startswith(dit.float32_islands) else dit.dtype


def _side_bytes(dit: DiT, module: nn.Module, placed: Placed) -> int:
    pair = placed.pair
    inputs = module.in_features + 1 if placed.projected else pair.a_shape[1]
    return pair.rank * (inputs + pair.b_shape[0]) * _side_dtype(dit, pair.slot.module, module).itemsize


def _put(dit: DiT, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(dit.get_submodule(parent), leaf, module)


def _take_out(dit: DiT, side: Iterable[str], originals: dict[str, tuple[Tensor, Tensor | None]]) -> None:
    for name in side:
        module = dit.get_submodule(name)
        if isinstance(module, LoraLinear):
            _put(dit, name, module.base)
    for name, (weight, bias) in originals.items():
        module = dit.get_submodule(name)
        module.weight, module.bias = weight, bias
        if hasattr(module, MARK):
            delattr(module, MARK)
