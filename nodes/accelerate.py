"""Acceleration, one node built from the runtime's registry.

H3 Accelerate (a preset, or one part with its options) ─▶ H3_ACCELERATION ─▶ H3 Accelerate ... ─▶ H3 Sampler
"""

from __future__ import annotations

from dataclasses import fields

from . import host
from .render import FOLDER
from .sockets import H3Acceleration, Node, io

PRESET = "preset"


def widget(field):
    """The widget of one option of an accelerator."""
    limits = field.metadata
    given = {"optional": True, "default": field.default, "tooltip": limits["words"]}
    if limits["choices"]:
        return io.Combo.Input(field.name, options=list(limits["choices"]), **given)
    if isinstance(field.default, bool):
        return io.Boolean.Input(field.name, **given)
    if isinstance(field.default, int):
        return io.Int.Input(field.name, min=int(limits["low"]), max=int(limits["high"]), **given)
    step = 0.01 if field.default >= 0.01 else 0.0001
    return io.Float.Input(field.name, min=float(limits["low"]), max=float(limits["high"]), step=step, **given)


def choices() -> list:
    """A preset, every accelerator with its options, and the parts that only set the job."""
    from ..h3_runtime import ACCELERATORS, JOB_PARTS, PRESETS

    preset = io.Combo.Input(
        PRESET,
        optional=True,
        options=list(PRESETS),
        default="high",
        tooltip="A set of parts for one purpose; what this machine lacks is left out, and the report says so.",
    )
    made = [io.DynamicCombo.Option(PRESET, [preset])]
    made += [
        io.DynamicCombo.Option(kind.name, [widget(field) for field in fields(kind.Options)]) for kind in ACCELERATORS
    ]
    return made + [io.DynamicCombo.Option(name, []) for name in JOB_PARTS]


def asked_for(name: str, options: dict, before):
    """The Acceleration of one node after those ``before`` it. H3Error for what cannot be used."""
    if name == PRESET:
        return before.and_preset(options.get(PRESET, "high"))
    return before.and_part(name, **options)


def acceleration_of(up, inputs: dict):
    """The Acceleration that nodes before one with these inputs ask for, read from the graph before it runs."""
    from ..h3_runtime import Acceleration

    step = up.step(inputs, "acceleration")
    if step is None or step.kind != "H3RuntimeAccelerate":
        return Acceleration()
    with up.inside(step):
        return acceleration_at(up, step)


def acceleration_at(up, step):
    """The Acceleration that the H3 Accelerate of ``step`` makes."""
    before, mark = acceleration_of(up, step.inputs), "accelerator."
    options = {key.removeprefix(mark): value for key, value in step.inputs.items() if key.startswith(mark)}
    return asked_for(step.inputs.get("accelerator", PRESET), options, before)


class Accelerate(Node):
    """One part of an acceleration."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3RuntimeAccelerate",
            display_name="H3 Accelerate",
            category=FOLDER,
            description="Makes the sampler faster, at a price that its label names. Choose a preset or one part; chain "
            "several of these to combine parts. Parts that exclude each other are refused. The sampler's report says "
            "what engaged, how often, and what did not.",
            search_aliases=["sage attention", "teacache", "spectrum", "sparse", "compile", "turbo"],
            inputs=[
                io.DynamicCombo.Input(
                    "accelerator", options=choices(), tooltip="What to switch on. Each has options of its own."
                ),
                H3Acceleration.Input(
                    "acceleration", optional=True, tooltip="Of another H3 Accelerate: its parts are kept."
                ),
            ],
            outputs=[H3Acceleration.Output(display_name="acceleration")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    @host.runtime_mode
    def execute(cls, accelerator, acceleration=None):
        from ..h3_runtime import JOB_PARTS, PRESETS, Acceleration

        chosen = {"accelerator": accelerator} if isinstance(accelerator, str) else dict(accelerator)
        name = chosen.pop("accelerator")
        before = Acceleration() if acceleration is None else acceleration
        made = asked_for(name, chosen, before)
        if name == PRESET:
            notes = [*made.notes[len(before.notes) :], *PRESETS[chosen.get(PRESET, "high")].lines()]
        else:
            words = {kind.name: kind.words for kind in made.kinds} | JOB_PARTS
            notes = [f"{name}: {words[name]}"]
        return cls.report(notes, made, label=made.fidelity)


NODES = [Accelerate]
