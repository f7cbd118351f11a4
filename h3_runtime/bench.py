"""Measures that anyone can repeat: the time of a step, the memory of a forward, the cost of loading.

    step     ours ── diffusers ── floor     in turns in one process: the same weights, shapes and dtype; median of 9
    memory   one forward of the full-size DiT under fake tensors: every live byte is counted, none is allocated
    load     a checkpoint made on the spot ──load_dit──▶ seconds, and host memory beyond what stays resident

The floor of a step is what every implementation has to do: the four matmuls and the attention of each block, at their
full shapes and nothing between them. diffusers takes part where it is installed; it is imported nowhere else.
"""

from __future__ import annotations

import gc
import importlib
import json
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from .checkpoint.load import load_dit
from .checkpoint.reader import DTYPES
from .checkpoint.writer import write_safetensors
from .errors import MissingDependency
from .geometry import AUDIO_CHANNELS, Canvas
from .job import MASK_LEVELS, Masks
from .layout import PackedLayout
from .memory.measure import LiveBytes
from .models.dit import DiT, DiTConfig
from .sampler import Rows, VelocityModel
from .schedule import plan_schedule
from .steps import StepPlan, Steps, on_device, plan_steps

Results = list[dict[str, Any]]

GIB = 2**30
DTYPE_NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MEMORY_FORWARDS = 8  # enough for a mask's tables to be too many to make before the loop: the larger case
PEAK_TARGETS_GIB = {124: 2.5, 362: 5.3}  # one full-size forward at 1344x768 without references
LOAD_BEYOND_GIB = 4e9 / GIB  # host memory while loading, beyond what stays


# --- the reference ---------------------------------------------------------------------------------------------------


def import_reference(path: str = "") -> Any:
    """diffusers, or a module of it. MissingDependency where it is not installed or too old for MiniMax-H3."""
    try:
        package = importlib.import_module("diffusers")
        package.MiniMaxH3Transformer3DModel  # noqa: B018  (absent before 0.42)
        return importlib.import_module(f"{package.__name__}.{path}") if path else package
    except (ImportError, AttributeError):
        raise MissingDependency(
            "diffusers 0.42 or newer is not installed: there is nothing to measure beside us; "
            "pip install 'diffusers>=0.42', or run dev.py test once, which installs it"
        ) from None


REFERENCE_PREFIXES = (
    ("video_patch_proj.", "proj_in."),
    ("audio_patch_proj.", "audio_proj_in."),
    ("condition_proj.", "context_embedder."),
    ("time_embedder.proj_in.", "time_embedder.linear_1."),
    ("time_embedder.proj_out.", "time_embedder.linear_2."),
    ("token_refiner.blocks.", "token_refiner.refiner_blocks."),
    ("blocks.", "transformer_blocks."),
    ("final_layer.norm.", "norm_out.norm."),
    ("final_layer.adaln_proj.", "norm_out."),
    ("final_layer.video_out.", "proj_out."),
    ("final_layer.audio_out.", "audio_proj_out."),
)
REFERENCE_ENDS = (
    (".attn.out_proj.weight", ".attn.to_out.0.weight"),
    (".attn.q_norm.weight", ".attn.norm_q.weight"),
    (".attn.k_norm.weight", ".attn.norm_k.weight"),
    (".mlp.fc2.weight", ".ff.net.2.weight"),
)


