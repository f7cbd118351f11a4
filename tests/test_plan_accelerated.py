"""The plan counts the forwards that run: what an accelerator surely leaves out is neither computed nor loaded."""

from __future__ import annotations

import pytest

from h3_runtime.accelerators import BY_NAME, spec_of
from h3_runtime.accelerators.presets import accelerate
from h3_runtime.geometry import Canvas
from h3_runtime.memory.plan import plan
from h3_runtime.memory.plan_lines import plan_lines
from h3_runtime.memory.probe import Card, Host
from h3_runtime.memory.rows import RenderSizes
from h3_runtime.memory.weights import released
from h3_runtime.sampler import sample

from .small_jobs import clip, job, small_dit

SIZES = RenderSizes(Canvas(1344, 768, 124))


def planned(*parts: str, sizes: RenderSizes = SIZES):
    return plan(sizes, released(), Card.given(12), Host.given(64), accelerate(parts).built())


@pytest.mark.parametrize(
    "given",
    [
        {"num_forwards": 20},
        {"num_forwards": 49},
        {"num_forwards": 12, "denoise": 0.5, "source": clip()},
        {"num_forwards": 20, "start": 3, "source": clip()},
        {"num_forwards": 20, "stop": 11},
        {"num_forwards": 20, "start": 4, "stop": 15, "source": clip()},
        {"num_forwards": 3},
    ],
)
@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_the_forwards_foreseen_are_those_that_run(given, share):
    spec = spec_of("forecast", calls=share, sound_limit=10.0)
    made = job(**given, accelerators=(spec,))
    (forecast,) = (BY_NAME[name](BY_NAME[name].Options(**dict(options))) for name, options in made.accelerators)
    assert forecast.planned_calls(made.schedule) == sample(small_dit(), made).dit_calls


def test_the_time_is_that_of_the_forwards_that_run():
    full, half = planned(), planned("forecast:calls=0.5")
    whole, fewer = full.stage("denoise"), half.stage("denoise")
    assert whole.passes == 49 and fewer.passes == 24
    assert fewer.seconds == pytest.approx(whole.seconds, rel=0.2), "a forward that runs takes what it took"
    assert half.seconds < 0.7 * full.seconds
    said = "\n".join(plan_lines(half))
    assert "x 24" in said and "25 of 49 forwards are left out" in said
    assert "left out by what" not in "\n".join(plan_lines(full))


def test_what_only_the_data_decides_is_not_promised():
    for part in ("block-cache", "sparse", "attention"):
        assert planned(part).stage("denoise").passes == 49
