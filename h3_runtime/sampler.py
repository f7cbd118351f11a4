"""The denoising loop on both streams.

    draw_noise ─▶ rows of the target (video [Nv, 96], sound [Na, 32], float32) and rows of the conditions (held)
    for each forward:   feed ─▶ h = [text | conditions | target] ─▶ blocks ─▶ heads on target rows ─▶ Euler step
    at sigma 0:         kept cells are replaced by the source exactly

Everything that can be known before the loop is made before it: layout, step plans, refined text rows, modulation
tables, noise. Inside it nothing is read back but one finite check per forward, because a run that has gone NaN must
stop there and not be decoded to a black video.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .accelerators import Accelerator, build, fold
from .errors import H3Error, NonFiniteError
from .job import AUDIO_LATENT_CHANNELS, VIDEO_CHANNELS, AVLatent, RenderJob
from .layout import PackedLayout, audio_to_rows, patchify_video, rows_to_audio, unpatchify_video
from .memory.streaming import DiTLayers, ResidentLayers, StreamedLayers, run_in_order
from .models.attention import dense_attention, rotary_table
from .models.dit import DiT, ForwardContext
from .models.precision import exact_float32, is_finite
from .recovery import RunRecovery
from .schedule import CONDITION_TIMESTEP, mix, start_point
from .solvers import SOLVERS, Sigmas, Solver
from .steps import StepPlan, Steps, on_device, plan_steps


class Rows(NamedTuple):
    """Target rows of both streams: ``video`` [Nv, 96] and ``audio`` [Na, 32], float32."""

    video: Tensor
    audio: Tensor


class Noise(NamedTuple):
    """All noise of a job, from one CPU generator: per visual condition in packed order (latent shape), the target's
    video [1, 24, T, h, w] and audio rows [2A, 32], and per sound guide [2a, 32]."""

    conditions: tuple[Tensor, ...]
    video: Tensor
    audio: Tensor
    sound_guides: tuple[Tensor, ...]


@dataclass(frozen=True)
class SampleResult:
    """``latent`` is clean when ``finished``, else the noisy state after the last forward. ``dit_calls`` counts the
    forwards of this process that ran the DiT to its last block; ``resumed_after`` says how many forwards an earlier
    process had done."""

    latent: AVLatent
    finished: bool
    dit_calls: int
    step_seconds: tuple[float, ...]
    num_rows: int
    tables_before_loop: bool
    resumed_after: int | None = None
    stats: dict = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()  # registered paths of the accelerators, as they ran


def draw_noise(job: RenderJob) -> Noise:
    """Draw in the reference's order from ``torch.Generator('cpu').manual_seed(seed)``.

    Visual conditions in packed order, then the target's video, then its sound rows; sound guides come last, so that
    adding one or weakening one never moves the target's noise.
    """
    generator = torch.Generator("cpu").manual_seed(job.seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    visual = [c.video for c in (*job.guides, *job.references) if c.video is not None]
    conditions = tuple(draw(*latent.shape) for latent in visual)
    canvas = job.canvas
    video = draw(1, VIDEO_CHANNELS, canvas.latent_t, canvas.latent_h, canvas.latent_w)
    audio = draw(canvas.rows_audio, AUDIO_LATENT_CHANNELS)
    sound = tuple(draw(2 * g.audio_length, AUDIO_LATENT_CHANNELS) for g in job.guides if g.audio is not None)
    return Noise(conditions, video, audio, sound)


def condition_rows(job: RenderJob, layout: PackedLayout, noise: Noise) -> list[tuple[int, int, bool, Tensor]]:
    """Per condition segment: start, stop, is_video and its float32 rows, mixed with noise where they are not clean."""
    visual, sound = iter(noise.conditions), iter(noise.sound_guides)
    held = []
    for segment in layout.conditions:
        item = (job.guides if segment.kind.startswith("guide") else job.references)[segment.item]
        if segment.is_video:
            rows = patchify_video(mix(item.video.cpu(), next(visual), segment.held or CONDITION_TIMESTEP))
        else:
            rows = audio_to_rows(item.audio.cpu())
            if segment.kind == "guide_audio":
                drawn = next(sound)
                rows = rows if segment.held is None else mix(rows, drawn, segment.held)
        held.append((segment.start, segment.stop, segment.is_video, rows))
    return held


class ModulationTables:
    """Rows of the AdaLN tables: all of a render in host memory, or made forward by forward when they are too many."""

    def __init__(self, dit: DiT, steps: Steps, adaln: ResidentLayers | StreamedLayers):
        self.dit, self.steps, self.adaln = dit, steps, adaln
        embedding = dit.time_embedding(steps.timesteps)
        self.embedding = embedding
        self.final = dit.final_table(embedding)
        self.blocks: list[Tensor] | None = None
        if steps.tables_before_loop:
            projections = enumerate(run_in_order(adaln))
            self.blocks = [dit.block_table(i, embedding, steps.pairs, project).cpu() for i, project in projections]

    def block(self, index: int, step: StepPlan) -> Tensor:
        """[P, 6, hidden] for ``step.pairs`` on the compute device."""
        if self.blocks is not None:
            return self.blocks[index].index_select(0, step.pair_ids).to(self.dit.device, non_blocking=True)
        with self.adaln.use(index) as project:
            return self.dit.block_table(index, self.embedding[step.timestep_ids], step.pairs, project)

    def final_rows(self, step: StepPlan) -> Tensor:
        """[n, 2, hidden] for ``step.timesteps``."""
        return self.final.index_select(0, step.timestep_ids.to(self.final.device))


class VelocityModel:
    """Target rows and a step plan in, velocity rows out: one forward of the DiT for one packed layout."""

    def __init__(
        self,
        dit: DiT,
        layout: PackedLayout,
        steps: Steps,
        text_rows: Tensor,
        conditions: Sequence[tuple[int, int, bool, Tensor]] = (),
        accelerators: Sequence[Accelerator] = (),
        poll: Callable[[], None] | None = None,
        layers: DiTLayers | None = None,
    ):
        self.dit, self.layout = dit, layout
        self.layers = layers or DiTLayers.resident(dit.blocks)
        self.last = steps.forwards[-1].index
        self.certain = not any(accelerator.leaves_out_blocks for accelerator in accelerators)
        self.text_rows = text_rows
        self.conditions = [(a, b, is_video, rows.to(dit.device)) for a, b, is_video, rows in conditions]
        self.tables = ModulationTables(dit, steps, self.layers.adaln)
        self.rotary = rotary_table(layout.positions, dit.rope.inv_freq, dit.dtype)
        self.attention = fold(accelerators, "wrap_attention", dense_attention)
        self.layer = fold(accelerators, "wrap_layer", _run_layer)
        self.block = fold(accelerators, "wrap_block", self._block)
        self.blocks = fold(accelerators, "wrap_blocks", self._blocks)
        self.velocity = fold(accelerators, "wrap_velocity", self._velocity)
        self.poll = poll
        self.calls = 0  # forwards that ran the last block

    def embed(self, rows: Rows) -> Tensor:
        """h [S, hidden]: text rows, held condition rows and the target's rows, projected."""
        dit, layout = self.dit, self.layout
        h = torch.empty(layout.num_rows, dit.config.hidden, dtype=dit.dtype, device=dit.device)
        h[: len(layout.text)] = self.text_rows
        for start, stop, is_video, held in self.conditions:
            (dit.embed_video if is_video else dit.embed_audio)(held, h[start:stop])
        dit.embed_audio(rows.audio, h[layout.target_audio.start : layout.target_audio.stop])
        dit.embed_video(rows.video, h[layout.target_video.start : layout.target_video.stop])
        return h

    def _velocity(self, rows: Rows, step: StepPlan) -> Rows:
        h = self.blocks(self.embed(rows), step, 0, self.dit.config.layers)
        final = self.tables.final_rows(step)
        audio = self.dit.run_heads(h, final, step.audio_runs, video=False)
        return Rows(self.dit.run_heads(h, final, step.video_runs, video=True), audio)

    def _blocks(self, h: Tensor, step: StepPlan, start: int, stop: int) -> Tensor:
        # where no block is left out the next forward begins with block 0: its copy may start during this one's end
        again = 0 if self.certain and step.index != self.last else None
        self.layers.blocks.announce(start, stop, again)
        if self.tables.blocks is None:
            self.layers.adaln.announce(start, stop, again)
        for index in range(start, stop):
            if self.poll is not None:
                self.poll()
            h = self.block(index, h, step)
        self.calls += stop == self.dit.config.layers
        return h

    def _block(self, index: int, h: Tensor, step: StepPlan) -> Tensor:
        context = ForwardContext(
            step.index, step.runs, self.rotary, self.attention, lambda i: self.tables.block(i, step), self.layers.chunks
        )
        with self.layers.blocks.use(index) as forward:
            return self.layer(forward, index, h, context)


