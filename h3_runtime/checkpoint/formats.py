"""The layouts weights come in, and how each becomes the one layout our modules have (that of the ComfyUI files).

    official folder (index + shards)     blocks.N.attn.qkv_proj   rows  q0 k0 v0 | q1 k1 v1 | ...   per head
    ComfyUI single file                  blocks.N.attn.qkv_proj   rows  q0 q1 .. | k0 k1 .. | v0 v1 ..   <- ours
    diffusers folder                     transformer_blocks.N.attn.to_q, to_k, to_v;   ff.net.0.proj = value | gate

        stored names and shapes --detect--> CheckpointFormat --key_map--> {our name: Recipe(sources, shape, combine)}

A key map is a tuple of ``Rule``s: our name, the stored names it is made of, and what is done to them. Names that no
rule touches stay as they are, so the ComfyUI key map is empty. In a rule ``{i}`` and ``{j}`` stand for a number,
``{leaf}`` for weight or bias, ``{path}`` for any name. Recipes are made from names and shapes alone; no tensor is read
until one is built.

The first two layouts have the same names and shapes and cannot be told apart by them: a shard index beside the file
means interleaved, and an explicit layout overrides it. Adding a format is adding one entry to FORMATS.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .reader import TensorSource, listed
from .text_layout import is_text_encoder

PARTS = {"dit": "DiT", "video_vae": "video VAE", "audio_vae": "audio VAE"}
TITLES = {**PARTS, "text_encoder": "text encoder"}
LAYOUTS = {"official": "official", "diffusers": "diffusers", "comfyui": "ComfyUI"}
DIT_PREFIXES = ("model.diffusion_model.", "diffusion_model.")
# in an all-in-one file these belong to other parts and are left alone
OTHER_PARTS = ("text_encoders.", "conditioner.", "cond_stage_model.", "first_stage_model.", "vae.", "audio_vae.")
RELEASED_VAE_HEAD_DIM = 64


@dataclass(frozen=True)
class Header:
    """What detection sees: stored shapes (prefix taken off), whether a shard index stands beside them, config.json.

    ``forced`` is set when the caller named the layout: then only the names decide.
    """

    shapes: Mapping[str, tuple[int, ...]]
    sharded: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    forced: bool = False


Combine = Callable[[Sequence[Tensor], Header], Tensor]


@dataclass(frozen=True)
class Rule:
    """Our name <- the stored names it is made of. Without ``combine`` it is the one source, renamed."""

    name: str
    sources: tuple[str, ...]
    combine: Combine | None = None


@dataclass(frozen=True)
class Recipe:
    """How one of our tensors is made: read ``sources``, then ``combine`` them (None: the one source as it is)."""

    sources: tuple[str, ...]
    shape: tuple[int, ...]
    combine: Callable[[Sequence[Tensor]], Tensor] | None = None

    def build(self, source: TensorSource, prefix: str = "") -> Tensor:
        """The tensor in its stored number type, in host memory."""
        tensors = [source.read(prefix + name) for name in self.sources]
        return tensors[0] if self.combine is None else self.combine(tensors)


@dataclass(frozen=True)
class CheckpointFormat:
    """One layout of one part.

    ``detect(header)`` returns None when the layout is this one, else the reason why not. ``tolerance`` is the largest
    relative L2 error that a tensor may have against the released one by way of this layout (0: bit-equal).
    ``aliases`` are other layouts whose files are the same for this part.
    """

    name: str
    part: str
    detect: Callable[[Header], str | None]
    key_map: tuple[Rule, ...] = ()
    tolerance: float = 0.0
    aliases: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"{TITLES[self.part]} in the {LAYOUTS.get(self.name, self.name)} layout"

    def answers_to(self, layout: str) -> bool:
        return layout == self.name or layout in self.aliases

    def recipes(self, header: Header) -> tuple[dict[str, Recipe], list[str]]:
        """Our name -> recipe for everything in ``header``, and what does not work out, in words."""
        recipes: dict[str, Recipe] = {}
        problems: dict[str, None] = {}  # in order, each once
        for name in header.shapes:
            rule, fields = self._rule_for(name)
            ours = rule.name.format(**fields) if rule else name
            sources = tuple(source.format(**fields) for source in rule.sources) if rule else (name,)
            if ours in recipes:
                if recipes[ours].sources != sources:
                    problems[f"{ours} is there twice ({listed((*recipes[ours].sources, *sources))})"] = None
                continue
            absent = [source for source in sources if source not in header.shapes]
            if absent:
                problems.update({f"missing {source}": None for source in absent})
                continue
            try:
                recipes[ours] = _recipe(sources, rule.combine if rule else None, header)
            except CheckpointError as error:
                problems[str(error)] = None
        for rule in self.key_map:
            if not rule.sources and rule.name not in recipes:
                try:
                    recipes[rule.name] = _recipe((), rule.combine, header)
                except CheckpointError as error:
                    problems[str(error)] = None
        return recipes, list(problems)

    def stored_names(self, ours: str) -> tuple[str, ...]:
        """The names under which this layout stores one of our tensors."""
        for rule in self.key_map:
            match = _pattern(rule.name).fullmatch(ours)
            if match and rule.sources:
                return tuple(source.format(**match.groupdict()) for source in rule.sources)
        return (ours,)

    def _rule_for(self, name: str) -> tuple[Rule | None, dict[str, str]]:
        for rule in self.key_map:
            for template in rule.sources:
                match = _pattern(template).fullmatch(name)
                if match:
                    return rule, match.groupdict()
        return None, {}


def _recipe(sources: tuple[str, ...], combine: Combine | None, header: Header) -> Recipe:
    if combine is None:
        return Recipe(sources, header.shapes[sources[0]])
    bound = partial(combine, header=header)
    try:  # the shape is what the recipe makes of tensors without memory
        made = bound([torch.empty(header.shapes[name], device="meta") for name in sources])
    except CheckpointError:
        raise
    except (RuntimeError, ValueError, TypeError, LookupError):
        shapes = listed(f"{name} {list(header.shapes[name])}" for name in sources)
        raise CheckpointError(f"misshapen: nothing can be made of {shapes}") from None
    return Recipe(sources, tuple(made.shape), bound)


@cache
def _pattern(template: str) -> re.Pattern:
    """The regular expression of a rule's name."""
    kinds = {"i": "[0-9]+", "j": "[0-9]+", "leaf": "weight|bias", "path": ".+"}
    pieces = re.split(r"\{(\w+)\}", template)  # text, placeholder, text, ...
    return re.compile("".join(f"(?P<{p}>{kinds[p]})" if i % 2 else re.escape(p) for i, p in enumerate(pieces)))


