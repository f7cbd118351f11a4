"""A checkpoint's layers put where the plan says: on the device, in RAM, or left on disk and read into a ring.

    OpenedPart (module on meta, pieces) + Placement(resident, rung, ahead)
        ├─ everything outside the layers, and the first ``resident`` layers ─▶ device
        └─ the other layers ─▶ ram:  built once (transformed, quantised, with their LoRA factors) into flat buffers
                             └▶ disk: read, and transformed where bytes differ, into the ring each time;
                                      or transformed once into a converted file (``converted``) and read as it is
    AdaLN projections are layers of their own: needed once a render, never resident.
    The refiner runs once, before the loop: where blocks are streamed it has a ring for as long as it runs.

Skeletons keep their place in the module with meta tensors; what computes are views into a slot. Placement never
changes a result: the same bytes reach the same operations.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..checkpoint.load import OpenedPart, settle_rope
from ..checkpoint.pieces import Pieces, assign
from ..checkpoint.reader import fingerprint
from ..errors import H3Error
from ..models.dit import DiT
from ..models.video_vae import VideoVAE
from .converted import converted_store, layers_key
from .streaming import (
    CudaMover,
    DiskStore,
    DiTLayers,
    HostMover,
    LayerLayout,
    LayerStore,
    RamStore,
    ResidentLayers,
    StreamedLayers,
)

RUNGS = ("resident", "ram", "disk")
BLOCKS = "blocks."
REFINER = "token_refiner.blocks."
ADALN = "adaln_proj."
DECODER_LAYERS = "decoder.transformer_blocks."


@dataclass(frozen=True)
class Placement:
    """``rung``: resident, ram or disk; on the latter two the first ``resident`` layers stay on the device, the rest
    come through a ring that copies ``ahead`` layers in advance. ``adaln``: where the AdaLN projections come from, which
    are read once a render. ``pin``: page-locked host memory, where it helps. ``converted``: a folder for transformed
    weights of the disk rung, "" to transform them at each read."""

    rung: str = "resident"
    resident: int = 0
    ahead: int = 1
    adaln: str = "disk"
    pin: bool = True
    converted: str = ""

    def __post_init__(self):
        for rung in (self.rung, self.adaln):
            if rung not in RUNGS:
                raise H3Error(f"placement {rung!r}: give one of {', '.join(RUNGS)}")
        if self.resident < 0 or self.ahead < 1:
            raise H3Error(f"placement keeps {self.resident} layers and copies {self.ahead} ahead: give 0.., 1..")
        if self.rung == "resident" and self.resident:
            raise H3Error(f"placement resident keeps all layers, not {self.resident}: give ram or disk with a number")

    def check(self, layers: int, what: str = "model") -> None:
        """H3Error where this keeps, or copies ahead, more layers than ``what`` has."""
        if self.rung == "resident":
            return
        if self.resident > layers:
            raise H3Error(
                f"{self.resident} layers shall stay on the device and the {what} has {layers}: give 0 to {layers}, or "
                "place it resident"
            )
        if self.ahead > max(2, layers):  # two slots in advance are harmless for any
            raise H3Error(f"{self.ahead} layers shall be copied ahead and the {what} has {layers}: give 1 to {layers}")

    def lower(self) -> Placement | None:
        """One rung down, for a device that ran out of memory; None at the bottom."""
        if self.rung == "resident":
            return replace(self, rung="ram", resident=0, ahead=1)
        if self.ahead > 1:
            return replace(self, ahead=1)
        return replace(self, resident=self.resident // 2) if self.resident else None

    def __str__(self) -> str:
        if self.rung == "resident":
            return "resident"
        kept = f"{self.resident} layers resident, the rest " if self.resident else ""
        return f"{kept}streamed from {self.rung}, {self.ahead} ahead"

    @property
    def converts(self) -> bool:
        """Whether a converted file is used, where there is something to convert."""
        return self.rung == "disk" and bool(self.converted)


def place_dit(
    opened: OpenedPart,
    placement: Placement,
    device: torch.device,
    prepare: Callable[[DiT], None] = lambda dit: None,
) -> tuple[DiT, DiTLayers]:
    """The DiT with everything but its streamed layers on ``device``, and where those come from.

    ``prepare`` is given the DiT before any weight is read, to put LoRA side branches on it; their factors travel with
    their layer.
    """
    dit: DiT = opened.module
    pieces = opened.pieces
    for name, dtype in pieces.dtypes.items():  # what is put on it asks the module for its number types
        assign(dit, name, torch.empty(pieces.shapes[name], dtype=dtype, device="meta"))
    prepare(dit)
    elsewhere = (BLOCKS,) if placement.rung == "resident" else (BLOCKS, REFINER)
    for name in pieces.names():
        if not name.startswith(elsewhere):
            _put(dit, name, pieces.piece(name, device))
    for name, part in dit.named_children():
        if not any(prefix.startswith(f"{name}.") for prefix in elsewhere):
            _move_held(part, device)
    settle_rope(pieces.checkpoint, dit, device)
    prefixes = [f"{BLOCKS}{index}." for index in range(dit.config.layers)]
    projections = [block.adaln_proj for block in dit.blocks]
    adaln = Placement(placement.adaln, ahead=placement.ahead, pin=placement.pin)
    layers = DiTLayers(
        place_layers(pieces, list(dit.blocks), prefixes, placement, device, skip=ADALN),
        place_layers(pieces, projections, [prefix + ADALN for prefix in prefixes], adaln, device),
    )
    if placement.rung == "resident":
        return dit, layers
    return dit, layers._replace(refiner=place_refiner(pieces, dit, device))


def place_refiner(
    pieces: Pieces, dit: DiT, device: torch.device
) -> Callable[[], AbstractContextManager[StreamedLayers]]:
    """The refiner's blocks, read from disk while a context of this lasts; no memory is held between."""
    modules = list(dit.token_refiner.blocks)
    source = _LayerSource(pieces, modules, [f"{REFINER}{index}." for index in range(len(modules))], "")
    store = DiskStore(source.layouts, source.read)

    @contextmanager
    def brought() -> Iterator[StreamedLayers]:
        mover = make_ring(store, len(modules), Placement("disk"), device)
        try:
            yield StreamedLayers(modules, 0, mover)
        finally:
            mover.close()

    return brought