def _run_layer(forward: Callable, index: int, h: Tensor, context: ForwardContext) -> Tensor:
    return forward(index, h, context)


class _Stream:
    """One stream of the loop: its rows, and how masks feed, move and restore them."""

    def __init__(self, kind: str, rows: Tensor, source: Tensor | None, noise: Tensor, mask: Tensor | None):
        self.kind, self.rows, self.mask = kind, rows, mask
        self.fed = None
        if mask is not None:
            kept = source if kind == "audio" else mix(source, noise, CONDITION_TIMESTEP)
            self.fed = (mask == 0, kept)

    def feed(self) -> Tensor:
        """What the model is shown: kept tokens at their own clean (or 0.999) level, the rest as they stand."""
        return self.rows if self.fed is None else torch.where(*self.fed, self.rows)

    def step(self, solver: Solver, velocity: Tensor, sigma: float, sigma_next: float) -> None:
        self.rows = solver.step(self.kind, self.rows, velocity, Sigmas(sigma, sigma_next), self.mask)


@torch.no_grad()
@exact_float32()
def sample(
    dit: DiT,
    job: RenderJob,
    accelerators: Sequence[Accelerator] = (),
    progress: Callable[[int, int, float], None] | None = None,
    poll: Callable[[], None] | None = None,
    recovery: RunRecovery | None = None,
    layers: DiTLayers | None = None,
    watch: Callable[[Callable[[], Tensor]], None] | None = None,
) -> SampleResult:
    """Run the forwards of ``job``.

    ``progress(done, total, seconds)`` is called after each; ``poll()`` before each block (it may raise to cancel).
    ``watch(denoised)`` may look, after each forward, at the clip it was heading for: ``denoised()`` gives the picture
    [1, 24, T, h, w]; it changes nothing.
    The job's accelerators are built here, before those given.
    With ``recovery``, the state is saved after each forward and a run found there goes on from its last one, bit for
    bit. ``layers`` says where the blocks' weights come from (default: the module's own). Raises NonFiniteError at the
    forward where a latent stops being finite.
    """
    if job.text.hidden.shape[1] != dit.config.text_dim:
        raise H3Error(
            f"the text condition is {job.text.hidden.shape[1]} wide and the DiT reads {dit.config.text_dim}: "
            "they belong to different models; use the text encoder of this checkpoint"
        )
    accelerators = [*build(job.accelerators), *accelerators]
    solver = SOLVERS[job.solver]()
    kept = [*accelerators, solver]  # what recovery saves beside the streams
    layout = PackedLayout.of(job.text.tags, job.canvas, job.guides, job.references)
    schedule = job.schedule
    steps = plan_steps(layout, schedule, job.masks)
    noise = draw_noise(job)
    video, audio = _streams(job, noise, dit.device)
    for accelerator in accelerators:
        accelerator.prepare(dit, job, layout, steps)
    model = VelocityModel(
        dit,
        layout,
        steps,
        _refine(dit, layers, job.text.hidden),
        condition_rows(job, layout, noise),
        accelerators,
        poll,
        layers,
    )
    resumed = _take_up(recovery, job, video, audio, kept)
    forwards = [plan for plan in steps.forwards if plan.index >= resumed]
    seconds = []
    for done, plan in enumerate(forwards, start=1 + len(steps.forwards) - len(forwards)):
        began = time.perf_counter()
        step = on_device(plan, dit.device)
        velocity = model.velocity(Rows(video.feed(), audio.feed()), step)
        before = None if watch is None else video.rows
        video.step(solver, velocity.video, step.video_sigma, step.video_sigma_next)
        audio.step(solver, velocity.audio, step.audio_sigma, step.audio_sigma_next)
        _require_finite(video.rows, audio.rows, plan.index, job.num_forwards)
        seconds.append(time.perf_counter() - began)
        if recovery is not None:
            recovery.save(plan.index + 1, False, _latent(job, video.rows, audio.rows), kept)
        if progress is not None:
            progress(done, len(steps.forwards), seconds[-1])
        if watch is not None:
            watch(partial(_denoised, job, before, velocity.video, step.video_sigma))
    latent = _latent(job, video.rows, audio.rows)
    if schedule.reaches_zero:
        latent = restore_kept(job, latent)
    if recovery is not None:
        recovery.save(schedule.stop, schedule.reaches_zero, latent, kept)
    return SampleResult(
        latent=latent,
        finished=schedule.reaches_zero,
        dit_calls=model.calls,
        step_seconds=tuple(seconds),
        num_rows=layout.num_rows,
        tables_before_loop=steps.tables_before_loop,
        resumed_after=resumed if resumed > schedule.start else None,
        stats={accelerator.name: accelerator.stats() for accelerator in accelerators},
        notes=tuple(note for accelerator in accelerators for note in accelerator.notes()),
        paths=tuple(path for accelerator in accelerators for path in accelerator.paths()),
    )


