"""What each stage of a render takes: wall time, processor time, time on the card, bytes that rings copied.

a stage begins: clock, process time, event on the card, bytes so far ─▶ its work ─▶ the same again ─▶ differences

Processor time is of all threads of the process: two busy cores spend two seconds in one. Time on the card is the span
between an event before and one behind the stage's work on the stream that computes, so it includes waiting for copies.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from .streaming import STREAMED


@dataclass
class Spent:
    """By stage: seconds of the clock, of the processor and of the card (empty without one), and bytes streamed."""

    device: str | torch.device = "cpu"
    seconds: dict[str, float] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    gpu_seconds: dict[str, float] = field(default_factory=dict)
    bytes_streamed: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure what runs inside as ``name``; work that raises is not recorded."""
        copied, event, processor, clock = STREAMED.nbytes, self._event(), time.process_time(), time.perf_counter()
        yield
        if event is not None:
            end = self._event()
            end.synchronize()
            self.gpu_seconds[name] = event.elapsed_time(end) / 1000
        self.seconds[name] = time.perf_counter() - clock
        self.cpu_seconds[name] = time.process_time() - processor
        self.bytes_streamed[name] = STREAMED.nbytes - copied

    def _event(self) -> torch.cuda.Event | None:
        if torch.device(self.device).type != "cuda":
            return None
        with torch.cuda.device(self.device):
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return event

    def to_dict(self) -> dict:
        """For the report; None stands for what was not measured."""
        return {
            "stage_seconds": self.seconds,
            "stage_cpu_seconds": self.cpu_seconds,
            "stage_gpu_seconds": self.gpu_seconds or None,
            "stage_bytes_streamed": self.bytes_streamed,
            "cpu_seconds": sum(self.cpu_seconds.values()),
            "gpu_seconds": sum(self.gpu_seconds.values()) if self.gpu_seconds else None,
            "bytes_streamed": sum(self.bytes_streamed.values()),
        }
