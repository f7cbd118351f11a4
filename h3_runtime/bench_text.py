"""What encoding a prompt takes: memory at the released sizes, and time of a small encoder here.

peak/<n>   the encoder's own run under fake tensors with n pictures of 2048 x 3648: words, tower, ring, layers;
           every live byte of the device is counted, weights in use included, none is allocated
layer/...  seconds a layer of a small encoder, resident and streamed from a file, on this machine
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn

from .bench import GIB, Results
from .checkpoint.pieces import assign
from .demo.text_maker import make_text_encoder
from .errors import MissingDependency
from .memory.measure import LiveBytes
from .memory.placement import Placement
from .memory.streaming import LayerLayout, ResidentLayers
from .text.config import TextEncoderConfig
from .text.encoder import TextEncoder, build_module, import_qwen, run
from .text.tower import Look
from .text.vision import MERGE, PATCH, PATCH_VALUES

TARGET_GIB = 6.0
PICTURE = (2048, 3648)  # height, width: 16:9 at the short edge of a reference
LABEL_ROWS = 8  # "<Picture 1>: " and the two ends of a picture
TAPPED = 3  # layers that pictures are added after, and one of them is the fullest


def bench_text(
    pictures: Sequence[int] = (0, 1, 9),
    config: TextEncoderConfig | None = None,
    size: tuple[int, int] = PICTURE,
    words: int = 512,
    repeat: int = 3,
) -> Results:
    """Peak live bytes in GiB of one bf16 encode with ``pictures`` of ``size`` and a prompt of ``words`` rows, weights
    streamed: the ring's two layers, the tower and what is computed count. Then the time of a layer of the demo's
    encoder. The default config is the released one with the layers that matter: three, which all meet a picture."""
    config = config or replace(TextEncoderConfig(), layers=TAPPED, vision_depth=TAPPED, deepstack=tuple(range(TAPPED)))
    results: Results = []
    for count in pictures:
        peak, stages = encode_peak(config, count, size, words)
        result = {
            "name": f"text/peak/{count}",
            "value": peak / GIB,
            "unit": "GiB",
            "rows": words + count * (picture_rows(size) + LABEL_ROWS),
            "tower": stages["tower"] / GIB,
            "layers": stages["layers"] / GIB,
        }
        if size == PICTURE and count == max(pictures):
            result["target"] = TARGET_GIB
        results.append(result)
    return results + layer_seconds(repeat)


def picture_rows(size: tuple[int, int]) -> int:
    """Text rows of a picture of (height, width), multiples of 32."""
    return size[0] * size[1] // (PATCH * MERGE) ** 2


class FakePlaced:
    """``PlacedWeights`` without weights: the tower and the ring count while they are in use, as streamed ones do."""

    def __init__(self, module: nn.Module, live: LiveBytes, tower_bytes: int):
        self.module, self.live, self.tower_bytes = module, live, tower_bytes
        self.peaks: dict[str, int] = {}

    @contextmanager
    def tower(self) -> Iterator[nn.Module]:
        held = torch.empty(self.tower_bytes, dtype=torch.uint8)
        yield self.module.visual
        del held
        self.peaks["tower"] = self.live.peak["cpu"]

    @contextmanager
    def layers(self) -> Iterator[ResidentLayers]:
        self.peaks.setdefault("tower", 0)
        self.live.start_peak()
        layout = LayerLayout.of(self.module.language_model.layers[0])
        ring = [torch.empty(layout.nbytes, dtype=torch.uint8) for _ in range(2)]
        yield ResidentLayers(list(self.module.language_model.layers))
        del ring
        self.peaks["layers"] = self.live.peak["cpu"]


def encode_peak(
    config: TextEncoderConfig, pictures: int, size: tuple[int, int], words: int
) -> tuple[int, dict[str, int]]:
    """(bytes, bytes by stage) at the fullest moment of ``text.encoder.run``, on tensors without memory.

    Weights count as streamed ones: the released tower while it is looked through, two layers while layers run.
    """
    from torch._subclasses import fake_tensor

    if pictures and import_qwen()[1] < (5,):
        raise MissingDependency(
            "pictures are counted with transformers 5 or newer: an older vision tower cannot be run on tensors without "
            "memory; pip install -U transformers"
        )
    grid = (size[0] // PATCH, size[1] // PATCH)
    each = picture_rows(size)
    rows = words + pictures * (each + LABEL_ROWS)
    released = replace(TextEncoderConfig(), layers=1) if config.hidden == TextEncoderConfig().hidden else config
    tower_bytes = 2 * sum(value.numel() for value in build_module(released).visual.parameters())
    # Picture sizes must stay known for the tower to cut its attention by them: small results of known values are kept.
    kept = mock.patch.object(fake_tensor, "CONSTANT_NUMEL_LIMIT", math.prod(grid) * max(pictures, 1) * 4)
    with kept, fake_tensor.FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        module = build_module(config)
        for name, value in list(module.named_parameters()):
            assign(module, name, torch.empty(value.shape, dtype=torch.bfloat16))
        live = LiveBytes()
        live.hold([*module.parameters(), *module.buffers()], counted=False)
        looks = []
        for index in range(pictures):  # the patches wait in host memory, a batch comes over at a time
            patches = torch.empty(math.prod(grid), PATCH_VALUES)
            live.hold([patches], counted=False)
            looks.append(Look(patches, grid, LABEL_ROWS - 1 + index * (each + LABEL_ROWS)))
        placed = FakePlaced(module, live, tower_bytes)
        with live:
            hidden: Tensor = torch.empty(rows, config.hidden, dtype=torch.bfloat16)
            run(placed, hidden, torch.zeros(3, rows, dtype=torch.int64), looks)
    return max(placed.peaks.values()), placed.peaks


def layer_seconds(repeat: int = 3, words: int = 512) -> Results:
    """Seconds a layer of the demo's encoder takes for a prompt of ``words`` words, by placement; best of ``repeat``."""
    results: Results = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        make_text_encoder(Path(folder), seed=0)
        for placement in (Placement(), Placement("ram"), Placement("disk")):
            encoder = TextEncoder.load(folder, placement=placement)
            seconds = []
            for _ in range(repeat):
                began = time.perf_counter()
                encoder.encode("ball " * words)
                seconds.append(time.perf_counter() - began)
            results.append(
                {
                    "name": f"text/layer/{placement.rung}",
                    "value": min(seconds) / encoder.config.layers,
                    "unit": "s",
                    "hidden": encoder.config.hidden,
                    "words": words,
                }
            )
    return results