# what is done to tensors; all of it along dim 0, so weights [rows, ...] and biases [rows] are treated alike


def stack_rows(tensors: Sequence[Tensor], header: Header) -> Tensor:
    """q, k, v [n, ...] each -> [3n, ...]."""
    return torch.cat(tuple(tensors))


def swap_halves(tensors: Sequence[Tensor], header: Header) -> Tensor:
    """value; gate -> gate; value."""
    first, second = tensors[0].chunk(2)
    if first.shape != second.shape:
        raise ValueError("an odd number of rows has no halves")
    return torch.cat((second, first))


def stack_interleaved(tensors: Sequence[Tensor], header: Header) -> Tensor:
    """Rows q0 k0 v0 | q1 k1 v1 ... (one group a head) -> q0 q1 ..; k0 k1 ..; v0 v1 .."""
    rows = tensors[0]
    head_dim = header.shapes["blocks.0.attn.q_norm.weight"][0]
    grouped = rows.view(-1, 3, head_dim, *rows.shape[1:])  # [heads, 3, head_dim, ...]
    return grouped.transpose(0, 1).reshape(rows.shape)


def interleave(tensors: Sequence[Tensor], header: Header) -> Tensor:
    """q, k, v [heads * d, ...] each -> rows q0 k0 v0 | q1 k1 v1 ... as the video VAE's decoder keeps them."""
    head_dim = header.config.get("decoder_attention_head_dim", RELEASED_VAE_HEAD_DIM)
    q = tensors[0]
    if q.shape[0] % head_dim:
        raise CheckpointError(
            f"q of {q.shape[0]} rows is not made of heads of {head_dim}: "
            "the config.json that tells decoder_attention_head_dim is needed beside the weights"
        )
    heads = [x.view(-1, head_dim, *x.shape[1:]) for x in tensors]  # [heads, d, ...] each
    return torch.stack(heads, dim=1).reshape(-1, *q.shape[1:])


def fold_weight_norm(tensors: Sequence[Tensor], header: Header) -> Tensor:
    """v [n, ...], g [n, 1, ...] -> g * v / |v| per row, float32 (the function torch's own weight_norm calls)."""
    direction, length = tensors
    if length.shape != (direction.shape[0], *(1,) * (direction.dim() - 1)):
        raise ValueError("one length per row is needed")
    return torch._weight_norm(direction.float(), length.float(), 0)


