"""What each path may claim: three labels, one registry, one rule to compose them.

    LOSSLESS     bit-identical to the baseline on the same device and compute dtype
    EXACT MATH   the same formula, floating-point order may differ
    APPROXIMATE  the algorithm or the precision changes

A path is named where it runs (``use("solver/euler")``); a name without an entry here raises, so a path cannot be built
without a label. A render's label is the weakest of its parts. BEYOND THE REFERENCE is a second mark beside it: the
list of what the reference has nothing to compare with.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch

BASELINE = (
    "DiT as released (bf16 with float32 islands), text encoder bf16, video and audio VAE float32, SDPA, TF32 off, "
    "Euler, 49 forwards, shifts 12 and 3, reference noise and recipe, VAE tiles of 256 px"
)

REMOTE = "remote, not verified here"  # stands in the label of every clip that a server rendered


class Label(enum.IntEnum):
    """From strongest to weakest; the weakest of a render's parts is the render's."""

    LOSSLESS = 0
    EXACT_MATH = 1
    APPROXIMATE = 2

    def __str__(self) -> str:
        return self.name.replace("_", " ")


@dataclass(frozen=True)
class Entry:
    """One registered path. ``unproven`` gives the reason why this machine cannot run it, or None."""

    name: str
    label: Label
    reason: str
    unproven: Callable[[], str | None] = lambda: None


@dataclass(frozen=True)
class Fidelity:
    """The label of one render: its parts (registry entries), the weakest of them, and what is beyond the reference."""

    parts: tuple[Entry, ...]
    beyond: tuple[str, ...] = ()
    compute: str = ""

    @property
    def label(self) -> Label:
        return max((part.label for part in self.parts), default=Label.LOSSLESS)

    @property
    def title(self) -> str:
        """The label in words, as shown on a node and in a file."""
        words = [str(self.label)]
        if self.compute:
            words.append(f"({self.compute})")
        if self.beyond:
            words.append("+ BEYOND THE REFERENCE: " + ", ".join(self.beyond))
        unproven = [part.name for part in self.parts if part.unproven()]
        if unproven:
            words.append("UNPROVEN HERE: " + ", ".join(unproven))
        return " ".join(words)

    @property
    def causes(self) -> tuple[Entry, ...]:
        """The parts that make the label weaker than LOSSLESS."""
        return tuple(part for part in self.parts if part.label > Label.LOSSLESS)

    def to_dict(self) -> dict:
        return {
            "label": str(self.label),
            "title": self.title,
            "compute": self.compute,
            "beyond_the_reference": list(self.beyond),
            "parts": [{"name": p.name, "label": str(p.label), "reason": p.reason} for p in self.parts],
        }


REGISTRY: dict[str, Entry] = {}


def register(name: str, label: Label, reason: str, unproven: Callable[[], str | None] = lambda: None) -> Entry:
    """Add a path. A name stands once: two paths must not share a label by accident."""
    assert name not in REGISTRY, name
    REGISTRY[name] = Entry(name, label, reason, unproven)
    return REGISTRY[name]


def use(name: str) -> Entry:
    """The entry of a path that is about to run; KeyError where none was registered."""
    return REGISTRY[name]


def compose(
    names: Iterable[str], beyond: Iterable[str] = (), compute: str = "", reasons: Mapping[str, str] | None = None
) -> Fidelity:
    """The fidelity of a render that ran the paths ``names``; ``reasons`` are this render's own words for some."""
    own = reasons or {}
    parts = (replace(use(name), reason=own.get(name, use(name).reason)) for name in dict.fromkeys(names))
    return Fidelity(tuple(parts), tuple(beyond), compute)


def _no_card(capability: tuple[int, int] = (0, 0), amd: bool = False) -> Callable[[], str | None]:
    """Why a kernel for NVIDIA cards of ``capability`` (or AMD cards too) cannot run here."""

    def reason() -> str | None:
        if not torch.cuda.is_available():
            return "no GPU here"
        if torch.version.hip:
            return None if amd else "needs an NVIDIA card"
        found = torch.cuda.get_device_capability()
        return None if found >= capability else f"needs compute capability {capability[0]}.{capability[1]}"

    return reason


def _lacks(package: str, capability: tuple[int, int], most: tuple[int, int] = (99, 0)) -> Callable[[], str | None]:
    """Why a kernel of ``package`` for NVIDIA cards from ``capability`` up to ``most`` cannot run here."""
    card = _no_card(capability)

    def reason() -> str | None:
        said = card()
        if said is None and torch.cuda.get_device_capability() > most:
            said = f"is not made for compute capability above {most[0]}.{most[1]}"
        if said is not None:
            return said
        try:
            found = importlib.util.find_spec(package)
        except (ImportError, ValueError):  # its parent is missing, or half-installed
            found = None
        return None if found else f"the package {package} is not installed"

    return reason


