"""H3 Accelerate without a ComfyUI: its choices are the registry's, its chains reach the sampler, refusals are told."""

from __future__ import annotations

import pytest
import torch

from .comfy_graphs import CARRIED, full_graphs


@pytest.fixture(scope="module")
def given(pack) -> dict:
    """A sampler's inputs on the small model: 96x64, 22 frames, five steps."""
    (clip,) = pack.run("H3RuntimeLoadTextEncoder", text_encoder=CARRIED)
    (model,) = pack.run("H3RuntimeLoadModel", model=CARRIED)
    latent, *_ = pack.run("H3RuntimeEmptyLatent", width=96, height=64, frames=22)
    positive, *_ = pack.run("H3RuntimeEncodePrompt", clip=clip, prompt="x")
    return {"model": model, "positive": positive, "latent": latent, "steps": 5, "resume": False}


def test_the_node_offers_every_part_with_its_options(pack):
    """Built from the registry: another accelerator or option is another choice or widget here, with its limits."""
    from h3_runtime.accelerators import ACCELERATORS
    from h3_runtime.accelerators.presets import JOB_PARTS, PRESETS

    choices = {choice.key: choice.inputs for choice in pack.accelerate.choices()}
    assert list(choices) == ["preset", *(kind.name for kind in ACCELERATORS), *JOB_PARTS]
    assert list(choices["preset"][0].options) == list(PRESETS)
    for kind in ACCELERATORS:
        defaults = kind.Options()
        assert {widget.id: widget.default for widget in choices[kind.name]} == vars(defaults)
        for widget in choices[kind.name]:
            for end in ("min", "max"):
                if getattr(widget, end, None) is not None:
                    kind.Options(**{widget.id: getattr(widget, end)})  # H3Error outside the limits


def test_parts_are_chained_and_what_excludes_each_other_is_refused(pack, given):
    def part(name, before=None, **options):
        chain = {} if before is None else {"acceleration": before}
        return pack.run("H3RuntimeAccelerate", accelerator={"accelerator": name, **options}, **chain)[0]

    made = part("second-order", part("forecast", calls=0.4))
    assert made.solver == "second-order" and dict(made.accelerators[0][1])["calls"] == 0.4
    with pytest.raises(pack.h3.H3Error, match="forecast and block-cache exclude each other"):
        pack.run("H3RuntimeSampler", **given, acceleration=part("block-cache", part("forecast")))
    preset = part("preset", preset="fast")
    assert [name for name, _ in preset.accelerators] == ["forecast"] and "left out" in preset.notes[1]


def test_the_sampler_tells_what_engaged(pack, given):
    (fast,) = pack.run(
        "H3RuntimeAccelerate",
        accelerator={"accelerator": "forecast", "calls": 0.1, "warmup": 2, "tail": 1, "sound_limit": 10.0},
    )
    latent, report = pack.run("H3RuntimeSampler", **given, acceleration=fast)
    plain, base = pack.run("H3RuntimeSampler", **given)
    assert "forecast: 2 of 5 forwards were foretold" in report and "forecast" not in base
    picture, other = (pack.av_latent.take_latent(made).clip.video for made in (latent, plain))
    assert not torch.equal(picture, other)
    few = pack.h3.Acceleration().and_part("few-step")
    with pytest.raises(pack.h3.H3Error, match="none of the LoRAs is known as one"):
        pack.run("H3RuntimeSampler", **given, acceleration=few)


def test_what_is_foreseen_is_what_the_run_says(pack):
    graph = full_graphs()["acceleration"]
    told = pack.foresee.forecast(graph, {})
    title = pack.walk(graph)["sampler"][1].splitlines()[0]
    fidelity = told["labels"]["sampler"]["fidelity"]
    assert fidelity["title"] == title
    assert {"accelerator/forecast", "solver/second-order"} <= {part["name"] for part in fidelity["parts"]}
    both = {
        **graph,
        "second": {**graph["second"], "inputs": {**graph["second"]["inputs"], "accelerator": "block-cache"}},
    }
    assert "exclude each other" in pack.foresee.forecast(both, {})["labels"]["sampler"]["error"]
