"""The denoising loop: against the reference's own blocks, and the laws of seed, schedule, guides and split runs.

RenderJob ──▶ sample ──▶ latent          diffusers: layout, condition noise, target noise, timesteps, denoise loop
     └── the same ready latents, text rows, seed and weights ──▶ those blocks, one after another ──▶ latent
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from h3_runtime import steps as step_plans
from h3_runtime.errors import H3Error, NonFiniteError
from h3_runtime.geometry import Canvas
from h3_runtime.guides import place
from h3_runtime.job import AVLatent, Guide, Masks, Reference, RenderJob, TextCondition
from h3_runtime.latents import load_latent, save_latent
from h3_runtime.layout import PackedLayout, audio_to_rows, patchify_video
from h3_runtime.models.dit import DiT
from h3_runtime.request import GuideRequest, Media, RenderRequest
from h3_runtime.sampler import Rows, condition_rows, draw_noise, sample
from h3_runtime.schedule import mix
from h3_runtime.steps import plan_steps

from .small_jobs import (
    CANVAS,
    CONFIG,
    FORWARDS,
    Probe,
    clip,
    differ,
    draw,
    job,
    one_thread,  # noqa: F401 (a fixture)
    picture,
    relative,
    render,
    row_labels,
    same,
    small_dit,
    sound,
    text,
)

SEEDS = range(5)


# ---- whole loops against the reference


@pytest.fixture(scope="module")
def reference():
    """The reference's blocks, imported when the first test needs them."""
    pytest.importorskip("diffusers")
    from diffusers import MiniMaxH3Scheduler, MiniMaxH3Transformer3DModel
    from diffusers.modular_pipelines.minimax_h3 import before_denoise, decoders, denoise
    from diffusers.modular_pipelines.modular_pipeline import PipelineState

    return SimpleNamespace(
        before=before_denoise,
        decoders=decoders,
        denoise=denoise,
        State=PipelineState,
        Scheduler=MiniMaxH3Scheduler,
        Transformer=MiniMaxH3Transformer3DModel,
    )


RENAMED = (
    ("video_patch_proj.", "proj_in."),
    ("audio_patch_proj.", "audio_proj_in."),
    ("condition_proj.", "context_embedder."),
    ("time_embedder.proj_in.", "time_embedder.linear_1."),
    ("time_embedder.proj_out.", "time_embedder.linear_2."),
    ("token_refiner.blocks.", "token_refiner.refiner_blocks."),
    ("final_layer.norm.", "norm_out.norm."),
    ("final_layer.adaln_proj.", "norm_out."),
    ("final_layer.video_out.", "proj_out."),
    ("final_layer.audio_out.", "audio_proj_out."),
    ("blocks.", "transformer_blocks."),
)


def reference_weights(dit: DiT) -> dict[str, torch.Tensor]:
    """Our tensors under the reference's names: q, k, v apart, value before gate."""
    theirs = {}
    for name, tensor in dit.state_dict().items():
        for ours, other in RENAMED:
            if name.startswith(ours):
                name = other + name[len(ours) :]
                break
        name = name.replace("attn.q_norm", "attn.norm_q").replace("attn.k_norm", "attn.norm_k")
        name = name.replace("attn.out_proj", "attn.to_out.0").replace("mlp.fc2", "ff.net.2")
        if name.endswith("qkv_proj.weight"):
            for letter, part in zip("qkv", tensor.chunk(3)):
                theirs[name.replace("qkv_proj", f"to_{letter}")] = part
        elif name.endswith("mlp.fc1.weight"):
            gate, value = tensor.chunk(2)
            theirs[name.replace("mlp.fc1", "ff.net.0.proj")] = torch.cat([value, gate])
        elif not name.startswith("rope."):
            theirs[name] = tensor
    return theirs


def reference_model(reference, dit: DiT):
    c = dit.config
    model = reference.Transformer(
        num_attention_heads=c.heads,
        attention_head_dim=c.head_dim,
        hidden_size=c.hidden,
        num_layers=c.layers,
        num_refiner_layers=c.refiner_layers,
        ffn_dim=c.ffn,
        text_dim=c.text_dim,
        freq_dim=c.time_features,
        time_embed_hidden_dim=c.time_hidden,
        time_embed_dim=c.time_dim,
        rope_freq_dim=c.rope_frequencies,
    )
    model.load_state_dict(reference_weights(dit), strict=True)
    return model.eval()


