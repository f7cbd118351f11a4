"""The text encoder's weights, layer by layer, from a file of any layout and number type.

    path ──▶ TextLayers   .sizes, .info                          headers read, every name, shape and type checked
                          .embeddings()  module: ids -> rows     kept as stored, rows decoded on use
                          .words(ids)    the same rows           of the file only these are read
                          .layer(i)      name -> tensor, or a quantised linear in its stored number type
                          .vision()      the same for the tower

Layers after the condition, the last norm and the output head are never read. AWQ files fold scales into their norms,
so all layers must come from one file: there is one path. Running the layers is the text encoder's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from .formats import CheckpointFormat, Header, Rule
from .gguf_file import open_weights
from .info import CheckpointInfo, describe
from .load import NUMBER_TYPES, compare_shapes, online_of
from .opening import CONFIG_KEY, Checkpoint
from .pieces import IN_TILES, Online, Pieces, StoredEmbedding
from .quantised import find_layers
from .reader import TensorSource
from .text_layout import (
    EMBEDDING,
    HEAD,
    PATCH_EMBED,
    Layout,
    beyond_condition,
    count_layers,
    is_text_encoder,
    recognise_text,
)
from .text_sizes import TextSizes, patch_embed_shape

CONDITION_LAYER = 50
OWN_FILE = "text_encoder.safetensors"
NO_LINEARS = ("visual.pos_embed", "visual.patch_embed.proj", EMBEDDING.removesuffix(".weight"))
LAYOUT_WORDS = {
    "official": "official",
    "transformers": "transformers",
    "ComfyUI": "comfyui",
    "ComfyUI all-in-one": "all-in-one",
}
Piece = Tensor | nn.Module


class TextLayers:
    """One text encoder, opened. CheckpointError when it is none, or names every tensor that is missing, beyond or of
    another shape.

    ``layers``: where the condition is read (default: what our own file says, else 50). ``dtype``: of plain tensors and
    of what quantised linears compute in (None: as stored, bfloat16 beside quantised layers). ``quantise``
    (int8_convrot, int8, fp8) quantises the seven linears of each layer as they are read, but those that ``exclude``
    names.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        layers: int | None = None,
        dtype: torch.dtype | None = None,
        quantise: str | Online | None = None,
        exclude: Sequence[str] = (),
    ):
        self.checkpoint, self.layout = open_text(path, layers)
        try:
            self.sizes = TextSizes.from_shapes(self.checkpoint.shapes)
        except CheckpointError as error:
            raise CheckpointError(f"{self.checkpoint.source.path} is no whole text encoder: {error}.") from None
        wanted = self.sizes.tensors()
        compare_shapes(self.checkpoint, wanted)
        self.dtype = dtype or self._stored_type()
        online = online_of(quantise, exclude)
        chosen = dict.fromkeys(online.linears(self.checkpoint), online.method) if online else {}
        kept = frozenset(name for name in self.checkpoint.layers if name not in NO_LINEARS)
        dtypes = dict.fromkeys(self.checkpoint.recipes, self.dtype)
        self.pieces = Pieces(self.checkpoint, dtypes, wanted, self.dtype, kept, chosen)
        halves = sum(self.checkpoint.stored_as(name) == "F16" for name in self.checkpoint.plain)
        reasons = [f"stores {halves} tensors in F16 (released in BF16)"] if halves else []
        self.info: CheckpointInfo = describe(self.pieces, [], reasons, "unknown")

    def layer(self, index: int, device: str | torch.device = "cpu") -> dict[str, Piece]:
        """Layer ``index``: name inside the layer -> tensor, or ``self_attn.q_proj`` -> quantised linear."""
        assert 0 <= index < self.sizes.layers, index
        return self._under(f"language_model.layers.{index}.", device)

    def vision(self, device: str | torch.device = "cpu") -> dict[str, Piece]:
        """The tower: name inside it -> tensor or quantised linear."""
        return self._under("visual.", device)

    def embeddings(self, device: str | torch.device = "cpu") -> nn.Module:
        """Module that gives the word embeddings of ids [...] -> [..., hidden], in ``dtype``."""
        name = EMBEDDING.removesuffix(".weight")
        if name in self.checkpoint.layers:
            layer = self.checkpoint.layers[name]
            rows = self.pieces.shapes[EMBEDDING]
            return StoredEmbedding(layer, self.checkpoint.read_layer(name), rows, self.dtype).to(device)
        return nn.Embedding.from_pretrained(self.pieces.tensor(EMBEDDING, device), freeze=True)

    def words(self, ids: Tensor) -> Tensor:
        """Word embeddings of ids [S] -> [S, hidden] in ``dtype``, in host memory: the bits of ``embeddings()(ids)``.

        Only the rows that occur are read, not the table (1.5 GB in the release). Where scales stand in tiles of many
        rows (nvfp4, mxfp8) it is read whole.
        """
        name = EMBEDDING.removesuffix(".weight")
        kept, inverse = ids.unique(return_inverse=True)
        count, width = self.pieces.shapes[EMBEDDING]
        if name not in self.checkpoint.layers:
            rows = self.checkpoint.read_rows(EMBEDDING, kept.tolist())
            return rows.to(self.pieces.dtypes[EMBEDDING])[inverse]
        layer = self.checkpoint.layers[name]
        if layer.format in IN_TILES:
            return self.embeddings()(ids)
        tensors = self.checkpoint.read_layer_rows(name, kept.tolist(), count)
        table = StoredEmbedding(layer, tensors, (len(kept), width), self.dtype)
        return table(torch.arange(len(kept)))[inverse]

    def _under(self, prefix: str, device: str | torch.device) -> dict[str, Piece]:
        return {name[len(prefix) :]: piece for name, piece in self.pieces.read(prefix, device)}

    def _stored_type(self) -> torch.dtype:
        if self.checkpoint.layers:
            return torch.bfloat16
        return NUMBER_TYPES[self.checkpoint.stored_as(EMBEDDING)]


