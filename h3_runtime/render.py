"""One render from request to latent: place, encode, sample; each part of the model is let go when its work is done.

    RenderRequest ─place─▶ pixels on the canvas, all checks ─▶ text encoder ─▶ VAEs encode ─▶ RenderJob
                  ─sample─▶ AVLatent ─▶ RenderResult (latent, job, label, seconds, peaks, notes) ─▶ save.py

``Models`` (model.py) loads a part when it is first asked for and lets it go when its stage is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from . import __version__
from .accelerators import build, checked, few_step
from .checkpoint.info import CheckpointInfo
from .checkpoint.kept import versions
from .checkpoint.opening import wrong_partition
from .encodings import Encode, encode_each
from .errors import H3Error
from .fidelity import Fidelity, compose, use
from .geometry import FPS, TRAINED_FRAMES, Canvas
from .guides import Placed, Placement, place
from .job import AVLatent, Guide, Reference, RenderJob, TextCondition
from .latents import PartialLatent
from .memory.plan import plan_request
from .memory.probe import probe_card, probe_host
from .memory.spent import Spent
from .model import RESIDENT, Models
from .models.attention import CANONICAL
from .models.precision import exact_float32
from .pressure import sample_under_pressure
from .recovery import RecoveryFolder, RunRecovery
from .references import PixelEncoder
from .request import RenderRequest
from .sampler import SampleResult
from .schedule import AUDIO_SHIFT, DEFAULT_FORWARDS, VIDEO_SHIFT, Schedule, plan_schedule
from .solvers import SOLVERS
from .text.conditions import ConditionRecord, MadeCondition, describe_shown
from .text.embeddings import resolve_prompt
from .text.encoder import open_weights
from .text.shown import present_shown
from .text.tokenizer import find_vocabulary, vocabulary_sha256

Progress = Callable[[str, int, int], None]  # stage, done, total


@dataclass(frozen=True)
class RenderResult:
    """What a render gave. ``finished`` False: the latent is the noisy state after ``job.schedule.stop`` forwards."""

    request: RenderRequest
    job: RenderJob
    latent: AVLatent
    finished: bool
    fidelity: Fidelity
    infos: dict[str, CheckpointInfo]
    notes: tuple[str, ...]
    spent: Spent
    step_seconds: tuple[float, ...]
    stats: dict = field(default_factory=dict)
    recovery: RunRecovery | None = None
    loras: dict | None = None  # what of each LoRA was applied, its preset and what was left out
    device: str = "cpu"
    dtype: str | None = None  # float32 when the weights were cast up, None as stored
    record: ConditionRecord | None = None  # what the text condition was made from
    source_sound: torch.Tensor | None = None  # [2, L] of the source clip, where a mask keeps some of it

    @property
    def canvas(self) -> Canvas:
        return self.job.canvas

    @property
    def seconds(self) -> dict[str, float]:
        """Wall time by stage."""
        return self.spent.seconds

    @property
    def dit_calls(self) -> int:
        """Forwards of this process that ran the DiT to its last block."""
        return self.stats.get("dit_calls", len(self.step_seconds))


def render_request(
    request: RenderRequest,
    models: Models,
    progress: Progress | None = None,
    poll: Callable[[], None] | None = None,
    recovery: RecoveryFolder | None = None,
    resume: bool | None = None,
    tell: Callable[[str], None] = lambda sentence: None,
    said: Sequence[str] = (),
) -> RenderResult:
    """Run ``request`` up to its latent. H3Error before any weights are read for what cannot be used.
    ``said`` are sentences about how the request was made, for its notes.

    With ``recovery`` the state is saved after every forward, and what an earlier process left of exactly this job is
    taken up; ``resume`` True also says when there is nothing, False starts over. ``tell`` is given at once what is
    known before the work: what was changed, the plan, and what was found.
    """
    spent = Spent(models.device)
    report = progress or (lambda stage, done, total: None)
    with spent.stage("place"):
        check_options(request, recovery)
        placement = place(request)
        task = placement.task
        notes = [*said, *placement.notes, *check_request(request, placement, models, task)]
        notes += choose_placement(request, placement, models)
        _tell_each(tell, notes)
    latents = models.caches.latents
    kept, missed = latents.hits, latents.misses
    with spent.stage("encode"):
        report("encode", 0, 1)
        condition = condition_text(request, placement, models)
        job = encode(request, placement, models, condition.text, notes)
        report("encode", 1, 1)
    with spent.stage("load"):
        report("load", 0, 1)
        models.place_dit(task)
        report("load", 1, 1)
    notes += check_state(job, placement, models)
    with spent.stage("denoise"):
        run, found = find_run(recovery, request, job, models, resume)
        _tell_each(tell, found)
        notes += found
        sampled, place_used, stepped = sample_under_pressure(
            partial(models.place_dit, task),
            models.loading.placement or RESIDENT,
            job,
            run,
            progress=lambda done, total, _: report("denoise", done, total),
            poll=poll,
        )
        notes += stepped
    models.done("dit")
    fidelity = label(job, sampled, models, condition)
    notes += [*job.text.notes, *sampled.notes]
    for part, info in models.infos.items():
        notes += [f"{part}: {note}" for note in info.notes]
        if part == "dit" and (warning := wrong_partition(info.partition, task)):
            notes.append(warning)
        if info.approximate:
            notes.append(info.approximate)
    notes += few_step_notes(request, models)
    return RenderResult(
        request=request,
        job=job,
        latent=sampled.latent,
        finished=sampled.finished,
        fidelity=fidelity,
        infos=dict(models.infos),
        notes=tuple(dict.fromkeys(notes)),
        spent=spent,
        step_seconds=sampled.step_seconds,
        stats={
            "rows": sampled.num_rows,
            "dit_calls": sampled.dit_calls,
            "condition": condition.source,
            "media": {"kept": latents.hits - kept, "encoded": latents.misses - missed},
            "placement": str(place_used),
            **sampled.stats,
        },
        recovery=run,
        loras=None if models.lora_plan is None else models.lora_plan.describe(),
        device=str(models.device),
        dtype=models.cast_to,
        record=condition.record,
        source_sound=source_sound(placement, job),
    )


def source_sound(placement: Placement, job: RenderJob) -> torch.Tensor | None:
    """The source clip's own sound [2, L], where it came as samples and a mask keeps some of it."""
    keeps = job.masks is not None and job.masks.audio is not None and bool((job.masks.audio == 0).any())
    return placement.source.audio if keeps and isinstance(placement.source, Placed) else None