def reference_layout(reference, made: RenderJob):
    canvas, tags = made.canvas, made.text.tags
    size = (canvas.latent_t, canvas.latent_h, canvas.latent_w, canvas.audio_t)
    fixed = {"patch_size": (1, 2, 2), "audio_channels": 2, "audio_tag": 2, "video_tag": 0}
    if made.task == "ref2va":
        items = [SimpleNamespace(kind=r.kind.split("_")[0], has_audio=r.audio is not None) for r in made.references]
        pictures = [r.video for r in made.references if r.video is not None]
        sounds = [audio_to_rows(r.audio) for r in made.references if r.audio is not None]
        step = reference.before.MiniMaxH3Ref2VAPrepareLayoutStep
        return step.build_ref2va_packed_sequence(tags, items, pictures, sounds, *size, **fixed)
    anchors = tuple("first" if guide.frame_index == 0 else "last" for guide in made.guides)
    step = reference.before.MiniMaxH3PrepareLayoutStep
    return step.build_packed_sequence(tags, *size, **fixed, keyframe_anchors=anchors)


def reference_run(reference, model, made: RenderJob):
    """The reference's blocks on the job's ready latents -> its condition rows, first target rows and final latent."""
    blocks, canvas = reference.before, made.canvas
    components = SimpleNamespace(
        transformer=model,
        transformer_ref=model,
        scheduler=reference.Scheduler(12.0),
        audio_scheduler=reference.Scheduler(3.0),
        _execution_device=torch.device("cpu"),
        patch_size=(1, 2, 2),
        keyframe_noise_aug=0.999,
        audio_channels=2,
        vae_latent_channels=24,
        audio_latent_channels=32,
    )
    state = reference.State()
    names = ("position_ids", "token_tags", "video_indices", "audio_indices", "text_indices")
    *rows, video_rows, audio_rows = reference_layout(reference, made)
    for name, value in zip(names, rows):
        state.set(name, value, "denoiser_input_fields")
    conditions = made.references if made.task == "ref2va" else made.guides
    given = {
        "num_condition_video_rows": video_rows,
        "num_condition_audio_rows": audio_rows,
        "num_latent_frames": canvas.latent_t,
        "latent_height": canvas.latent_h,
        "latent_width": canvas.latent_w,
        "num_audio_latents": canvas.audio_t,
        "condition_latents": [c.video for c in conditions if c.video is not None],
        "audio_condition_latents": [audio_to_rows(c.audio) for c in conditions if c.audio is not None],
        "prompt_embeds": made.text.hidden[None],
        "generator": torch.Generator("cpu").manual_seed(made.seed),
        "num_inference_steps": made.num_forwards + 1,
    }
    for name, value in given.items():
        state.set(name, value)
    if conditions:
        blocks.MiniMaxH3PrepareConditionLatentsStep()(components, state)
    blocks.MiniMaxH3PrepareLatentsStep()(components, state)
    first = state.get("condition_rows"), state.get("latents").clone(), state.get("audio_latents").clone()
    ref2va = made.task == "ref2va"
    if conditions:
        front = blocks.MiniMaxH3Ref2VAPrepareLatentsStep if ref2va else blocks.MiniMaxH3FL2VAPrepareLatentsStep
        front()(components, state)
    blocks.MiniMaxH3SetTimestepsStep()(components, state)
    loop = reference.denoise.MiniMaxH3Ref2VADenoiseStep() if ref2va else reference.denoise.MiniMaxH3DenoiseStep()
    loop.set_progress_bar_config(disable=True)
    loop(components, state)
    reference.decoders.MiniMaxH3AfterDenoiseStep()(components, state)
    return *first, AVLatent(state.get("latents"), state.get("audio_latents").permute(1, 0, 2)[None])


