"""The names inside a LoRA file, in every spelling that is in circulation, and the module of ours each one belongs to.

    blocks.3.attn.qkv_proj.lora_A.weight                        native        ─┐
    diffusion_model.blocks.3.attn.qkv_proj.lora_up.weight       ComfyUI        │
    transformer_blocks.3.attn.to_k.lora_B.default.weight        diffusers      ├─▶ blocks.3.attn.qkv_proj
    lora_unet_blocks_3_attn_qkv_proj.lora_down.weight           kohya          │   (all rows, or its q, k or v rows)
    blocks.3.attn.qkv_proj.lora_A.default.weight                DiffSynth      │
    blocks.3.attn.qkv_proj.lora_a                               TaoMate       ─┘

Nothing is read here. Underscored names are not taken apart: each is looked up in a table made from the known modules,
because module names contain underscores themselves. What is no LoRA of this kind (DoRA, LoKr, interval heads, two-time
conditioning) is refused by name, for applying a part of it would run and look wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..checkpoint.formats import FORMATS
from ..checkpoint.reader import listed
from ..errors import CheckpointError

LAYOUTS = {
    "native": "the DiT's own names, q/k/v rows stacked",
    "comfyui": "the DiT's own names behind diffusion_model., q/k/v rows stacked",
    "diffusers": "transformer_blocks names: q, k, v apart, FFN rows value; gate",
    "kohya": "lora_unet_ and underscores, q/k/v rows stacked",
    "diffsynth": "the DiT's own names with .default., q/k/v rows interleaved per head",
    "taomate": "the DiT's own names with .lora_a and .lora_b, q/k/v rows stacked",
}
PREFIXES = (
    "base_model.model.",
    "model.diffusion_model.",
    "diffusion_model.",
    "transformer.",
    "transformer_ref.",
    "model.",
)
FLAT_PREFIXES = ("lora_unet__", "lora_unet_", "lora_transformer_", "lycoris_")

# every linear of the DiT, under our names
MODULES = (
    *(f"blocks.{{i}}.{leaf}" for leaf in ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2", "adaln_proj.linear")),
    *(f"token_refiner.blocks.{{i}}.{leaf}" for leaf in ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")),
    "video_patch_proj",
    "audio_patch_proj",
    "condition_proj",
    "time_embedder.proj_in",
    "time_embedder.proj_out",
    "final_layer.adaln_proj.linear",
    "final_layer.video_out",
    "final_layer.audio_out",
)

_FACTOR = re.compile(
    r"(?P<module>.+)\.(?P<kind>lora_A|lora_B|lora_a|lora_b|lora_down|lora_up|lora\.down|lora\.up)"
    r"(?:\.(?P<adapter>(?!weight$|bias$)[^.]+))?(?:\.weight)?"
)
_ALPHA = re.compile(r"(?P<module>.+)\.alpha")
_SET = re.compile(
    r"(adaln_t_table|(blocks\.[0-9]+|final_layer)\.adaln_proj\.linear(\.(weight|bias))?)(\.set_(weight|bias))?"
)
_HEADS = re.compile(
    r"(proj_out|audio_proj_out|final_layer\.(video|audio)_out)\.(weight|bias|set_weight|set_bias)(\.set_(weight|bias))?"
)
_BLOCK_NUMBER = re.compile(r"blocks[._]([0-9]{1,4})[._]")
_FIRST_KINDS = ("lora_A", "lora_a", "lora_down", "lora.down")

# what a file is when one of its names matches, and why it is refused
SPECIAL_NAMES: tuple[tuple[re.Pattern, str], ...] = (
    (
        re.compile(r".*(endpoint_time_embedder|hyperflow).*"),
        "HyperFlow, which conditions every step on two times and brings its own sigmas: that is no plain LoRA",
    ),
    (
        _HEADS,
        "a PDD file, which brings one output head per interval of the schedule: that is no plain LoRA",
    ),
    (re.compile(r".*\.(dora_scale|lora_magnitude_vector|magnitude)(\..*)?"), "a DoRA, which rescales whole weights"),
    (re.compile(r".*\.lokr_.*"), "a LoKr (Kronecker factors)"),
    (re.compile(r".*\.hada_.*"), "a LoHa (Hadamard factors)"),
    (re.compile(r".*\.(oft_|boft_).*"), "an OFT (rotations)"),
    (re.compile(r".*\.lora_mid\..*"), "a LoCon with middle factors"),
)


@dataclass(frozen=True)
class Slot:
    """Where a pair goes: one of our modules, all its rows (part None) or its q, k or v rows (part 0, 1, 2).

    ``swapped``: the rows come as value; gate and are needed as gate; value. ``split``: diffusers' names.
    """

    module: str
    part: int | None = None
    swapped: bool = False
    split: bool = False


@dataclass(frozen=True)
class Factors:
    """The stored names of one pair: ``down`` is A [r, in], ``up`` is B [out, r]. None: the file lacks it."""

    slot: Slot
    down: str | None
    up: str | None
    alpha: str | None


@dataclass(frozen=True)
class Sorted:
    """All names of a file: pairs, tensors that replace the AdaLN curve, and what nothing is known of.

    ``layout`` is a key of LAYOUTS, or several joined by + for a file that mixes them. ``prefixes`` were taken off.
    """

    factors: tuple[Factors, ...]
    sets: tuple[str, ...]
    unknown: tuple[str, ...]
    layout: str
    prefixes: frozenset[str]


def strip_prefixes(name: str) -> tuple[str, tuple[str, ...]]:
    """The name without the prefixes of PREFIXES, however many stand before it, and those prefixes."""
    taken: list[str] = []
    while prefix := next((p for p in PREFIXES if name.startswith(p)), None):
        taken.append(prefix)
        name = name[len(prefix) :]
    return name, tuple(taken)


def known_slots(names: Iterable[str]) -> dict[str, Slot]:
    """Dotted name, ours or diffusers', -> slot, for the block numbers that occur in ``names``."""
    diffusers = next(f for f in FORMATS if (f.part, f.name) == ("dit", "diffusers"))
    numbers = sorted({int(n) for name in names for n in _BLOCK_NUMBER.findall(name)})
    slots: dict[str, Slot] = {}
    for template in MODULES:
        for ours in [template.format(i=n) for n in numbers] if "{i}" in template else [template]:
            slots[ours] = Slot(ours)
            theirs = [name.removesuffix(".weight") for name in diffusers.stored_names(f"{ours}.weight")]
            for part, name in enumerate(theirs):
                swapped = ours.endswith("mlp.fc1")
                slots.setdefault(name, Slot(ours, part if len(theirs) > 1 else None, swapped, split=True))
    return slots


