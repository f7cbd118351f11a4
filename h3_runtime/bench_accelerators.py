"""What accelerators cost and change: on a smooth velocity field, on the small model, and in operations at full size.

    field    rows ─▶ analytic velocity of a mixture of Gaussians ─▶ the loop's own steps, with and without forecasting
    small    a DiT of random weights, every preset and accelerator against the full run of the same seed
    carried  the carried model with a prompt of its world: forecasting and its rivals at three budgets
    full     one forward of an accelerator's own arithmetic under fake tensors, against one block of the release

Errors are relative L2 to the full run, median of the seeds. The field is smooth, has modes to choose from and no
structure of a clip: it shows how an error grows, not how a clip looks.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .accelerators import BY_NAME, Accelerator, Spec, spec_of
from .accelerators.presets import PRESETS, Acceleration
from .checkpoint.load import load_dit
from .checkpoint.parts import find_parts
from .demo.carried import CARRIED_MODEL
from .demo.maker import make_model
from .demo.run import text_to_video
from .geometry import Canvas
from .guides import place
from .job import RenderJob, TextCondition
from .layout import PackedLayout, patchify_video
from .memory.measure import FakeMemory
from .model import Models
from .models.dit import DiT, DiTConfig
from .render import condition_text, encode
from .sampler import Rows, draw_noise, sample
from .schedule import DEFAULT_FORWARDS
from .solvers import SOLVERS, Sigmas
from .steps import plan_steps

Results = list[dict[str, Any]]

BUDGETS = (0.25, 0.5, 0.75)
SEEDS = range(8)
FULL_CANVAS = Canvas(1344, 768, 124)
FULL_PROMPT = 512
SMALL_CANVAS = Canvas(96, 64, 22)


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Relative L2 of ours to theirs."""
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


# --- the velocity field ----------------------------------------------------------------------------------------------


class Mixture:
    """v(x, sigma) = E[x0 - noise | x] of a mixture of ``modes`` Gaussians, x = (1 - sigma) x0 + sigma noise; rows are
    independent. The choice between modes is tempered, so that it is made over many steps."""

    def __init__(self, width: int, seed: int, modes: int = 4):
        generator = torch.Generator().manual_seed(seed)
        self.means = torch.randn(modes, width, generator=generator)
        self.scales = 0.35 + 0.3 * torch.rand(modes, 1, generator=generator)

    def __call__(self, x: Tensor, sigma: float) -> Tensor:
        """x [rows, width] -> [rows, width]."""
        keep = 1 - sigma
        variance = (keep * self.scales) ** 2 + sigma**2  # [modes, 1]
        apart = x[:, None] - keep * self.means  # [rows, modes, width]
        fit = -(apart.square() / (2 * variance)).sum(-1) - x.shape[1] / 2 * variance[:, 0].log()
        share = torch.softmax(fit / 8, dim=-1)[..., None]
        return (share * (keep * self.scales**2 - sigma) / variance * apart + share * self.means).sum(1)


class NoWeights(NamedTuple):
    """What accelerators ask of a DiT before the loop."""

    config: DiTConfig
    dtype: torch.dtype
    device: torch.device = torch.device("cpu")


class Field:
    """Blocks whose last hidden state is the velocity itself; heads read it back."""

    def __init__(self, layout: PackedLayout, seed: int):
        self.layout, self.calls = layout, 0
        self.video, self.audio = Mixture(96, 100 + seed), Mixture(32, 200 + seed)

    def run(self, h: Tensor, step, start: int, stop: int) -> Tensor:
        """The innermost ``wrap_blocks`` call: h [S, 96] holds rows, and velocities when it is done."""
        self.calls += 1
        picture, sound = self.rows(h)
        picture.copy_(self.video(picture, step.video_sigma))
        sound.copy_(self.audio(sound, step.audio_sigma))
        return h

    def rows(self, h: Tensor) -> Rows:
        """The target rows in h: picture [Nv, 96], sound [Na, 32]."""
        video, audio = self.layout.target_video, self.layout.target_audio
        return Rows(h[video.start : video.stop], h[audio.start : audio.stop, :32])


