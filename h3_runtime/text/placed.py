"""Where the text encoder's weights are while it runs.

                     resident                    ram                           disk
    words            host memory, rows go over   host memory                   the prompt's rows are read
    vision tower     on the device               read when there are pictures, let go after them
    layers           on the device               host memory ─▶ ring           file ─▶ ring

The ring of layers is made when the layers begin and let go when they end: the vision tower has its memory before, and
nothing stays between prompts. Streamed and resident layers run the same operations on the same bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..checkpoint.text_layers import TextLayers
from ..memory.placement import Placement, make_ring, store_layers
from ..memory.streaming import ResidentLayers, StreamedLayers
from .layer import ChunkedLayer

LAYER = "language_model.layers.{}."
TOWER = "visual."


class PlacedWeights:
    """The weights of ``text`` for ``module`` (meta, from ``build_module``) as ``placement`` says.

    Resident weights are put into the module; of streamed ones it keeps the shapes only.
    """

    def __init__(self, module: nn.Module, text: TextLayers, placement: Placement, device: torch.device):
        self.module, self.text, self.placement, self.device = module, text, placement, device
        layers = list(module.language_model.layers)
        prefixes = [LAYER.format(index) for index in range(len(layers))]
        self._first, self._store = store_layers(text.pieces, layers, prefixes, placement, device)
        self._resident = ResidentLayers(layers) if self._store is None else None
        if self._resident is not None:
            text.pieces.fill(module, TOWER, device)
        if placement.rung != "disk":
            module.language_model.embed_tokens = text.embeddings()
        for part in (module.language_model.rotary_emb, module.visual.rotary_pos_emb):
            part.to(device)
        module.requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        """Number type of the states."""
        return self.text.dtype

    def words(self, ids: Tensor) -> Tensor:
        """Word embeddings of ids [S] -> [S, D], on the device; only the rows that occur go there."""
        if self.placement.rung == "disk":
            return self.text.words(ids.cpu()).to(self.device)
        return self.module.language_model.embed_tokens(ids.cpu()).to(self.device)

    @contextmanager
    def tower(self) -> Iterator[nn.Module]:
        """The vision tower for as long as the block runs."""
        if self._resident is not None:
            yield self.module.visual
            return
        holder = nn.Module()
        holder.visual = copy.deepcopy(self.module.visual)  # the shapes: filled, and let go with it
        self.text.pieces.fill(holder, TOWER, self.device)
        yield holder.visual.requires_grad_(False)

    @contextmanager
    def layers(self) -> Iterator[ResidentLayers | StreamedLayers]:
        """The layers for as long as the block runs; no thread, copy or ring outlives it."""
        if self._resident is not None:
            yield self._resident
            return
        layers = list(self.module.language_model.layers)
        ring = make_ring(self._store, len(layers) - self._first, self.placement, self.device)
        try:
            yield StreamedLayers(layers, self._first, ring, self.placement.ahead)
        finally:
            ring.close()


def chunk_layers(module: nn.Module) -> None:
    """Have every language layer of ``module`` run in canonical chunks; tensors keep their names."""
    language = module.language_model
    language.layers = nn.ModuleList(ChunkedLayer(layer) for layer in language.layers)