def _kitchen_lacks() -> str | None:
    """Why comfy-kitchen's INT8 attention cannot run here."""
    said = _lacks("comfy_kitchen", (7, 5))()
    if said is not None:
        return said
    ask = getattr(importlib.import_module("comfy_kitchen"), "int8_attention_is_available", None)
    if ask is None:
        return "this comfy-kitchen has no INT8 attention"
    return None if ask() else "this comfy-kitchen has no INT8 attention for this card"


_LOSSLESS, _APPROXIMATE = Label.LOSSLESS, Label.APPROXIMATE

register("dit/stored", _LOSSLESS, "the DiT computes in the dtype its file stores, float32 islands kept: the baseline")
register("dit/float32", _LOSSLESS, "the stored weights cast up to float32: the baseline of that compute dtype")
register("dit/file-approximate", _APPROXIMATE, "the DiT file itself is not the released precision")
for _part, _whose in (("dit", "the DiT"), ("encoder", "the text encoder"), ("video-vae", "the video VAE's decoder")):
    register(f"{_part}/int8-convrot", _APPROXIMATE, f"{_whose} in INT8, inputs rotated in groups and rounded per row")
    register(f"{_part}/int8", _APPROXIMATE, f"{_whose} in INT8, inputs rounded per row")
    register(f"{_part}/fp8", _APPROXIMATE, f"{_whose} in FP8 weights (e4m3 or e5m2)")
for _part, _whose in (("dit", "the DiT"), ("encoder", "the text encoder")):
    register(f"{_part}/nvfp4", _APPROXIMATE, f"{_whose} in NVFP4: 4-bit floats, a scale per 16")
    register(f"{_part}/mxfp8", _APPROXIMATE, f"{_whose} in MXFP8: FP8 weights, a power of two per 32")
    register(f"{_part}/convrot-w4a4", _APPROXIMATE, f"{_whose} in rotated 4-bit weights, inputs at 8 bits")
    register(f"{_part}/asym-w4a8", _APPROXIMATE, f"{_whose} in 4-bit codes of a codebook, inputs at 8 bits")
    register(f"{_part}/gguf", _APPROXIMATE, f"{_whose} in GGUF blocks (Q8_0 ... Q2_K), decoded as they are used")
register("dit/pruned-curve", _APPROXIMATE, "AdaLN pruned to a curve over t: about 2e-3 from the full projections")
register("kernel/int8-int-mm", _APPROXIMATE, "int8 x int8 with int32 sums by torch._int_mm: inputs are rounded")
register(
    "kernel/int8-comfy-kitchen",
    _APPROXIMATE,
    "int8 x int8 with int32 sums by comfy-kitchen's fused kernel: inputs are rounded",
    _no_card((7, 5), amd=True),
)
register("kernel/int8-dequantised", Label.EXACT_MATH, "weights decoded as they are used, inputs as they are")
register(
    "kernel/float8-scaled-mm", _APPROXIMATE, "float8 tensor cores: inputs are rounded to e4m3 per row", _no_card((8, 9))
)
register("kernel/float8-dequantised", Label.EXACT_MATH, "weights decoded as they are used, inputs as they are")
register("kernel/block-scaled-float-dequantised", Label.EXACT_MATH, "weights decoded as they are used")
register("kernel/gguf-dequantised", Label.EXACT_MATH, "weights decoded as they are used, inputs as they are")
register("attention/sdpa", _LOSSLESS, "PyTorch's SDPA in canonical head groups: the baseline's kernel")
for _name, _words, _why in (
    ("sdpa-flash", "PyTorch's FlashAttention kernel, asked for by name", lambda: None),
    ("sdpa-math", "PyTorch's plain kernel, scores held whole", lambda: None),
    ("sdpa-efficient", "PyTorch's memory-efficient kernel", _no_card((5, 0), amd=True)),
    ("sdpa-cudnn", "cuDNN's attention through PyTorch", _no_card((8, 0))),
    ("flash-2", "FlashAttention 2", _lacks("flash_attn", (8, 0))),
    ("flash-3", "FlashAttention 3", _lacks("flash_attn_interface", (9, 0), (9, 0))),
    ("flash-4", "FlashAttention 4", _lacks("flash_attn.cute", (9, 0))),
    ("flash-eager", "the eager twin of FlashAttention: online softmax by key tiles", lambda: None),
):
    register(f"attention/{_name}", Label.EXACT_MATH, f"{_words}: the same formula, sums in another order", _why)