@torch.no_grad()
def walk_field(job: RenderJob, seed: int, accelerators: Sequence[Accelerator] = ()) -> tuple[Rows, int]:
    """(the rows where the loop ends, calls of the field), from the job's noise through its solver and schedule."""
    layout = PackedLayout.of(job.text.tags, job.canvas, (), ())
    field, noise, steps = Field(layout, seed), draw_noise(job), plan_steps(layout, job.schedule)
    blocks: Callable = field.run
    for accelerator in accelerators:
        accelerator.prepare(NoWeights(DiTConfig(), torch.float32), job, layout, steps)
        blocks = accelerator.wrap_blocks(blocks)
    solver = SOLVERS[job.solver]()
    rows = Rows(patchify_video(noise.video), noise.audio)
    for step in steps.forwards:
        h = torch.zeros(layout.num_rows, 96)
        for held, moving in zip(field.rows(h), rows):
            held.copy_(moving)
        velocity = field.rows(blocks(h, step, 0, 2))
        rows = Rows(
            solver.step("video", rows.video, velocity.video, Sigmas(step.video_sigma, step.video_sigma_next)),
            solver.step("audio", rows.audio, velocity.audio, Sigmas(step.audio_sigma, step.audio_sigma_next)),
        )
    return rows, field.calls


@dataclass(frozen=True)
class Errors:
    """Median over seeds of a way's relative L2 to the full run, and its calls."""

    calls: float
    picture: float
    sound: float


def field_errors(
    ways: dict[Any, Callable[[RenderJob], tuple[RenderJob, list[Accelerator]]]], seeds: Sequence[int] = SEEDS
) -> dict[Any, Errors]:
    """Each way, a function of the full job that gives its own job and accelerators, against the full run."""
    found: dict[Any, list[tuple[int, float, float]]] = {name: [] for name in ways}
    for seed in seeds:
        job = small_job(seed)
        full, _ = walk_field(job, seed)
        for name, way in ways.items():
            made, accelerators = way(job)
            rows, calls = walk_field(made, seed, accelerators)
            found[name].append((calls, relative(rows.video, full.video), relative(rows.audio, full.audio)))
    return {name: Errors(*map(statistics.median, zip(*values))) for name, values in found.items()}


def small_job(seed: int, text_dim: int = 64, forwards: int = DEFAULT_FORWARDS) -> RenderJob:
    """96x64, 22 frames, nine text rows."""
    hidden = torch.randn(9, text_dim, generator=torch.Generator().manual_seed(1))
    text = TextCondition(hidden, torch.ones(9, dtype=torch.int64))
    return RenderJob(SMALL_CANVAS, text, seed=seed, num_forwards=forwards)


def forecasting_ways(budget: float) -> dict[str, Callable]:
    """Forecasting, reuse, and fewer steps, each with ``budget`` of the full run's calls."""
    fewer = math.floor(DEFAULT_FORWARDS * budget)
    options = BY_NAME["forecast"].Options(calls=budget, sound_limit=10.0)  # no forward beyond the budget
    return {
        "forecast": lambda job: (job, [BY_NAME["forecast"](options)]),
        "reuse": lambda job: (job, [BY_NAME["forecast"](replace(options, degree=0))]),
        "fewer steps": lambda job: (replace(job, num_forwards=fewer), []),
    }


def solver_errors(
    solver: str, counts: Sequence[int] = (12, 24, 49), seeds: Sequence[int] = SEEDS, path: int = 1000
) -> dict[str, Errors]:
    """A solver with ``counts`` forwards against the field's own path, which ``path`` forwards of second order walk: the
    error of 49 of Euler's is the baseline's own."""
    found: dict[int, list[tuple[int, float, float]]] = {count: [] for count in counts}
    for seed in seeds:
        job = small_job(seed)
        truth, _ = walk_field(replace(job, num_forwards=path, solver="second-order"), seed)
        for count in counts:
            rows, calls = walk_field(replace(job, num_forwards=count, solver=solver), seed)
            found[count].append((calls, relative(rows.video, truth.video), relative(rows.audio, truth.audio)))
    return {f"{solver} {count}": Errors(*map(statistics.median, zip(*rows))) for count, rows in found.items()}


