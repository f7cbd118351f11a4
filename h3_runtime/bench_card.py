"""What one card does: are placements bit-equal on it, are peaks as planned, what does streaming cost, how fast is the
disk ring. ``python -m h3_runtime bench card``; made to end within five minutes.

    demo model     ──place_dit──▶ resident, RAM, disk, mixed, quantised          the same bits
    one full-size block's bytes, used for all 50   ──sampler.sample, allocator capped──▶
                   resident ▸ streamed from pinned RAM                             the same bits, seconds, peak
    a file of full-size layers ──disk ring──▶ bytes a second                       beside plain reads of the same file

All blocks share one buffer, so that 38 GB need not be there twice; copies and matmuls are as many and as long as with
50. Without a card everything runs on a tiny model on the CPU, and the result says that the proof is incomplete.
"""

from __future__ import annotations

import copy
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .checkpoint.load import load_dit, open_dit
from .checkpoint.pieces import assign
from .checkpoint.reader import SafetensorsFile
from .checkpoint.writer import write_safetensors
from .demo.maker import DIT, make_model
from .geometry import Canvas
from .job import RenderJob, TextCondition
from .memory.moments import DiTLoad, denoise_moments, largest
from .memory.placement import ADALN, Placement, place_dit
from .memory.rows import RenderSizes
from .memory.streaming import (
    CudaMover,
    DiskStore,
    DiTLayers,
    Entry,
    HostMover,
    LayerLayout,
    LayerStore,
    ResidentLayers,
    StreamedLayers,
    run_in_order,
)
from .memory.weights import named_dit
from .models.attention import inverse_frequencies
from .models.dit import DiT, DiTConfig
from .pressure import free_memory
from .sampler import SampleResult, sample
from .schedule import DEFAULT_FORWARDS
from .selftest import drawn, tiny_job

Results = list[dict[str, Any]]

GIB = 1 << 30
STREAMING_OVERHEAD = 0.03  # of the resident step, at most
PEAK_UNDER, PEAK_OVER = 0.03, 0.10  # of the measured peak that the predicted one may be off
RING_SHARE = 0.8  # of the plain reads' rate that the ring must reach
INCOMPLETE = "PROOF INCOMPLETE: no CUDA card here; bits were compared on the CPU, a tiny model stood for the release"


@dataclass(frozen=True)
class CardCase:
    """What is measured: the release at 124 frames of 1344x768 under a cap of 24 GiB, three forwards of 49."""

    config: DiTConfig = field(default_factory=DiTConfig)
    canvas: Canvas = field(default_factory=lambda: Canvas(1344, 768, 124))
    text: int = 512
    dtype: torch.dtype = torch.bfloat16
    forwards: int = 3
    cap: int = 24 * GIB
    disk_layers: int = 4

    def job(self) -> RenderJob:
        text = TextCondition(drawn(self.text, self.config.text_dim, seed=1), torch.ones(self.text, dtype=torch.int64))
        return RenderJob(self.canvas, text, num_forwards=DEFAULT_FORWARDS, stop=self.forwards)


TINY = CardCase(DIT, Canvas(96, 64, 22), 5, torch.float32, disk_layers=3)


