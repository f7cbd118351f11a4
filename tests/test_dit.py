"""The DiT and what it is fed, against the reference: layouts, clocks, labels and one forward, bit for bit or by bounds.

    job ──▶ layout, step plan, rows ──▶ VelocityModel ──▶ velocity     diffusers: static layout and timestep functions,
                                                                       scheduler, MiniMaxH3Transformer3DModel
and its own laws: which rows are computed together never shows, except in the rounding of a matmul.
"""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from h3_runtime.bench import reference_model, reference_tensors
from h3_runtime.geometry import audio_latents, pixel_frames
from h3_runtime.job import Guide, Reference, RenderJob
from h3_runtime.layout import ConditionShape, PackedLayout, patchify_video
from h3_runtime.memory.streaming import DiTLayers
from h3_runtime.models import attention
from h3_runtime.models.attention import HEAD_GROUP, Attention, ChunkSizes, Where, dense_attention, rotary_table, rotate_
from h3_runtime.models.dit import DiT, DiTConfig, Run, gated_add_, modulated_norm
from h3_runtime.sampler import Rows, VelocityModel, condition_rows, draw_noise
from h3_runtime.schedule import CONDITION_TIMESTEP, euler_step, plan_schedule, sigma_grid
from h3_runtime.steps import plan_steps

from .small_jobs import (
    draw,
    job,
    one_thread,  # noqa: F401 (a fixture)
    picture,
    relative,
    row_labels,
    small_dit,
    sound,
    text,
)

SEEDS = range(5)
FIXED = {"patch_size": (1, 2, 2), "audio_channels": 2, "audio_tag": 2, "video_tag": 0}


@pytest.fixture(scope="module")
def reference():
    pytest.importorskip("diffusers")
    from diffusers import MiniMaxH3Scheduler
    from diffusers.modular_pipelines.minimax_h3 import (
        MiniMaxH3AudioReference,
        MiniMaxH3ImageReference,
        MiniMaxH3VideoReference,
        before_denoise,
    )

    kinds = {"image": MiniMaxH3ImageReference, "video": MiniMaxH3VideoReference, "audio": MiniMaxH3AudioReference}
    return SimpleNamespace(
        Scheduler=MiniMaxH3Scheduler,
        kinds=kinds,
        layout=before_denoise.MiniMaxH3PrepareLayoutStep.build_packed_sequence,
        ref2va_layout=before_denoise.MiniMaxH3Ref2VAPrepareLayoutStep.build_ref2va_packed_sequence,
        row_timesteps=before_denoise.MiniMaxH3SetTimestepsStep.build_row_timesteps,
    )


# ---- layouts


def reference_of(reference, kind: str):
    """The reference's own object for one of our kinds; only its modality is read."""
    if kind.startswith("video"):
        return reference.kinds["video"](
            frames=torch.zeros(1, 3, 2, 2), audio=torch.zeros(2, 4) if kind == "video_audio" else None
        )
    if kind == "image":
        return reference.kinds["image"](image=torch.zeros(3, 2, 2))
    return reference.kinds["audio"](audio=torch.zeros(2, 4), sample_rate=32000)


def their_layout(reference, tags, target, audio_t, conditions):
    if any(c.kind != "guide" for c in conditions):
        items = [reference_of(reference, c.kind) for c in conditions]
        pictures = [torch.empty(1, 24, *c.video) for c in conditions if c.video]
        sounds = [torch.empty(2 * c.audio, 32) for c in conditions if c.audio]
        return reference.ref2va_layout(tags, items, pictures, sounds, *target, audio_t, **FIXED)
    anchors = tuple("first" if c.frame_index == 0 else "last" for c in conditions)
    return reference.layout(tags, *target, audio_t, **FIXED, keyframe_anchors=anchors)