def reference_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our DiT's tensors under diffusers' names: q, k, v apart, and value above gate."""
    theirs = {}
    for name, tensor in tensors.items():
        name = next((new + name[len(old) :] for old, new in REFERENCE_PREFIXES if name.startswith(old)), name)
        name = next((name[: -len(old)] + new for old, new in REFERENCE_ENDS if name.endswith(old)), name)
        if name.endswith(".attn.qkv_proj.weight"):
            stem = name.removesuffix("qkv_proj.weight")
            theirs.update((f"{stem}to_{part}.weight", rows) for part, rows in zip("qkv", tensor.chunk(3)))
        elif name.endswith(".mlp.fc1.weight"):
            gate, value = tensor.chunk(2)
            theirs[name.removesuffix("mlp.fc1.weight") + "ff.net.0.proj.weight"] = torch.cat((value, gate))
        elif name != "rope.inv_freq":
            theirs[name] = tensor
    return theirs


def reference_model(dit: DiT) -> torch.nn.Module:
    """diffusers' transformer on ``dit``'s own weights, float32 islands included."""
    config = dit.config
    with torch.device("meta"):
        model = import_reference().MiniMaxH3Transformer3DModel(
            num_attention_heads=config.heads,
            attention_head_dim=config.head_dim,
            hidden_size=config.hidden,
            num_layers=config.layers,
            num_refiner_layers=config.refiner_layers,
            ffn_dim=config.ffn,
            in_channels=config.video_channels,
            audio_in_channels=config.audio_channels,
            text_dim=config.text_dim,
            freq_dim=config.time_features,
            time_embed_hidden_dim=config.time_hidden,
            time_embed_dim=config.time_dim,
            rope_freq_dim=config.rope_frequencies,
        )
    model.load_state_dict(reference_tensors(dit.state_dict()), strict=True, assign=True)
    model.rope.inv_freq = dit.rope.inv_freq.clone()
    return model.eval().requires_grad_(False)


def reference_inputs(layout: PackedLayout, step: StepPlan, text: Tensor, rows: Rows) -> dict[str, Any]:
    """Keyword arguments of diffusers' forward for a layout without conditions; ``text`` [L, text_dim]."""
    timesteps = torch.tensor([1 - step.video_sigma, 1 - step.audio_sigma], dtype=torch.float32)
    which = torch.zeros(layout.num_rows, dtype=torch.int64)
    which[layout.target_audio.start : layout.target_audio.stop] = 1
    return {
        "hidden_states": rows.video[None],
        "audio_hidden_states": rows.audio[None],
        "encoder_hidden_states": text[None],
        "timestep": timesteps,
        "timestep_indices": which,
        "token_tags": layout.row_tags(),
        "position_ids": layout.positions,
        "video_indices": layout.video_rows(),
        "audio_indices": layout.audio_rows(),
        "text_indices": torch.arange(len(layout.text)),
        "return_dict": False,
    }


# --- step ------------------------------------------------------------------------------------------------------------


STEP_CONFIG = DiTConfig(
    hidden=1024, layers=8, heads=11, ffn=2752, text_dim=256, time_features=64, time_hidden=256, time_dim=256
)


@dataclass(frozen=True)
class StepCase:
    """What ``bench_step`` runs: a DiT, and a layout of text rows, sound latents and picture latents (t, h, w)."""

    config: DiTConfig = STEP_CONFIG
    text: int = 256
    audio: int = 64
    video: tuple[int, int, int] = (12, 28, 44)  # 3,696 rows, 4,080 with text and sound

    def layout(self) -> PackedLayout:
        return PackedLayout.build(torch.ones(self.text, dtype=torch.int64), self.video, self.audio)


