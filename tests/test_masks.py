"""The laws of noise masks: from pixels to tokens, what masked tokens are fed and told, how they move, what is kept.

pixels ─max─▶ latent cells ─max─▶ tokens, up to k / 256       1 regenerates, 0 keeps
token m:   starts at (1 - m * s0) * source + m * s0 * noise   walks m * sigma   ends restored where cells are 0
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from h3_runtime.geometry import Canvas, frame_groups
from h3_runtime.job import AVLatent, Guide, Masks, Reference, RenderJob, pool_pixels, pool_tokens
from h3_runtime.layout import PackedLayout, audio_to_rows, patchify_video, rows_to_audio, unpatchify_video
from h3_runtime.sampler import Rows, draw_noise, sample
from h3_runtime.schedule import Schedule, euler_step, mix, plan_schedule
from h3_runtime.steps import plan_steps

from .small_jobs import (
    CANVAS,
    FORWARDS,
    Probe,
    clip,
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

CELLS, LATENTS = (7, 4, 6), (2, 37)
SOURCE = clip(seed=4)


def video_mask(value: float = 0.0) -> torch.Tensor:
    return torch.full(CELLS, float(value))


def sound_mask(value: float = 0.0) -> torch.Tensor:
    return torch.full(LATENTS, float(value))


def mixed_levels() -> tuple[torch.Tensor, torch.Tensor]:
    """Cell and sound masks that hold 0, 1 and values between, cells of one token unequal."""
    cells = torch.tensor([0.0, 0.25, 1.0, 0.5, 0.75]).repeat(34)[: math.prod(CELLS)].reshape(CELLS).clone()
    cells[0, :2, :2] = cells[3, 2:, 4:] = cells[6] = 0.0
    cells[2] = 1.0
    levels = torch.tensor([0.0, 1.0, 0.5]).repeat(25)[: math.prod(LATENTS)].reshape(LATENTS)
    return cells, levels


def masked(video: torch.Tensor | None = None, audio: torch.Tensor | None = None, **changes) -> RenderJob:
    """A job with masks made as a person's are; ``mixed_levels`` where none are given."""
    if video is None and audio is None:
        video, audio = mixed_levels()
    return job(masks=Masks.make(video, audio), source=SOURCE, **changes)


def spread(tokens: torch.Tensor) -> torch.Tensor:
    """Tokens [T, h/2, w/2] -> cells [T, h, w]."""
    return tokens.repeat_interleave(2, 1).repeat_interleave(2, 2)


def guided() -> dict:
    return {
        "guides": (Guide(0, picture(), keyframe=True), Guide(9, picture(2, seed=1), sound(6), strength=0.4)),
        "references": (Reference("video_audio", picture(2, 4, 4), sound(9)), Reference("image", picture(1, 2, 4))),
    }


def hearsay(velocity):
    """A probe that answers with ``velocity`` = (video rows, audio rows), whatever it is fed."""
    return Probe(lambda rows, step: Rows(*velocity))


# ---- from pixels to cells and tokens


def test_every_frame_sets_its_own_latent():
    starts = [0, 1, 5, 9, 13, 17, 18, 22, 26, 30, 34, 35, 39]  # 39 frames are 12 latents
    assert [group.start for group in frame_groups(12)] == starts[:-1]
    for frame in range(39):
        pixels = torch.zeros(39, 32, 64)
        pixels[frame, 5, 40] = 1.0
        cells = pool_pixels(pixels, 12)
        assert cells.nonzero().tolist() == [[sum(frame >= s for s in starts[1:]), 0, 2]]
    pixels = torch.zeros(22, 64, 96)
    pixels[17] = 1.0
    cells = pool_pixels(pixels, 7)
    assert cells[5].all() and cells.sum() == 4 * 6


def test_one_picture_masks_every_frame():
    pixels = torch.zeros(1, 64, 96)
    pixels[0, 63, 0] = 0.5
    cells = pool_pixels(pixels, 7)
    assert cells.shape == CELLS and (cells[:, 3, 0] == 0.5).all() and cells.sum() == 7 * 0.5


