"""Whole stages on a card that is not there: the runtime's own code on fake tensors, weights placed as a plan says.

    job with tensors of any size, none of them allocated ──sampler.sample──▶ peak bytes on the card, weights counted
    latent ──decode_video──▶  pixels ──VideoVAE──▶  sound ──AudioVAE──▶  a language layer, a block of the vision tower

Only what reads values is replaced (finite checks, step plans made beforehand from real masks). One forward is run: the
one that reads most modulation rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import torch
from torch import Tensor, nn

from h3_runtime import decode, job, sampler, soundness
from h3_runtime.accelerators import Accelerator
from h3_runtime.job import AVLatent, Guide, Masks, Reference, RenderJob, TextCondition
from h3_runtime.layout import ConditionShape
from h3_runtime.lora.opening import LowRank
from h3_runtime.lora.side import LoraLinear
from h3_runtime.memory.measure import FakeMemory, LiveBytes
from h3_runtime.memory.rows import RenderSizes
from h3_runtime.memory.streaming import (
    DiTLayers,
    LayerLayout,
    ResidentLayers,
    StreamedLayers,
    _ViewCache,
    run_in_order,
)
from h3_runtime.models import audio_vae
from h3_runtime.models.attention import CANONICAL, ChunkSizes
from h3_runtime.models.audio_vae import AudioVAE, AudioVAEConfig
from h3_runtime.models.dit import DiT, DiTConfig
from h3_runtime.models.video_vae import VideoVAE, VideoVAEConfig
from h3_runtime.quant import kernels
from h3_runtime.quant.linear import Int8Linear
from h3_runtime.schedule import Schedule, plan_schedule
from h3_runtime.steps import Steps, plan_steps
from h3_runtime.text.config import TextEncoderConfig
from h3_runtime.text.encoder import build_module


class LayoutsOnly:
    """A store without bytes."""

    def __init__(self, layouts: Sequence[LayerLayout]):
        self.layouts = list(layouts)

    def layout(self, layer: int) -> LayerLayout:
        return self.layouts[layer]


class SlotsOnly:
    """A mover whose ring is on the card and is never filled: what streaming costs in memory."""

    def __init__(self, layouts: Sequence[LayerLayout], slots: int):
        size = max(layout.nbytes for layout in layouts)
        self.slots = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(slots)]
        self.views = _ViewCache(LayoutsOnly(layouts), self.slots)

    def copy(self, layer, slot, after):
        return None

    def wait(self, ticket):
        pass

    def mark(self):
        return None

    def tensors(self, layer: int, slot: int) -> dict[str, Tensor]:
        return self.views(layer, slot)

    def drain(self):
        pass


class Holder(Accelerator):
    """A stand-in accelerator: declares bytes, and holds that much from the start."""

    name = "holder"

    def __init__(self, per_row: int):
        self.per_row = per_row

    def bytes(self, layout, config, item=2) -> int:
        return self.per_row * layout.num_rows

    def prepare(self, dit, job, layout, steps) -> None:
        self.held = torch.empty(self.bytes(layout, dit.config), dtype=torch.uint8, device=dit.device)


@dataclass(frozen=True)
class Placed:
    """How a fake DiT is placed: the first ``resident`` blocks stay. ``rank``: of a LoRA beside every block linear.
    ``int8``: the block linears are quantised."""

    resident: int = 0
    ahead: int = 1
    chunks: ChunkSizes = CANONICAL
    rank: int = 0
    int8: bool = False
    accelerators: tuple[Accelerator, ...] = ()


# ---- weights


def _put(module: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    owner = module.get_submodule(owner)
    where = owner._parameters if leaf in owner._parameters else owner._buffers
    where[leaf] = nn.Parameter(tensor, requires_grad=False) if where is owner._parameters else tensor


def on_card(module: nn.Module, away: tuple[str, ...] = ()) -> None:
    """Meta tensors become tensors on the card, but those under ``away``."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_meta and not name.startswith(away):
            _put(module, name, torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda"))


def meta_dit(config: DiTConfig, dtype: torch.dtype) -> DiT:
    with torch.device("meta"):
        dit = DiT(config).eval()
    for name, parameter in dit.named_parameters():
        if not name.startswith(dit.float32_islands):
            parameter.data = parameter.data.to(dtype)
    return dit


BLOCK_LINEARS = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")


def _change_linears(dit: DiT, placed: Placed, dtype: torch.dtype) -> None:
    """Quantised linears and LoRA branches in every block, on meta."""
    for block in dit.blocks:
        for name in BLOCK_LINEARS:
            linear = block.get_submodule(name)
            if placed.int8:
                weight = torch.empty(linear.weight.shape, dtype=torch.int8, device="meta")
                scale = torch.empty(weight.shape[0], 1, device="meta")
                marker = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}
                linear = Int8Linear.from_stored({"weight": weight, "weight_scale": scale}, marker, dtype)
                block.set_submodule(name, linear)
            if placed.rank:
                a = torch.empty(placed.rank, linear.in_features, device="meta")
                b = torch.empty(linear.out_features, placed.rank, device="meta")
                block.set_submodule(name, LoraLinear(linear, [LowRank(a, b, 1.0)], dtype, torch.device("meta")))


