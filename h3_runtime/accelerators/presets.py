"""Presets, one switch for a creator, and what a person asked of acceleration put together.

    --preset fast --accelerate forecast:calls=0.5 ─▶ Acceleration ─on_request─▶ RenderRequest (accelerators, solver,
    H3 Accelerate nodes ────────────────────────────┘                            steps and shifts of a few-step LoRA)

A preset names its parts. A part that this machine lacks is left out, and a sentence says so; a part that is given
beside the preset takes the place of the preset's own. Figures are what was measured, on what, by which command.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import H3Error
from ..fidelity import Fidelity, Label, compose, use
from ..request import RenderRequest
from ..solvers import SOLVERS
from . import BY_NAME, Accelerator, Spec, build, checked, few_step, parse, spec_of
from .few_step import ScheduleSettings, few_step_settings


@dataclass(frozen=True)
class Measured:
    """Figures of one preset against the lossless run of the same seed: ``calls`` of the DiT out of ``forwards``, and
    relative L2 of the latents, median of seeds."""

    on: str
    forwards: int
    calls: int
    picture: float
    sound: float
    command: str = "bench accelerators"

    def line(self) -> str:
        return (
            f"{self.calls} of {self.forwards} DiT calls, relative L2 {self.picture:.2g} of the picture and "
            f"{self.sound:.2g} of the sound ({self.on}; {self.command})"
        )


@dataclass(frozen=True)
class Preset:
    """``parts`` as they would be typed after ``--accelerate``."""

    name: str
    words: str
    parts: tuple[str, ...] = ()
    measured: tuple[Measured, ...] = ()

    @property
    def label(self) -> Label:
        """The weakest label that its parts can have."""
        return accelerate(self.parts).label

    def lines(self) -> list[str]:
        """What it is, in sentences: parts, label, figures."""
        parts = ", ".join(self.parts) or "none: the baseline"
        figures = [measured.line() for measured in self.measured] + ([NO_CARD] if self.parts else [])
        return [f"{self.name}: {self.label}; parts: {parts}. {self.words}", *(f"  {line}" for line in figures)]


SMALL = "small model of random weights, 96x64, 22 frames, CPU float32, 8 seeds"
NO_CARD = "not measured yet: on a card, with the released weights, at full size"

PRESETS = {
    preset.name: preset
    for preset in (
        Preset("lossless", "Bit-identical to the baseline."),
        Preset(
            "extra-high", "Faster exact kernels and compiled blocks; nothing is left out.", ("attention", "compile")
        ),
        Preset(
            "high",
            "A quarter of the forwards is foretold.",
            ("attention", "forecast:calls=0.75"),
            (Measured(f"{SMALL}, attention by SDPA", 49, 36, 2.3e-4, 2.4e-5),),
        ),
        Preset(
            "fast",
            "More than half of the forwards are foretold; attention in INT8.",
            ("attention:kernel=sage-2", "forecast:calls=0.4"),
            (Measured(f"{SMALL}, attention by SDPA", 49, 19, 1.3e-3, 2.7e-4),),
        ),
        Preset(
            "draft",
            "For looking at a take: three quarters of the forwards are foretold, attention is sparse.",
            ("sparse:keep=0.3", "forecast:calls=0.25"),
            (Measured(f"{SMALL}, attention dense for want of rows", 49, 12, 6.6e-3, 2.0e-3),),
        ),
    )
}
JOB_PARTS = {"second-order": SOLVERS["second-order"].words, few_step.NAME: few_step.WORDS}  # parts that set the job


def _label_of(name: str, options: dict) -> Label:
    kind = BY_NAME[name]
    if kind.fidelity:
        return use(kind.fidelity).label
    return Label.EXACT_MATH if options["kernel"] == "auto" else use(f"attention/{options['kernel']}").label


@dataclass(frozen=True)
class Acceleration:
    """All that was asked: specs of accelerators, a solver, whether a few-step LoRA sets the schedule, and sentences
    about what was left out."""

    accelerators: tuple[Spec, ...] = ()
    solver: str = "euler"
    few_step: bool = False
    notes: tuple[str, ...] = ()

    def and_part(self, name: str, **options) -> Acceleration:
        """One more part; it takes the place of one of the same name. H3Error for what cannot be used."""
        if name in JOB_PARTS:
            if options:
                raise H3Error(f"accelerator {name} has no options, and {', '.join(options)} was given: leave it out")
            if name == few_step.NAME:
                return replace(self, few_step=True)
            return replace(self, solver=name)
        if name not in BY_NAME:
            known = ", ".join([*BY_NAME, *JOB_PARTS])
            raise H3Error(f"accelerator {name!r} is not built: choose from {known}")
        kept = tuple(spec for spec in self.accelerators if spec[0] != name)
        return replace(self, accelerators=(*kept, spec_of(name, **options)))

    def and_preset(self, name: str) -> Acceleration:
        """All parts of a preset that this machine can run; a sentence about each of the others."""
        if name not in PRESETS:
            raise H3Error(f"preset {name!r} is unknown: choose from {', '.join(PRESETS)}")
        made, used, notes = self, [], []
        for part in PRESETS[name].parts:
            kind, options = parse(part)
            missing = BY_NAME[kind].missing(BY_NAME[kind].Options(**options)) if kind in BY_NAME else None
            if missing is not None:
                notes.append(f"preset {name}: {part} was left out, this machine lacks it ({missing})")
                continue
            used.append(part)
            made = made.and_part(kind, **options)
        said = f"preset {name}: {', '.join(used) or 'nothing is accelerated'}"
        return replace(made, notes=(*made.notes, said, *notes))

    @property
    def kinds(self) -> tuple[type[Accelerator], ...]:
        return tuple(BY_NAME[name] for name, _ in self.accelerators)

    @property
    def label(self) -> Label:
        """The weakest label of what was asked; of the kernel ``auto`` that of what it may choose."""
        labels = [_label_of(name, dict(options)) for name, options in self.accelerators]
        labels.append(use(SOLVERS[self.solver].path).label)
        return max(labels + ([use(few_step.PATH).label] if self.few_step else []))

    def built(self) -> list[Accelerator]:
        """Fresh accelerators, for a plan. H3Error as ``build``."""
        return build(self.accelerators)

    @property
    def ways(self) -> tuple[str, ...]:
        """Registered paths of what will run, as far as this machine decides it. H3Error as ``build``."""
        accelerated = [path for accelerator in self.built() for path in accelerator.paths()]
        return (SOLVERS[self.solver].path, *accelerated, *([few_step.PATH] if self.few_step else []))

    @property
    def fidelity(self) -> Fidelity:
        """What it may claim on this machine. H3Error as ``build``."""
        return compose(self.ways)

    def settle(self, loras: Iterable[str | Path], asked: ScheduleSettings) -> tuple[ScheduleSettings, str | None, list]:
        """(schedule, name of the few-step LoRA's preset or None, sentences). H3Error for parts that exclude another."""
        checked(self.accelerators)
        if not self.few_step:
            return asked, None, list(self.notes)
        settings, name, notes = few_step_settings(loras, asked)
        return settings, name, [*self.notes, *notes]

    def on_request(self, request: RenderRequest) -> tuple[RenderRequest, list[str]]:
        """The request with everything set, and sentences."""
        asked = ScheduleSettings(request.num_forwards, request.video_shift, request.audio_shift)
        schedule, name, notes = self.settle([lora.media.path for lora in request.loras], asked)
        changed = replace(
            request,
            accelerators=checked(self.accelerators),
            solver=self.solver,
            few_step=name,
            num_forwards=schedule.num_forwards,
            video_shift=schedule.video_shift,
            audio_shift=schedule.audio_shift,
        )
        return changed, notes


def accelerate(parts: Sequence[str] = (), preset: str | None = None) -> Acceleration:
    """From the command line's words. H3Error as ``and_part`` and ``and_preset``."""
    made = Acceleration() if preset is None else Acceleration().and_preset(preset)
    for text in parts:
        name, options = parse(text)
        made = made.and_part(name, **options)
    names = [parse(text)[0] for text in parts]
    for name in names:
        if names.count(name) > 1:
            raise H3Error(f"accelerator {name} was given twice: leave one of them out")
    checked(made.accelerators)
    return made