def choose_placement(request: RenderRequest, placed: Placement, models: Models) -> list[str]:
    """Where nobody said how to place the DiT on a card, the plan does, before any weights are read. H3Error with what
    would fit when the request does not."""
    device = torch.device(models.device)
    if models.loading.placement is not None or device.type != "cuda":
        return []
    host = probe_host().with_disk(models.parts.dit_for(placed.task).path)
    host = replace(host, converted=models.loading.converted)
    made = plan_request(
        request,
        models.parts,
        probe_card(device),
        host,
        placed,
        models.loading.loras,
        build(request.accelerators),
        models.layout,
    )
    return models.follow(made)


TILE_BATCH = "video-vae/tile-batch"
FEW_FORWARDS = 12  # below this, a model that was not trained for few forwards gives noise or mush


def few_step_notes(request: RenderRequest, models: Models) -> list[str]:
    """Sentences where the steps, shifts and LoRAs of a request do not belong together, with the preset that does."""
    plan, steps = models.lora_plan, request.num_forwards
    if plan is not None:
        return plan.warnings(models.infos["dit"].partition, steps, request.video_shift, request.audio_shift)
    if steps < FEW_FORWARDS and request.stop is None and request.start == 0 and request.denoise == 1:
        count = f"{steps} forward{'s' if steps > 1 else ''}"
        return [f"{count} without a few-step LoRA: the model was released for {DEFAULT_FORWARDS}"]
    return []