def place(dit: DiT, placed: Placed) -> DiTLayers:
    """A DiT on meta put onto the fake card, and its layers: what ``placement.place_dit`` gives, without bytes."""
    config = dit.config
    adaln = [block.adaln_proj for block in dit.blocks]
    slots, kept = placed.ahead + 1, placed.resident
    away = [f"blocks.{index}." + ("adaln_proj." if index < kept else "") for index in range(config.layers)]
    on_card(dit, (*away, *(["token_refiner.blocks."] if kept < config.layers else [])))
    blocks: ResidentLayers | StreamedLayers = ResidentLayers(dit.blocks)
    if kept < config.layers:
        layouts = [LayerLayout.of(block, ("adaln_proj.",)) for block in dit.blocks[kept:]]
        blocks = StreamedLayers(list(dit.blocks), kept, SlotsOnly(layouts, slots), placed.ahead)
    refiner = list(dit.token_refiner.blocks)

    @contextmanager
    def brought() -> Iterator[StreamedLayers]:
        yield StreamedLayers(refiner, 0, SlotsOnly([LayerLayout.of(block) for block in refiner], 2))

    projections = StreamedLayers(adaln, 0, SlotsOnly([LayerLayout.of(p) for p in adaln], slots), placed.ahead)
    return DiTLayers(blocks, projections, placed.chunks, None if kept == config.layers else brought)


# ---- the loop


