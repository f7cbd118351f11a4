"""Accelerators on the small DiT: what they leave alone, what they decide by, what they hold, and what they say."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from h3_runtime.accelerators import ACCELERATORS, BY_NAME, KERNELS, Accelerator, build, checked, parse, spec_of
from h3_runtime.accelerators import attention as kernels
from h3_runtime.accelerators.forecast import Window, forecast_weights, place_calls
from h3_runtime.accelerators.sparse import sparse_attention
from h3_runtime.bench_accelerators import (
    BUDGETS,
    budget_ways,
    carried,
    field_errors,
    forecasting_ways,
    model_errors,
    model_ways,
    own_cost,
    solver_errors,
)
from h3_runtime.errors import H3Error
from h3_runtime.job import Guide, Masks, Reference
from h3_runtime.layout import PackedLayout
from h3_runtime.models.attention import Where, dense_attention
from h3_runtime.recovery import KeptState
from h3_runtime.sampler import sample
from h3_runtime.schedule import plan_schedule
from h3_runtime.solvers import SecondOrder, Sigmas

from .small_jobs import (
    CANVAS,
    ENGAGED,
    Crash,
    Probe,
    clip,
    draw,
    engaged,
    job,
    picture,
    relative,
    render,
    same,
    small_dit,
    sound,
    text,
)
from .test_streaming import hollow_dit, placed


class Layers(Probe):
    """Which blocks run, forward by forward."""

    name = "layers"

    def __init__(self):
        super().__init__()
        self.ran: list[tuple[int, int]] = []

    def wrap_block(self, call):
        def block(index, h, step):
            self.ran.append((step.index, index))
            return call(index, h, step)

        return block


# --- the door --------------------------------------------------------------------------------------------------------


def test_words_of_the_command_line_become_specs():
    assert parse("forecast") == ("forecast", {})
    _, options = parse("attention:kernel=sage-2,protect=false,warmup=3")
    assert options == {"kernel": "sage-2", "protect": False, "warmup": 3}
    assert parse("forecast:ridge=1e-3,sound-limit=0.5")[1] == {"ridge": 1e-3, "sound_limit": 0.5}
    spec = spec_of("block-cache", video=0.2)
    assert dict(spec[1])["video"] == 0.2 and set(dict(spec[1])) == {"video", "audio", "warmup", "tail", "most"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["teacache"], "is not built: choose from attention, sparse"),
        (["forecast:speed=2"], "has no option 'speed': it has calls"),
        (["forecast:calls=2"], "calls is 2: give a number from 0.1 to 1"),
        (["forecast:warmup=1.5"], "warmup is 1.5: give a whole number"),
        (["forecast:calls"], "cannot be read at 'calls'"),
        (["attention:kernel=magic"], "kernel is 'magic': give one of auto"),
        (["attention:protect=1"], "give true or false"),
        (["forecast", "block-cache"], "exclude each other .both leave out forwards"),
        (["compile", "block-cache"], "exclude each other .a step cache beside compiled"),
        (["forecast", "compile"], "exclude each other"),
        (["sparse", "attention"], "exclude each other .both replace the attention"),
        (["sparse", "sparse"], "given twice"),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_sentence(words, said):
    with pytest.raises(H3Error, match=said) as caught:
        checked([spec_of(name, **options) for name, options in map(parse, words)])
    assert "\n" not in str(caught.value)


def test_a_job_with_an_accelerator_is_another_job():
    plain = job()
    prints = {replace(plain, accelerators=specs).fingerprint() for specs in ((), (engaged("forecast"),))}
    prints.add(replace(plain, accelerators=(spec_of("forecast"),)).fingerprint())
    prints.add(replace(plain, solver="second-order").fingerprint())
    assert len(prints) == 4


@pytest.mark.parametrize("name", BY_NAME)
def test_defaults_can_be_built_and_hold_nothing_before_they_run(name):
    made = BY_NAME[name]()
    assert made.name == name and made.words.endswith(".") and made.options == BY_NAME[name].Options()


def test_every_accelerator_has_settings_that_engage_it():
    assert set(ENGAGED) == {kind.name for kind in ACCELERATORS}


# --- every accelerator -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in ENGAGED if name != "compile"])
def test_it_engages_says_so_and_resumes_bit_for_bit(name):
    """Also after a crash inside a forward, when its own state is half-way through it."""
    made = job(num_forwards=6, accelerators=(engaged(name),))
    whole = sample(small_dit(), made)
    assert not any("did not engage" in note for note in whole.notes) and whole.stats[name]
    assert not same(whole.latent, render(job(num_forwards=6)))
    for crash_at in (2, 4):
        kept = KeptState()

        def stop(done, total, seconds, crash_at=crash_at):
            if done == crash_at:
                raise Crash

        with pytest.raises(Crash):
            sample(small_dit(), made, progress=stop, recovery=kept)
        again = sample(small_dit(), made, recovery=kept)
        assert same(again.latent, whole.latent) and again.stats == whole.stats and again.notes == whole.notes


@pytest.mark.parametrize("name", ["block-cache", "forecast", "sparse", "attention"])
def test_one_that_does_not_engage_says_so(name):
    options = {
        "block-cache": {"video": 0.0},
        "forecast": {"calls": 1.0},
        "sparse": {"keep": 1.0},
        "attention": {"kernel": "flash-2", "missing": "sdpa"},
    }
    result = sample(small_dit(), job(accelerators=(spec_of(name, **options[name]),)))
    assert "did not engage" in result.notes[0]
    assert same(result.latent, render(job()))


@pytest.mark.parametrize("name", ["block-cache", "forecast"])
def test_blocks_that_are_left_out_are_not_run(name):
    layers = Layers()
    result = sample(small_dit(), job(num_forwards=6, accelerators=(engaged(name),)), [layers])
    first, rest = ({forward for forward, block in layers.ran if block == index} for index in (0, 1))
    assert rest == {0, 1, 5} if name == "forecast" else {0, 1} <= rest < set(range(6))
    assert first == (set(range(6)) if name == "block-cache" else rest)
    assert result.dit_calls == len(rest)


@pytest.mark.parametrize("name", ["sparse", "block-cache", "forecast"])
def test_guides_references_and_masks_keep_their_meaning(name):
    source, levels = clip(), (torch.arange(7 * 4 * 6).view(7, 4, 6) % 3) / 2
    masked = job(source=source, masks=Masks.make(levels, None), num_forwards=6, accelerators=(engaged(name),))
    kept = (masked.masks.video == 0).expand_as(source.video)
    result = render(masked)
    assert torch.equal(result.video[kept], source.video[kept]) and not same(result, source)
    guided = job(num_forwards=6, guides=(Guide(9, picture(), sound(5), 0.5),), accelerators=(engaged(name),))
    pictured = replace(guided, guides=(), references=(Reference("image", picture()),))
    for made in (guided, pictured):
        assert not same(render(made), render(job(num_forwards=6, accelerators=(engaged(name),))))


# --- forecasting -----------------------------------------------------------------------------------------------------


def test_the_fit_is_exact_for_what_its_polynomials_hold():
    for degree, values in ((0, [3.0] * 4), (1, [1.0, 4.0, 7.0, 10.0]), (2, [1.0, 9.0, 25.0, 49.0])):
        seen, at = [0, 3, 6, 9], 12
        truth = np.polyval(np.polyfit(seen, values, degree), at)
        weights = forecast_weights(seen, at, degree, 0.0)
        assert sum(weights) == pytest.approx(1) and np.dot(weights, values) == pytest.approx(truth)
        assert sum(forecast_weights(seen, at, degree, 5.0)) == pytest.approx(1), "a constant stays exact under a ridge"
    assert forecast_weights([4], 9, 3, 0.1) == [1.0]


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.75, 0.99, 1.0])
@pytest.mark.parametrize("begin", [0, 7])
def test_computed_forwards_keep_to_their_share_and_window(share, begin):
    schedule = plan_schedule(49)
    window = Window(begin + 3, 47)
    computed = place_calls(schedule.video, schedule.audio, begin, window, share)
    count = 49 - begin
    assert len(computed) == count and all(computed[:3]) and all(computed[-2:])
    assert sum(computed) <= max(5, share * count + 1e-9)
    if 0.25 <= share < 1:
        assert sum(computed) >= share * count - 2, "the share is used"
    assert all(computed) == (share == 1.0)


def test_short_runs_are_computed_whole():
    window = Window(3, 0)
    schedule = plan_schedule(2)
    assert place_calls(schedule.video, schedule.audio, 0, window, 0.1) == [True, True]


class Shifted(Accelerator):
    """Blocks that write into the sound rows what ``values`` says for each forward."""

    name = "shifted"

    def __init__(self, values):
        self.values = values

    def prepare(self, dit, job, layout, steps):
        self.rows = layout.target_audio

    def wrap_blocks(self, call):
        def blocks(h, step, start, stop):
            h[self.rows.start : self.rows.stop] = self.values[step.index]
            return h

        return blocks


def test_the_sound_is_protected():
    """A sound that jumps where the fit expects none makes the next forward a computed one."""
    options = {"calls": 0.5, "warmup": 2, "tail": 1, "degree": 1, "window": 2}
    calm, jumps = [1.0] * 12, [1.0, 1.0, *[1.0 if k < 5 else 5.0 + k % 2 for k in range(2, 12)]]
    for values, expected in ((calm, 0), (jumps, 1)):
        made = job(num_forwards=12, accelerators=(spec_of("forecast", **options, sound_limit=0.3),))
        stats = sample(small_dit(), made, [Shifted(values)]).stats["forecast"]
        assert (stats["computed_for_the_sound"] > 0) == bool(expected), stats
        assert stats["computed"] + stats["foretold"] == 12


@pytest.fixture(scope="module")
def errors() -> dict:
    return field_errors({(way, b): made for b in BUDGETS for way, made in forecasting_ways(b).items()})


@pytest.mark.parametrize("budget", BUDGETS)
def test_forecasting_beats_skipping_and_reuse_on_a_smooth_field(budget, errors):
    """Relative L2 to the full run of 49 forwards, median of 8 seeds."""
    found = {way: error for (way, share), error in errors.items() if share == budget}
    own = found["forecast"]
    assert own.calls <= 49 * budget and found["reuse"].calls == own.calls
    for rival in ("reuse", "fewer steps"):
        assert own.picture < found[rival].picture and own.sound < found[rival].sound, (budget, rival, found)
    assert own.sound <= own.picture, found


def test_and_on_the_small_model():
    """One seed here; ``bench accelerators`` has eight."""
    chosen = {name: way for name, way in model_ways().items() if name.endswith("%")}
    found = model_errors(small_dit(), chosen, seeds=[0])
    for share in ("25%", "50%", "75%"):
        own = found[f"forecast {share}"]
        for rival in (f"reuse {share}", f"fewer steps {share}"):
            assert own.picture < found[rival].picture and own.sound < found[rival].sound, (rival, found)
        assert own.sound <= own.picture and own.calls <= found[f"fewer steps {share}"].calls


@pytest.mark.parametrize("budget", BUDGETS)
def test_forecasting_on_the_carried_model_is_nearest_at_its_budget(carried_model, budget):
    """Below plain step skipping and below reuse, and the sound no further than the picture; one seed of the eight."""
    dit, job_of_a_prompt = carried_model
    ways = model_errors(dit, budget_ways(budget), seeds=[0], plain=job_of_a_prompt)
    forecast, *others = ways.values()
    assert all(forecast.calls <= other.calls for other in others)
    for other in others:
        assert forecast.picture < other.picture and forecast.sound < other.sound
    assert forecast.sound <= forecast.picture


@pytest.fixture(scope="module")
def carried_model():
    return carried()


def test_a_window_in_ram_gives_the_same_bits():
    device, ram = (
        render(job(num_forwards=6, accelerators=(spec_of("forecast", **{**ENGAGED["forecast"], "store": store}),)))
        for store in ("device", "ram")
    )
    assert same(device, ram)


# --- first-block cache -----------------------------------------------------------------------------------------------


class FirstBlock(Accelerator):
    """The first block adds ``changes[forward]`` = (picture, sound) to its rows; the others run as they are."""

    name = "first-block"

    def __init__(self, changes):
        self.changes = changes

    def prepare(self, dit, job, layout, steps):
        self.rows = (layout.target_video, layout.target_audio)

    def wrap_block(self, call):
        def block(index, h, step):
            if index:
                return call(index, h, step)
            for rows, change in zip(self.rows, self.changes(step.index)):
                h[rows.start : rows.stop] += change
            return h

        return block


@pytest.mark.parametrize(
    ("changes", "reused"),
    [
        (lambda k: (1.0, 1.0), True),
        (lambda k: (1.0, 1.0 + 0.2 * k), False),  # the picture stands still, the sound moves
        (lambda k: (1.0 + 0.2 * k, 1.0), False),
        (lambda k: (1.0 + 0.02 * k, 1.0), True),  # 0.02, 0.04, 0.06: below 0.08 until it has drifted
    ],
)
def test_both_streams_have_to_agree(changes, reused):
    made = job(num_forwards=8, accelerators=(spec_of("block-cache", warmup=2, tail=1, most=100),))
    stats = sample(small_dit(), made, [FirstBlock(changes)]).stats["block-cache"]
    assert (stats["reused"] > 0) == reused
    if changes(1)[0] == 1.02:
        assert stats["computed"] > 3, "small changes add up against the last computed forward"


def test_kept_rows_have_no_say():
    """All of the change is in rows that a mask lets move: 1 of 42 picture rows."""
    levels = torch.zeros(7, 4, 6)
    levels[0, :2, :2] = 1
    masked = job(num_forwards=8, source=clip(), masks=Masks.make(levels, None))
    moving = int(masked.masks.video_tokens.count_nonzero())
    assert moving == 1

    class OneRow(FirstBlock):
        def wrap_block(self, call):
            def block(index, h, step):
                if index:
                    return call(index, h, step)
                h[self.rows[0].start : self.rows[0].stop] += 1.0
                h[self.rows[0].start] += 0.3 * step.index
                h[self.rows[1].start : self.rows[1].stop] += 1.0
                return h

            return block

    spec = spec_of("block-cache", warmup=2, tail=1)
    for made, reused in ((job(num_forwards=8), True), (masked, False)):
        stats = sample(small_dit(), replace(made, accelerators=(spec,)), [OneRow(None)]).stats["block-cache"]
        assert (stats["reused"] > 0) == reused


def test_no_more_in_a_row_than_asked():
    layers = Layers()
    spec = spec_of("block-cache", video=10.0, audio=10.0, warmup=1, tail=0, most=2)
    sample(small_dit(), job(num_forwards=10, accelerators=(spec,)), [layers])
    assert [forward for forward, block in layers.ran if block == 1] == [0, 3, 6, 9]


# --- sparse ----------------------------------------------------------------------------------------------------------


def test_rows_that_are_not_picture_stay_dense():
    """Text, conditions and sound equal the dense result to rounding; picture rows do not."""
    seen = {}

    class Compare(Accelerator):
        name = "compare"

        def wrap_attention(self, call):
            def attention(q, k, v, where):
                out = call(q, k, v, where)
                if where == Where(0, 2, 0, 3):
                    seen["out"], seen["dense"] = out, dense_attention(q, k, v, where)
                return out

            return attention

    guided = job(num_forwards=4, guides=(Guide(9, picture(), sound(5)),))
    spec = engaged("sparse")
    sample(small_dit(), guided, [Compare(), *build((spec,))])
    start = PackedLayout.of(guided.text.tags, CANVAS, guided.guides, ()).target_video.start
    assert relative(seen["out"][:start], seen["dense"][:start]) < 1e-6
    assert relative(seen["out"][start:], seen["dense"][start:]) > 1e-3


def test_all_blocks_chosen_is_dense_attention():
    q, k, v = (draw(45, 2, 8, seed=s) for s in range(3))
    out = dense_attention(q, k, v, Where(0, 0, 0, 2)).clone()
    dense = out.clone()
    out[5:37] = 0
    sparse_attention(q, k, v, (5, 37), 8, 4, out)
    assert relative(out, dense) < 1e-6


def test_a_block_reads_itself_and_those_it_points_at():
    """Values tell which keys were read: block i's value is one-hot i."""
    blocks, size = 6, 4
    q, k = torch.zeros(blocks * size, 1, 8), torch.zeros(blocks * size, 1, 8)
    for index in range(blocks):
        k[index * size : (index + 1) * size, 0, index] = 4.0
        q[index * size : (index + 1) * size, 0, (index + 2) % blocks] = 4.0
    v = k.clone()
    out = torch.empty_like(v)
    sparse_attention(q, k, v, (0, blocks * size), size, 2, out)
    for index in range(blocks):
        read = set(out[index * size, 0].nonzero().flatten().tolist())
        assert read == {index, (index + 2) % blocks}