def text_path(path: str | os.PathLike) -> Path:
    """``path``, or our own encoder file in it."""
    path = Path(path)
    return path / OWN_FILE if path.is_dir() and (path / OWN_FILE).is_file() else path


def holds_text_encoder(path: str | os.PathLike) -> bool:
    """Whether a text encoder, and nothing else, lies at ``path``; CheckpointError when nothing readable does."""
    return is_text_encoder(open_weights(text_path(path)).shapes)


def open_text(path: str | os.PathLike, layers: int | None = None) -> tuple[Checkpoint, Layout]:
    """Recognise a text encoder: its tensors under the module's names (``language_model.``, ``visual.``), what lies
    after the condition left out. Nothing but headers and markers is read."""
    source = open_weights(text_path(path))
    layout, known = recognise_text(source)
    found, taken, problems = find_layers(source, "")
    last = _condition_layer(source, count_layers(known), layers)
    own = {stored: name for name, stored in known.items() if not beyond_condition(name, last)}
    shapes = {stored: source.shapes[stored] for stored in own if stored not in taken}
    quantised = {}
    for layer in found.values():
        name = own.get(f"{layer.name}.weight")
        if name is not None:
            quantised[name.removesuffix(".weight")] = layer
            shapes[f"{layer.name}.weight"] = layer.size
    header = Header(shapes, source.sharded)
    recipes, odd = text_format(layout).recipes(header)
    problems = [problem for problem in problems if layout.language in problem or layout.vision in problem]
    notes = source.notes
    if layout.holds_other_parts:
        others = sum(1 for name in source.shapes if layout.module_name(name) is None and not name.endswith(HEAD))
        notes += (f"{others} tensors of other parts in the same file were left alone",)
    fmt = text_format(layout)
    return Checkpoint(source, fmt, "", header, recipes, (*odd, *problems), notes, quantised), layout


def text_format(layout: Layout) -> CheckpointFormat:
    """The rules that turn ``layout``'s names into the module's."""

    def rule(prefix: str, own: str) -> Rule:
        return Rule(f"{own}{{path}}", (f"{prefix}{{path}}",))

    patches = Rule(PATCH_EMBED, (layout.stored_name(PATCH_EMBED),), _unfold_patches)
    rules = (patches, rule(layout.vision, "visual."), rule(layout.language, "language_model."))
    return CheckpointFormat(LAYOUT_WORDS[layout.name], "text_encoder", lambda header: None, rules)


def _unfold_patches(tensors: Sequence[Tensor], header: Header) -> Tensor:
    return tensors[0].view(patch_embed_shape(tuple(tensors[0].shape)))


def _condition_layer(source: TensorSource, available: int, asked: int | None) -> int:
    """After which layer the condition is read; CheckpointError when the file has fewer."""
    wanted = asked
    if wanted is None and CONFIG_KEY in source.metadata:
        try:
            wanted = json.loads(source.metadata[CONFIG_KEY])["layers"]
        except (ValueError, KeyError, TypeError):
            raise CheckpointError(f"{source.path}: the metadata {CONFIG_KEY} is damaged; make the file anew.") from None
    wanted = CONDITION_LAYER if wanted is None else wanted
    if type(wanted) is not int or not 1 <= wanted <= available:
        raise CheckpointError(
            f"{source.path} has {available} layers and the condition is the state after layer {wanted}; "
            "H3 needs Qwen3-VL-32B with its first 50 layers."
        )
    return wanted
