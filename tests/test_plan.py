"""The plan against the runtime: predicted peaks are those of the code itself, on fake tensors; and what it decides."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from h3_runtime.checkpoint.load import load_dit, open_dit
from h3_runtime.checkpoint.parts import find_parts
from h3_runtime.cli import main
from h3_runtime.demo.maker import make_model, make_reference_dit
from h3_runtime.fidelity import REGISTRY
from h3_runtime.geometry import Canvas
from h3_runtime.guides import place as place_media
from h3_runtime.job import Guide, Reference
from h3_runtime.layout import ConditionShape, PackedLayout
from h3_runtime.lora import Lora
from h3_runtime.memory.moments import DiTLoad, denoise_moments, largest
from h3_runtime.memory.moments_media import (
    decode_moments,
    encode_moments,
    sound_decode_moments,
    sound_encode_moments,
    text_moments,
)
from h3_runtime.memory.plan import CHUNK_LADDER, pass_seconds, plan, plan_request, reserve
from h3_runtime.memory.plan_lines import plan_lines, plan_results
from h3_runtime.memory.probe import GIB, Card, Host, probe_cpu, probe_host
from h3_runtime.memory.rows import (
    GuideSize,
    ReferenceSize,
    RenderSizes,
    Vision,
    clip_reference,
    gradient_levels,
    picture_reference,
    sound_reference,
)
from h3_runtime.memory.streaming import DiTLayers, LayerLayout
from h3_runtime.memory.weights import (
    RELEASED_TEXT,
    LoraWeights,
    aligned,
    dit_of,
    named_audio_vae,
    named_dit,
    named_text,
    named_video_vae,
    released,
    with_loras,
)
from h3_runtime.models.attention import CANONICAL, ChunkSizes
from h3_runtime.models.audio_vae import AudioVAEConfig
from h3_runtime.models.dit import DiTConfig
from h3_runtime.models.video_vae import VideoVAEConfig
from h3_runtime.request import GuideRequest, Media, ReferenceRequest, RenderRequest
from h3_runtime.sampler import ModulationTables
from h3_runtime.schedule import plan_schedule
from h3_runtime.steps import plan_steps

from .fake_card import (
    Holder,
    Placed,
    decode_peak,
    encode_peak,
    language_layer_peak,
    masks_of,
    sample_peak,
    sound_peak,
    tags_of,
)
from .small_jobs import job, picture, small_dit, sound, text
from .test_streaming import makespan, mixed_makespan

NARROW = DiTConfig(
    hidden=1536,
    layers=2,
    refiner_layers=1,
    heads=12,
    head_dim=128,
    ffn=4096,
    text_dim=1280,
    time_hidden=768,
    time_dim=512,
)
WIDE = Canvas.fit(124, (1344, 768))
LONG = Canvas.fit(362, (1344, 768))


def weights(placed: Placed, config: DiTConfig):
    """What the planner is told of weights that the fake card holds."""
    made = named_dit("int8" if placed.int8 else "bf16", config)
    if placed.rank:
        inner = config.heads * config.head_dim
        linears = ((3 * inner, config.hidden), (config.hidden, inner))
        linears += ((2 * config.ffn, config.hidden), (config.hidden, config.ffn))
        factors = aligned(size for out, into in linears for size in (placed.rank * into * 2, out * placed.rank * 2))
        made = replace(made, lora=LoraWeights((factors,) * config.layers, placed.rank, placed.rank))
    return made


def predicted(sizes: RenderSizes, config: DiTConfig, placed: Placed, chunks: ChunkSizes | None = None) -> int:
    load = DiTLoad.of(sizes, weights(placed, config), placed.accelerators)
    load = replace(load, chunks=chunks or placed.chunks)
    return largest(denoise_moments(load, placed.resident, placed.ahead)).nbytes


def close(found: int, measured: int) -> bool:
    """Within 10 % of the measured peak, and never more than 3 % under it."""
    return -0.03 <= found / measured - 1 <= 0.10


# ---- peaks of the loop


def sized(frames: int, size: tuple[int, int], **more) -> RenderSizes:
    return RenderSizes(Canvas.fit(frames, size), text_rows=70, num_forwards=6, **more)


def small_picture() -> ReferenceSize:
    return ReferenceSize(ConditionShape((1, 24, 32), kind="image"), Vision(0))


def small_clip() -> ReferenceSize:
    return ReferenceSize(ConditionShape((12, 16, 20), 60, kind="video_audio"), Vision(0))


def small_sound() -> ReferenceSize:
    return ReferenceSize(ConditionShape(None, 90, kind="audio"), Vision(0))


LEVELS = gradient_levels(257)
SHAPES = {
    "a few rows": sized(5, (64, 32)),
    "plain": sized(56, (416, 256)),
    "tall, with sound guides": sized(39, (192, 512), guides=(GuideSize(0, 0, 40), GuideSize(30, 5, 9, 0.5))),
    "keyframes": sized(39, (512, 256), guides=(GuideSize(0, 1, keyframe=True), GuideSize(38, 1, keyframe=True))),
    "nine pictures": replace(
        sized(22, (256, 256), references=(small_picture(),) * 9), text_rows=1200, text_vision=True
    ),
    "clips and sounds": sized(39, (256, 320), references=(small_clip(),) * 3 + (small_sound(),) * 3),
    "a mask of five values": sized(39, (448, 256), video_levels=gradient_levels(5), has_source=True),
    "masks of 257 values": sized(
        22, (512, 256), video_levels=LEVELS, sound_levels=gradient_levels(65), has_source=True
    ),
}
PLACEMENTS = {
    "all streamed": Placed(),
    "one resident, two ahead": Placed(1, 2),
    "all resident": Placed(2),
    "LoRA beside": Placed(1, rank=48),
    "int8": Placed(int8=True),
    "int8 with a LoRA, two ahead": Placed(0, 2, rank=16, int8=True),
    "an accelerator": Placed(1, accelerators=(Holder(700),)),
    "smaller chunks": Placed(chunks=CHUNK_LADDER[1]),
}
# every pair of a shape with five of the placements, shifted from shape to shape so that all pairs of kinds meet
CASES = [
    (shape, list(PLACEMENTS)[(index + step) % len(PLACEMENTS)])
    for index, shape in enumerate(SHAPES)
    for step in (0, 1, 3, 4, 6)
]


def test_there_are_enough_cases():
    assert len(set(CASES)) >= 40


@pytest.mark.parametrize(("shape", "placement"), CASES)
def test_the_predicted_peak_is_the_measured_one(shape, placement):
    sizes, placed = SHAPES[shape], PLACEMENTS[placement]
    measured, found = sample_peak(sizes, NARROW, placed), predicted(sizes, NARROW, placed)
    assert close(found, measured), f"{found / measured - 1:+.2%} of {measured / 2**20:.1f} MiB"


@pytest.mark.parametrize("chunks", [ChunkSizes(12, CANONICAL.rows), ChunkSizes(CANONICAL.heads, 4 * CANONICAL.rows)])
def test_a_chunk_size_changed_in_the_runtime_alone_is_seen(chunks):
    sizes = sized(90, (448, 320))
    measured = sample_peak(sizes, NARROW, Placed(2, chunks=chunks))
    assert not close(predicted(sizes, NARROW, Placed(2), CANONICAL), measured)
    assert close(predicted(sizes, NARROW, Placed(2), chunks), measured)


@pytest.mark.parametrize(("frames", "target"), [(124, 5.0), (362, 8.0)])
@pytest.mark.parametrize("masked", [False, True])
def test_the_release_streamed_whole_fits_its_target(frames, target, masked):
    """1344x768, lossless bf16, everything streamed, weights counted; also under a mask of 256 values."""
    sizes = RenderSizes(Canvas.fit(frames, (1344, 768)))
    if masked:
        sizes = replace(sizes, video_levels=LEVELS[1:], sound_levels=LEVELS[1:], has_source=True)
    assert predicted(sizes, DiTConfig(), Placed()) <= target * GIB


def test_the_release_takes_what_is_predicted():
    """At full width; one block, as the ring is the same for 50 and what does not run holds nothing."""
    sizes = RenderSizes(WIDE, num_forwards=4, video_levels=LEVELS[1:], has_source=True)
    config = DiTConfig(layers=1)
    assert predicted(sizes, config, Placed()) == predicted(sizes, DiTConfig(), Placed())
    assert close(predicted(sizes, config, Placed()), sample_peak(sizes, config, Placed()))


# ---- peaks of the other stages


TWO_LAYERS = replace(VideoVAEConfig(), layers=2)


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("latent", [(7, 24, 40), (12, 16, 16)])
def test_decoding_takes_what_is_predicted(latent, resident):
    found = largest(decode_moments(named_video_vae(TWO_LAYERS), latent, resident, 1)).nbytes
    assert close(found, decode_peak(TWO_LAYERS, latent, resident))


def test_tiles_decoded_at_once_take_what_is_predicted():
    weights, latent = named_video_vae(TWO_LAYERS), (7, 24, 40)
    found = largest(decode_moments(weights, latent, True, 1, batch=4)).nbytes
    assert close(found, decode_peak(TWO_LAYERS, latent, True, batch=4))
    assert found > 1.2 * largest(decode_moments(weights, latent, True, 1)).nbytes
    sizes = RenderSizes(Canvas.fit(124, (1344, 768)), text_rows=100)
    alone, four = (plan(replace(sizes, tile_batch=n), released(), Card.given(40), Host.given(64)) for n in (1, 4))
    stage = four.stage("video decode")
    assert stage.vram > alone.stage("video decode").vram and "4 at once" in stage.how


@pytest.mark.parametrize(("frames", "height", "width"), [(1, 256, 384), (22, 256, 256)])
def test_encoding_takes_what_is_predicted(frames, height, width):
    found = largest(encode_moments(named_video_vae(TWO_LAYERS), frames, height, width)).nbytes
    assert close(found, encode_peak(TWO_LAYERS, frames, height, width))


@pytest.mark.parametrize("audio_t", [37, 603])
def test_sound_takes_what_is_predicted(audio_t):
    config = AudioVAEConfig(
        decoder_rates=(25, 32), decoder_kernels=(25, 32), res_kernels=(3, 7), res_dilations=((1,), (1,))
    )
    weights = named_audio_vae(config)
    assert close(largest(sound_encode_moments(weights, audio_t)).nbytes, sound_peak(config, audio_t, decode=False))
    if audio_t < 100:
        assert close(largest(sound_decode_moments(weights, audio_t)).nbytes, sound_peak(config, audio_t, decode=True))


@pytest.mark.parametrize("rows", [300, 9000])
def test_a_language_layer_takes_what_is_predicted(rows):
    weights = named_text(replace(RELEASED_TEXT, layers=1))
    moments = text_moments(replace(weights, vision=0), rows, (), True, 0)
    assert close(largest(moments).nbytes, language_layer_peak(rows))


def test_the_text_stage_grows_with_every_picture():
    """A picture before the prompt costs rows and patches, and both cost memory."""
    takes = []
    for count in (0, 1, 9):
        sizes = RenderSizes(WIDE, references=(picture_reference(1920, 1080),) * count)
        stage = plan(sizes, released(), Card.given(24), Host.given(64)).stage("text")
        takes.append((sizes.rows_of_text, stage.vram, stage.seconds))
    assert takes == sorted(takes) and len({take[1] for take in takes}) == 3
    assert takes[2][0] == 512 + 9 * (7 + 2 + 7296)
    assert takes[2][1] <= 7 * GIB


def test_from_disk_the_word_table_costs_the_host_its_rows_only():
    """1.5 GB of the release's table stay in the file; resident encoders keep it in host memory."""
    sizes = RenderSizes(WIDE)
    streamed, resident = (plan(sizes, released(), Card.given(vram), Host.given(200)).stage("text") for vram in (24, 80))
    table = named_text().embedding
    assert (streamed.rung, resident.rung) == ("disk", "resident") and table > 1.5e9
    ring = (streamed.ahead + 1) * max(named_text().layers)  # the staging buffers of a ring from disk
    assert resident.host - (streamed.host - ring) == table - sizes.rows_of_text * table // named_text().sizes.vocab


