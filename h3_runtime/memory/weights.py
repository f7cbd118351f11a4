"""How many bytes each part of a model takes where it computes: from a file's header, or from sizes alone.

    bf16 | int8 + DiTConfig ─▶ modules on the meta device ─┐
    header of a file, shards, GGUF ─▶ our names, types ────┴─▶ DiTWeights(per block, AdaLN, refiner, rest)
    LoRAs: headers ─▶ LoraWeights(per block, ranks beside q/k/v)
    VAEs, text encoder likewise

A block's bytes are those of its slot: every tensor on its own boundary, as the streamer lays it out. Nothing is read
but headers. Plain weights count in the number type they compute in, quantised ones as they are stored.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from ..checkpoint.load import OpenedPart, open_audio_vae, open_dit, open_video_vae
from ..checkpoint.parts import PartPaths
from ..checkpoint.pieces import Online, Pieces
from ..checkpoint.text_layers import TextLayers
from ..checkpoint.text_sizes import TextSizes
from ..errors import H3Error
from ..lora import Lora
from ..lora import plan as plan_loras
from ..models.audio_vae import AudioVAE, AudioVAEConfig
from ..models.dit import DiT, DiTConfig
from ..models.video_vae import VideoVAE, VideoVAEConfig
from .streaming import ALIGNMENT

NAMED_WEIGHTS = ("bf16", "int8", "fp32")
INTEGER_FORMATS = ("int8_tensorwise", "convrot_w4a4", "asym_w4a8_int8")
FLOAT, INTEGER, DECODED = "float", "integer", "decoded"  # how a block's matmuls run
BLOCKS = "blocks."
BLOCK = re.compile(r"blocks\.(\d+)\.(.*)")
ADALN = "adaln_proj."
REFINER = re.compile(r"token_refiner\.blocks\.(\d+)\.")
LAYER = re.compile(r"language_model\.layers\.(\d+)\.")
DECODER_LAYER = re.compile(r"decoder\.transformer_blocks\.(\d+)\.")
BLOCK_LINEARS = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")


@dataclass(frozen=True)
class LoraWeights:
    """Side branches: bytes added to each block, ranks that stand beside q/k/v (their inputs are kept for all heads),
    the largest rank elsewhere in a block, and bytes outside the blocks."""

    per_block: tuple[int, ...] = ()
    qkv_rank: int = 0
    other_rank: int = 0
    rest: int = 0

    @property
    def nbytes(self) -> int:
        return sum(self.per_block) + self.rest


@dataclass(frozen=True)
class DiTWeights:
    """A DiT's bytes: ``blocks`` without their AdaLN projections, one such projection (``adaln``), the blocks of the
    ``refiner``, and the ``rest``. ``itemsize`` is that of the compute type, ``arithmetic`` how the blocks'
    matmuls run, ``transform`` what is done to a block's bytes between file and device ("" for nothing), ``transforms``
    its kinds."""

    config: DiTConfig
    name: str
    itemsize: int
    blocks: tuple[int, ...]
    adaln: int
    refiner: tuple[int, ...]
    rest: int
    largest: int
    arithmetic: str = FLOAT
    transform: str = ""
    transforms: tuple[str, ...] = ()
    lora: LoraWeights = LoraWeights()

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Each block with the LoRA factors that travel with it."""
        extra = self.lora.per_block or (0,) * len(self.blocks)
        return tuple(block + more for block, more in zip(self.blocks, extra))

    @property
    def slot(self) -> int:
        return max(self.block_bytes)


@dataclass(frozen=True)
class VideoVAEWeights:
    """The video VAE's bytes: each decoder layer, and all the rest (both ends of the decoder, the whole encoder)."""

    config: VideoVAEConfig
    layers: tuple[int, ...]
    rest: int
    itemsize: int = 4

    @property
    def nbytes(self) -> int:
        return sum(self.layers) + self.rest


@dataclass(frozen=True)
class AudioVAEWeights:
    config: AudioVAEConfig
    nbytes: int


@dataclass(frozen=True)
class TextWeights:
    """The text encoder's bytes: each language layer, the embedding, and the vision tower."""

    sizes: TextSizes
    layers: tuple[int, ...]
    embedding: int
    vision: int
    itemsize: int = 2


@dataclass(frozen=True)
class ModelWeights:
    """All parts of a model."""

    dit: DiTWeights
    video_vae: VideoVAEWeights
    audio_vae: AudioVAEWeights
    text: TextWeights


def aligned(nbytes: Iterable[int]) -> int:
    """Bytes of a flat buffer that holds tensors of ``nbytes`` each."""
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in nbytes)


# ---- the DiT