def tasks(seed: int) -> dict[str, RenderJob]:
    """One job per task and kind of condition, all parts seeded by ``seed``."""
    first = Guide(0, picture(seed=seed), keyframe=True)
    last = Guide(21, picture(seed=seed + 10), keyframe=True)
    image = Reference("image", picture(1, 6, 4, seed=seed + 20))
    moving = Reference("video_audio", picture(7, 2, 8, seed=seed + 30), sound(40, seed=seed))
    silent = Reference("video", picture(2, 4, 4, seed=seed + 40))
    voice = Reference("audio", audio=sound(13, seed=seed + 5))
    parts = {
        "t2va": {},
        "fl2va first": {"guides": (first,)},
        "fl2va last": {"guides": (last,)},
        "fl2va both": {"guides": (first, last)},
        "ref2va image": {"references": (image,)},
        "ref2va video": {"references": (moving,)},
        "ref2va mixed": {"references": (voice, image, silent, moving)},
        "t2va short": {"canvas": Canvas(64, 96, 5), "num_forwards": 7},
    }
    given = {name: {"text": text(6, 0 if name[0] == "t" else 3, seed), "seed": seed, **p} for name, p in parts.items()}
    return {name: job(**p) for name, p in given.items()}


@pytest.mark.parametrize("task", list(tasks(0)))
def test_loop_is_the_references(reference, task):
    worst = 0.0
    for seed in SEEDS:
        dit, made = small_dit(seed), tasks(seed)[task]
        held, video, audio, theirs = reference_run(reference, reference_model(reference, dit), made)
        noise = draw_noise(made)
        assert torch.equal(patchify_video(noise.video), video) and torch.equal(noise.audio, audio)
        layout = PackedLayout.of(made.text.tags, made.canvas, made.guides, made.references)
        ours = [rows for _, _, is_video, rows in condition_rows(made, layout, noise) if is_video]
        assert (held is None) == (not ours) and (held is None or torch.equal(torch.cat(ours), held))
        result = sample(dit, made)
        worst = max(worst, relative(result.latent.video, theirs.video), relative(result.latent.audio, theirs.audio))
        assert result.finished and result.dit_calls == made.num_forwards
    assert worst <= 1e-5, worst


# ---- seeds and prompts


def test_what_decides_the_latent():
    one, other = (Reference("image", picture(1, 4, 4, seed=seed)) for seed in (1, 2))
    base = job(references=(one, other))
    assert same(render(base), render(replace(base)))
    for changed in (
        replace(base, seed=1),
        replace(base, text=text(seed=1)),
        replace(base, text=text(vision=2)),
        replace(base, references=(other, one)),
        replace(base, references=(one,)),
        replace(base, num_forwards=FORWARDS + 1),
        replace(base, video_shift=9.0),
        replace(base, audio_shift=2.0),
    ):
        assert differ(render(base), render(changed))


def test_a_middle_guide_reaches_back():
    """Changing a picture held in the middle changes the target's latents before it, from the first forward on."""
    guides = [(Guide(13, picture(2, seed=seed)),) for seed in (1, 2)]
    for forwards in (1, FORWARDS):
        ours, changed = (render(job(guides=g, num_forwards=forwards)) for g in guides)
        apart = (ours.video - changed.video).abs().amax(dim=(0, 1, 3, 4))
        assert bool((apart[:4] > 1e-4).all()), apart  # frames 0 to 12


# ---- two clocks


@pytest.mark.parametrize("forwards", [4, 8, 20, 49])
def test_each_stream_walks_its_own_clock(forwards):
    """A velocity known in closed form: both end points are those of float64 Euler on each stream's own grid."""

    def velocity(x, sigma, tanh):
        return tanh(x) * (0.4 + sigma) - 0.5 * x

    probe = Probe(
        lambda rows, step: Rows(
            velocity(rows.video, step.video_sigma, torch.tanh), velocity(rows.audio, step.audio_sigma, torch.tanh)
        )
    )
    made = job(num_forwards=forwards)
    result, noise = render(made, probe), draw_noise(made)
    for ours, start, shift in (
        (patchify_video(result.video), patchify_video(noise.video), 12.0),
        (audio_to_rows(result.audio), noise.audio, 3.0),
    ):
        base = 1 - np.arange(forwards + 1) / forwards
        grid = shift * base / (1 + (shift - 1) * base)
        x = start.double().numpy()
        for sigma, following in itertools.pairwise(grid):
            x = x + (sigma - following) * velocity(x, sigma, np.tanh)
        assert relative(ours, torch.from_numpy(x)) < 2e-6
    assert (probe.forwards, len(probe.fed)) == (0, forwards)


# ---- counts, progress, stopping