# ---- rows


def test_rows_of_a_job_are_those_of_its_layout():
    held = (Guide(0, picture(), keyframe=True), Guide(5, None, sound(7), 0.5))
    references = (Reference("image", picture(1, 8, 6)), Reference("video_audio", picture(7), sound(30)))
    made = job(text=text(9, 3), guides=held, references=references)
    layout = PackedLayout.of(made.text.tags, made.canvas, made.guides, made.references)
    assert RenderSizes.of_job(made).layout().segments == layout.segments


@pytest.mark.parametrize("name", ["a mask of five values", "tall, with sound guides", "keyframes", "clips and sounds"])
def test_modulation_rows_are_those_of_the_step_plans(name):
    sizes = SHAPES[name]
    layout = replace(sizes.layout(), text_tags=tags_of(sizes))
    steps = plan_steps(layout, plan_schedule(sizes.num_forwards), masks_of(sizes))
    counts = sizes.step_counts()
    assert counts.all_pairs == len(steps.pairs) and counts.all_timesteps == len(steps.timesteps)
    assert counts.pairs == max(len(step.pairs) for step in steps.forwards)
    assert counts.timesteps == max(len(step.timesteps) for step in steps.forwards)
    assert counts.before_loop == steps.tables_before_loop and counts.forwards == len(steps.forwards)