def test_chunks_of_gathered_keys_change_nothing(monkeypatch):
    q, k, v = (draw(64, 2, 8, seed=s) for s in range(3))
    outs = []
    for limit in (1 << 28, 1):
        monkeypatch.setattr("h3_runtime.accelerators.sparse.GATHERED", limit)
        outs.append(torch.zeros_like(v))
        sparse_attention(q, k, v, (4, 60), 8, 3, outs[-1])
    assert relative(*outs) < 1e-6


# --- attention kernels -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [130, 1500])
def test_the_twins_against_plain_attention(rows):
    q, k, v = (draw(rows, 2, 32, seed=s) for s in range(3))
    plain = KERNELS["sdpa-math"].run(q.double(), k.double(), v.double())
    assert relative(KERNELS["flash-eager"].run(q, k, v), plain) < 1e-6
    assert 1e-4 < relative(KERNELS["int8-eager"].run(q, k, v), plain) < 3e-2
    shifted = KERNELS["int8-eager"].run(q, k + 50.0, v)
    assert relative(shifted, plain) < 3e-2, "a shift that all keys share is taken out before they are rounded"


def test_the_int8_twin_rounds_as_its_papers_say():
    x = draw(1, 100, 16)
    values, scale = kernels.quantise_blocks(x, 64)
    assert values.abs().max() == 127 and torch.equal(values, values.round()) and values.shape == x.shape
    assert (values * scale - x).abs().max() <= scale.max() / 2 + 1e-6
    assert len(scale.unique()) == 2, "one scale per block"