@pytest.mark.parametrize("forwards", [1, 4, 9])
def test_steps_are_model_calls(forwards):
    probe, told, polls = Probe(), [], []
    result = sample(
        small_dit(), job(num_forwards=forwards), (probe,), lambda *e: told.append(e), lambda: polls.append(1)
    )
    assert result.dit_calls == len(result.step_seconds) == probe.forwards == len(probe.fed) == forwards
    assert probe.blocks == len(polls) == forwards * CONFIG.layers
    assert [event[:2] for event in told] == [(done, forwards) for done in range(1, forwards + 1)]
    assert [event[2] for event in told] == list(result.step_seconds)
    assert "probe" in result.stats and result.num_rows == 5 + 74 + 42


def test_a_part_of_the_grid_counts_its_own_forwards():
    probe, told = Probe(), []
    made = job(num_forwards=6, start=2, stop=5, source=clip())
    result = sample(small_dit(), made, (probe,), lambda *event: told.append(event[:2]))
    assert result.dit_calls == probe.forwards == 3 and not result.finished
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_poll_cancels():
    class Cancelled(Exception):
        pass

    for allowed in (0, 1, 5):
        probe, polls = Probe(), []

        def poll(polls=polls, allowed=allowed):
            if len(polls) == allowed:
                raise Cancelled
            polls.append(1)

        with pytest.raises(Cancelled):
            sample(small_dit(), job(), (probe,), poll=poll)
        assert probe.forwards == allowed // CONFIG.layers + 1
        assert probe.blocks == allowed


# ---- numbers that are none


@pytest.mark.parametrize("name", ["blocks.1.attn.out_proj.weight", "final_layer.audio_out.bias", "condition_proj.bias"])
def test_a_nan_weight_stops_the_first_forward(name):
    dit = DiT(CONFIG)
    weights = {key: tensor.clone() for key, tensor in small_dit().state_dict().items()}
    weights[name].view(-1)[0] = torch.nan
    dit.load_state_dict(weights)
    probe = Probe()
    with pytest.raises(NonFiniteError, match=f"forward 1 of {FORWARDS}"):
        sample(dit, job(), (probe,))
    assert probe.forwards == 1


@pytest.mark.parametrize(("stream", "word"), [("video", "picture"), ("audio", "sound")])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_an_exploding_velocity_stops_where_it_explodes(stream, word, bad):
    def velocity(rows, step):
        calm = Rows(torch.zeros_like(rows.video), torch.zeros_like(rows.audio))
        if step.index >= 2:
            getattr(calm, stream)[3, 5] = bad
        return calm

    for start in (0, 1, 2):  # forwards are counted on the grid, whichever part of it runs
        probe, told = Probe(velocity), []
        with pytest.raises(NonFiniteError, match=f"{word} latent .* forward 3 of 6"):
            sample(
                small_dit(),
                job(num_forwards=6, start=start, source=clip()),
                (probe,),
                lambda *e, told=told: told.append(e),
            )
        assert len(probe.fed) == 3 - start and len(told) == 2 - start


def test_a_latent_that_outgrows_float32_stops():
    probe = Probe(lambda rows, step: Rows(rows.video * 1e25, rows.audio * 1e-25))
    with pytest.raises(NonFiniteError, match=f"picture latent .* forward 2 of {FORWARDS}"):
        sample(small_dit(), job(), (probe,))
    assert len(probe.fed) == 2


def test_the_text_must_be_the_models():
    wide = TextCondition(draw(3, 41), torch.ones(3, dtype=torch.int64))
    with pytest.raises(H3Error, match=r"41 wide .* reads 40"):
        render(job(text=wide))


# ---- start, stop, denoise


def split_jobs() -> dict[str, RenderJob]:
    levels = (torch.arange(CANVAS.latent_t * 4 * 6).reshape(7, 4, 6) % 5) / 4
    masks = Masks.make(levels, (torch.arange(2 * 37).reshape(2, 37) % 3) / 2)
    guides = (
        Guide(0, picture(), keyframe=True),
        Guide(9, picture(2, seed=1), sound(6), strength=0.4),
        Guide(12, audio=sound(17, seed=1)),
    )
    references = (Reference("video_audio", picture(2, 4, 4), sound(9)), Reference("image", picture(1, 2, 4)))
    plain = job(seed=3)
    masked = replace(plain, masks=masks, source=clip())
    return {
        "plain": plain,
        "masks": masked,
        "guides": replace(plain, guides=guides),
        "masks, guides, references": replace(masked, guides=guides, references=references),
        "denoise": replace(plain, denoise=0.5, source=clip()),
        "denoise, masks, guides": replace(masked, denoise=0.5, guides=guides),
    }