def find_run(
    folder: RecoveryFolder | None, request: RenderRequest, job: RenderJob, models: Models, resume: bool | None = None
) -> tuple[RunRecovery | None, list[str]]:
    """Where this job's states are kept, and a sentence about what an earlier process left of it. That is taken up when
    the job runs; with ``resume`` False it is dropped here, with True its absence is told.

    A state is named by all that decides the job's output. What the text encoder and the VAEs made is in the job itself,
    so of the checkpoints only the DiT is named, with the dtype it is cast to.
    """
    if folder is None:
        return None, []
    fingerprint = job.fingerprint(f"dit={models.infos['dit'].fingerprint}", str(models.dtype), __version__)
    run = folder.run(fingerprint, job.canvas, task=job.task, prompt=request.prompt, seed=job.seed)
    state, left = run.load(), run.path.is_file()
    done = "" if state is None else f"forward {state.done} of {job.num_forwards}"
    if resume is False:
        run.discard()
        if not left:
            return run, []
        return run, [f"run from its start: {done or 'a damaged state'}, saved by an earlier run, was dropped"]
    if state is not None:
        return run, [f"taken up after {done}, saved by an earlier run of exactly this job"]
    if left:
        return run, [f"run from its start: the saved state {run.path} is damaged"]
    return run, ["run from its start: no earlier run of exactly this job has left a state"] if resume else []


def check_options(request: RenderRequest, recovery: RecoveryFolder | None = None) -> Schedule:
    """What can be seen of a request before its media are read."""
    if recovery is not None:
        recovery.check_writable()
    build(request.accelerators)
    if request.solver not in SOLVERS:
        raise H3Error(f"solver {request.solver!r} is not built: choose one of {', '.join(SOLVERS)}")
    schedule = plan_schedule(
        request.num_forwards, request.denoise, request.start, request.stop, request.video_shift, request.audio_shift
    )
    if request.source is None and request.state is None:
        if schedule.skipped:
            raise H3Error(f"denoise {request.denoise} starts from a clip, and none was given: add --source FILE")
        if request.start > 0:
            raise H3Error(f"start {request.start} needs a saved state or a source clip: add --state or --source FILE")
    return schedule


def check_request(request: RenderRequest, placement: Placement, models: Models, task: str) -> list[str]:
    """Everything else that can be wrong and is cheap to see; sentences about inputs that will have no effect."""
    schedule, notes = check_options(request), []
    if placement.state is not None:
        done, sigma = (placement.state.info.get(key) for key in ("stop", "sigma_video"))
        if placement.state.finished:
            raise H3Error(
                "the saved latent is a finished clip, not a state to go on from: give it as --source to edit it"
            )
        if request.start != done:
            raise H3Error(f"the saved state stopped after forward {done}: continue it with --start {done}")
        if sigma not in (None, schedule.video[request.start]):
            raise H3Error(
                f"the saved state stands at sigma {sigma:.6f} and forward {done} of this schedule at "
                f"{schedule.video[request.start]:.6f}: give the steps, denoise and shifts that it was made with"
            )
    elif request.denoise < 1 and not schedule.skipped:
        notes.append(f"denoise {request.denoise} of {request.num_forwards} forwards rounds to the full run: no effect")
    if request.source is not None and placement.masks is None and (schedule.from_noise or placement.state is not None):
        notes.append(f"{request.source.name} only gave the size: without a mask, denoise or start it has no effect")
    models.check(task, encoder=placement.condition is None)
    if placement.condition is not None:
        width, needed = placement.condition.text.hidden.shape[1], models.text_width(task)
        if width != needed:
            raise H3Error(
                f"the condition in {request.embeds.name} is {width} wide and this DiT reads {needed}: it was made with "
                "another text encoder, make it again with this model's"
            )
    return notes


def check_state(job: RenderJob, placement: Placement, models: Models) -> list[str]:
    """A sentence about a saved state that this job does not go on from as it began."""
    made_by = None if placement.state is None else placement.state.info.get("run")
    if made_by in (None, run_fingerprint(job, models.infos["dit"], models.cast_to)):
        return []
    return [
        "the saved state is of another run (its prompt, seed, guides, masks, source or model differ): the clip is not "
        "what one unbroken run gives"
    ]