@pytest.mark.parametrize("name", [name for name, kernel in KERNELS.items() if kernel.missing() is None])
def test_kernels_of_this_machine_run_in_a_render(name):
    result = sample(small_dit(), job(accelerators=(spec_of("attention", kernel=name),)))
    plain = render(job())
    assert result.stats["attention"]["kernel"] == name and result.paths == (f"attention/{name}",)
    assert relative(result.latent.video, plain.video) < (1e-5 if KERNELS[name].exact else 1e-1)


def test_a_missing_kernel_is_refused_by_name_and_told_by_auto():
    with pytest.raises(H3Error, match=r"sage-2 cannot run here .no GPU here.*: choose auto, or missing=sdpa"):
        sample(small_dit(), job(accelerators=(spec_of("attention", kernel="sage-2"),)))
    result = sample(small_dit(), job(accelerators=(spec_of("attention"),)))
    assert "no faster exact kernel here (flash-4: " in result.notes[0] and result.paths == ()


def test_rows_beside_the_picture_are_exact_under_a_rounding_kernel():
    spec = spec_of("attention", kernel="int8-eager")
    seen = []

    class Watch(Accelerator):
        name = "watch"

        def wrap_attention(self, call):
            def attention(q, k, v, where):
                out = call(q, k, v, where)
                seen.append((out, dense_attention(q, k, v, where)))
                return out

            return attention

    made = job(num_forwards=1)
    sample(small_dit(), made, [Watch(), *build((spec,))])
    start = PackedLayout.of(made.text.tags, CANVAS, (), ()).target_video.start
    out, dense = seen[0]
    assert relative(out[:start], dense[:start]) < 1e-6 < relative(out[start:], dense[start:])