def bench_card(device: torch.device | None = None, case: CardCase | None = None) -> Results:
    """All checks on ``device`` (default: the card, else the CPU with a tiny model)."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    case = case or (CardCase() if device.type == "cuda" else TINY)
    results = equal_bits(device)
    with capped(device, case.cap):
        results += streaming(device, case)
    results += disk_ring(device, case)
    if device.type != "cuda":
        results.append({"name": "card/proof", "value": None, "unit": INCOMPLETE})
    return results


def _row(name: str, value: float, unit: str, passed: bool | None = None, **more: Any) -> dict[str, Any]:
    row = {"name": f"card/{name}", "value": value, "unit": unit, **more}
    return row if passed is None else {**row, "pass": passed}


@contextmanager
def capped(device: torch.device, nbytes: int) -> Iterator[None]:
    """The allocator of a card may take no more than ``nbytes`` inside the block."""
    if device.type != "cuda":
        yield
        return
    whole = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / whole), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


# --- bits ------------------------------------------------------------------------------------------------------------

PLACEMENTS = (
    Placement("ram"),
    Placement("disk"),
    Placement("ram", resident=2, ahead=2, adaln="ram"),
    Placement("disk", resident=1, adaln="resident"),
)


def equal_bits(device: torch.device) -> Results:
    """The demo model in every placement and quantisation against resident: how many latents differ."""
    rows, job = [], tiny_job()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = make_model(Path(folder)) / "dit.safetensors"
        for quantise in (None, "int8_convrot", "fp8"):
            expected = sample(load_dit(path, device=device, quantise=quantise)[0], job).latent
            wrong = []
            for placement in PLACEMENTS:
                dit, layers = place_dit(open_dit(path, quantise=quantise), placement, device)
                found = sample(dit, job, layers=layers).latent
                if not (torch.equal(found.video, expected.video) and torch.equal(found.audio, expected.audio)):
                    wrong.append(str(placement))
            name = f"bits/{quantise or 'stored'}"
            rows.append(_row(name, len(wrong), f"of {len(PLACEMENTS)} placements differ", not wrong, differ=wrong))
    return rows


# --- streaming -------------------------------------------------------------------------------------------------------


class OneBuffer:
    """A store whose layers are all the same bytes, in one buffer."""

    def __init__(self, module: nn.Module, skip: tuple[str, ...], pin: bool):
        self.one = LayerLayout.of(module, skip)
        self.flat = torch.empty(self.one.nbytes, dtype=torch.uint8, pin_memory=pin)
        _draw(self.one.views(self.flat))

    def layout(self, layer: int) -> LayerLayout:
        return self.one

    def read(self, layer: int, out: Tensor) -> None:
        out[: self.one.nbytes].copy_(self.flat)

    def host(self, layer: int) -> Tensor:
        return self.flat


def _draw(tensors: dict[str, Tensor]) -> None:
    """Random matrices that keep activations in range; vectors are ones or zeros."""
    for name, tensor in tensors.items():
        if tensor.ndim > 1:
            tensor.normal_(0.0, 0.5 / tensor.shape[1] ** 0.5)
        else:
            tensor.fill_(0.0 if name.endswith("bias") else 1.0)


class OneBlockModel:
    """The DiT of ``case`` whose blocks are all the same one: its parts on ``device``, the others' bytes in host RAM."""

    def __init__(self, case: CardCase, device: torch.device):
        self.case, self.device, self.pin = case, device, device.type == "cuda"
        with torch.device("meta"):
            dit = DiT(replace(case.config, layers=1)).eval().requires_grad_(False)
        for name, tensor in (*dit.named_parameters(), *dit.named_buffers()):
            where = "meta" if name.startswith(("blocks.", "token_refiner.blocks.")) else device
            island = name.startswith(dit.float32_islands)
            assign(dit, name, torch.empty_like(tensor, dtype=torch.float32 if island else case.dtype, device=where))
        torch.manual_seed(0)
        _draw({name: tensor.data for name, tensor in dit.named_parameters() if not tensor.is_meta})
        assign(dit, "rope.inv_freq", inverse_frequencies(case.config.rope_frequencies).to(device))
        dit.config = case.config
        self.dit, self.block = dit, dit.blocks[0]
        self.stores = {
            "blocks": OneBuffer(self.block, (ADALN,), self.pin),
            "adaln": OneBuffer(self.block.adaln_proj, (), self.pin),
            "refiner": OneBuffer(dit.token_refiner.blocks[0], (), self.pin),
        }

    def streamed(self) -> DiTLayers:
        """Everything that can be streamed is."""
        count, refiners = self.case.config.layers, self.case.config.refiner_layers

        @contextmanager
        def refiner():
            layers = self._ring("refiner", self.dit.token_refiner.blocks[0], refiners)
            try:
                yield layers
            finally:
                layers.stream.mover.close()

        return DiTLayers(
            self._ring("blocks", self.block, count),
            self._ring("adaln", self.block.adaln_proj, count),
            refiner=refiner,
        )

    def resident(self) -> DiTLayers:
        """The one block on the device; the refiner comes through its ring all the same, before the loop."""
        count = self.case.config.layers
        here = {name: self._filled(name, module) for name, module in self._parts()}
        return DiTLayers(
            ResidentLayers([here["blocks"]] * count),
            ResidentLayers([here["adaln"]] * count),
            refiner=self.streamed().refiner,
        )

    def _parts(self) -> tuple[tuple[str, nn.Module], ...]:
        return ("blocks", self.block), ("adaln", self.block.adaln_proj)

    def _filled(self, name: str, module: nn.Module) -> nn.Module:
        store, filled = self.stores[name], copy.deepcopy(module)
        for inner, view in store.one.views(store.flat.to(self.device)).items():
            assign(filled, inner, view)
        return filled

    def _ring(self, name: str, skeleton: nn.Module, count: int) -> StreamedLayers:
        return StreamedLayers([skeleton] * count, 0, _mover(self.stores[name], count, self.device))