# --- the small model -------------------------------------------------------------------------------------------------


def model_errors(
    dit: DiT,
    ways: dict[str, Callable[[RenderJob], RenderJob]],
    seeds: Sequence[int] = SEEDS,
    plain: RenderJob | None = None,
) -> dict[str, Errors]:
    """Each way, a function of the full job (``plain``, by default the small one), on ``dit`` against the full run of
    the same seed."""
    found: dict[str, list[tuple[int, float, float]]] = {name: [] for name in ways}
    plain = small_job(0, dit.config.text_dim) if plain is None else plain
    for seed in seeds:
        job = replace(plain, seed=seed)
        full = sample(dit, job).latent
        for name, way in ways.items():
            done = sample(dit, way(job))
            apart = relative(done.latent.video, full.video), relative(done.latent.audio, full.audio)
            found[name].append((done.dit_calls, *apart))
    return {name: Errors(*map(statistics.median, zip(*values))) for name, values in found.items()}


def accelerated(*specs: Spec, **changes) -> Callable[[RenderJob], RenderJob]:
    return lambda job: replace(job, accelerators=specs, **changes)


def model_ways() -> dict[str, Callable[[RenderJob], RenderJob]]:
    """Every preset as this machine runs it, every accelerator, and forecasting's rivals at three budgets."""
    made: dict[str, Callable] = {}
    for name in PRESETS:
        asked = Acceleration().and_preset(name)
        made[f"preset {name}"] = accelerated(*asked.accelerators, solver=asked.solver)
    for budget in BUDGETS:
        made |= budget_ways(budget)
    made["block-cache"] = accelerated(spec_of("block-cache"))
    made["sparse, blocks of 4"] = accelerated(spec_of("sparse", block=4))
    made["attention int8-eager"] = accelerated(spec_of("attention", kernel="int8-eager"))
    return made


def budget_ways(budget: float) -> dict[str, Callable[[RenderJob], RenderJob]]:
    """Forecasting, reuse and fewer steps, each with ``budget`` of the full run's calls."""
    return {
        f"forecast {budget:.0%}": accelerated(spec_of("forecast", calls=budget, sound_limit=10.0)),
        f"reuse {budget:.0%}": accelerated(spec_of("forecast", calls=budget, degree=0, sound_limit=10.0)),
        f"fewer steps {budget:.0%}": accelerated(num_forwards=math.floor(DEFAULT_FORWARDS * budget)),
    }


def carried() -> tuple[DiT, RenderJob]:
    """The carried model's DiT, and the job of a prompt of its world at the size it was trained at."""
    models = Models(find_parts(CARRIED_MODEL), torch.float32)
    request = text_to_video(DEFAULT_FORWARDS)
    placement = place(request)
    job = encode(request, placement, models, condition_text(request, placement, models).text)
    return models.dit(job.task), job


# --- operations at full size -----------------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Counts floating-point operations: two per term of a matrix product or attention, one per element written by
    anything else that computes. Views, allocation and copies count nothing."""

    FREE = tuple(
        "view slice select empty detach transpose permute expand as_strided unsqueeze copy_ clone _to_copy zeros alias "
        "unbind split t. arange index lift".split()
    )

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::")
        if name.startswith(("mm", "addmm", "bmm", "baddbmm")):
            left, right = [x for x in args if isinstance(x, Tensor)][-2:]
            self.total += 2 * left.numel() * right.shape[-1]
        elif "scaled_dot_product" in name:
            q, k = args[:2]
            self.total += 4 * q.numel() * k.shape[-2]
        elif not name.startswith(self.FREE):
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                self.total += tensor.numel() if isinstance(tensor, Tensor) else 0
        return out


@dataclass(frozen=True)
class Cost:
    """An accelerator's own work at full size: operations of a forward, their share of one block's, and the live bytes
    that it adds at most, beside what its ``bytes`` says."""

    operations: int
    share_of_block: float
    live_bytes: int
    said_bytes: int


def block_operations(config: DiTConfig, rows: int) -> int:
    """Operations of one block's matmuls and attention."""
    inner = config.heads * config.head_dim
    return 2 * rows * (4 * config.hidden * inner + 3 * config.hidden * config.ffn) + 4 * rows * rows * inner