def limits(name, rows, dtype=torch.bfloat16, width=128):
    return KERNELS[name].refusal(rows, dtype, width)


def test_kernels_have_limits_in_rows_dtypes_and_widths():
    assert limits("sage-2", 160_000) is None and "not safe above 160,000 rows" in limits("sage-2", 160_001)
    assert "does not take float32" in limits("flash-2", 1000, torch.float32)
    assert "heads of 64 or 128, not 96" in limits("sage-1", 1000, width=96)
    assert kernels.sage_2_function((9, 0))[0].endswith("sm90") and "fp16" in kernels.sage_2_function((8, 6))[0]
    assert "fp8" in kernels.sage_2_function((12, 0))[0]


def test_offsets_and_strides_are_checked_on_the_true_shapes():
    """Meta tensors: a strided view that spans more than 2^31 elements is copied, one that is so large is not run."""
    with torch.device("meta"):
        wide = torch.empty(300_000, 3, 56, 128)[:, 2]  # values inside a joined qkv
        fits = torch.empty(300_000, 8, 128)
        huge = torch.empty(2**31 // 1024, 8, 128)
        odd = torch.empty(1001, 8, 129)[:, :, :128]
    assert kernels.span(wide) > kernels.OFFSETS and kernels.laid_out(wide) is not wide
    assert kernels.laid_out(fits) is fits and not kernels.too_long(fits)
    assert kernels.too_long(huge) and not kernels.too_long(huge[:-1])
    assert kernels.laid_out(odd).stride() == (1024, 128, 1)


# --- compiled blocks -------------------------------------------------------------------------------------------------


def test_a_block_that_cannot_be_compiled_runs_plain_and_says_so(monkeypatch):
    def broken(function, **options):
        def fails(*arguments):
            arguments[1].mul_(0)  # half-way through the block, which works in place
            raise RuntimeError("no compiler on this machine\nlong trace")

        return fails

    monkeypatch.setattr(torch, "compile", broken)
    result = sample(small_dit(), job(accelerators=(spec_of("compile"),)))
    assert same(result.latent, render(job()))
    assert result.notes == ("compile did not engage, the plain block ran: no compiler on this machine",)
    assert result.paths == () and result.stats["compile"]["plain_calls"] == 10


def test_attention_inside_a_compiled_block_knows_where_it_is(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    seen = []

    class Spots(Accelerator):
        name = "spots"

        def wrap_attention(self, call):
            def attention(q, k, v, where):
                seen.append((where.forward, where.block))
                return call(q, k, v, where)

            return attention

    made = job(num_forwards=2, accelerators=(spec_of("compile"),))
    assert same(sample(small_dit(), made, [Spots()]).latent, render(job(num_forwards=2)))
    assert seen == [(0, 0), (0, 1), (1, 0), (1, 1)]


# --- what they cost --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["forecast", "block-cache"])
def test_own_arithmetic_at_full_size(name):
    """At most 1 % of a block of the release, and no byte beyond what the plan is told."""
    cost = own_cost(name)
    assert 0 < cost.share_of_block <= 0.01 and cost.live_bytes <= cost.said_bytes * 1.001
    assert cost.live_bytes > cost.said_bytes * 0.9, "nor is the plan told much more"


def test_a_window_in_ram_is_planned_in_ram():
    layout = PackedLayout.of(text().tags, CANVAS, (), ())
    config = small_dit().config
    device, ram = (BY_NAME["forecast"](BY_NAME["forecast"].Options(store=store)) for store in ("device", "ram"))
    assert device.host_bytes(layout, config) == 0 < ram.host_bytes(layout, config)
    assert device.bytes(layout, config) - ram.bytes(layout, config) == ram.host_bytes(layout, config)
    assert ram.host_bytes(layout, config, 4) == 2 * ram.host_bytes(layout, config, 2)


# --- the second-order solver -----------------------------------------------------------------------------------------


def test_the_second_order_solver_is_of_second_order():
    """On the field's own path: half the step, a quarter of the error (Euler: half), sound and picture."""
    euler, second = (solver_errors(name, (48, 96), seeds=[0], path=400) for name in ("euler", "second-order"))
    for stream in ("picture", "sound"):
        first = [getattr(euler[f"euler {count}"], stream) for count in (48, 96)]
        better = [getattr(second[f"second-order {count}"], stream) for count in (48, 96)]
        assert 1.6 < first[0] / first[1] < 2.4 and 3.0 < better[0] / better[1], (stream, first, better)
        assert better[0] < 0.5 * first[0]


def test_unequal_steps_are_weighed():
    """A velocity that is linear in sigma is followed exactly after the first step, whatever the steps; under a mask m
    the row moves m times as far."""
    sigmas = (1.0, 0.9, 0.55, 0.5, 0.1, 0.0)
    for m in (1.0, 0.25):
        solver, x, mask = SecondOrder(), torch.zeros(1, 1), torch.full((1, 1), m)
        for index, (now, after) in enumerate(itertools.pairwise(sigmas)):
            before, x = x, solver.step("video", x, torch.full((1, 1), now), Sigmas(now, after), mask)
            if index:
                assert (x - before).item() == pytest.approx(m * (now**2 - after**2) / 2, rel=1e-5)


def test_a_masked_row_keeps_what_it_keeps_under_the_second_order_solver():
    source = clip()
    ones, zeros = (Masks.make(torch.full((7, 4, 6), value), None) for value in (1.0, 0.0))
    plain = render(job(solver="second-order"))
    assert same(render(job(solver="second-order", source=source, masks=ones)), plain)
    assert torch.equal(render(job(solver="second-order", source=source, masks=zeros)).video, source.video)
    assert not same(plain, render(job()))


def test_streamed_blocks_that_are_left_out_are_not_copied():
    made = job(num_forwards=6, accelerators=(engaged("forecast"),))
    layers = placed("ram")
    assert same(sample(hollow_dit(), made, layers=layers).latent, render(made))
    assert layers.blocks.stream.copies == 3 * small_dit().config.layers