def _mover(store: LayerStore, layers: int, device: torch.device) -> CudaMover | HostMover:
    return CudaMover(store, layers, 2, device) if device.type == "cuda" else HostMover(store, layers, 2)


def streaming(device: torch.device, case: CardCase) -> Results:
    """Resident against streamed from pinned RAM: bits, seconds of the fastest forward but the first, and the peak."""
    model, job = OneBlockModel(case, device), case.job()
    before = _allocated(device)
    streamed, peak = _measured(model, model.streamed, job)
    resident, _ = _measured(model, model.resident, job)
    same = torch.equal(streamed.latent.video, resident.latent.video)
    slow, fast = (min(result.step_seconds[1:]) for result in (streamed, resident))
    overhead = slow / fast - 1
    on_card = device.type == "cuda"
    rows = [
        _row("bits/full-size", int(not same), "of 1 streamed renders differ", same),
        _row("resident", fast, "s a forward", rows=resident.num_rows),
        _row("streamed", slow, "s a forward"),
        _row("overhead", overhead, "of the resident step", overhead <= STREAMING_OVERHEAD if on_card else None),
    ]
    if on_card:
        weights = named_dit("bf16" if case.dtype == torch.bfloat16 else "fp32", case.config)
        load = DiTLoad.of(RenderSizes.of_job(job), weights)
        predicted = largest(denoise_moments(load, 0, 1)).nbytes
        off = predicted / peak - 1
        rows += [
            _row("peak", peak / GIB, "GiB", -PEAK_UNDER <= off <= PEAK_OVER, predicted=predicted / GIB),
            _row("peak/before", before / GIB, "GiB of it are weights outside the blocks"),
        ]
    return rows


def _measured(model: OneBlockModel, layers, job: RenderJob) -> tuple[SampleResult, int]:
    """The run, and the most that was allocated on the card during it."""
    free_memory()
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(model.device)
    placed = layers()
    result = sample(model.dit, job, layers=placed)
    peak = torch.cuda.max_memory_allocated(model.device) if model.device.type == "cuda" else 0
    for part in (placed.blocks, placed.adaln):
        if isinstance(part, StreamedLayers):
            part.stream.mover.close()
    return result, peak


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


# --- the disk --------------------------------------------------------------------------------------------------------


def disk_ring(device: torch.device, case: CardCase) -> Results:
    """A file of layers as large as a block, through the ring with nothing to compute, beside plain reads of it."""
    with torch.device("meta"):
        block = DiT(replace(case.config, layers=1)).to(case.dtype).blocks[0]
    size = LayerLayout.of(block, (ADALN,)).nbytes
    layout = LayerLayout((Entry("flat", torch.uint8, (size,), 0),), size)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "layers.safetensors"
        names = [f"layer.{index}" for index in range(case.disk_layers)]
        content = torch.randint(0, 256, (size,), dtype=torch.uint8)
        write_safetensors(path, dict.fromkeys(names, ("U8", (size,))), ((name, content) for name in names), {})
        file, whole = SafetensorsFile(path), size * case.disk_layers
        store = DiskStore([layout] * len(names), lambda layer, views: file.read(names[layer], views["flat"]))
        out = torch.empty(size, dtype=torch.uint8)
        plain = _seconds(path, device, lambda: [file.read(name, out) for name in names])
        mover = _mover(store, len(names), device)
        layers = StreamedLayers([nn.Identity()] * len(names), 0, mover)
        ring = _seconds(path, device, lambda: [None for _ in run_in_order(layers)])
        mover.close()
    share, on_card = plain / ring, device.type == "cuda"
    return [
        _row("disk/plain", whole / plain / 1e9, "GB/s", bytes=whole),
        _row("disk/ring", whole / ring / 1e9, "GB/s", share >= RING_SHARE if on_card else None, share=share),
    ]


def _seconds(path: Path, device: torch.device, run) -> float:
    """Of ``run``, the file's pages dropped from the cache first where the system lets us."""
    if hasattr(os, "posix_fadvise"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else (lambda: None)
    wait()
    began = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - began