def place_video_vae(
    opened: OpenedPart, placement: Placement, device: torch.device
) -> tuple[VideoVAE, ResidentLayers | StreamedLayers]:
    """The video VAE with its decoder layers placed, and those layers."""
    vae = place_video_encoder(opened, device)  # all but the layers
    modules = list(vae.decoder.transformer_blocks)
    prefixes = [f"{DECODER_LAYERS}{index}." for index in range(len(modules))]
    return vae, place_layers(opened.pieces, modules, prefixes, placement, device)


def place_video_encoder(opened: OpenedPart, device: torch.device) -> VideoVAE:
    """The video VAE for encoding: its decoder's layers, 9 of 10 bytes, are never read and stay on meta.

    There is no ring for the encoder: its largest two layers are more than half of it, and weigh less than the
    activations of one tile.
    """
    vae: VideoVAE = opened.module
    for name in opened.pieces.names():
        if not name.startswith(DECODER_LAYERS):
            _put(vae, name, opened.pieces.piece(name, device))
    return vae


def place_layers(
    pieces: Pieces,
    modules: Sequence[nn.Module],
    prefixes: Sequence[str],
    placement: Placement,
    device: torch.device,
    skip: str = "",
) -> ResidentLayers | StreamedLayers:
    """``modules`` (on meta; layer i holds the tensors under ``prefixes[i]`` but those under ``skip``) placed.

    A module outside its model is placed too: ``skip`` keeps a layer's part that is placed on its own.
    """
    count, store = store_layers(pieces, modules, prefixes, placement, device, skip)
    if store is None:
        return ResidentLayers(modules)
    mover = make_ring(store, len(modules) - count, placement, device)
    return StreamedLayers(modules, count, mover, placement.ahead, getattr(store, "notes", ()))


def store_layers(
    pieces: Pieces,
    modules: Sequence[nn.Module],
    prefixes: Sequence[str],
    placement: Placement,
    device: torch.device,
    skip: str = "",
) -> tuple[int, LayerStore | None]:
    """(how many of ``modules`` are filled and stay on the device, where the others come from: None for no others).

    No ring is made: its memory belongs to whoever runs the layers, for as long as they run.
    """
    placement.check(len(modules))
    count = len(modules) if placement.rung == "resident" else placement.resident
    store = None
    if placement.converts and count < len(modules) and pieces.transforms(prefixes, skip):
        # the file holds all layers, so that it serves whatever number stays on the device
        every = [*map(copy.deepcopy, modules[:count]), *modules[count:]]
        source = _LayerSource(pieces, every, prefixes, skip)
        store = converted_store(placement.converted, source.key(), source.layouts, source.read, count)
    for module, prefix in zip(modules[:count], prefixes):
        fill_layer(pieces, module, prefix, skip, device)
    if count == len(modules) or store is not None:
        return count, store
    source = _LayerSource(pieces, modules[count:], prefixes[count:], skip)
    if placement.rung == "ram":
        return count, RamStore(source.layouts, source.read, pin=placement.pin and device.type == "cuda")
    return count, DiskStore(source.layouts, source.read)


def make_ring(store: LayerStore, layers: int, placement: Placement, device: torch.device) -> CudaMover | HostMover:
    """The ring that brings ``layers`` layers out of ``store``; the caller closes it, or lets it go with its layers."""
    slots = placement.ahead + 1
    if device.type == "cuda":
        return CudaMover(store, layers, slots, device, placement.pin)
    return HostMover(store, layers, slots)


def fill_layer(pieces: Pieces, module: nn.Module, prefix: str, skip: str, device: str | torch.device = "cpu") -> None:
    """Read one layer into ``module``, in place of what it has on meta."""
    for name, piece in read_pieces(pieces, prefix, skip, device):
        _put(module, name, piece)
    _move_held(module, device)