@lru_cache(maxsize=8)
def named_dit(name: str = "bf16", config: DiTConfig | None = None) -> DiTWeights:
    """The DiT of ``config`` (default: the release) with weights in bf16, fp32, or int8 with a scale per output."""
    if name not in NAMED_WEIGHTS:
        raise H3Error(f"weights {name!r}: give {', '.join(NAMED_WEIGHTS)}, or a file")
    config = DiTConfig() if config is None else config
    itemsize = 4 if name == "fp32" else 2
    sizes: dict[str, int] = {}
    for tensor_name, tensor in _on_meta(DiT, config):
        linear, _, leaf = tensor_name.rpartition(".")
        island = tensor_name.startswith(_islands(config))
        sizes[tensor_name] = tensor.numel() * (4 if island else itemsize)
        if name == "int8" and leaf == "weight" and linear.split(".", 2)[-1] in BLOCK_LINEARS and BLOCK.match(linear):
            sizes[tensor_name] = tensor.numel()
            sizes[f"{linear}.weight_scale"] = 4 * tensor.shape[0]
    arithmetic = INTEGER if name == "int8" else FLOAT
    run = (arithmetic, "linears are quantised (int8)", ("int8",)) if name == "int8" else (arithmetic, "", ())
    return _sorted_dit(config, name, itemsize, sizes, run)


def dit_of(opened: OpenedPart) -> DiTWeights:
    """The DiT that ``opened`` (``open_dit``: a file, shards, a folder; quantised as it loads or not) will be."""
    pieces, config = opened.pieces, opened.module.config
    done = pieces.transforms((BLOCKS,), ADALN)
    run = (_arithmetic(pieces), " and ".join(done.values()), tuple(done))
    name = Path(pieces.checkpoint.source.path).name
    return _sorted_dit(config, name, pieces.compute.itemsize, piece_bytes(pieces), run)


def piece_bytes(pieces: Pieces) -> dict[str, int]:
    """Bytes in memory of everything that ``pieces`` hands out, by our names; a quantised linear's tensors apart."""
    checkpoint, sizes = pieces.checkpoint, {}
    for name in checkpoint.recipes:
        linear, shape = name.removesuffix(".weight"), pieces.shapes[name]
        if linear in pieces.stored:
            for role, stored in checkpoint.layers[linear].roles.items():
                sizes[f"{linear}.{role}"] = checkpoint.source.nbytes(stored)
        elif linear in pieces.online:
            sizes |= {name: math.prod(shape), f"{linear}.weight_scale": 4 * shape[0]}
        else:
            sizes[name] = math.prod(shape) * pieces.dtypes[name].itemsize
    return sizes


def _arithmetic(pieces: Pieces) -> str:
    """How most of the blocks' linears run."""
    layers, kinds = pieces.checkpoint.layers, Counter()
    for linear in pieces.stored:
        if BLOCK.match(linear):
            kinds[INTEGER if layers[linear].format in INTEGER_FORMATS else DECODED] += 1
    for method in pieces.online.values():
        kinds[INTEGER if method.startswith("int8") else DECODED] += 1
    return kinds.most_common(1)[0][0] if kinds else FLOAT


def _islands(config: DiTConfig) -> tuple[str, ...]:
    if not config.curve_points:
        return DiT.float32_islands
    return (*DiT.float32_islands, *(f"blocks.{i}.{ADALN}" for i in range(config.layers)), f"final_layer.{ADALN}")


def _sorted_dit(
    config: DiTConfig, name: str, itemsize: int, sizes: Mapping[str, int], run: tuple[str, str, tuple[str, ...]]
) -> DiTWeights:
    blocks: list[list[int]] = [[] for _ in range(config.layers)]
    adaln: list[list[int]] = [[] for _ in range(config.layers)]
    refiner: list[list[int]] = [[] for _ in range(config.refiner_layers)]
    rest = 0
    for tensor, size in sizes.items():
        if match := BLOCK.match(tensor):
            (adaln if match[2].startswith(ADALN) else blocks)[int(match[1])].append(size)
        elif match := REFINER.match(tensor):
            refiner[int(match[1])].append(size)
        else:
            rest += size
    return DiTWeights(
        config,
        name,
        itemsize,
        tuple(aligned(block) for block in blocks),
        max(aligned(projection) for projection in adaln),
        tuple(aligned(block) for block in refiner),
        rest,
        max(sizes.values()),
        *run,
    )


def with_loras(weights: DiTWeights, loras: Sequence[Lora]) -> DiTWeights:
    """``weights`` with the LoRAs beside them, read from their headers. H3Error for one that does not fit."""
    if not loras:
        return weights
    config = weights.config
    with torch.device("meta"):
        dit = DiT(config)
    planned = plan_loras(dit, loras)
    per_block, qkv, other, rest = [0] * config.layers, Counter(), Counter(), 0
    for placed in planned.applied:
        pair = placed.pair
        size = aligned((pair.rank * pair.a_shape[1] * weights.itemsize, pair.outputs * pair.rank * weights.itemsize))
        match = BLOCK.match(pair.slot.module)
        if match is None or match[2].startswith(ADALN.rstrip(".")):
            rest += size
            continue
        per_block[int(match[1])] += size
        (qkv if match[2] == "attn.qkv_proj" else other)[int(match[1])] += pair.rank
    lora = LoraWeights(tuple(per_block), max(qkv.values(), default=0), max(other.values(), default=0), rest)
    return DiTWeights(**{**vars(weights), "lora": lora})