def _refine(dit: DiT, layers: DiTLayers | None, hidden: Tensor) -> Tensor:
    """The text rows. A refiner that does not live in the module is there only while this runs."""
    if layers is None or layers.refiner is None:
        return dit.refine_text(hidden)
    with layers.refiner() as blocks:
        return dit.refine_text(hidden, blocks=run_in_order(blocks))


def _take_up(
    recovery: RunRecovery | None,
    job: RenderJob,
    video: _Stream,
    audio: _Stream,
    kept: Sequence[Accelerator | Solver],
) -> int:
    """Put a saved state into the streams, accelerators and solver; returns the first forward that is still to run."""
    start = job.schedule.start
    state = None if recovery is None else recovery.load()
    if state is None or not start < state.done <= job.schedule.stop:
        return start
    video.rows = patchify_video(state.latent.video).to(video.rows.device)
    audio.rows = audio_to_rows(state.latent.audio).to(audio.rows.device)
    for one in kept:
        one.restore(state.accelerators.get(one.name, {}))
    return state.done


def _streams(job: RenderJob, noise: Noise, device: torch.device) -> tuple[_Stream, _Stream]:
    schedule, masks = job.schedule, job.masks
    video_mask = None if masks is None else masks.video_tokens
    audio_mask = None if masks is None else masks.audio_tokens
    made = []
    for kind, mask, drawn, sigma in (
        ("video", video_mask, patchify_video(noise.video), schedule.video[schedule.start]),
        ("audio", audio_mask, noise.audio, schedule.audio[schedule.start]),
    ):
        to_rows = patchify_video if kind == "video" else audio_to_rows
        source = None if job.source is None else to_rows(getattr(job.source, kind).cpu())
        mask = None if mask is None else mask[:, None]
        if job.state is not None:
            rows = to_rows(getattr(job.state, kind).cpu())
        else:
            rows = start_point(None if schedule.from_noise and mask is None else source, drawn, sigma, mask)
        made.append(_Stream(kind, *(None if x is None else x.to(device) for x in (rows, source, drawn, mask))))
    return made[0], made[1]