def test_a_feathered_mask_over_many_forwards_is_planned_forward_by_forward():
    few = RenderSizes(WIDE, video_levels=gradient_levels(5), has_source=True)
    many = replace(few, video_levels=gradient_levels(257))
    assert few.step_counts().before_loop and not many.step_counts().before_loop
    made = [plan(sizes, released(), Card.given(16), Host.given(64)) for sizes in (few, many)]
    assert made[0].tables and "modulation/tables" in made[0].paths
    assert not made[1].tables and "modulation/by-forward" in made[1].paths
    assert made[1].stage("denoise").moved > made[0].stage("denoise").moved + 20e9
    assert any("modulation rows are too many" in note for note in made[1].notes)


def test_tables_on_the_host_are_as_large_as_planned():
    dit, made = small_dit(), job()
    layout = PackedLayout.of(made.text.tags, made.canvas, (), ())
    tables = ModulationTables(dit, plan_steps(layout, made.schedule), DiTLayers.resident(dit.blocks).adaln)
    weights = replace(released(), dit=named_dit("fp32", dit.config))
    planned = plan(RenderSizes.of_job(made), weights, Card.given(24), Host.given(64))
    assert planned.tables == sum(table.nbytes for table in tables.blocks)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    """Rates measured here do not end up in the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp("model"))
    make_reference_dit(folder)
    return folder


def test_sizes_of_a_request_are_those_of_what_is_placed():
    """Sizes named on the command line give the rows of the same media, read and placed."""
    pixels = np.zeros((1, 90, 160, 3), np.uint8)
    frames = np.zeros((48, 72, 128, 3), np.uint8)
    tone = torch.zeros(2, 32000)
    request = RenderRequest(
        "a cat",
        size=(96, 64),
        frames=22,
        first_frame=Media(frames=pixels),
        guides=(GuideRequest(Media(frames=pixels, audio=tone[:, :8000]), frame=9),),
        references=(
            ReferenceRequest("image", Media(frames=pixels)),
            ReferenceRequest("video", Media(frames=frames, audio=torch.zeros(2, 64000))),
            ReferenceRequest("audio", Media(audio=tone)),
        ),
    )
    placed = RenderSizes.of_request(request, place_media(request))
    canvas = Canvas.fit(22, (96, 64))
    named = (picture_reference(160, 90), clip_reference(128, 72, 48, canvas, 2.0), sound_reference(1.0, canvas))
    assert placed.references == named
    assert [guide.frames for guide in placed.guides] == [1, 1] and placed.guides[1].sound == 10
    assert placed.guides[0].keyframe and len(placed.shown) == 4


# ---- weights


@pytest.mark.parametrize("quantise", [None, "int8_convrot"])
def test_bytes_of_a_file_are_those_of_what_is_loaded(model, quantise):
    planned = dit_of(open_dit(model / "dit.safetensors", quantise=quantise))
    dit, _ = load_dit(model / "dit.safetensors", quantise=quantise)
    layouts = [LayerLayout.of(block, ("adaln_proj.",)) for block in dit.blocks]
    assert planned.blocks == tuple(layout.nbytes for layout in layouts)
    assert planned.adaln == LayerLayout.of(dit.blocks[0].adaln_proj).nbytes
    refiner = [LayerLayout.of(block).nbytes for block in dit.token_refiner.blocks]
    assert planned.refiner == tuple(refiner)
    everything = sum(tensor.nbytes for tensor in (*dit.parameters(), *dit.buffers()))
    blocks = sum(tensor.nbytes for block in dit.blocks for tensor in (*block.parameters(), *block.buffers()))
    blocks += sum(tensor.nbytes for tensor in dit.token_refiner.blocks.parameters())
    assert planned.rest == everything - blocks
    assert planned.arithmetic == ("float" if quantise is None else "integer")
    assert bool(planned.transform) == bool(quantise)


def test_the_release_has_its_known_sizes():
    made = released()
    assert made.dit.slot == pytest.approx(771e6, rel=0.01) and len(made.dit.blocks) == 50
    assert made.dit.adaln == pytest.approx(520e6, rel=0.01)
    assert sum(made.text.layers) == pytest.approx(48.8e9, rel=0.01)
    assert made.audio_vae.nbytes == pytest.approx(0.6e9, rel=0.02)
    assert named_dit("int8").slot == pytest.approx(made.dit.slot / 2, rel=0.01)


def test_a_lora_adds_its_factors_to_the_blocks(tmp_path):
    """Bytes as the LoRA's own plan counts them, but for the boundaries of a slot."""
    config = DiTConfig(layers=2)
    rank, tensors = 8, {}
    for index, (linear, out, into) in itertools.product(
        range(2), (("attn.qkv_proj", 21504, 5376), ("mlp.fc2", 5376, 14336))
    ):
        key = f"diffusion_model.blocks.{index}.{linear}"
        tensors[f"{key}.lora_A.weight"] = torch.zeros(rank, into)
        tensors[f"{key}.lora_B.weight"] = torch.zeros(out, rank)
    path = tmp_path / "style.safetensors"
    save_file(tensors, path)
    made = with_loras(named_dit("bf16", config), [Lora(path)]).lora
    expected = 2 * rank * (21504 + 5376 + 5376 + 14336)
    assert made.per_block == (expected, expected)
    assert (made.qkv_rank, made.other_rank, made.rest) == (rank, rank, 0)