def statistic(tensors: Sequence[Tensor], header: Header, name: str) -> Tensor:
    """latents_mean or latents_std [channels], float32, from config.json."""
    values = header.config.get(name)
    if not isinstance(values, (list, tuple)) or not all(isinstance(v, (int, float)) for v in values):
        raise CheckpointError(f"{name} is neither in the file nor in a config.json beside it; download config.json too")
    return torch.tensor([float(value) for value in values], dtype=torch.float32)


def unused_mask_token(tensors: Sequence[Tensor], header: Header) -> Tensor:
    """Zeros [1, 1, width] for the token that only training used; diffusers files leave it out."""
    return torch.zeros(1, 1, header.shapes["decoder.register_tokens"][-1])


STATISTICS = tuple(Rule(name, (), partial(statistic, name=name)) for name in ("latents_mean", "latents_std"))

DIT_OFFICIAL = (Rule("{path}.attn.qkv_proj.weight", ("{path}.attn.qkv_proj.weight",), stack_interleaved),)


def _diffusers_block(ours: str, theirs: str) -> tuple[Rule, ...]:
    qkv = tuple(f"{theirs}.attn.to_{x}.weight" for x in "qkv")
    return (
        Rule(f"{ours}.attn.qkv_proj.weight", qkv, stack_rows),
        Rule(f"{ours}.attn.out_proj.weight", (f"{theirs}.attn.to_out.0.weight",)),
        Rule(f"{ours}.attn.q_norm.weight", (f"{theirs}.attn.norm_q.weight",)),
        Rule(f"{ours}.attn.k_norm.weight", (f"{theirs}.attn.norm_k.weight",)),
        Rule(f"{ours}.mlp.fc1.weight", (f"{theirs}.ff.net.0.proj.weight",), swap_halves),
        Rule(f"{ours}.mlp.fc2.weight", (f"{theirs}.ff.net.2.weight",)),
        Rule(f"{ours}.{{path}}", (f"{theirs}.{{path}}",)),
    )


DIT_DIFFUSERS = (
    *_diffusers_block("token_refiner.blocks.{i}", "token_refiner.refiner_blocks.{i}"),
    *_diffusers_block("blocks.{i}", "transformer_blocks.{i}"),
    Rule("video_patch_proj.{leaf}", ("proj_in.{leaf}",)),
    Rule("audio_patch_proj.{leaf}", ("audio_proj_in.{leaf}",)),
    Rule("condition_proj.{leaf}", ("context_embedder.{leaf}",)),
    Rule("time_embedder.proj_in.{leaf}", ("time_embedder.linear_1.{leaf}",)),
    Rule("time_embedder.proj_out.{leaf}", ("time_embedder.linear_2.{leaf}",)),
    Rule("final_layer.video_out.{leaf}", ("proj_out.{leaf}",)),
    Rule("final_layer.audio_out.{leaf}", ("audio_proj_out.{leaf}",)),
    Rule("final_layer.adaln_proj.linear.{leaf}", ("norm_out.linear.{leaf}",)),
    Rule("final_layer.norm.weight", ("norm_out.norm.weight",)),
)

_VIT = "decoder.transformer_blocks.{i}"
_RESNET = "encoder.down_blocks.{i}.resnets.{j}"
VIDEO_VAE_DIFFUSERS = (
    Rule(f"{_VIT}.attn.to_qkv.{{leaf}}", tuple(f"{_VIT}.attn.to_{x}.{{leaf}}" for x in "qkv"), interleave),
    Rule(f"{_VIT}.attn.to_out.{{leaf}}", (f"{_VIT}.attn.to_out.0.{{leaf}}",)),
    Rule(f"{_VIT}.ff.w1.{{leaf}}", (f"{_VIT}.ff.net.0.proj.{{leaf}}",), swap_halves),
    Rule(f"{_VIT}.ff.w2.{{leaf}}", (f"{_VIT}.ff.net.2.{{leaf}}",)),
    Rule("decoder.x_embedder.{leaf}", ("decoder.proj_in.{leaf}",)),
    Rule("encoder.down.{i}.block.{j}.nin_shortcut.{leaf}", (f"{_RESNET}.conv_shortcut.{{leaf}}",)),
    Rule("encoder.down.{i}.block.{j}.{path}", (f"{_RESNET}.{{path}}",)),
    Rule("encoder.down.{i}.downsample.{path}", ("encoder.down_blocks.{i}.downsamplers.0.{path}",)),
    Rule("decoder.mask_token", (), unused_mask_token),
    *STATISTICS,
)