def _latent(job: RenderJob, video: Tensor, audio: Tensor) -> AVLatent:
    shape = (job.canvas.latent_t, job.canvas.latent_h, job.canvas.latent_w)
    return AVLatent(unpatchify_video(video.cpu(), shape), rows_to_audio(audio.cpu()))


def _denoised(job: RenderJob, rows: Tensor, velocity: Tensor, sigma: float) -> Tensor:
    """x0 = x + sigma v of the picture (masks left out), [1, 24, T, h, w] on the CPU."""
    shape = (job.canvas.latent_t, job.canvas.latent_h, job.canvas.latent_w)
    return unpatchify_video((rows + sigma * velocity).cpu(), shape)


def restore_kept(job: RenderJob, latent: AVLatent) -> AVLatent:
    """Put the source back, bit for bit, wherever the masks keep: per latent cell of the picture, per sound latent."""
    if job.masks is None:
        return latent
    video, audio = latent.video, latent.audio
    if job.masks.video is not None:
        video = torch.where(job.masks.video == 0, job.source.video.cpu(), video)
    if job.masks.audio is not None:
        audio = torch.where(job.masks.audio == 0, job.source.audio.cpu(), audio)
    return AVLatent(video, audio)


def _require_finite(video: Tensor, audio: Tensor, index: int, total: int) -> None:
    for name, rows in (("picture", video), ("sound", audio)):
        if not is_finite(rows):
            raise NonFiniteError(
                f"the {name} latent became NaN or infinite at forward {index + 1} of {total}: nothing was decoded; "
                "check the checkpoint (inspect it), or compute in float32"
            )