# ---- decisions


def test_more_card_keeps_more_blocks():
    kept = []
    for vram in (12, 16, 24, 32, 80):
        made = plan(RenderSizes(WIDE), released(), Card.given(vram), Host.given(128))
        stage = made.stage("denoise")
        kept.append(stage.resident)
        assert made.fits and stage.vram + reserve(stage.vram) <= made.free_vram
        assert stage.resident_bytes == sum(named_dit().blocks[: stage.resident])
        shown = "\n".join(plan_lines(made))
        assert "of blocks stay on the card" in shown and "left alone" in shown
    assert kept == sorted(kept) and kept[0] > 0 and kept[-1] == 50


def test_the_ladder_goes_from_the_card_to_ram_to_disk():
    def rung(vram: float, ram: float) -> str:
        return plan(RenderSizes(WIDE), released(), Card.given(vram), Host.given(ram)).stage("denoise").rung

    assert (rung(80, 64), rung(16, 64), rung(16, 24)) == ("resident", "ram", "disk")


def test_two_layers_are_copied_ahead_when_the_card_has_room():
    assert plan(RenderSizes(LONG), released(), Card.given(16), Host.given(64)).stage("denoise").ahead == 2
    assert plan(RenderSizes(LONG), released(), Card.given(8), Host.given(64)).stage("denoise").ahead == 1