@pytest.mark.parametrize("kind", list(split_jobs()))
def test_split_runs_equal_the_unsplit_run(kind, tmp_path):
    whole = split_jobs()[kind]
    unsplit = render(whole)
    for k in range(1, FORWARDS):
        first = sample(small_dit(), replace(whole, stop=k))
        assert not first.finished and first.dit_calls == k
        path = save_latent(tmp_path / f"{k}.safetensors", whole.canvas, first.latent, whole.source, stop=k)
        saved = load_latent(path)
        assert same(saved.latent, first.latent) and not saved.finished
        second = sample(small_dit(), replace(whole, start=k, state=saved.latent, source=saved.source))
        assert second.finished and second.dit_calls == FORWARDS - k
        assert same(second.latent, unsplit), k


def test_split_in_three(tmp_path):
    whole = split_jobs()["denoise, masks, guides"]
    latent = None
    for start, stop in ((0, 2), (2, 3), (3, FORWARDS)):
        part = replace(whole, start=start, stop=stop, state=latent)
        path = save_latent(tmp_path / "part.safetensors", CANVAS, sample(small_dit(), part).latent)
        latent = load_latent(path).latent
    assert same(latent, render(whole))


def test_denoise_one_is_none():
    plain = render(job())
    assert same(plain, render(job(denoise=1)))
    assert same(plain, render(job(denoise=1.0, source=clip())))
    assert same(plain, render(job(denoise=0.95, source=clip())))  # round(5 / 0.95) is 5


@pytest.mark.parametrize(("denoise", "start"), [(0.5, 0), (0.5, 2), (0.3, 0), (1.0, 2), (1.0, 4)])
def test_a_run_from_a_source_starts_between_it_and_noise(denoise, start):
    made = job(denoise=denoise, start=start, source=clip(seed=4), seed=9)
    probe = Probe()
    sample(small_dit(), made, (probe,))
    noise, total = draw_noise(made), round(FORWARDS / denoise)
    fresh = draw_noise(job(seed=9))
    assert torch.equal(noise.video, fresh.video) and torch.equal(noise.audio, fresh.audio)
    base = 1 - (total - FORWARDS + start) / total
    for ours, source, drawn, shift in (
        (probe.fed[0].video, patchify_video(made.source.video), patchify_video(noise.video), 12.0),
        (probe.fed[0].audio, audio_to_rows(made.source.audio), noise.audio, 3.0),
    ):
        sigma = shift * base / (1 + (shift - 1) * base)
        torch.testing.assert_close(ours, (1 - sigma) * source + sigma * drawn, rtol=0, atol=2e-6)
    assert len(probe.fed) == FORWARDS - start


def test_less_denoise_stays_nearer_to_the_source():
    source = clip(seed=4)
    apart = [
        relative(render(job(denoise=d, source=source, num_forwards=4)).video, source.video) for d in (0.1, 0.3, 0.6, 1)
    ]
    assert apart == sorted(apart) and apart[0] < 0.9 * apart[-1], apart


# ---- guides


def test_full_strength_is_the_default():
    guide = Guide(9, picture(2), sound(6))
    assert same(render(job(guides=(guide,))), render(job(guides=(replace(guide, strength=1),))))
    weak = [render(job(guides=(replace(guide, strength=s),))) for s in (1.0, 0.6, 0.2)]
    assert differ(weak[0], weak[1]) and differ(weak[1], weak[2])