def make_dit(config: DiTConfig, dtype: torch.dtype, seed: int = 0) -> DiT:
    """A DiT with seeded weights in ``dtype``, its islands in float32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        dit = DiT(config)
    for name, parameter in dit.named_parameters():
        if not name.startswith(dit.float32_islands):
            parameter.data = parameter.data.to(dtype)
    return dit.eval().requires_grad_(False)


@torch.no_grad()
def bench_step(
    case: StepCase | None = None,
    repeat: int = 9,
    dtypes: Sequence[str] = ("fp32", "bf16"),
    clock: Callable[[], float] = time.perf_counter,
) -> Results:
    """Seconds of our denoise step, of diffusers' forward and of the floor, and their ratios, per dtype.

    A ratio is the median over ``repeat`` rounds of the ratio inside a round, because the three of one round met the
    same state of the machine. ``step/fp32/rel_l2`` is how far the two outputs are apart. Without diffusers its entries
    are left out and a note says so.
    """
    case = case or StepCase()
    results: Results = []
    for dtype in dtypes:
        runs, rel_l2 = _step_runs(case, DTYPE_NAMES[dtype])
        seconds = take_turns(runs, repeat, clock)
        results += _step_results(f"step/{dtype}", seconds, rel_l2, case.layout().num_rows)
    return results


def _step_runs(case: StepCase, dtype: torch.dtype) -> tuple[dict[str, Callable[[], Any]], float | None]:
    """The three contenders as calls without arguments, and the distance of the first two's outputs."""
    dit = make_dit(case.config, dtype)
    layout = case.layout()
    steps = plan_steps(layout, plan_schedule(4))
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(kind)

    text = draw(case.text, case.config.text_dim, kind=dtype)
    rows = Rows(
        draw(len(layout.target_video), 4 * case.config.video_channels),
        draw(len(layout.target_audio), case.config.audio_channels),
    )
    model = VelocityModel(dit, layout, steps, dit.refine_text(text))
    step = on_device(steps.forwards[1], dit.device)
    runs: dict[str, Callable[[], Any]] = {"ours": lambda: model.velocity(rows, step)}
    rel_l2 = None
    try:
        reference = reference_model(dit)
    except MissingDependency:
        pass
    else:
        given = reference_inputs(layout, step, text, rows)
        runs["diffusers"] = lambda: reference(**given)
        ours, (video, audio) = runs["ours"](), runs["diffusers"]()
        rel_l2 = max(relative_l2(ours.video, video[0]), relative_l2(ours.audio, audio[0]))
    runs["floor"] = _floor(dit, layout.num_rows, draw)
    return runs, rel_l2


def _floor(dit: DiT, rows: int, draw: Callable[..., Tensor]) -> Callable[[], None]:
    """Every block's matmuls, each over all rows at once, and attention over all heads at once; nothing between."""
    config, dtype = dit.config, dit.dtype
    inner = config.heads * config.head_dim
    x = {width: draw(rows, width, kind=dtype) for width in {config.hidden, inner, config.ffn}}
    q, k, v = (draw(1, config.heads, rows, config.head_dim, kind=dtype) for _ in range(3))

    def run() -> None:
        for block in dit.blocks:
            F.linear(x[config.hidden], block.attn.qkv_proj.weight)
            F.scaled_dot_product_attention(q, k, v)
            F.linear(x[inner], block.attn.out_proj.weight)
            F.linear(x[config.hidden], block.mlp.fc1.weight)
            F.linear(x[config.ffn], block.mlp.fc2.weight)

    return run