def run_fingerprint(job: RenderJob, dit: CheckpointInfo, dtype: str | None) -> str:
    """What all parts of one run have in common, whichever of its forwards they do."""
    return replace(job, start=0, stop=None, state=None).fingerprint(dit.fingerprint, str(dtype))


@exact_float32()
def condition_text(request: RenderRequest, placement: Placement, models: Models) -> MadeCondition:
    """The prompt and what stands before it as the DiT's text rows: from a file, from the cache, else encoded.

    The record that names a condition needs the encoder's header and fingerprint only, so its weights are read for a
    prompt or reference that is new, never for a new seed.
    """
    if placement.condition is not None:
        return _loaded_condition(request, placement.condition, models)
    weights = open_weights(models.parts.text_encoder)
    info = models.describe_encoder(weights)
    resolved = resolve_prompt(request.prompt, models.embedding_folders, weights.config.hidden, request.recipe)
    record = ConditionRecord(
        prompt=request.prompt,
        recipe=request.recipe,
        encoder=f"{weights.source.path.name}, state after layer {weights.config.layers}",
        fingerprint=info.fingerprint,
        vocabulary=vocabulary_sha256(find_vocabulary(models.parts.text_encoder, models.parts.tokenizer)),
        dtype=models.cast_to or "stored",
        made_with=versions(models.device, "transformers", kernels=info.kernels),
        items=describe_shown(placement.shown),
        embeddings=resolved.used,
        read_as=resolved.read_as,
        approximate=info.approximate,
    )
    made = models.caches.conditions.get(record)
    if made is None:
        items, inputs = present_shown(placement.shown, request.recipe)
        text = models.text_encoder().encode_items(request.prompt, items, inputs, resolved.pieces)
        made = MadeCondition(replace(text, notes=(*text.notes, *resolved.notes)), record)
        refused = models.caches.conditions.put(made)
        if refused:
            made = replace(made, text=replace(made.text, notes=(*made.text.notes, refused)))
    models.done("text_encoder")
    models.infos["text_encoder"] = info
    return made


def _loaded_condition(request: RenderRequest, made: MadeCondition, models: Models) -> MadeCondition:
    record, file = made.record, request.embeds.name
    here = None
    if models.parts.text_encoder is not None:
        here = models.describe_encoder(open_weights(models.parts.text_encoder)).fingerprint
    note = f"the prompt's states come from {file}, made by {record.encoder}"
    if here not in (None, record.fingerprint):
        note += f"; {models.parts.text_encoder.name} in the model folder is another encoder and would give other states"
    if models.loading.online("text_encoder") is not None:
        note += "; quantising the text encoder has no effect: it is not needed"
    models.infos["text_encoder"] = CheckpointInfo(
        path=request.embeds.path,
        format="saved condition",
        part="text_encoder",
        partition="unknown",
        dtypes={},
        nbytes=Path(request.embeds.path).stat().st_size,
        fingerprint=record.fingerprint,
        approximate=record.approximate,
    )
    notes = (*made.text.notes, note)
    return replace(made, text=replace(made.text, notes=notes), other_encoder=here not in (None, record.fingerprint))


