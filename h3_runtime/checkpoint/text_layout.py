"""How files name the tensors of the text encoder, and which of them the condition needs.

    official, HF folder    model.language_model.layers.N   model.visual.    }
    transformers           language_model.layers.N         visual.          }  -->  language_model.*, visual.*
    ComfyUI, GGUF          model.layers.N                  visual.          }
    ComfyUI all-in-one     text_encoders.qwen3vl_32b.transformer. before ComfyUI's

``model.`` means the language model in one layout and the whole encoder in another, so a layout is told by the full
beginning of its layers' names and never by cutting ``model.`` off. Layers after the condition and the last norm are
whole encoders' own and are never read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import CheckpointError
from .reader import TensorSource, listed

LAYER_NUMBER = re.compile(r"language_model\.layers\.(\d+)\.")
HEAD = "lm_head.weight"
LAST_NORM = "language_model.norm.weight"
EMBEDDING = "language_model.embed_tokens.weight"
PATCH_EMBED = "visual.patch_embed.proj.weight"


@dataclass(frozen=True)
class Layout:
    """How one kind of file names the language stack and the vision tower. Several share tensor names' beginnings, so
    the kind is told by ``language`` + ``layers.``, never by cutting ``model.`` off blindly."""

    name: str
    language: str
    vision: str
    holds_other_parts: bool = False

    def module_name(self, stored: str) -> str | None:
        """The module's name for a stored tensor; None when it belongs to neither the language stack nor the tower."""
        for prefix, own in ((self.language, "language_model."), (self.vision, "visual.")):
            if stored.startswith(prefix):
                return own + stored[len(prefix) :]
        return None

    def stored_name(self, name: str) -> str:
        """The inverse of ``module_name``."""
        own, prefix = ("visual.", self.vision) if name.startswith("visual.") else ("language_model.", self.language)
        return prefix + name.removeprefix(own)


LAYOUTS = (
    Layout("official", "model.language_model.", "model.visual."),
    Layout("transformers", "language_model.", "visual."),
    Layout("ComfyUI", "model.", "visual."),
    Layout(
        "ComfyUI all-in-one",
        "text_encoders.qwen3vl_32b.transformer.model.",
        "text_encoders.qwen3vl_32b.transformer.visual.",
        holds_other_parts=True,
    ),
)


def is_text_encoder(names: Iterable[str]) -> bool:
    """Whether tensor names are those of the Qwen3-VL text encoder alone, in any of its layouts."""
    names = frozenset(names)
    alone = [layout for layout in LAYOUTS if not layout.holds_other_parts]
    return any(f"{layout.language}layers.0.self_attn.q_proj.weight" in names for layout in alone)


def recognise_text(source: TensorSource) -> tuple[Layout, dict[str, str]]:
    """The layout of a text encoder, and module name -> stored name of everything in it but the output head.

    CheckpointError when it is none, or mixes layouts. Names that fit neither stack nor tower stand for themselves; an
    all-in-one file's other parts are left alone.
    """
    names = tuple(source.shapes)
    found = [layout for layout in LAYOUTS if any(name.startswith(f"{layout.language}layers.") for name in names)]
    if len(found) > 1:
        raise CheckpointError(
            f"{source.path} mixes text encoder layouts ({', '.join(layout.name for layout in found)}); "
            "use one file of one kind"
        )
    if not found:
        known = ", ".join(f"{layout.name}: {layout.language}layers.*" for layout in LAYOUTS)
        raise CheckpointError(
            f"{source.path} is no Qwen3-VL text encoder: none of the known names is in it ({known}); it begins with "
            f"{listed(sorted(names)[:3]) or 'nothing'}"
        )
    layout = found[0]
    if layout.holds_other_parts:
        names = tuple(name for name in names if layout.module_name(name))
    return layout, {layout.module_name(name) or name: name for name in names if not name.endswith(HEAD)}


def layer_of(name: str) -> int | None:
    """The language layer that the module's name ``name`` belongs to, None for everything else."""
    match = LAYER_NUMBER.match(name)
    return int(match[1]) if match else None


def beyond_condition(name: str, layers: int) -> bool:
    """Whether the module's name ``name`` is of the last norm or a layer after the condition."""
    number = layer_of(name)
    return name == LAST_NORM or (number is not None and number >= layers)


def count_layers(names: Iterable[str]) -> int:
    """How many language layers the module's names speak of."""
    return max((number for name in names if (number := layer_of(name)) is not None), default=-1) + 1