@pytest.mark.parametrize("strength", [1.0, 0.7, 0.25])
def test_strength_sets_rows_and_labels(strength):
    guides = (Guide(4, picture(2), sound(6), strength), Guide(9, picture(seed=1), strength=strength))
    guides += (Guide(12, audio=sound(5, seed=1), strength=strength), Guide(0, picture(seed=2), keyframe=True))
    made = job(guides=guides, num_forwards=20, video_shift=0.001)  # sigmas so small that t_v passes 0.999
    layout = PackedLayout.of(made.text.tags, made.canvas, guides, ())
    noise = draw_noise(made)
    held = condition_rows(made, layout, noise)
    drawn = iter(noise.conditions), iter(noise.sound_guides)
    for segment, (start, stop, is_video, rows) in zip(layout.conditions, held, strict=True):
        assert (segment.start, segment.stop, segment.is_video) == (start, stop, is_video)
        guide = guides[segment.item]
        clean = patchify_video(guide.video) if is_video else audio_to_rows(guide.audio)
        other = patchify_video(next(drawn[0])) if is_video else next(drawn[1])
        t = guide.strength * (0.999 if is_video else 1.0)
        torch.testing.assert_close(rows, t * clean + (1 - t) * other, rtol=0, atol=1e-6)
        if not is_video and guide.strength == 1:
            assert torch.equal(rows, clean)
        if is_video and guide.strength == 1:
            assert torch.equal(rows, mix(clean, other, 0.999))
    passed = 0
    for step in plan_steps(layout, made.schedule).forwards:
        t_video = torch.tensor(1.0) - torch.tensor(step.video_sigma)
        passed += bool(t_video > 0.999)
        timesteps, modalities = row_labels(step)
        for segment in layout.conditions:
            guide = guides[segment.item]
            weak = torch.tensor(guide.strength * 0.999 if segment.is_video else guide.strength)
            full = torch.maximum(t_video, torch.tensor(0.999)) if segment.is_video else torch.tensor(1.0)
            want = weak if guide.strength < 1 else full
            assert bool((timesteps[segment.start : segment.stop] == want).all()), segment
            assert bool((modalities[segment.start : segment.stop] == (0 if segment.is_video else 2)).all())
    assert 0 < passed < 20


def test_sound_guides_never_move_the_targets_noise():
    keyframe = Guide(0, picture(), keyframe=True)
    sounds = (Guide(4, audio=sound(6)), Guide(12, audio=sound(9, seed=1), strength=0.3))
    plain = draw_noise(job(guides=(keyframe,)))
    for guides in itertools.chain.from_iterable(itertools.permutations(sounds, n) for n in (0, 1, 2)):
        for strength in (1.0, 0.5):
            held = tuple(replace(guide, strength=strength) for guide in guides)
            noise = draw_noise(job(guides=(keyframe, *held)))
            assert torch.equal(noise.video, plain.video) and torch.equal(noise.audio, plain.audio)
            assert torch.equal(noise.conditions[0], plain.conditions[0])
            assert [tuple(n.shape) for n in noise.sound_guides] == [(2 * g.audio_length, 32) for g in held]
    generator = torch.Generator().manual_seed(0)
    both = draw_noise(job(guides=(keyframe, *sounds)))
    for tensor in (both.conditions[0], both.video, both.audio, *both.sound_guides):
        assert torch.equal(tensor, torch.randn(tensor.shape, generator=generator))


def test_moving_a_guide_changes_its_place_only():
    places = [job(guides=(Guide(frame, picture(2), sound(6)),)) for frame in (0, 3, 9, 12)]
    layouts = [PackedLayout.of(made.text.tags, made.canvas, made.guides, ()) for made in places]
    first, still = layouts[0], draw_noise(places[0])
    for made, layout in zip(places[1:], layouts[1:]):
        assert layout.segments == first.segments
        moved = layout.positions - first.positions
        guided = torch.zeros(layout.num_rows, dtype=torch.bool)
        guided[layout.conditions[0].start : layout.conditions[-1].stop] = True
        assert not moved[~guided].any() and not moved[:, 1:].any()
        shift = torch.full((int(guided.sum()),), 5 / 3 * made.guides[0].frame_index, dtype=torch.float64)
        torch.testing.assert_close(moved[guided, 0], shift, rtol=0, atol=1e-9)
        assert all(torch.equal(a, b) for a, b in zip(draw_noise(made)[1:3], still[1:3]))
        assert differ(render(made), render(places[0]))