AUDIO_VAE_WEIGHT_NORM = (
    Rule("{path}.weight", ("{path}.weight_v", "{path}.weight_g"), fold_weight_norm),
    *STATISTICS,
)


def _has(*names: str) -> Callable[[Header], str | None]:
    def detect(header: Header) -> str | None:
        absent = [name for name in names if name not in header.shapes]
        return f"has no {absent[0]}" if absent else None

    return detect


_native_dit = _has("token_refiner.blocks.0.attn.qkv_proj.weight", "blocks.0.attn.qkv_proj.weight")
_native_video_vae = _has("decoder.transformer_blocks.0.attn.to_qkv.weight", "encoder.conv_in.weight")


def _official_dit(header: Header) -> str | None:
    other = _native_dit(header)
    if other or header.sharded or header.forced:
        return other
    return "no .safetensors.index.json lists it (a single file with these names is ComfyUI's)"


def _comfyui_dit(header: Header) -> str | None:
    other = _native_dit(header)
    if other or not header.sharded or header.forced:
        return other
    return "a .safetensors.index.json stands beside it (shards with these names are the official ones)"


def _official_video_vae(header: Header) -> str | None:
    other = _native_video_vae(header)
    if other or header.forced or "latents_mean" not in header.shapes:
        return other
    return "latents_mean is in the file (the official one has it in config.json)"


def _comfyui_video_vae(header: Header) -> str | None:
    other = _native_video_vae(header)
    return other or _has("latents_mean", "latents_std")(header)


FORMATS: tuple[CheckpointFormat, ...] = (
    CheckpointFormat("official", "dit", _official_dit, DIT_OFFICIAL),
    CheckpointFormat("comfyui", "dit", _comfyui_dit),
    CheckpointFormat(
        "diffusers", "dit", _has("transformer_blocks.0.attn.norm_q.weight", "context_embedder.weight"), DIT_DIFFUSERS
    ),
    CheckpointFormat("official", "video_vae", _official_video_vae, STATISTICS),
    CheckpointFormat("comfyui", "video_vae", _comfyui_video_vae),
    CheckpointFormat(
        "diffusers",
        "video_vae",
        _has("decoder.proj_in.weight", "encoder.down_blocks.0.resnets.0.conv1.weight"),
        VIDEO_VAE_DIFFUSERS,
    ),
    CheckpointFormat("comfyui", "audio_vae", _has("dec_in_proj.weight", "decoder.conv_pre.weight")),
    CheckpointFormat(
        "diffusers",
        "audio_vae",
        _has("dec_in_proj.weight", "decoder.conv_pre.weight_v"),
        AUDIO_VAE_WEIGHT_NORM,
        tolerance=1e-6,
        aliases=("official",),
    ),
)


def dit_prefix(names) -> str:
    """The prefix that a DiT's names carry in this file ("" for most)."""
    for prefix in DIT_PREFIXES:
        if any(name.startswith(prefix) for name in names):
            return prefix
    return ""


def choose_format(header: Header, part: str | None, layout: str | None, where: str) -> CheckpointFormat:
    """The one format that ``header`` is in. ``part`` None means any; ``layout`` names it instead of detection.

    CheckpointError tells a file of another part by what it is, and else why each format does not match.
    """
    if layout is not None and layout not in LAYOUTS:
        raise CheckpointError(f"layout is {layout!r}; choose one of {', '.join(LAYOUTS)}, or leave it out.")
    asked = [f for f in FORMATS if part in (None, f.part) and (layout is None or f.answers_to(layout))]
    verdicts = {f: f.detect(header) for f in asked}
    matching = [f for f, reason in verdicts.items() if reason is None]
    if len(matching) == 1:
        return matching[0]
    if len(matching) > 1:
        raise CheckpointError(
            f"{where} matches more than one layout ({listed(f.title for f in matching)}); give the layout."
        )
    wanted = PARTS[part] if part else "MiniMax-H3 part"
    asked_for = f" in the {layout} layout that was asked for" if layout else ""
    header = replace(header, forced=False)
    other = [f for f in FORMATS if f not in asked and f.detect(header) is None]
    if other:
        raise CheckpointError(f"{where} is a {other[0].title}; a {wanted}{asked_for} is needed here.")
    if is_text_encoder(header.shapes):
        raise CheckpointError(f"{where} is a text encoder (Qwen3-VL); a {wanted} is needed here.")
    reasons = "; ".join(f"not {f.title}: it {reason}" for f, reason in verdicts.items())
    raise CheckpointError(f"{where} is no {wanted}{asked_for} that this version knows. {reasons}.")