@torch.no_grad()
def own_cost(name: str, dtype: torch.dtype = torch.bfloat16, **options) -> Cost:
    """``wrap_blocks`` of an accelerator around blocks that do nothing, on the release's sizes at 1344x768, 124 frames:
    the dearest of its forwards, and the most it holds."""
    config, accelerator = DiTConfig(), BY_NAME[name](BY_NAME[name].Options(**options))
    tags = torch.ones(FULL_PROMPT, dtype=torch.int64)
    job = RenderJob(FULL_CANVAS, TextCondition(torch.zeros(FULL_PROMPT, 8), tags))
    layout = PackedLayout.of(tags, job.canvas, (), ())
    steps, dearest = plan_steps(layout, job.schedule), 0
    accelerator.prepare(NoWeights(config, dtype), job, layout, steps)
    with FakeMemory() as live:
        accelerator.read = lambda tensor: 0.0  # a fake tensor holds no number
        blocks = accelerator.wrap_blocks(lambda h, step, start, stop: h)
        h = torch.empty(layout.num_rows, config.hidden, dtype=dtype)
        live.start_peak()
        before = live.now["cpu"]
        for step in steps.forwards[:10]:
            with Operations() as counted:
                h = blocks(h, step, 0, config.layers)
            dearest = max(dearest, counted.total)
        held = live.peak["cpu"] - before
    share = dearest / block_operations(config, layout.num_rows)
    return Cost(dearest, share, held, accelerator.bytes(layout, config, dtype.itemsize))


# --- bench -----------------------------------------------------------------------------------------------------------


def bench_accelerators() -> Results:
    """All four measures; about four minutes on two idle cores."""
    results: Results = []
    for budget in BUDGETS:
        results += _rows(f"accelerators/field/{budget:.0%}", field_errors(forecasting_ways(budget)))
    for solver in SOLVERS:
        results += _rows("accelerators/field to its path", solver_errors(solver))
    with tempfile.TemporaryDirectory() as folder:
        dit, _ = load_dit(make_model(Path(folder)) / "dit.safetensors", torch.float32)
        results += _rows("accelerators/small", model_errors(dit, model_ways()))
    dit, job = carried()
    for budget in BUDGETS:
        results += _rows("accelerators/carried", model_errors(dit, budget_ways(budget), plain=job))
    for name in ("forecast", "block-cache"):
        cost = own_cost(name)
        results += [
            {"name": f"accelerators/full/{name}/share_of_a_block", "value": cost.share_of_block, "unit": "ratio"},
            {"name": f"accelerators/full/{name}/operations", "value": cost.operations, "unit": "operations"},
            {"name": f"accelerators/full/{name}/live", "value": cost.live_bytes / 2**30, "unit": "GiB"},
            {"name": f"accelerators/full/{name}/planned", "value": cost.said_bytes / 2**30, "unit": "GiB"},
        ]
    return results


def _rows(prefix: str, errors: dict[str, Errors]) -> Results:
    rows: Results = []
    for name, found in errors.items():
        rows.append({"name": f"{prefix}/{name}/dit_calls", "value": found.calls, "unit": "calls"})
        rows.append({"name": f"{prefix}/{name}/picture", "value": found.picture, "unit": "rel L2"})
        rows.append({"name": f"{prefix}/{name}/sound", "value": found.sound, "unit": "rel L2"})
    return rows