def test_references_do_not_shift_guides():
    guides = (Guide(0, picture()), Guide(8, picture(), sound(6)), Guide(21, picture()))
    for pictures, videos, sounds in itertools.product(range(10), range(4), range(4)):
        references = [Reference("image", picture(1, 4, 2))] * pictures
        references += [Reference("video_audio", picture(7, 2, 4), sound(31))] * (videos // 2)
        references += [Reference("video", picture(7, 2, 4))] * (videos - videos // 2)
        references += [Reference("audio", audio=sound(17))] * sounds
        layout = PackedLayout.of(text().tags, CANVAS, guides, references)
        origin = layout.positions[layout.target_video.start, 0]
        assert layout.positions[layout.target_audio.start, 0] == origin
        ends = 5.0 + pictures + sounds * 17 + (videos // 2) * max(31, 110 / 3) + (videos - videos // 2) * 110 / 3
        assert abs(origin.item() - ends) < 1e-9
        for segment in layout.conditions[:4]:
            at = layout.positions[segment.start, 0] - origin
            assert abs(at.item() - 5 / 3 * guides[segment.item].frame_index) < 1e-9, segment


def toy_latent(frames: np.ndarray) -> torch.Tensor:
    """Cell means of the first frame, spread over 24 channels: enough to tell pictures apart."""
    cells = torch.from_numpy(np.ascontiguousarray(frames[:1])).float().mean(-1) / 64 - 2
    cells = torch.nn.functional.avg_pool2d(cells[:, None], 16)  # [1, 1, h, w]
    return cells[:, :, None] * torch.linspace(-1, 1, 24).view(1, 24, 1, 1, 1)


def test_five_guides_in_any_order_are_one_render():
    generator = np.random.default_rng(0)
    asked = []
    for frame, seconds in ((3, None), (20, None), (None, 0.25), (-9, None), (11, None)):
        pixels = generator.integers(0, 256, (1, 64, 96, 3), dtype=np.uint8)
        asked.append(GuideRequest(Media(frames=pixels, name=f"{frame}"), frame, seconds))
    latents = []
    for order in (range(5), (4, 2, 0, 3, 1), (1, 0, 3, 4, 2)):
        placement = place(RenderRequest("x", size=(96, 64), frames=22, guides=tuple(asked[i] for i in order)))
        assert [guide.frame_index for guide in placement.guides] == [3, 6, 11, 13, 20]
        guides = tuple(Guide(g.frame_index, toy_latent(g.frames)) for g in placement.guides)
        latents.append(render(job(canvas=placement.canvas, guides=guides)))
    assert same(latents[0], latents[1]) and same(latents[0], latents[2])
    assert differ(latents[0], render(job(guides=guides[:4])))


# ---- rows


@pytest.mark.parametrize("frames", [5, 39, 124])
def test_row_counts_of_every_combination(frames):
    """Guide x sound guide x sound reference x video reference: every count comes from the tensors' own sizes."""
    canvas = Canvas(96, 64, frames)
    video = Guide(0, picture(2))
    guide_sound = Guide(1, audio=sound(6))
    voice = Reference("audio", audio=sound(11))
    moving = Reference("video_audio", picture(7, 2, 4), sound(38))
    sizes = {video: 12, guide_sound: 12, voice: 22, moving: 14 + 76}
    for chosen in itertools.product((False, True), repeat=4):
        parts = [part for part, wanted in zip(sizes, chosen) if wanted]
        made = job(
            canvas=canvas,
            guides=tuple(part for part in parts if isinstance(part, Guide)),
            references=tuple(part for part in parts if isinstance(part, Reference)),
            num_forwards=1,
        )
        result = sample(small_dit(), made)
        assert result.num_rows == 5 + canvas.rows_video + canvas.rows_audio + sum(sizes[part] for part in parts)
        assert result.latent.fits(canvas)


# ---- modulation tables


@pytest.mark.parametrize("kind", ["plain", "masks, guides, references"])
def test_tables_before_the_loop_equal_tables_by_forward(kind, monkeypatch):
    made = split_jobs()[kind]
    if made.masks is not None:  # more levels than one batch of table rows holds
        ramp = torch.linspace(0, 1, 7 * 4 * 6).reshape(7, 4, 6)
        made = replace(made, masks=Masks.make(ramp, torch.linspace(0, 1, 74).reshape(2, 37)))
    before = sample(small_dit(), made)
    monkeypatch.setattr(step_plans, "MAX_TABLE_PAIRS", 0)
    by_forward = sample(small_dit(), made)
    assert before.tables_before_loop and not by_forward.tables_before_loop
    assert same(before.latent, by_forward.latent)
    layout = PackedLayout.of(made.text.tags, made.canvas, made.guides, made.references)
    planned = plan_steps(layout, made.schedule, made.masks)
    assert (len(planned.timesteps) > 64) == (made.masks is not None)