def test_a_decoder_that_does_not_fit_runs_layer_by_layer():
    small = plan(RenderSizes(LONG), released(), Card.given(8), Host.given(64))
    assert small.fits and small.stage("video decode").rung == "ram" and "video-vae/layer-major" in small.paths
    assert "layer by layer" in small.stage("video decode").how
    assert plan(RenderSizes(LONG), released(), Card.given(12), Host.given(64)).stage("video decode").rung == "resident"


def test_smaller_chunks_come_last_and_are_said():
    """Just under what the canonical chunks need: smaller ones fit, and the label is no longer LOSSLESS."""
    load = DiTLoad.of(RenderSizes(LONG), named_dit())
    peak = largest(denoise_moments(load, 0, 1)).nbytes
    tight = Card("tight", 8 * GIB, peak + reserve(peak) - (1 << 20))
    made = plan(RenderSizes(LONG), released(), tight, Host.given(64))
    assert made.fits and made.chunks == tuple(CHUNK_LADDER[1]) and "chunks/smaller" in made.paths
    assert any("EXACT MATH" in note for note in made.notes)
    enough = plan(RenderSizes(LONG), released(), replace(tight, free=tight.free + (2 << 20)), Host.given(64))
    assert enough.chunks == tuple(CANONICAL) and "chunks/canonical" in enough.paths
    assert set(made.paths) | set(enough.paths) <= set(REGISTRY)