# ---- the other parts


@lru_cache(maxsize=4)
def named_video_vae(config: VideoVAEConfig | None = None) -> VideoVAEWeights:
    """The video VAE of ``config`` (default: the release) in float32."""
    config = VideoVAEConfig() if config is None else config
    return _sorted_video_vae(config, {name: t.numel() * 4 for name, t in _on_meta(VideoVAE, config)})


def _sorted_video_vae(config: VideoVAEConfig, sizes: Mapping[str, int]) -> VideoVAEWeights:
    layers: list[list[int]] = [[] for _ in range(config.layers)]
    rest = 0
    for name, size in sizes.items():
        match = DECODER_LAYER.match(name)
        if match:
            layers[int(match[1])].append(size)
        else:
            rest += size
    return VideoVAEWeights(config, tuple(aligned(layer) for layer in layers), rest)


@lru_cache(maxsize=4)
def named_audio_vae(config: AudioVAEConfig | None = None) -> AudioVAEWeights:
    """The audio VAE of ``config`` (default: the release) in float32."""
    config = AudioVAEConfig() if config is None else config
    return AudioVAEWeights(config, sum(t.numel() * 4 for _, t in _on_meta(AudioVAE, config)))


RELEASED_TEXT = TextSizes(
    vocab=151_936,
    hidden=5120,
    layers=50,
    ffn=25_600,
    query_rows=64 * 128,
    key_rows=8 * 128,
    head_dim=128,
    vision_hidden=1152,
    vision_ffn=4304,
    vision_depth=27,
    vision_positions=2304,
    deepstack=3,
)


def named_text(sizes: TextSizes = RELEASED_TEXT, itemsize: int = 2) -> TextWeights:
    """The text encoder of ``sizes`` (default: the release) in bf16."""
    layer = aligned(math.prod(shape) * itemsize for shape in sizes.layer_tensors().values())
    vision = sum(math.prod(shape) for shape in sizes.vision_tensors().values()) * itemsize
    return TextWeights(sizes, (layer,) * sizes.layers, sizes.vocab * sizes.hidden * itemsize, vision, itemsize)


def text_of(layers: TextLayers) -> TextWeights:
    """An opened text encoder, quantised or not."""
    per_layer: list[list[int]] = [[] for _ in range(layers.sizes.layers)]
    vision = embedding = 0
    for name, size in piece_bytes(layers.pieces).items():
        match = LAYER.match(name)
        if match:
            per_layer[int(match[1])].append(size)
        elif name.startswith("visual."):
            vision += size
        else:
            embedding += size
    itemsize = layers.pieces.compute.itemsize
    return TextWeights(layers.sizes, tuple(aligned(layer) for layer in per_layer), embedding, vision, itemsize)


def _on_meta(kind: type[nn.Module], config):
    with torch.device("meta"):
        module = kind(config)
    return [*module.named_parameters(), *module.named_buffers()]


def released(dit: DiTWeights | None = None) -> ModelWeights:
    """The release's parts beside ``dit``."""
    return ModelWeights(dit or named_dit(), named_video_vae(), named_audio_vae(), named_text())


def weights_of(
    text: str, loras: Sequence[Lora] = (), layout: str | None = None, online: Online | None = None
) -> DiTWeights:
    """The DiT that a user names: bf16, int8, fp32, or a file, quantised by ``online`` as it loads. H3Error when it is
    neither."""
    if text in NAMED_WEIGHTS and online is not None:
        raise H3Error(f"weights {text!r} is no file, and only a file is quantised while loading: give one, or int8")
    if text in NAMED_WEIGHTS:
        return with_loras(named_dit(text), loras)
    if not Path(text).exists():
        raise H3Error(f"weights {text!r} is no file: give {', '.join(NAMED_WEIGHTS)}, or a file that exists")
    return with_loras(dit_of(open_dit(text, layout=layout, quantise=online)), loras)


def parts_of(parts: PartPaths, dit: DiTWeights, online: Mapping[str, Online | None] | None = None) -> ModelWeights:
    """All parts of a model folder beside ``dit``, from their headers; the release's sizes for those not found.
    ``online``: how a part is quantised while it loads."""
    online = online or {}
    video = named_video_vae()
    if parts.video_vae is not None:
        opened = open_video_vae(parts.video_vae, quantise=online.get("video_vae"))
        video = _sorted_video_vae(opened.module.config, piece_bytes(opened.pieces))
    audio = named_audio_vae()
    if parts.audio_vae is not None:
        opened = open_audio_vae(parts.audio_vae)
        audio = AudioVAEWeights(opened.module.config, sum(piece_bytes(opened.pieces).values()))
    text = named_text()
    if parts.text_encoder is not None:
        text = text_of(TextLayers(parts.text_encoder, quantise=online.get("text_encoder")))
    return ModelWeights(dit, video, audio, text)