def read_pieces(pieces: Pieces, prefix: str, skip: str, device: str | torch.device = "cpu"):
    """(name inside the layer, piece) for everything under ``prefix`` but ``skip``, one at a time."""
    for name in pieces.names(prefix):
        inside = name[len(prefix) :]
        if not (skip and inside.startswith(skip)):
            yield inside, pieces.piece(name, device)


def _put(module: nn.Module, name: str, piece: Tensor | nn.Module) -> None:
    if isinstance(piece, nn.Module):
        module.set_submodule(_owner(module, name), piece)
    else:
        assign(module, _owner(module, name), piece)


def _move_held(module: nn.Module, device: str | torch.device) -> None:
    """What no checkpoint holds (a LoRA's factors) goes where its layer computes."""
    for owner in module.modules():
        for name, tensor in owner.named_buffers(recurse=False):
            if not tensor.is_meta:
                setattr(owner, name, tensor.to(device))


def _hollow(module: nn.Module, skip: str) -> None:
    """Every tensor of ``module`` to meta, but those under ``skip``, which are placed on their own."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not (skip and name.startswith(skip)) and not tensor.is_meta:
            assign(module, name, tensor.to("meta"))


def _owner(module: nn.Module, name: str) -> str:
    """Where a piece lives in ``module``: a linear inside a LoRA branch stands under ``.base``."""
    owner, _, leaf = name.rpartition(".")
    for linear, rest in ((name, ""), (owner, f".{leaf}")):
        try:
            if hasattr(module.get_submodule(linear), "base"):
                return f"{linear}.base{rest}"
        except AttributeError:
            continue
    return name


class _LayerSource:
    """Layouts of layers and the reading of their bytes. Layers whose pieces are stored alike share one layout."""

    def __init__(self, pieces: Pieces, modules: Sequence[nn.Module], prefixes: Sequence[str], skip: str):
        self.pieces, self.prefixes, self.skip = pieces, list(prefixes), skip
        self.extras: list[dict[str, Tensor]] = []  # per layer: tensors that no file holds (LoRA factors)
        self.layouts: list[LayerLayout] = []
        known: dict[tuple, tuple[LayerLayout, nn.Module]] = {}
        for index, module in enumerate(modules):
            held = {n: t for n, t in (*module.named_parameters(), *module.named_buffers()) if not t.is_meta}
            held = {n: t.cpu() for n, t in held.items() if not (skip and n.startswith(skip))}
            kind = (self._signature(index), tuple((n, t.dtype, tuple(t.shape)) for n, t in held.items()))
            if kind not in known:
                fill_layer(pieces, module, prefixes[index], skip)
                known[kind] = (LayerLayout.of(module, (skip,) if skip else ()), module)
                _hollow(module, skip)
            else:
                self._take_shape(module, known[kind][1])
            self.layouts.append(known[kind][0])
            self.extras.append(held)

    def _signature(self, index: int) -> tuple:
        """How each piece of a layer is made: its name inside the layer, stored format or online method."""
        prefix, pieces = self.prefixes[index], self.pieces
        made = []
        for name in pieces.names(prefix):
            layer = pieces.checkpoint.layers.get(name.removesuffix(".weight"))
            how = layer.title if layer is not None else pieces.online.get(name, "")
            made.append((name[len(prefix) :], how))
        return tuple(made)

    def key(self) -> str:
        """Names the bytes that ``read`` gives."""
        pieces = self.pieces
        how = [[self.prefixes[index], self._signature(index)] for index in range(len(self.prefixes))]
        files = pieces.checkpoint.source.files
        return layers_key(fingerprint(files), [str(pieces.compute), self.skip, how], self.layouts, self.extras)

    def _take_shape(self, module: nn.Module, like: nn.Module) -> None:
        """The quantised linears of ``like`` (on meta) into ``module``, whose pieces are stored alike."""
        for name, child in like.named_modules():
            if self.skip and name.startswith(self.skip):
                continue
            if name and type(child) is not type(module.get_submodule(name)):
                module.set_submodule(name, copy.deepcopy(child))
        _hollow(module, self.skip)

    def read(self, layer: int, views: dict[str, Tensor]) -> None:
        """Fill ``views`` with the bytes of one layer."""
        left = set(views)
        for name, piece in read_pieces(self.pieces, self.prefixes[layer], self.skip):
            found = {name: piece}
            if isinstance(piece, nn.Module):
                tensors = (*piece.named_parameters(), *piece.named_buffers())
                found = {f"{name}.{inner}": tensor for inner, tensor in tensors}
            for inner, tensor in found.items():
                key = inner if inner in views else self._under_base(inner, views)
                views[key].copy_(tensor)
                left.discard(key)
        for name, tensor in self.extras[layer].items():
            views[name].copy_(tensor)
            left.discard(name)
        assert not left, sorted(left)

    @staticmethod
    def _under_base(name: str, views: dict[str, Tensor]) -> str:
        owner, _, leaf = name.rpartition(".")
        while f"{owner}.base.{leaf}" not in views:
            owner, _, inner = owner.rpartition(".")
            leaf = f"{inner}.{leaf}"
        return f"{owner}.base.{leaf}"