def masks_of(sizes: RenderSizes) -> Masks | None:
    """Real masks with just the values that ``sizes`` speaks of."""
    canvas = sizes.canvas
    video = sound = None
    if sizes.video_levels:
        grid = (canvas.latent_t, canvas.latent_h // 2, canvas.latent_w // 2)
        tokens = _spread(sizes.video_levels, grid[0] * grid[1] * grid[2]).view(grid)
        video = tokens.repeat_interleave(2, 1).repeat_interleave(2, 2)
    if sizes.sound_levels:
        sound = _spread(sizes.sound_levels, 2 * canvas.audio_t).view(2, -1)
    return None if video is None and sound is None else Masks(video, sound)


def _spread(levels: Sequence[float], count: int) -> Tensor:
    return torch.tensor(levels)[torch.arange(count) * len(levels) // count]


def tags_of(sizes: RenderSizes) -> Tensor:
    tags = torch.ones(sizes.rows_of_text, dtype=torch.int64)
    tags[: int(sizes.text_vision)] = 0
    return tags


def fake_job(sizes: RenderSizes, masks: Masks | None, tags: Tensor, width: int, dtype: torch.dtype) -> RenderJob:
    """The job of these sizes, in fake tensors where a mode for them is on."""
    canvas = sizes.canvas
    text = object.__new__(TextCondition)  # its checks read values
    values = {"hidden": torch.empty(len(tags), width, dtype=dtype), "tags": tags, "notes": (), "source": ""}
    for name, value in values.items():
        object.__setattr__(text, name, value)

    def latents(shape: ConditionShape) -> tuple[Tensor | None, Tensor | None]:
        video = None if shape.video is None else torch.empty(1, 24, *shape.video)
        return video, torch.empty(1, 32, 2, shape.audio) if shape.audio else None

    count = len(sizes.guides)
    guides = [Guide(c.frame_index, *latents(c), c.strength) for c in sizes.conditions[:count]]
    references = [Reference(c.kind, *latents(c)) for c in sizes.conditions[count:]]
    source = None
    if sizes.has_source:
        source = AVLatent(*latents(ConditionShape((canvas.latent_t, canvas.latent_h, canvas.latent_w), canvas.audio_t)))
    return RenderJob(canvas, text, tuple(guides), tuple(references), masks, source, num_forwards=sizes.num_forwards)


@contextmanager
def no_values_read(steps: Steps | None = None, schedule: Schedule | None = None) -> Iterator[LiveBytes]:
    """Fake tensors, with everything replaced that would look into them."""

    def nothing(*arguments):
        return None

    replaced = (
        (job, "plan_schedule", lambda *arguments: schedule),
        (job, "_require_finite", nothing),
        (job, "_check_levels", nothing),
        (sampler, "_require_finite", nothing),
        (sampler, "plan_steps", lambda *arguments: steps),
        (kernels, "choice", lambda op, device: kernels.KernelChoice(op, kernels.INT_MM, "assumed")),
        (audio_vae, "_check_numbers", nothing),
        (soundness.FrameLevels, "add", nothing),
        (Tensor, "__bool__", lambda self: True),
        (Tensor, "__invert__", lambda self: self),
    )
    with ExitStack() as stack:
        for owner, name, instead in replaced:
            stack.enter_context(mock.patch.object(owner, name, instead))
        yield stack.enter_context(FakeMemory())


def sample_peak(sizes: RenderSizes, config: DiTConfig, placed: Placed, dtype: torch.dtype = torch.bfloat16) -> int:
    """Peak bytes on the card of the busiest forward of this render, all that comes before it included."""
    masks, tags, schedule = masks_of(sizes), tags_of(sizes), plan_schedule(sizes.num_forwards)
    steps = plan_steps(replace(sizes.layout(), text_tags=tags), schedule, masks)
    steps = replace(steps, forwards=(max(steps.forwards, key=lambda plan: len(plan.pairs)),))
    dit = meta_dit(config, dtype)
    _change_linears(dit, placed, dtype)
    with no_values_read(steps, schedule) as live:
        made = fake_job(sizes, masks, tags, config.text_dim, dtype)
        layers = place(dit, placed)
        sampler.sample(dit, made, placed.accelerators, layers=layers)
        return live.peak["cuda"]


# ---- the VAEs


def decode_peak(
    config: VideoVAEConfig, latent: tuple[int, int, int], resident: bool, ahead: int = 1, batch: int = 1
) -> int:
    """Peak of decoding [1, 24, *latent] into a sink that keeps nothing."""
    with torch.device("meta"):
        vae = VideoVAE(config).eval()
    with no_values_read() as live:
        on_card(vae, () if resident else ("decoder.transformer_blocks.",))
        layers = None
        if not resident:
            blocks = list(vae.decoder.transformer_blocks)
            mover = SlotsOnly([LayerLayout.of(block) for block in blocks], ahead + 1)
            streamed = StreamedLayers(blocks, 0, mover, ahead)
            layers = lambda: run_in_order(streamed)  # noqa: E731
        clip = AVLatent(torch.empty(1, 24, *latent, device="cuda"), torch.empty(1, 32, 2, 1))

        class Sink:
            def write(self, frames):
                pass

        way = decode.Decoder("fake", lambda video, start: vae.decode_chunks(video, start, layers=layers, batch=batch))
        decode.decode_video([way], clip, Sink())
        return live.peak["cuda"]


def encode_peak(config: VideoVAEConfig, frames: int, height: int, width: int) -> int:
    """Peak of encoding pixels, the decoder's layers away."""
    with torch.device("meta"):
        vae = VideoVAE(config).eval()
    with no_values_read() as live:
        on_card(vae, ("decoder.transformer_blocks.",))
        vae.encode_mean(torch.empty(frames, height, width, 3, dtype=torch.uint8))
        return live.peak["cuda"]


def sound_peak(config: AudioVAEConfig, audio_t: int, decode: bool) -> int:
    """Peak of the audio VAE on ``audio_t`` latents of sound."""
    with torch.device("meta"):
        vae = AudioVAE(config).eval()
    with no_values_read() as live:
        on_card(vae)
        if decode:
            vae.decode(torch.empty(1, config.latent_channels, 2, audio_t, device="cuda"))
        else:
            vae.encode(torch.empty(1, 2, audio_t * config.hop, device="cuda"))
        return live.peak["cuda"]


# ---- the text encoder


def language_layer_peak(rows: int) -> int:
    """Peak of one released language layer on ``rows`` rows of bf16, its weights and its input counted."""
    module = build_module(replace(TextEncoderConfig(), layers=1, vision_depth=1, deepstack=(0,))).to(torch.bfloat16)
    with no_values_read() as live:
        on_card(module.language_model.layers)
        hidden = torch.empty(1, rows, module.language_model.config.hidden_size, dtype=torch.bfloat16, device="cuda")
        turn = [
            torch.empty(1, rows, TextEncoderConfig().head_dim, dtype=torch.bfloat16, device="cuda") for _ in range(2)
        ]
        module.language_model.layers[0](hidden, tuple(turn))
        return live.peak["cuda"]
