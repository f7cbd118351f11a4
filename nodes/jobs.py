"""What the sampler node was given, as the runtime's RenderJob.

CONDITIONING ─take_condition─┐
LATENT ─take_latent──────────┼─▶ RenderJob (decides the output) + RenderRequest (for manifest) + Origin (for label)
widgets ─Settings────────────┘
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

from .av_latent import TakenLatent, take_latent
from .conditioning import TakenCondition, take_condition


@dataclass(frozen=True)
class Settings:
    """The sampler's widgets. ``stop`` 0: to the end; ``acceleration`` the runtime's Acceleration, or None."""

    seed: int = 0
    steps: int = 49
    denoise: float = 1.0
    start: int = 0
    stop: int = 0
    video_shift: float = 12.0
    audio_shift: float = 3.0
    frames: int = 124
    acceleration: Any = None


@dataclass(frozen=True)
class GraphJob:
    """A job with all that is told about it. ``latent`` is the LATENT it was made from."""

    job: Any
    request: Any
    origin: Any
    latent: TakenLatent


def make_job(positive: list, latent: dict, settings: Settings, model) -> GraphJob:
    """Check and translate everything. H3Error for what cannot be rendered; no weights are touched."""
    from ..h3_runtime import Origin, RenderJob, lint_pace, overlaps

    taken = take_latent(latent, settings.frames)
    condition = take_condition(positive, taken.canvas)
    notes = [*taken.canvas.notes, *taken.notes, *condition.notes, *condition.text.notes]
    notes += lint_pace(condition.prompt, taken.canvas.seconds) + overlaps([guide.held for guide in condition.guides])
    settings, few_step, said = _accelerated(settings, model)
    notes += said
    source, state = _source_and_state(taken, settings, notes)
    request = _request(condition, taken, settings, model, (source, state), few_step)
    job = RenderJob(
        canvas=taken.canvas,
        text=condition.text,
        guides=condition.guides,
        references=condition.references,
        masks=taken.masks,
        source=source,
        state=state,
        seed=settings.seed,
        num_forwards=settings.steps,
        start=settings.start,
        stop=settings.stop or None,
        denoise=settings.denoise,
        video_shift=settings.video_shift,
        audio_shift=settings.audio_shift,
        accelerators=request.accelerators,
        solver=request.solver,
        request=request,
    )
    origin = Origin(condition.infos, condition.made, condition.foreign, tuple(notes))
    return GraphJob(job, request, origin, taken)


def _accelerated(settings: Settings, model) -> tuple:
    """(settings with the schedule of a few-step LoRA where that is asked for, the name of its preset, sentences)."""
    from ..h3_runtime import ScheduleSettings

    if settings.acceleration is None:
        return settings, None, []
    asked = ScheduleSettings(settings.steps, settings.video_shift, settings.audio_shift)
    schedule, name, notes = settings.acceleration.settle([lora.path for lora in model.loras], asked)
    shifts = {"video_shift": schedule.video_shift, "audio_shift": schedule.audio_shift}
    return replace(settings, steps=schedule.num_forwards, **shifts), name, notes


def _source_and_state(taken: TakenLatent, settings: Settings, notes: list[str]):
    """(the clip to keep or start from, the noisy state to go on from), either may be None."""
    from ..h3_runtime import H3Error

    carried = taken.carried
    if carried is not None and not carried.finished:
        if settings.start != carried.stop:
            raise H3Error(
                f"the latent is the state after forward {carried.stop} of a run: set start_step to {carried.stop}"
            )
        _check_sigma(carried, settings)
        return carried.source, taken.clip
    needs = [
        what
        for what, needed in (
            ("a mask keeps parts of a clip", taken.masks is not None),
            (f"denoise {settings.denoise:g} starts from a clip", settings.denoise < 1),
            (f"start_step {settings.start} starts from a clip", settings.start > 0),
        )
        if needed
    ]
    if taken.clip is None and needs:
        raise H3Error(f"{needs[0]}, and the latent is empty: encode one with H3 Encode Video and Sound")
    if taken.clip is not None and not needs:
        notes.append("the clip in the latent only gave the size: without mask, denoise or start_step it has no effect")
        return None, None
    return taken.clip, None


def _check_sigma(carried, settings: Settings) -> None:
    """H3Error when this schedule stands elsewhere at ``start`` than the run whose state it is to go on with."""
    from ..h3_runtime import H3Error, plan_schedule

    grid = plan_schedule(
        settings.steps,
        settings.denoise,
        settings.start,
        settings.stop or None,
        settings.video_shift,
        settings.audio_shift,
    )
    sigma = carried.info.get("sigma_video")
    if carried.result is not None:
        sigma = carried.result.job.schedule.video[carried.stop]
    if sigma not in (None, grid.video[settings.start]):
        raise H3Error(
            f"the state stands at sigma {sigma:.6f} and step {settings.start} of these settings at "
            f"{grid.video[settings.start]:.6f}: give the steps, denoise and shifts that it was made with"
        )


def _request(condition: TakenCondition, taken: TakenLatent, settings: Settings, model, clips: tuple, few_step):
    """What was asked for, as the manifest tells it: media by name and hash."""
    from ..h3_runtime import GuideRequest, LoraRequest, Media, PastMedia, RenderRequest

    canvas, named = taken.canvas, {}
    middle = []
    for guide, mark in zip(condition.guides, condition.marks):
        end = {0: "first_frame", canvas.num_frames - 1: "last_frame"}.get(guide.frame_index)
        if guide.keyframe and end is not None and end not in named:
            named[end] = mark.media
        else:
            middle.append(GuideRequest(mark.media, frame=guide.frame_index, strength=guide.strength))
    for name, clip in zip(("source", "state"), clips):
        if clip is not None:
            named[name] = PastMedia(name=f"{name} latent", digest=_hash(clip.video, clip.audio))
    if taken.masks is not None:
        masks = [("picture", taken.masks.video), ("sound", taken.masks.audio)]
        streams = [name for name, mask in masks if mask is not None]
        digest = _hash(*(mask for _, mask in masks if mask is not None))
        named["mask"] = PastMedia(name=f"mask of the {' and '.join(streams)}", digest=digest)
    return RenderRequest(
        prompt=condition.prompt,
        size=(canvas.width, canvas.height),
        frames=canvas.num_frames,
        guides=tuple(middle),
        references=condition.asked_references,
        seed=settings.seed,
        num_forwards=settings.steps,
        start=settings.start,
        stop=settings.stop or None,
        denoise=settings.denoise,
        video_shift=settings.video_shift,
        audio_shift=settings.audio_shift,
        dtype=model.models.cast_to,
        loras=tuple(LoraRequest(Media(str(lora.path)), lora.strength) for lora in model.loras),
        quantise=model.models.loading.quantise,
        recipe=condition.recipe,
        accelerators=() if settings.acceleration is None else settings.acceleration.accelerators,
        solver="euler" if settings.acceleration is None else settings.acceleration.solver,
        few_step=few_step,
        **named,
    )


def _hash(*tensors) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