def test_a_refusal_says_what_would_fit():
    card, host = Card.given(6.5), Host.given(32)
    made = plan(RenderSizes(LONG), released(), card, host)
    assert not made.fits
    words = made.refusal.split(" ")
    assert made.refusal.startswith("362 frames at 1344x768 needs 6.8 GiB (denoise); this card has 6.0 GiB free: ")
    frames, size = int(words[words.index("frames", 3) - 1]), tuple(map(int, words[-1].split("x")))
    for canvas in (Canvas.fit(frames, (1344, 768)), Canvas.fit(362, size)):
        assert plan(RenderSizes(canvas), released(), card, host).fits
    assert not plan(RenderSizes(Canvas.fit(frames + 17, (1344, 768))), released(), card, host).fits


def test_a_refusal_counts_references_that_fit():
    nine = RenderSizes(Canvas.fit(22, (320, 192)), references=(picture_reference(1920, 1080),) * 9)
    made = plan(nine, released(), Card.given(7), Host.given(64))
    assert not made.fits and made.refusal.endswith("of the 9 references fit"), made.refusal
    kept = int(made.refusal.split(": ")[1].split(" ")[0])
    fewer = replace(nine, references=nine.references[:kept])
    assert plan(fewer, released(), Card.given(7), Host.given(64)).fits


def test_too_little_host_memory_is_refused():
    made = plan(RenderSizes(WIDE), released(), Card.given(12), Host(8 * GIB, 3 * GIB, 3 * GIB, "cgroup v2 limit"))
    assert "of host memory" in made.refusal and "cgroup v2 limit" in made.refusal


def test_weights_that_may_not_be_pinned_are_streamed_slower_and_said():
    free = Host(128 * GIB, 120 * GIB, 120 * GIB)
    sizes, card = RenderSizes(WIDE), Card.given(12)
    pinned, pageable = (plan(sizes, released(), card, host) for host in (free, replace(free, pinnable=8 * GIB)))
    assert pinned.stage("denoise").pinned and not pageable.stage("denoise").pinned
    assert dict(pageable.stage("denoise").times)["copy"] > dict(pinned.stage("denoise").times)["copy"]
    assert any("page-locked" in note for note in pageable.notes)


def test_the_bound_is_named():
    sizes, host = RenderSizes(Canvas.fit(5, (320, 192))), Host.given(128)
    card = Card.given(8)
    assert plan(RenderSizes(WIDE), released(), card, host).stage("denoise").bound == "compute"
    assert plan(sizes, released(), card, host).stage("denoise").bound == "copy"
    assert plan(sizes, released(), card, Host.given(24)).stage("denoise").bound == "disk"


def test_many_rows_are_told():
    """A 15 second reference clip turns into about 100,000 rows: nobody should learn that from a bar at 0 %."""
    heavy = RenderSizes(LONG, references=(clip_reference(1344, 768, 362, LONG, 15.0),))
    made = plan(heavy, released(), Card.given(24), Host.given(64))
    assert made.num_rows > 200_000 and any("of them are conditions" in note for note in made.notes)
    assert not any(
        "of them are conditions" in n for n in plan(RenderSizes(WIDE), released(), Card.given(24), Host.given(64)).notes
    )


def test_accelerators_count():
    held = Holder(50_000)
    plain, more = (
        plan(RenderSizes(WIDE), released(), Card.given(24), Host.given(64), accelerators)
        for accelerators in ((), (held,))
    )
    assert more.stage("denoise").resident < plain.stage("denoise").resident
    assert dict(more.stage("denoise").parts)["accelerators"] == 50_000 * plain.num_rows


# ---- time


@pytest.mark.parametrize(("copy", "compute"), [(3.0, 1.0), (1.0, 3.0), (2.0, 2.0)])
def test_a_pass_lasts_as_long_as_the_schedule_says(copy, compute):
    """The streamer itself on a virtual clock over many passes: all streamed, and behind resident layers."""
    layers = 6
    passes = [makespan([copy] * layers, [compute] * layers, 1, passes=count) for count in (2, 3)]
    assert pass_seconds([copy] * layers, [compute] * layers, 1) == passes[1] - passes[0]
    mixed = pass_seconds([0.0, 0.0, *[copy] * layers], [compute] * (layers + 2), 1)
    passes = [mixed_makespan(2, [copy] * layers, [compute] * (layers + 2), 1, passes=count) for count in (2, 3)]
    assert mixed == passes[1] - passes[0]
    assert pass_seconds([0.0] * layers, [compute] * layers, 1) == layers * compute


# ---- the command, and the request of a render