@exact_float32()
def encode(
    request: RenderRequest,
    placement: Placement,
    models: Models,
    text: TextCondition,
    notes: list[str] | None = None,
) -> RenderJob:
    """Media to the job that the sampler runs, one VAE at a time: every picture first, then every sound.

    What the same VAE encoded before is taken from where ``models`` keeps it; a VAE with nothing to encode is not read.
    ``notes`` is given what was done otherwise than planned.
    """
    placed = [*placement.guides, *placement.references]
    source, edited = None, placement.source if isinstance(placement.source, Placed) else None
    if isinstance(placement.source, PartialLatent):
        source = placement.source.latent
    everything = placed if edited is None else [*placed, edited]
    notes = [] if notes is None else notes
    videos = _encoded(
        {
            index: _picture(item.frames, request.recipe, mean=item is edited)
            for index, item in enumerate(everything)
            if item.frames is not None
        },
        "video_vae",
        models,
        notes,
    )
    sounds = _encoded(
        {index: _sound(item.audio) for index, item in enumerate(everything) if item.audio is not None},
        "audio_vae",
        models,
        notes,
    )
    if edited is not None:
        source = AVLatent(videos[len(placed)], sounds[len(placed)])
    guides, references = [], []
    for index, item in enumerate(placed):
        video, sound = videos.get(index), sounds.get(index)
        if isinstance(item, Placed):
            guides.append(Guide(item.frame_index, video, sound, item.strength, item.keyframe, item.name))
        else:
            references.append(Reference(item.kind, video, sound, item.name))
    state = None
    if placement.state is not None:
        state = placement.state.latent
        source = source or placement.state.source
    return RenderJob(
        canvas=placement.canvas,
        text=text,
        guides=tuple(guides),
        references=tuple(references),
        masks=placement.masks,
        source=source,
        state=state,
        seed=request.seed,
        num_forwards=request.num_forwards,
        start=request.start,
        stop=request.stop,
        denoise=request.denoise,
        solver=request.solver,
        video_shift=request.video_shift,
        audio_shift=request.audio_shift,
        accelerators=checked(request.accelerators),
        request=request,
    )


def _encoded(wanted: dict[int, Encode], part: str, models: Models, notes: list[str]) -> dict[int, torch.Tensor]:
    if not wanted:
        return {}
    cache, origin = models.kept_latents(part)
    if part == "video_vae":
        load = lambda: PixelEncoder(models.encoders(), notes.append)  # noqa: E731
    else:
        load = models.audio_vae
    latents = encode_each(wanted.values(), load, cache, origin, notes)
    models.done(part)
    return dict(zip(wanted, latents))


def _picture(frames: np.ndarray, recipe: str, mean: bool) -> Encode:
    mean = mean or recipe == "comfy"
    return Encode(frames, "mean" if mean else "sampled", lambda encode: encode(frames, mean=mean))


def _sound(audio: torch.Tensor) -> Encode:
    return Encode(audio, "sound mean", lambda vae: vae.encode(audio[None]).cpu())


@dataclass(frozen=True)
class LabelFacts:
    """All of a render that its label is made from, known after it ran or foreseen before.

    ``condition``: paths that made the text rows; ``cast``: the DiT's weights are cast up to float32; ``state``: it goes
    on from a saved state; ``ways``: paths of its solver and of what makes it faster.
    """

    infos: Mapping[str, CheckpointInfo]
    condition: tuple[str, ...]
    cast: bool = False
    recipe: str = "reference"
    canonical: bool = True
    tables: bool = True
    num_forwards: int = DEFAULT_FORWARDS
    shifts: tuple[float, float] = (VIDEO_SHIFT, AUDIO_SHIFT)
    state: bool = False
    tile_batch: int = 1
    ways: tuple[str, ...] = (SOLVERS["euler"].path,)

    def fidelity(self, beyond: Iterable[str] = ()) -> Fidelity:
        """The label. A checkpoint that is itself approximate makes every render so."""
        names = ["dit/float32" if self.cast else "dit/stored", *self.condition]
        names += ["chunks/canonical" if self.canonical else "chunks/smaller"]
        names += ["attention/sdpa", "refiner/once", *self.ways, f"recipe/{self.recipe}"]
        names += ["modulation/tables" if self.tables else "modulation/by-forward"]
        steps, shifts = self.num_forwards == DEFAULT_FORWARDS, self.shifts == (VIDEO_SHIFT, AUDIO_SHIFT)
        names += [] if steps else ["schedule/steps"]
        names += [] if shifts else ["schedule/shifts"]
        names += ["schedule/reference"] if steps and shifts else []
        names += ["video-vae/float32", "video-vae/chunk-stream", "audio-vae/float32"]
        names += [TILE_BATCH] if self.tile_batch > 1 else []
        names += [path for info in self.infos.values() for path in info.paths]
        names += ["resume/state"] if self.state else []
        return compose(names, beyond, "fp32 compute" if self.cast else "", reasons_of(self.infos.values()))