for _name, _words, _why in (
    ("sage-1", "SageAttention 1: q and k in INT8, values in fp16", _lacks("sageattention", (8, 0), (9, 0))),
    ("sage-2", "SageAttention 2: q and k in INT8, values in fp16 or fp8", _lacks("sageattention", (8, 0))),
    ("kitchen-int8", "comfy-kitchen's attention: q, k and values in INT8", _kitchen_lacks),
    ("int8-eager", "the eager twin of SageAttention: q and k rounded to INT8", lambda: None),
):
    register(f"attention/{_name}", _APPROXIMATE, _words, _why)
register("accelerator/sparse", _APPROXIMATE, "picture rows attend to a chosen share of the picture's blocks")
register("accelerator/block-cache", _APPROXIMATE, "all blocks but the first left out where the first changed little")
register("accelerator/forecast", _APPROXIMATE, "forwards left out, their last hidden state foretold by regression")
register("accelerator/compile", Label.EXACT_MATH, "blocks compiled by torch.compile: sums may be ordered anew")
register("accelerator/few-step", _APPROXIMATE, "the forwards and shifts that a few-step LoRA was trained for")
register("chunks/canonical", _LOSSLESS, "fixed row chunks and head groups, the same on every card: the baseline's")
register("chunks/smaller", Label.EXACT_MATH, "smaller row chunks and head groups, where the canonical ones do not fit")
register("refiner/once", _LOSSLESS, "text rows are refined once a request: a constant is computed once")
register("modulation/tables", _LOSSLESS, "AdaLN rows computed before the loop, by the same fixed batches")
register("modulation/by-forward", _LOSSLESS, "AdaLN rows computed in each forward, by the same fixed batches")
register("solver/euler", _LOSSLESS, "the reference's sampler, both streams on their own grids")
register("solver/second-order", _APPROXIMATE, "Adams-Bashforth of second order: another path to the same end point")
register("schedule/reference", _LOSSLESS, "49 forwards, shifts 12 and 3: the release's schedule")
register("schedule/steps", _APPROXIMATE, "a forward count other than the release's 49 walks another path")
register("schedule/shifts", _APPROXIMATE, "shifts other than 12 (picture) and 3 (sound) walk another path")
register("recipe/reference", _LOSSLESS, "conditions sampled with seed 42 and rounded to fp16, as the reference does")
register("recipe/comfy", _APPROXIMATE, "conditions at ComfyUI's sizes, posterior means without rounding")
register("condition/kept", _LOSSLESS, "the prompt's states kept from an earlier encode of exactly the same inputs")
register(
    "condition/other-encoder", _APPROXIMATE, "the prompt's states come from another encoder file than this model's"
)
register("encoder/stored", _LOSSLESS, "the text encoder computes in the dtype its file stores")
register("encoder/float32", _LOSSLESS, "the text encoder's weights cast up to float32")
register("encoder/file-approximate", _APPROXIMATE, "the text encoder file itself is not the released precision")
register("video-vae/float32", _LOSSLESS, "float32 weights and compute, tiles of 256 px: the baseline")
register("video-vae/file-approximate", _APPROXIMATE, "the video VAE file is not float32: pixels move by about 1e-3")
register("video-vae/layer-major", _LOSSLESS, "each layer applied to every tile of a chunk in turn, at batch 1")
register(
    "video-vae/tile-batch", Label.EXACT_MATH, "several tiles through a layer at once: sums may come in another order"
)
register("video-vae/chunk-stream", _LOSSLESS, "frames leave the decoder chunk by chunk; the same blend")
register("video-vae/other-tile", _APPROXIMATE, "the decoder was trained on 256 px tiles; others move its coordinates")
register("audio-vae/float32", _LOSSLESS, "float32, two mono passes: the baseline")
register("audio-vae/file-approximate", _APPROXIMATE, "the audio VAE file is not float32")
register("resume/state", _LOSSLESS, "a run continued from a saved float32 state walks the same bits")
register("condition/foreign", _APPROXIMATE, "a prompt, guide or reference encoded by another program's code")
register("dit/lora", _APPROXIMATE, "LoRAs on the weights: the result is another model's than the release's")
register(
    "remote/engine",
    _APPROXIMATE,
    "rendered by another engine on a server, in its own way and coded as mp4: not verified",
)