def sort_names(shapes: Mapping[str, tuple[int, ...]], where: str) -> Sorted:
    """Sort a file's tensor names. CheckpointError for a kind of adapter that is not a LoRA, and for a pair there twice.

    ``where`` is the path, for messages.
    """
    _refuse_special(shapes, where)
    dotted = known_slots(shapes)
    flat = {name.replace(".", "_"): slot for name, slot in dotted.items()}
    found: dict[tuple[str, str], dict[str, str]] = {}  # (module as stored, adapter) -> kind -> stored name
    alphas: dict[str, str] = {}
    sets, rest = [], []
    for name in shapes:
        if match := _FACTOR.fullmatch(name):
            kind = "down" if match["kind"] in _FIRST_KINDS else "up"
            found.setdefault((match["module"], match["adapter"] or ""), {})[kind] = name
        elif match := _ALPHA.fullmatch(name):
            alphas[match["module"]] = name
        elif _SET.fullmatch(strip_prefixes(name)[0]):
            sets.append(name)
        else:
            rest.append(name)
    adapters = sorted({adapter for _, adapter in found if adapter})
    if len(adapters) > 1:
        raise CheckpointError(
            f"{where} holds {len(adapters)} adapters ({listed(adapters)}); one is needed: save each to its own file."
        )
    factors: dict[Slot, Factors] = {}
    layouts: dict[str, None] = {}
    prefixes: set[str] = set()
    for (module, adapter), names in found.items():
        slot, taken, is_flat = _slot_of(module, dotted, flat)
        if slot is None:
            rest += names.values()
            continue
        other = factors.get(slot)
        if other is not None:
            twice = listed(n for n in (other.down, other.up, *names.values()) if n)
            raise CheckpointError(f"{where} has the pair of {slot.module} twice ({twice}); keep one of them.")
        factors[slot] = Factors(slot, names.get("down"), names.get("up"), alphas.pop(module, None))
        prefixes.update(taken)
        layouts[_layout(slot, is_flat, taken, bool(adapter), next(iter(names.values())))] = None
    rest += alphas.values()
    return Sorted(tuple(factors.values()), tuple(sets), tuple(rest), "+".join(layouts), frozenset(prefixes))


def _slot_of(
    module: str, dotted: Mapping[str, Slot], flat: Mapping[str, Slot]
) -> tuple[Slot | None, tuple[str, ...], bool]:
    """The slot of a stored module name, the prefixes taken off, and whether it was an underscored one."""
    bare, taken = strip_prefixes(module)
    if bare in dotted:
        return dotted[bare], taken, False
    for name in (bare, *(bare[len(p) :] for p in FLAT_PREFIXES if bare.startswith(p))):
        if "." not in name and name in flat:
            return flat[name], taken, True
    return None, (), False


def _layout(slot: Slot, is_flat: bool, taken: tuple[str, ...], infix: bool, name: str) -> str:
    if slot.split:
        return "diffusers"
    if is_flat:
        return "kohya"
    if infix:
        return "diffsynth"
    if re.search(r"\.lora_[ab](\.|$)", name):
        return "taomate"
    return "comfyui" if any(p.endswith("diffusion_model.") for p in taken) else "native"


def _refuse_special(shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    pairs = any(_FACTOR.fullmatch(name) for name in shapes)
    for pattern, what in SPECIAL_NAMES:
        if pattern is _HEADS and not pairs:
            continue  # a whole checkpoint has these names too
        names = [name for name in shapes if pattern.fullmatch(strip_prefixes(name)[0])]
        if names:
            raise CheckpointError(f"{where} is {what}, which cannot be applied here ({listed(names[:3])}).")