def reasons_of(infos: Iterable[CheckpointInfo]) -> dict[str, str]:
    """This render's own words for the paths that approximate files bring."""
    return {
        path: info.approximate
        for info in infos
        if info.approximate
        for path in info.paths
        if not path.startswith("kernel/")
    }


def ways_of(job: RenderJob, accelerated: Iterable[str]) -> tuple[str, ...]:
    """Paths of a job's solver, of a few-step LoRA's settings, and of its accelerators."""
    few = [] if job.request is None or job.request.few_step is None else [few_step.PATH]
    return (SOLVERS[job.solver].path, *accelerated, *few)


def casts_up(models: Models, dit: CheckpointInfo | None) -> bool:
    """Whether the DiT computes in float32 that its file does not store."""
    return models.cast_to is not None and not (dit is not None and set(dit.dtypes) == {"F32"})


def label(
    job: RenderJob,
    sampled: SampleResult,
    models: Models,
    condition: MadeCondition | None = None,
    others: Mapping[str, CheckpointInfo] | None = None,
) -> Fidelity:
    """The render's fidelity from what ran; ``others``: infos of parts that ``models`` does not hold itself."""
    infos = {**(others or {}), **models.infos}
    cast = casts_up(models, infos.get("dit"))
    beyond = beyond_the_reference(job)
    if condition is not None and condition.record.embeddings:
        beyond.append("prompt embeddings")
    return LabelFacts(
        infos,
        tuple(_condition_paths(condition, cast)),
        cast,
        "reference" if job.request is None else job.request.recipe,
        models.loading.chunks == CANONICAL,
        sampled.tables_before_loop,
        job.num_forwards,
        (job.video_shift, job.audio_shift),
        job.state is not None,
        1 if job.request is None else job.request.tile_batch,
        ways_of(job, sampled.paths),
    ).fidelity(beyond)


def _condition_paths(condition: MadeCondition | None, cast: bool) -> list[str]:
    """What made the text rows. A cache hit is not told: the same render must give the same label, hit or not."""
    use("condition/kept")
    if condition is None or condition.source != "file":
        return ["encoder/float32" if cast else "encoder/stored"]
    paths = ["encoder/float32" if condition.record.dtype == "float32" else "encoder/stored", "condition/kept"]
    return paths + (["condition/other-encoder"] if condition.other_encoder else [])


def beyond_the_reference(job: RenderJob) -> list[str]:
    """What of a job the reference has nothing to compare with."""
    partial_run = bool(job.start or job.schedule.stop < job.num_forwards)
    return beyond_of(job.canvas, job.guides, bool(job.references), job.masks is not None, job.denoise < 1, partial_run)


def beyond_of(
    canvas: Canvas, guides: Iterable, references: bool, masks: bool, denoise: bool, partial_run: bool
) -> list[str]:
    """The same from what a job will be; ``guides`` have ``keyframe`` and ``strength``."""
    beyond, guides = [], tuple(guides)
    if any(not guide.keyframe for guide in guides):
        beyond.append("guides in the middle")
    if any(guide.strength < 1 for guide in guides):
        beyond.append("guide strength")
    if guides and references:
        beyond.append("guides with references")
    if masks:
        beyond.append("masks")
    if denoise:
        beyond.append("denoise strength")
    if partial_run:
        beyond.append("start and stop")
    low, high = TRAINED_FRAMES
    if not low <= canvas.num_frames <= high:
        beyond.append(f"{canvas.num_frames} frames ({canvas.num_frames / FPS:.1f} s; trained {low} to {high})")
    trained = Canvas.fit(canvas.num_frames, ratio=min(max(canvas.width / canvas.height, 0.25), 4.0))
    if (trained.width, trained.height) != (canvas.width, canvas.height):
        beyond.append(f"size {canvas.width}x{canvas.height}")
    return beyond


def _tell_each(tell: Callable[[str], None], sentences: Iterable[str]) -> None:
    for sentence in sentences:
        tell(sentence)


def environment(device: str) -> dict[str, str]:
    """What of the machine decides a render's bits: versions and the kind of ``device`` it ran on, no names."""
    kind = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else device
    return {"runtime": __version__, "torch": torch.__version__, "device": kind}