def test_one_white_pixel_sets_one_token():
    for y, x in ((0, 0), (15, 31), (16, 32), (31, 31), (32, 95), (63, 64)):
        pixels = torch.zeros(22, 64, 96)
        pixels[9, y, x] = 1.0
        masks = Masks.make(pool_pixels(pixels, 7))
        assert masks.video.nonzero().tolist() == [[3, y // 16, x // 16]]
        assert masks.video_tokens.nonzero().flatten().tolist() == [3 * 6 + (y // 32) * 3 + x // 32]
        assert masks.audio is None and masks.audio_tokens is None


def test_tokens_take_the_largest_cell():
    cells = torch.zeros(CELLS)
    cells[1, 0, 1], cells[1, 1, 0], cells[1, 2, 5] = 0.25, 0.5, 0.75
    tokens = pool_tokens(cells)
    assert tokens.shape == (7, 2, 3) and tokens.sum() == 1.25
    assert (tokens[1, 0, 0], tokens[1, 1, 2]) == (0.5, 0.75)


@pytest.mark.parametrize(("height", "width"), [(3, 6), (4, 5), (3, 5), (1, 1), (5, 7)])
def test_odd_sizes_repeat_their_edge(height, width):
    cells = draw(3, height, width) - 5  # all below zero: padding with zeros would win every edge
    tokens = pool_tokens(cells)
    assert tokens.shape == (3, (height + 1) // 2, (width + 1) // 2)
    for t, i, j in ((t, i, j) for t in range(3) for i in range(tokens.shape[1]) for j in range(tokens.shape[2])):
        assert tokens[t, i, j] == cells[t, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].max()
    odd = pool_pixels(torch.ones(1, 16 * height - 5, 16 * width - 1), 2)
    assert odd.shape == (2, height, width) and odd.all()


def test_levels_are_rounded_up_to_256ths():
    levels = torch.tensor([0.0, 1e-9, 1 / 256, 1 / 255, 0.5, 0.5001, 128 / 255, 254 / 255, 255.5 / 256, 1.0])
    made = Masks.make(levels.expand(2, -1)[:, :, None].repeat(1, 1, 2)).video[0, :, 0]
    assert (made * 256).tolist() == [0, 1, 1, 2, 128, 129, 129, 255, 256, 256]
    kept = Masks.make(made.expand(2, -1)[:, :, None])
    assert torch.equal(kept.video[0, :, 0], made)  # already on the grid: it stays


def test_sound_rows_are_left_then_right():
    levels = sound_mask()
    levels[0, 3], levels[1, 5] = 1.0, 0.5
    tokens = Masks.make(audio=levels).audio_tokens
    assert tokens.nonzero().flatten().tolist() == [3, 37 + 5] and tokens[42] == 0.5
    assert torch.equal(tokens[:, None], audio_to_rows(levels[None, None]))


# ---- one everywhere, zero everywhere


def test_all_one_is_no_mask():
    assert Masks.make(video_mask(1), sound_mask(1)) is None and Masks.make() is None
    assert Masks.make(video_mask(0.9999), None) is None  # rounded up
    only = Masks.make(video_mask(1), sound_mask(0.5))
    assert only.video is None and only.audio is not None
    assert same(render(job()), render(masked(video_mask(1), sound_mask(1))))


@pytest.mark.parametrize("conditions", [{}, guided()], ids=["plain", "guides and references"])
def test_ones_that_are_not_dropped_change_no_bit(conditions):
    """The masked path itself, given ones: same labels row by row, same start, same steps."""
    free = job(**conditions)
    forced = replace(free, masks=Masks(video_mask(1), sound_mask(1)), source=SOURCE)
    assert same(render(free), render(forced))
    layout = PackedLayout.of(free.text.tags, CANVAS, free.guides, free.references)
    for a, b in zip(*(plan_steps(layout, free.schedule, made.masks).forwards for made in (free, forced))):
        assert all(torch.equal(x, y) for x, y in zip(row_labels(a), row_labels(b)))
    beside = render(masked(video_mask(1), mixed_levels()[1], **conditions))
    assert same(beside, render(replace(forced, masks=Masks(video_mask(1), mixed_levels()[1]))))


@pytest.mark.parametrize("changes", [{}, guided(), {"denoise": 0.5}, {"start": 2}, {"num_forwards": 1}], ids=str)
def test_all_zero_returns_the_source(changes):
    assert same(render(masked(video_mask(0), sound_mask(0), **changes)), SOURCE)


def test_one_stream_kept():
    """Kept sound with a free picture, and the other way round: the kept stream is the source, the other is made."""
    silent = render(masked(audio=sound_mask(0)))
    assert torch.equal(silent.audio, SOURCE.audio) and relative(silent.video, SOURCE.video) > 0.1
    still = render(masked(video_mask(0)))
    assert torch.equal(still.video, SOURCE.video) and relative(still.audio, SOURCE.audio) > 0.1


# ---- what is kept


@pytest.mark.parametrize("conditions", [{}, guided()], ids=["plain", "guides and references"])
def test_kept_cells_are_the_source(conditions):
    made = masked(**conditions)
    result = render(made)
    kept = made.masks.video == 0
    assert torch.equal(result.video[:, :, kept], SOURCE.video[:, :, kept])
    assert not (result.video[:, :, ~kept] == SOURCE.video[:, :, ~kept]).any()
    silent = made.masks.audio == 0
    assert torch.equal(result.audio[:, :, silent], SOURCE.audio[:, :, silent])
    assert not (result.audio[:, :, ~silent] == SOURCE.audio[:, :, ~silent]).any()
    kept_tokens = spread(pool_tokens(made.masks.video)) == 0
    assert 0 < int(kept_tokens.sum()) < int(kept.sum())  # some kept cells stand inside regenerated tokens


def test_half_and_half():
    half = video_mask()
    half[:, :, :2] = 1.0
    result = render(masked(half))
    assert torch.equal(result.video[..., 2:], SOURCE.video[..., 2:])
    assert relative(result.video[..., :2], SOURCE.video[..., :2]) > 0.1


def test_a_kept_cell_inside_a_token_is_restored_at_the_end_only():
    cells = video_mask()
    cells[4, 2, 3] = 1.0
    made = masked(cells)
    token = torch.zeros(CELLS, dtype=torch.bool)
    token[4, 2:, 2:4] = True
    stopped = sample(small_dit(), replace(made, stop=FORWARDS - 1))
    assert not stopped.finished
    moved = (stopped.latent.video != SOURCE.video).all(dim=1)[0]
    assert torch.equal(moved, token)  # the whole token runs, the rest already equals the source
    finished = render(made)
    assert torch.equal((finished.video != SOURCE.video).any(dim=1)[0], cells == 1)


def test_kept_tokens_do_not_move_at_any_forward():
    made = masked()
    tokens = made.masks.video_tokens[:, None]
    for stop in range(1, FORWARDS):
        state = sample(small_dit(), replace(made, stop=stop)).latent
        kept = (tokens == 0)[:, 0]
        assert torch.equal(patchify_video(state.video)[kept], patchify_video(SOURCE.video)[kept])
        silent = made.masks.audio == 0
        assert torch.equal(state.audio[:, :, silent], SOURCE.audio[:, :, silent])


# ---- what the model is shown and told


@pytest.mark.parametrize("changes", [{}, guided(), {"start": 2}, {"denoise": 0.5}], ids=str)
def test_kept_picture_is_fed_a_little_noisy_and_kept_sound_clean(changes):
    made = masked(**changes)
    probe, noise = Probe(), draw_noise(made)
    sample(small_dit(), made, (probe,))
    source, drawn = patchify_video(SOURCE.video), patchify_video(noise.video)
    tokens, silent = made.masks.video_tokens, made.masks.audio_tokens == 0
    kept = tokens == 0
    near = 0.999 * source + 0.001 * drawn
    assert len(probe.fed) == made.schedule.num_forwards
    for rows in probe.fed:
        assert torch.equal(rows.video[kept], mix(source, drawn, 0.999)[kept])
        torch.testing.assert_close(rows.video[kept], near[kept], rtol=0, atol=1e-6)
        assert torch.equal(rows.audio[silent], audio_to_rows(SOURCE.audio)[silent])
    sigma, sigma_a = made.schedule.video[made.start], made.schedule.audio[made.start]
    level = (tokens * sigma)[:, None]
    want = (1 - level) * source + level * drawn
    torch.testing.assert_close(probe.fed[0].video[~kept], want[~kept], rtol=0, atol=2e-6)
    level = (made.masks.audio_tokens * sigma_a)[:, None]
    want = (1 - level) * audio_to_rows(SOURCE.audio) + level * noise.audio
    torch.testing.assert_close(probe.fed[0].audio, want, rtol=0, atol=2e-6)


def test_masks_leave_the_noise_alone():
    free, made = draw_noise(job(**guided())), draw_noise(masked(**guided()))
    assert torch.equal(free.video, made.video) and torch.equal(free.audio, made.audio)
    assert all(
        torch.equal(a, b) for a, b in zip(free.conditions + free.sound_guides, made.conditions + made.sound_guides)
    )


def test_labels():
    """min(1 - m * sigma, max(t_v, 0.999)), sound min(1 - m * sigma_a, 1); text, guides and references as ever."""
    made = masked(**guided(), text=text(6, vision=2))
    layout = PackedLayout.of(made.text.tags, CANVAS, made.guides, made.references)
    video = (1.0, 0.9, 0.5, 0.1, 0.0015, 0.0005, 0.0)  # the last two forwards have t_v above 0.999
    sound_sigmas = (1.0, 0.8, 0.3, 0.05, 0.0006, 0.0002, 0.0)
    schedule = Schedule(video, sound_sigmas, 0, 6)
    masked_plan = plan_steps(layout, schedule, made.masks)
    free_plan = plan_steps(layout, schedule)
    one = torch.tensor(1.0)
    for step, free, sigma, sigma_a in zip(masked_plan.forwards, free_plan.forwards, video, sound_sigmas):
        timesteps, modalities = row_labels(step)
        plain, tags = row_labels(free)
        assert torch.equal(modalities, layout.row_tags()) and torch.equal(tags, modalities)
        start = layout.target_audio.start
        assert torch.equal(timesteps[:start], plain[:start]) and bool((timesteps[:6] == one - sigma).all())
        ceiling = torch.maximum(one - torch.tensor(sigma), torch.tensor(0.999))
        want = torch.minimum(one - made.masks.video_tokens * torch.tensor(sigma), ceiling)
        assert torch.equal(timesteps[layout.target_video.start :], want)
        want = torch.minimum(one - made.masks.audio_tokens * torch.tensor(sigma_a), one)
        assert torch.equal(timesteps[start : layout.target_video.start], want)
        for runs, segment in ((step.video_runs, layout.target_video), (step.audio_runs, layout.target_audio)):
            own = torch.cat([step.timesteps[run.row].expand(run.stop - run.start) for run in runs])
            assert torch.equal(own, timesteps[segment.start : segment.stop])
        assert torch.equal(masked_plan.timesteps[step.timestep_ids], step.timesteps)


def test_tables_hold_only_pairs_in_use():
    made = masked()
    layout = PackedLayout.of(made.text.tags, CANVAS, (), ())
    plan = plan_steps(layout, made.schedule, made.masks)
    used = set()
    for step in plan.forwards:
        timesteps, modalities = row_labels(step)
        used |= set(zip(timesteps.tolist(), modalities.tolist()))
        assert set(step.pairs.tolist()) == {
            int((step.timesteps == t).nonzero()) * 3 + m for t, m in zip(timesteps, modalities.tolist())
        }
    held = {(plan.timesteps[pair // 3].item(), int(pair % 3)) for pair in plan.pairs}
    assert held == used


# ---- how masked tokens move


@pytest.mark.parametrize("forwards", [1, 4, 20])
@pytest.mark.parametrize("denoise", [1.0, 0.5])
def test_the_true_velocity_keeps_every_token_on_its_line(forwards, denoise):
    """The mask acts once: with v = x0 - noise a state is (1 - m * sigma) * x0 + m * sigma * noise at every forward."""
    made = masked(num_forwards=forwards, denoise=denoise)
    noise, levels = draw_noise(made), made.masks
    source = Rows(patchify_video(SOURCE.video), audio_to_rows(SOURCE.audio))
    drawn = Rows(patchify_video(noise.video), noise.audio)
    probe = hearsay((source.video - drawn.video, source.audio - drawn.audio))
    result = sample(small_dit(), made, (probe,))
    tokens = Rows(levels.video_tokens[:, None], levels.audio_tokens[:, None])
    moving = Rows(*(t[:, 0] > 0 for t in tokens))
    for index, rows in enumerate(probe.fed):
        for fed, x0, other, m, alive, sigmas in zip(
            rows, source, drawn, tokens, moving, (made.schedule.video, made.schedule.audio)
        ):
            line = (1 - m.double() * sigmas[index]) * x0 + m.double() * sigmas[index] * other
            torch.testing.assert_close(fed[alive].double(), line[alive], rtol=0, atol=1e-5)
    torch.testing.assert_close(result.latent.video, SOURCE.video, rtol=0, atol=1e-5)
    torch.testing.assert_close(result.latent.audio, SOURCE.audio, rtol=0, atol=1e-5)


def test_a_masked_step_moves_m_times_as_far():
    x, velocity = draw(60, 8), draw(60, 8, seed=1)
    mask = torch.linspace(0, 1, 60)[:, None]
    grid = plan_schedule(9).video
    for sigma, following in itertools.pairwise(grid):
        moved = euler_step(x, velocity, sigma, following, mask)
        torch.testing.assert_close(moved, x + mask * velocity * (sigma - following), rtol=0, atol=2e-6)
        assert torch.equal(moved[0], x[0])
        assert torch.equal(
            euler_step(x, velocity, sigma, following, torch.ones(60, 1)), euler_step(x, velocity, sigma, following)
        )
        own = euler_step(x, velocity, 0.25 * sigma, 0.25 * following)  # m = 1/4 is a quarter of the clock
        torch.testing.assert_close(
            own, euler_step(x, velocity, sigma, following, torch.full((60, 1), 0.25)), rtol=0, atol=2e-6
        )


def lattice(video: torch.Tensor) -> float:
    """How much of a latent's variance repeats with every 2x2 token: that of the means over all tokens."""
    _, channels, frames, height, width = video.shape
    cells = video.reshape(channels, frames, height // 2, 2, width // 2, 2)
    means = cells.mean(dim=(1, 2, 4))  # [C, 2, 2]
    return ((means - means.mean(dim=(1, 2), keepdim=True)).square().mean() / video.var()).item()


def test_a_uniform_mask_prints_no_lattice():
    canvas = Canvas(384, 256, 22)  # 7 x 8 x 12 tokens: enough for their means to settle
    source = clip(canvas, seed=2)
    cells = (canvas.latent_t, canvas.latent_h, canvas.latent_w)
    for seed in range(2):
        made = [
            job(canvas=canvas, num_forwards=3, source=source, masks=Masks.make(torch.full(cells, m)), seed=seed)
            for m in (1.0, 0.5)
        ]
        free, half = (render(one).video for one in made)
        assert lattice(half) <= 1.05 * lattice(free), (lattice(half), lattice(free))
        noise = draw_noise(made[1])
        sounds = torch.zeros(canvas.rows_audio, 32)
        probe = hearsay((patchify_video(source.video - noise.video), sounds))
        true = render(made[1], probe).video
        assert lattice(true - source.video) * (true - source.video).var().item() < 1e-12


def test_fractional_masks_edit_at_partial_strength():
    """The larger m, the farther from the source; m = 1 is the free render, and all of it without a jump."""
    levels = (1 / 256, 0.25, 0.5, 0.75, 1.0)
    results = [render(masked(video_mask(m), sound_mask(m), num_forwards=8)) for m in levels]
    for stream in ("video", "audio"):
        apart = [relative(getattr(result, stream), getattr(SOURCE, stream)) for result in results]
        assert apart == sorted(apart) and apart[0] < 0.02, apart
    assert same(results[-1], render(job(num_forwards=8)))


def test_masks_touch_neither_guides_nor_references():
    """Condition rows are fed and labelled the same with masks as without."""
    embedded = []

    class Looking(Probe):
        def wrap_blocks(self, call):
            def look(h, step, start, stop):
                embedded.append(h[: layout.target_audio.start].clone())
                return call(h, step, start, stop)

            return look

    free, made = job(**guided(), num_forwards=2), masked(**guided(), num_forwards=2)
    layout = PackedLayout.of(free.text.tags, CANVAS, free.guides, free.references)
    for one in (free, made):
        sample(small_dit(), one, (Looking(),))
    assert len(embedded) == 4 and all(torch.equal(embedded[0], rows) for rows in embedded[1:])


def test_masks_beside_guides_and_references_still_listen_to_them():
    parts = guided()
    whole = render(masked(**parts))
    for name in parts:
        other = render(masked(**{**parts, name: ()}))
        assert not torch.equal(whole.video, other.video) and not torch.equal(whole.audio, other.audio)


def test_the_kept_part_conditions_the_rest():
    """What is kept reaches what is made: another source in the kept half changes the other half."""
    half = video_mask()
    half[:, :, :2] = 1.0
    changed = SOURCE.video.clone()
    changed[..., 2:] += 1.0
    results = [render(job(masks=Masks.make(half), source=AVLatent(v, SOURCE.audio))) for v in (SOURCE.video, changed)]
    assert relative(results[0].video[..., :2], results[1].video[..., :2]) > 1e-3


def test_rows_and_latents_are_one_order():
    """Token order of masks is that of the rows they multiply."""
    cells = draw(*CELLS).abs()
    rows = patchify_video(spread(pool_tokens(cells))[None, None].expand(1, 24, -1, -1, -1))
    assert torch.equal(rows, pool_tokens(cells).flatten()[:, None].expand(-1, 96))
    assert torch.equal(unpatchify_video(patchify_video(SOURCE.video), CELLS), SOURCE.video)
    assert torch.equal(rows_to_audio(audio_to_rows(SOURCE.audio)), SOURCE.audio)