def take_turns(
    runs: dict[str, Callable[[], Any]], repeat: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of every run in ``repeat`` rounds after one that is thrown away. Each round starts with another one."""
    names = list(runs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-1, repeat):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            began = clock()
            runs[name]()
            spent = clock() - began
            if turn >= 0:
                seconds[name].append(spent)
    return seconds


def _step_results(prefix: str, seconds: dict[str, list[float]], rel_l2: float | None, rows: int) -> Results:
    results: Results = []
    for one, other in (("ours", "floor"), ("ours", "diffusers"), ("diffusers", "floor")):
        if one in seconds and other in seconds:
            ratios = [a / b for a, b in zip(seconds[one], seconds[other])]
            results.append(
                {
                    "name": f"{prefix}/{one}_to_{other}",
                    "value": statistics.median(ratios),
                    "unit": "ratio",
                    "low": min(ratios),
                    "high": max(ratios),
                }
            )
    for name, values in seconds.items():
        results.append({"name": f"{prefix}/{name}", "value": statistics.median(values), "unit": "s", "rows": rows})
    if rel_l2 is not None:
        results.append({"name": f"{prefix}/rel_l2", "value": rel_l2, "unit": "relative L2 to diffusers"})
    else:
        results[0]["note"] = "diffusers is not installed: measured without it"
    return results


def relative_l2(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want| over all elements, in float64."""
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


# --- memory ----------------------------------------------------------------------------------------------------------


def bench_memory(
    frames: Sequence[int] = (124, 209, 362),
    config: DiTConfig | None = None,
    size: tuple[int, int] = (1344, 768),
    text: int = 512,
    masks: Sequence[bool] = (False, True),
    reference: bool = True,
) -> Results:
    """Peak live bytes of one bf16 forward in GiB at each of ``frames``, and with a gradient mask of 256 levels.

    Runs the sampler's own forward under fake tensors: hidden state, inputs, rotary tables and all intermediates count,
    weights and the modulation tables made before the loop do not. Blocks leave nothing behind, so the default config
    has one instead of 50. ``masks`` picks runs without (False) and with the mask (True). The same count over
    diffusers' block alone stands beside each where it is installed.
    """
    config = config or DiTConfig(layers=1)
    results: Results = []
    for count in frames:
        canvas = Canvas.fit(count, size)
        layout = PackedLayout.build(
            torch.ones(text, dtype=torch.int64), (canvas.latent_t, canvas.latent_h, canvas.latent_w), canvas.audio_t
        )
        beside = _reference_peak(config, layout.num_rows) if reference else None
        for masked in masks:
            steps = plan_steps(layout, plan_schedule(MEMORY_FORWARDS), gradient_mask(canvas) if masked else None)
            result = {
                "name": f"peak/{count}/mask" if masked else f"peak/{count}",
                "value": forward_peak(config, layout, steps) / GIB,
                "unit": "GiB",
                "rows": layout.num_rows,
                "tables": "before the loop" if steps.tables_before_loop else "by forward",
            }
            if size == (1344, 768) and count in PEAK_TARGETS_GIB:
                result["target"] = PEAK_TARGETS_GIB[count]
            if beside is not None:
                result["diffusers_block"] = beside / GIB
            results.append(result)
    return results


def gradient_mask(canvas: Canvas) -> Masks:
    """Picture and sound masks that run through all 256 levels above zero, in the order of their rows."""

    def ramp(*shape: int) -> Tensor:
        count = math.prod(shape)
        return (torch.arange(count) * MASK_LEVELS // count + 1).view(shape) / MASK_LEVELS

    video = ramp(canvas.latent_t, canvas.latent_h, canvas.latent_w)
    audio = ramp(AUDIO_CHANNELS, canvas.audio_t)
    return Masks.make(video, audio)


def forward_peak(config: DiTConfig, layout: PackedLayout, steps: Steps, dtype: torch.dtype = torch.bfloat16) -> int:
    """Peak live bytes of ``VelocityModel.velocity`` at the first of ``steps``, on tensors without memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        dit = make_dit(config, dtype)
        text = torch.empty(len(layout.text), config.hidden, dtype=dtype)
        rows = Rows(
            torch.empty(len(layout.target_video), 4 * config.video_channels),
            torch.empty(len(layout.target_audio), config.audio_channels),
        )
        model = VelocityModel(dit, layout, steps, text)
        step = on_device(steps.forwards[0], dit.device)
        live = LiveBytes()
        live.hold([*dit.parameters(), *dit.buffers()], counted=False)
        live.hold((model.tables.embedding, model.tables.final, *(model.tables.blocks or ())), counted=False)
        live.hold((text, *rows, *model.rotary))
        with live:
            model.velocity(rows, step)
    return live.peak["cpu"]


def _reference_peak(config: DiTConfig, rows: int) -> int | None:
    """The same count over diffusers' block alone: its inputs and intermediates. None where it is not installed."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        module = import_reference("models.transformers.transformer_minimax_h3")
    except MissingDependency:
        return None
    with FakeTensorMode(), torch.no_grad():
        block = module.MiniMaxH3TransformerBlock(
            config.hidden, config.heads, config.head_dim, config.ffn, config.time_dim, 1e-5, 1e-5
        )
        for parameter in block.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
        rotary = tuple(torch.empty(rows, 6 * config.rope_frequencies) for _ in range(2))
        given = (
            torch.empty(1, rows, config.hidden, dtype=torch.bfloat16),
            torch.empty(3, config.time_dim),
            torch.zeros(rows, dtype=torch.int64),
        )
        live = LiveBytes()
        live.hold(block.parameters(), counted=False)
        live.hold((*given, *rotary))
        with live:
            block(*given, rotary)
    return live.peak["cpu"]


# --- load ------------------------------------------------------------------------------------------------------------

LOAD_CONFIG = DiTConfig(hidden=2048, layers=8, heads=22, ffn=5504, text_dim=1024, time_hidden=512, time_dim=512)
NUM_SHARDS = 4


def bench_load(config: DiTConfig = LOAD_CONFIG, folder: Path | None = None) -> Results:
    """Seconds to load a bf16 DiT (1.5 GB by default) and its host memory, from one file and from official shards.

    The file is the ComfyUI layout, which is ours; the shards carry interleaved q/k/v, which are rearranged on the way.
    ``beyond`` is the largest resident set seen while loading, less the one afterwards. Files were just written, so
    they come from the page cache where that is large enough. They are made in ``folder`` (default: the system's
    folder for temporary files) and removed.
    """
    results: Results = []
    for name, shards in (("single", 1), ("sharded", NUM_SHARDS)):
        with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as place:
            path = write_checkpoint(Path(place), config, shards)
            results += _weigh_load(f"load/{name}", path)
    return results


def write_checkpoint(folder: Path, config: DiTConfig, shards: int) -> Path:
    """A bf16 DiT with float32 islands, every value 0.01, in ``folder``: one file, or shards and their index."""
    with torch.device("meta"):
        dit = DiT(config)
    # rope.inv_freq is a formula and most layouts leave it out
    shapes = {name: tuple(tensor.shape) for name, tensor in dit.state_dict().items() if name != "rope.inv_freq"}
    kinds = {name: "F32" if name.startswith(dit.float32_islands) else "BF16" for name in shapes}
    names = sorted(kinds)
    files = {}
    for index in range(shards):
        part = names[index * len(names) // shards : (index + 1) * len(names) // shards]
        file = "dit.safetensors" if shards == 1 else f"model-{index + 1:05}-of-{shards:05}.safetensors"
        made = ((name, torch.full(shapes[name], 0.01, dtype=getattr(torch, DTYPES[kinds[name]][1]))) for name in part)
        write_safetensors(folder / file, {name: (kinds[name], shapes[name]) for name in part}, made, {})
        files.update(dict.fromkeys(part, file))
    if shards == 1:
        return folder / "dit.safetensors"
    index_path = folder / "model.safetensors.index.json"
    index_path.write_text(json.dumps({"metadata": {}, "weight_map": files}), encoding="utf-8")
    return folder


def _weigh_load(name: str, path: Path) -> Results:
    process = psutil.Process()
    gc.collect()
    before, stop, seen = process.memory_info().rss, threading.Event(), [0]

    def watch() -> None:
        while not stop.wait(0.002):
            seen[0] = max(seen[0], process.memory_info().rss)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    began = time.perf_counter()
    dit, info = load_dit(path)
    seconds = time.perf_counter() - began
    stop.set()
    watcher.join()
    after = process.memory_info().rss
    weights = sum(tensor.untyped_storage().nbytes() for tensor in dit.state_dict().values())
    return [
        {"name": name, "value": seconds, "unit": "s", "format": info.format, "gb_per_s": info.nbytes / seconds / 1e9},
        {"name": f"{name}/weights", "value": weights / GIB, "unit": "GiB"},
        {"name": f"{name}/resident", "value": (after - before) / GIB, "unit": "GiB"},
        {"name": f"{name}/beyond", "value": max(0, seen[0] - after) / GIB, "unit": "GiB", "target": LOAD_BEYOND_GIB},
    ]


# --- words -----------------------------------------------------------------------------------------------------------


def format_lines(results: Results) -> list[str]:
    """One line per result: name, value with its unit, and what else it carries."""
    width = max((len(result["name"]) for result in results), default=0)
    lines = []
    for result in results:
        value = result["value"]
        shown = "" if value is None else f"{value:.3g}" if abs(value) < 0.01 else f"{value:.3f}"
        rest = [
            f"{key.replace('_', ' ')} {extra:.2f}" if isinstance(extra, float) else f"{key.replace('_', ' ')} {extra}"
            for key, extra in result.items()
            if key not in ("name", "value", "unit")
        ]
        lines.append(
            f"{result['name']:<{width}}  {shown} {result['unit']}" + (f"  ({', '.join(rest)})" if rest else "")
        )
    return lines