def assert_same_layout(ours: PackedLayout, theirs) -> None:
    positions, tags, video_rows, audio_rows, text_rows, held_video, held_audio = theirs
    assert torch.equal(ours.row_tags(), tags)
    assert torch.equal(ours.video_rows(), video_rows) and torch.equal(ours.audio_rows(), audio_rows)
    assert torch.equal(torch.arange(len(ours.text)), text_rows)
    assert sum(len(s) for s in ours.conditions if s.is_video) == held_video
    assert sum(len(s) for s in ours.conditions if s.is_audio) == held_audio
    assert ours.positions.dtype == torch.float64 and (ours.positions - positions).abs().max() <= 1e-11
    assert torch.equal(ours.positions.float(), positions.float())


def tags_of(length: int) -> torch.Tensor:
    """Text tags with a vision block of a third of the rows in the middle."""
    tags = torch.ones(length, dtype=torch.int64)
    tags[length // 3 : 2 * length // 3] = 0
    return tags


SIZES = [(4, 4), (8, 14), (14, 8), (16, 10), (6, 22), (22, 6)]  # latent heights and widths


@pytest.mark.parametrize("latent_t", range(2, 123, 5))
def test_keyframe_layouts_are_the_references(reference, latent_t):
    audio_t, last = audio_latents(pixel_frames(latent_t)), pixel_frames(latent_t) - 1
    for index, (height, width) in enumerate(SIZES):
        frames = [(), (0,), (last,), (0, last)][(index + latent_t) % 4]
        conditions = [ConditionShape((1, height, width), frame_index=frame) for frame in frames]
        tags, target = tags_of(7 + 61 * index + latent_t), (latent_t, height, width)
        ours = PackedLayout.build(tags, target, audio_t, conditions)
        assert_same_layout(ours, their_layout(reference, tags, target, audio_t, conditions))


def test_the_largest_layout_is_the_references(reference):
    tags, target = tags_of(517), (107, 48, 84)  # 362 frames of 1344x768
    conditions = [ConditionShape((1, 48, 84), frame_index=frame) for frame in (0, 361)]
    ours = PackedLayout.build(tags, target, 603, conditions)
    assert_same_layout(ours, their_layout(reference, tags, target, 603, conditions))
    assert ours.num_rows == 517 + 2 * 1008 + 1206 + 107 * 1008


REFERENCE_SHAPES = {
    "image": ConditionShape((1, 10, 6), kind="image"),
    "video": ConditionShape((17, 4, 8), kind="video"),
    "soundtrack shorter": ConditionShape((37, 6, 4), 150, kind="video_audio"),
    "soundtrack longer": ConditionShape((2, 4, 6), 57, kind="video_audio"),
    "voice": ConditionShape(None, 83, kind="audio"),
}


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_reference_layouts_are_the_references(reference, count):
    for index, names in enumerate(itertools.permutations(REFERENCE_SHAPES, count)):
        conditions = [REFERENCE_SHAPES[name] for name in names]
        if all(c.video is None for c in conditions):
            continue
        tags, target = tags_of(11 + index), (5 * (index % 8) + 2, *SIZES[index % len(SIZES)])
        audio_t = audio_latents(pixel_frames(target[0]))
        ours = PackedLayout.build(tags, target, audio_t, conditions)
        assert_same_layout(ours, their_layout(reference, tags, target, audio_t, conditions))


# ---- clocks


@pytest.mark.parametrize("shift", [12.0, 3.0, 6.0])
def test_schedules_are_the_references(reference, shift):
    for points in range(2, 61):
        theirs = reference.Scheduler(shift)
        theirs.set_timesteps(points)
        assert torch.equal(sigma_grid(points, shift), theirs.sigmas)
        ours = torch.tensor(plan_schedule(points - 1, video_shift=shift).video)
        assert torch.equal(ours, theirs.sigmas) and torch.equal(1 - ours[:-1], theirs.timesteps)


@pytest.mark.parametrize("shift", [12.0, 3.0, 6.0])
def test_steps_are_the_references(reference, shift):
    theirs = reference.Scheduler(shift)
    theirs.set_timesteps(50)
    grid = plan_schedule(49, video_shift=shift).video
    ours = sample = draw(6, 96)
    for index, timestep in enumerate(theirs.timesteps):
        velocity = draw(6, 96, seed=index)
        ours = euler_step(ours, velocity, grid[index], grid[index + 1])
        sample = theirs.step(velocity, timestep, sample, return_dict=False)[0]
        assert torch.equal(ours, sample), index
    assert theirs.step_index == 49


def tasks(seed: int) -> dict[str, RenderJob]:
    first, last = Guide(0, picture(seed=seed), keyframe=True), Guide(21, picture(seed=seed + 10), keyframe=True)
    references = (
        Reference("image", picture(1, 6, 4, seed=seed + 20)),
        Reference("video_audio", picture(7, 2, 8, seed=seed + 30), sound(40, seed=seed)),
        Reference("audio", audio=sound(13, seed=seed + 5)),
    )
    return {
        "t2va": job(text=text(6, seed=seed), seed=seed),
        "fl2va": job(text=text(7, 3, seed), seed=seed, guides=(first, last)),
        "ref2va": job(text=text(9, 4, seed), seed=seed, references=references),
    }


TASKS = list(tasks(0))


def layout_of(made: RenderJob) -> PackedLayout:
    return PackedLayout.of(made.text.tags, made.canvas, made.guides, made.references)


def their_row_timesteps(reference, layout: PackedLayout, step):
    """The reference's distinct timesteps and row -> timestep index at one forward."""
    held = [sum(len(s) for s in layout.conditions if kind(s)) for kind in (lambda s: s.is_video, lambda s: s.is_audio)]
    t_video, t_audio = (float(1 - torch.tensor(sigma)) for sigma in (step.video_sigma, step.audio_sigma))
    pinned = max(t_video, CONDITION_TIMESTEP)
    rows = layout.video_rows(), layout.audio_rows()
    return reference.row_timesteps(*rows, *held, len(layout.text), t_video, t_audio, pinned, 1.0)


@pytest.mark.parametrize("task", TASKS)
def test_row_timesteps_are_the_references(reference, task):
    made = tasks(0)[task]
    layout = layout_of(made)
    for step in plan_steps(layout, plan_schedule(49)).forwards:
        timesteps, which = their_row_timesteps(reference, layout, step)
        ours, modalities = row_labels(step)
        assert torch.equal(ours, timesteps[which]) and torch.equal(modalities, layout.row_tags())
        assert torch.equal(step.timesteps, timesteps)


# ---- one forward


def test_weights_are_renamed_as_the_released_files_are(golden):
    ours, theirs = (load_file(golden / f"b_dit_{word}.safetensors") for word in ("comfy", "diffusers"))
    renamed = reference_tensors(ours)
    assert set(renamed) == set(theirs)
    assert all(torch.equal(renamed[name], theirs[name]) for name in theirs)


@pytest.fixture(scope="module")
def golden(request):
    return request.path.parent / "golden"


def in_bf16(dit: DiT) -> tuple[DiT, DiT]:
    """``dit`` with bf16 weights outside the islands, and a float32 twin with the same values."""
    half = copy.deepcopy(dit)
    for name, parameter in half.named_parameters():
        if not name.startswith(half.float32_islands):
            parameter.data = parameter.data.bfloat16()
    return half, copy.deepcopy(half).float()


@torch.no_grad()
def our_velocity(dit: DiT, made: RenderJob, index: int) -> Rows:
    layout, noise = layout_of(made), draw_noise(made)
    steps = plan_steps(layout, made.schedule)
    held = condition_rows(made, layout, noise)
    model = VelocityModel(dit, layout, steps, dit.refine_text(made.text.hidden), held)
    return model.velocity(Rows(patchify_video(noise.video), noise.audio), steps.forwards[index])


@torch.no_grad()
def their_velocity(reference, dit: DiT, made: RenderJob, index: int) -> Rows:
    """The reference's forward on the same rows and weights -> its target rows."""
    layout, noise = layout_of(made), draw_noise(made)
    held = condition_rows(made, layout, noise)
    picture_rows = [rows for _, _, is_video, rows in held if is_video]
    sound_rows = [rows for _, _, is_video, rows in held if not is_video]
    timesteps, which = their_row_timesteps(reference, layout, plan_steps(layout, made.schedule).forwards[index])
    video, audio = reference_model(dit)(
        hidden_states=torch.cat([*picture_rows, patchify_video(noise.video)])[None],
        audio_hidden_states=torch.cat([*sound_rows, noise.audio])[None],
        encoder_hidden_states=made.text.hidden[None],
        timestep=timesteps,
        timestep_indices=which,
        token_tags=layout.row_tags(),
        position_ids=layout.positions,
        video_indices=layout.video_rows(),
        audio_indices=layout.audio_rows(),
        text_indices=torch.arange(len(layout.text)),
        return_dict=False,
    )
    return Rows(video[0, -len(layout.target_video) :], audio[0, -len(layout.target_audio) :])


def apart(ours: Rows, theirs: Rows) -> float:
    return max(relative(ours.video, theirs.video), relative(ours.audio, theirs.audio))


@pytest.mark.parametrize("task", TASKS)
def test_forward_is_the_references_in_float32(reference, task):
    worst = 0.0
    for seed, index in itertools.product(SEEDS, (0, 3)):
        dit, made = small_dit(seed), tasks(seed)[task]
        worst = max(worst, apart(our_velocity(dit, made, index), their_velocity(reference, dit, made, index)))
    assert worst <= 1e-6, worst


@pytest.mark.parametrize("task", TASKS)
def test_forward_is_the_references_in_bf16(reference, task):
    apart_worst, ratio_worst = 0.0, 0.0
    for seed in SEEDS:
        (half, full), made = in_bf16(small_dit(seed)), tasks(seed)[task]
        ours, theirs = our_velocity(half, made, 2), their_velocity(reference, half, made, 2)
        exact = their_velocity(reference, full, made, 2)
        assert ours.video.dtype == torch.float32
        apart_worst = max(apart_worst, apart(ours, theirs))
        ratio_worst = max(ratio_worst, apart(ours, exact) / apart(theirs, exact))
    assert apart_worst <= 0.02 and ratio_worst <= 1.25, (apart_worst, ratio_worst)


# ---- rows computed together do not show


@pytest.fixture(scope="module")
def wide() -> DiT:
    """A DiT whose tables are wide enough for every matmul kernel that the release's would meet."""
    config = DiTConfig(
        hidden=256, layers=1, refiner_layers=0, heads=2, ffn=64, text_dim=32, time_hidden=384, time_dim=320
    )
    torch.manual_seed(0)
    return DiT(config).requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_table_rows_do_not_depend_on_their_number(wide, dtype):
    dit = wide if dtype == torch.float32 else in_bf16(wide)[0]
    timesteps = torch.linspace(0, 1, 100)
    embedding, all_pairs = dit.time_embedding(timesteps), torch.arange(300)
    table, final = dit.block_table(0, embedding, all_pairs), dit.final_table(embedding)
    assert (embedding.dtype, table.dtype, tuple(table.shape)) == (torch.float32, dtype, (300, 6, 256))
    for index in (0, 1, 37, 63, 64, 65, 99):
        alone = dit.time_embedding(timesteps[index : index + 1])
        assert torch.equal(alone[0], embedding[index])
        assert torch.equal(dit.block_table(0, alone, torch.arange(3)), table[3 * index : 3 * index + 3])
        assert torch.equal(dit.final_table(alone)[0], final[index])
    picked = torch.tensor([5, 0, 299])
    assert torch.equal(dit.block_table(0, embedding, picked), table[picked])


def chunked(monkeypatch, rows: int, heads: int) -> None:
    monkeypatch.setattr(attention.row_chunks, "__defaults__", (rows,))  # outside the blocks
    monkeypatch.setattr(DiTLayers.__new__, "__defaults__", (ChunkSizes(heads, rows), None))


@pytest.mark.parametrize(("rows", "heads"), [(7, 8), (64, 1), (5, 2), (100, 3)])
def test_other_chunks_stay_within_exact_math(rows, heads, monkeypatch):
    for seed in SEEDS:
        made = tasks(seed)["ref2va"]
        (half, full), dit = in_bf16(small_dit(seed)), small_dit(seed)
        before, before_half, exact = (our_velocity(part, made, 2) for part in (dit, half, full))
        with monkeypatch.context() as patch:
            chunked(patch, rows, heads)
            assert apart(our_velocity(dit, made, 2), before) <= 1e-5
            assert apart(our_velocity(half, made, 2), exact) <= 1.25 * apart(before_half, exact)


@pytest.mark.parametrize("heads", range(1, 18))
def test_head_groups_cover_all_heads(heads):
    torch.manual_seed(heads)
    layer, x = Attention(24, heads, 8, 1e-5).requires_grad_(False), draw(19, 24, seed=heads)
    layer.q_norm.weight.data.uniform_(0.5, 1.5)
    layer.k_norm.weight.data.uniform_(0.5, 1.5)
    rotary = rotary_table(draw(19, 3).double() * 20, attention.inverse_frequencies(1), torch.float32)
    seen: list[Where] = []

    def call(q, k, v, where):
        assert q.shape == k.shape == v.shape == (19, where.head_stop - where.head_start, 8)
        seen.append(where)
        return dense_attention(q, k, v, where)

    out = layer.attend(x, rotary, call, 5, 9)
    assert {where[:2] for where in seen} == {(5, 9)}
    starts, stops = [where.head_start for where in seen], [where.head_stop for where in seen]
    assert starts == list(range(0, heads, HEAD_GROUP)) and stops == [*starts[1:], heads]

    q, k, v = layer.qkv_proj(x).view(19, 3, heads, 8).unbind(1)
    q, k = (rotate_(norm(part), *rotary) for norm, part in ((layer.q_norm, q), (layer.k_norm, k)))
    weights = torch.einsum("shd,thd->hst", q.double(), k.double()).div(8**0.5).softmax(-1)
    assert relative(out, torch.einsum("hst,thd->shd", weights, v.double()).flatten(1)) <= 1e-6


def test_rotation_turns_pairs_by_position_times_frequency():
    positions, x = draw(11, 3).double() * 50, draw(11, 2, 16)
    frequencies = attention.inverse_frequencies(2)
    turned = rotate_(x.clone(), *rotary_table(positions, frequencies, torch.float32)).double()
    angles = (positions.float()[:, :, None] * frequencies).flatten(1).double()  # [S, 6]: t | h | w
    pairs = (
        torch.complex(x[..., :6].double(), x[..., 6:12].double())
        * torch.polar(torch.ones(()).double(), angles)[:, None]
    )
    assert relative(turned[..., :12], torch.cat((pairs.real, pairs.imag), -1)) <= 1e-6
    assert torch.equal(turned[..., 12:], x[..., 12:].double())


def test_modulation_reads_one_table_row_per_run_or_per_row():
    h, shift, scale, norm = draw(10, 8), draw(3, 8, seed=1), draw(3, 8, seed=2), torch.nn.RMSNorm(8, eps=1e-5)
    each = torch.tensor([2, 0, 1, 1, 0, 2, 2, 0])
    runs = (Run(0, 2, 1), Run(2, 10, each))
    row = torch.cat((torch.tensor([1, 1]), each))
    with torch.no_grad():
        want = F.rms_norm(h, (8,), eps=1e-5) * (1 + scale[row]) + shift[row]
        for start, stop in ((0, 10), (1, 2), (1, 7), (5, 10)):
            out = torch.full((stop - start, 8), torch.nan)
            modulated_norm(h, norm, shift, scale, runs, (start, stop), out)
            assert torch.allclose(out, want[start:stop], atol=1e-6)
            added = h.clone()
            gated_add_(added, scale, out, runs, start, stop)
            assert torch.allclose(added[start:stop], h[start:stop] + scale[row[start:stop]] * out, atol=1e-6)
            assert torch.equal(added[:start], h[:start]) and torch.equal(added[stop:], h[stop:])