def test_the_command_plans_from_sizes(capsys):
    given = ["plan", "--size", "1344x768", "--frames", "362", "--vram", "12", "--ram", "32", "--json"]
    more = ["--weights", "int8", "--ref-image", "1920x1080", "--guide", "100+22", "--keyframes", "1"]
    assert main([*given, *more]) == 0
    out = capsys.readouterr()
    results = {row["name"]: row for row in json.loads(out.out)["results"]}
    assert results["fits"]["value"] is True and results["rows/reference_video"]["value"] == 7296
    assert results["peak/card"]["unit"] == "GiB" and results["denoise/bound"]["value"] == "compute"
    assert "does not fit" not in out.err and "denoise" in out.err
    assert main(["plan", "--frames", "362", "--vram", "6.5", "--ram", "32"]) == 1
    assert "does not fit: 362 frames at 1344x768 needs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--size", "1340x768"], "the nearest are 1312 and 1344"),
        (["--ref-image", "big"], "--ref-image 'big' cannot be read: give WxH"),
        (["--ref-video", "100x100"], "WxH@SECONDS"),
        (["--ref-image", "100x900"], "1:4"),
        (["--vram", "-1"], "--vram is -1.0: give gibibytes above 0"),
        (["--weights", "none.safetensors"], "is no file: give bf16, int8, fp32"),
        (["--mask-levels", "1"], "give 2 to 257"),
        (["--guide", "400"], "the clip has frames 0 to 123"),
        (["--guide", "3+0"], "FRAME or FRAME+FRAMES"),
        (["--ref-image", "64x64"] * 10, "10 image references were given: at most 9"),
        (["--ref-audio", "2"], "a sound cannot be the only reference"),
        (["--ref-video", "100x100@0"], "give more than 0"),
        (["--ram", "nan"], "--ram is nan: give gibibytes"),
        (["--frames", "0"], "frames is 0"),
        (["--steps", "0"], "steps (forwards)"),
        (["--size", "9" * 18 + "68x32"], "cannot be read"),
        (["--size", "999999968x999999968"], "beyond any machine"),
        (["--frames", "9" * 20], "beyond any machine"),
        (["--size", ""], "--size '' cannot be read"),
        (["--guide", "9" * 400], "FRAME or FRAME+FRAMES"),
        (["--ref-image", "9" * 400 + "x1"], "WxH"),
        (["--ref-video", "100x100@" + "9" * 400], "WxH@SECONDS"),
        (["--converted", "no folder"], "--converted no folder is not a folder"),
    ],
)
def test_the_command_refuses_what_it_cannot_read(given, said, capsys):
    assert main(["plan", "--ram", "32", *given]) == 2
    assert said in capsys.readouterr().out


def test_the_command_says_what_it_cuts(capsys):
    given = ["--guide", "120+500", "--guide", "3+6", "--ref-image", "64x64", "--ref-audio", "60", "--guide", "4+22"]
    assert main(["plan", "--vram", "24", "--ram", "64", *given]) == 0
    said = capsys.readouterr().out
    assert "--guide 120+500: 1 of the 500 frames" in said and "--guide 3+6: 5 of the 6 frames" in said
    assert "--ref-audio 60 is cut to the clip's 5.2 s" in said and "4+22" not in said


def test_a_request_is_planned_on_a_model_folder(model, capsys):
    request = RenderRequest(
        "a cat", size=(96, 64), frames=22, first_frame=Media(frames=np.zeros((1, 64, 96, 3), np.uint8))
    )
    host = probe_host()
    made = plan_request(request, find_parts(model), probe_cpu(host), host)
    assert made.fits and [stage.name for stage in made.stages] == [
        "text",
        "encode",
        "denoise",
        "video decode",
        "sound decode",
    ]
    assert {stage.rung for stage in made.stages} == {"resident"} and made.card == "CPU"
    assert dict(made.rows)["guide video"] == 6
    assert len(plan_results(made)) > 40
    assert main(["plan", "--model", str(model), "--size", "96x64", "--frames", "22"]) == 0
    assert "fits: about" in capsys.readouterr().out
    smaller = plan_request(replace(request, quantise="int8"), find_parts(model), probe_cpu(host), host)
    assert smaller.stage("denoise").resident_bytes < made.stage("denoise").resident_bytes
    tiny = plan_request(request, find_parts(model), probe_cpu(host), replace(host, available=1 << 20))
    assert "GiB of memory" in tiny.refusal
