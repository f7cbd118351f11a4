"""Step forecasting: some forwards are not computed, their last hidden state is foretold from the ones before.

    forward    0  1  2  3  4  5  6  7  8 ...              computed: warm-up, tail, and a share of the rest
    computed   #  #  #  .  .  #  .  .  #                  . : no block runs, no weight is loaded
    hidden     h0 h1 h2 ─┬───▶ ĥ3 ĥ4 ─▶ final norm and heads with the forward's own modulation
                         └ ridge regression on Chebyshev polynomials of the forward's index

After Han et al., "Adaptive Spectral Feature Forecasting for Diffusion Sampling Acceleration" (arXiv 2603.01623): each
value of the last block's output is a function of time, fitted by ridge regression on Chebyshev polynomials T_0..T_M.
The fit is linear in what was seen, so it needs no coefficients: ĥ(t) = sum_k w_k h_k with
w = phi(t) (Phi^T Phi + ridge D)^-1 Phi^T, where D spares T_0 (the weights then sum to one and a constant stays exact).

Ours: a short window and a low degree; picture and sound are foretold apart, each with its own window; the forwards
that are computed lie where both streams travel (their sigmas), not evenly; and the sound is protected: at each computed
forward its forecast is compared with the truth, and when it misses by more than ``sound_limit`` the next forward is
computed. A kept row's foretold value is never used: a mask holds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..models.attention import row_chunks
from ..schedule import Schedule
from .base import AT_FORWARD, TAIL, WARMUP, Accelerator, Options, Streams, Window, option

STREAMS = ("video", "audio")
TRAVEL = 0.25  # weight of each stream's sigma in how far a forward is from another; the rest is its index


@dataclass(frozen=True)
class ForecastOptions(Options):
    calls: float = option(0.5, "Share of the forwards that is computed, warm-up and tail included.", 0.1, 1.0)
    warmup: int = option(3, WARMUP, 1, 100)
    tail: int = option(2, TAIL, 1, 100)
    degree: int = option(2, "Highest Chebyshev polynomial of the fit; 0 repeats what was seen last.", 0, 6)
    window: int = option(3, "Computed forwards that the fit looks back on.", 1, 8)
    ridge: float = option(1e-4, "Strength of the regularisation: more is steadier and less exact.", 0.0, 10.0)
    sound_limit: float = option(
        0.3, "Relative miss of the sound's forecast above which the next forward is computed.", 0.0, 10.0
    )
    store: str = option("device", "Where the window is kept; ram spares the card.", choices=("device", "ram"))


def chebyshev(points: np.ndarray, degree: int) -> np.ndarray:
    """T_0..T_degree at ``points`` float64 [n] in [-1, 1] -> [n, degree + 1]."""
    columns = [np.ones_like(points), points]
    for _ in range(degree - 1):
        columns.append(2 * points * columns[-1] - columns[-2])
    return np.stack(columns[: degree + 1], axis=1)


def forecast_weights(seen: Sequence[float], at: float, degree: int, ridge: float) -> list[float]:
    """w with sum_k w_k f(seen_k) = the fit's value at ``at``. The points are mapped onto [-1, 1]; T_0 is not
    regularised, so the weights sum to one."""
    degree = min(degree, len(seen) - 1)
    if degree == 0:
        return [0.0] * (len(seen) - 1) + [1.0]
    low, high = min(*seen, at), max(*seen, at)
    phi = chebyshev((np.array([*seen, at], dtype=np.float64) - low) * (2 / (high - low)) - 1, degree)
    normal = phi[:-1].T @ phi[:-1] + np.diag([0.0] + [ridge] * degree)
    return (phi[-1] @ np.linalg.solve(normal, phi[:-1].T)).tolist()


def place_calls(video: Sequence[float], audio: Sequence[float], begin: int, window: Window, share: float) -> list[bool]:
    """Which of the forwards begin..len(video) - 2 are computed: at most ``share`` of them beside warm-up and tail.

    A forward is computed when the streams have travelled far enough since the last one that was, but no more in a row
    than the share asks for: the last forwards move the picture most and the sound least, and what is left out must not
    all fall to the sound. The distance is the smallest that keeps to the share.
    """
    last = len(video) - 1
    count = last - begin
    allowed = max(math.floor(count * share + 1e-9), min(count, window.begin - begin) + min(count, last - window.end))
    if allowed >= count:
        return [True] * count
    row = math.ceil(share / (1 - share)) + 1

    def travelled(index: int) -> float:
        return TRAVEL * (2 - video[index] - audio[index]) + (1 - 2 * TRAVEL) * index / last

    def walk(distance: float) -> list[bool]:
        computed, since, run = [], begin, 0
        for index in range(begin, last):
            if window.full(index):
                computed.append(True)
                since = index
                continue
            computed.append(run < row and travelled(index) - travelled(since) >= distance)
            since, run = (index, run + 1) if computed[-1] else (since, 0)
        return computed

    low, high = 0.0, 2.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(walk(middle)) > allowed else (low, middle)
    return walk(high)


class Forecast(Accelerator):
    """See the module's picture."""

    name = "forecast"
    words = "Leaves out forwards and foretells their result from the ones before; picture and sound apart."
    fidelity = "accelerator/forecast"
    Options = ForecastOptions
    excludes = {  # noqa: RUF012
        "block-cache": "both leave out forwards, and each would judge by the other's guesses",
        "compile": "a step cache beside compiled blocks is unsafe: a failed recording may end the process",
    }
    keeps_state = True

    def prepare(self, dit, job, layout, steps) -> None:
        self.device, self.streams = dit.device, Streams.of(job, layout, dit.device)
        schedule, own = job.schedule, self.options
        self.window = Window.of(job, steps, own.warmup, own.tail)
        self.begin = schedule.start
        self.planned = place_calls(schedule.video, schedule.audio, schedule.start, self.window, own.calls)
        self.seen: list[int] = []
        self.kept: dict[str, list[Tensor]] = {stream: [] for stream in STREAMS}
        self.owed = False  # the sound's forecast missed: the next forward is computed
        self.computed = self.foretold = self.extra = 0
        self.worst = 0.0

    def wrap_blocks(self, call: Callable) -> Callable:
        def blocks(h: Tensor, step, start: int, stop: int) -> Tensor:
            if self._leaves_out(step.index):
                self.foretold += 1
                for stream in STREAMS:
                    self._foretell(stream, step.index, self._rows(h, stream))
                return h
            h = call(h, step, start, stop)
            self._judge(h, step.index)
            self._keep(h, step.index)
            self.computed += 1
            return h

        return blocks

    def _rows(self, h: Tensor, stream: str) -> Tensor:
        segment = getattr(self.streams, stream)
        return h[segment.start : segment.stop]

    def _leaves_out(self, index: int) -> bool:
        if self.planned[index - self.begin] or not self.seen:
            return False
        if self.owed:
            self.owed = False
            self.extra += 1
            return False
        return True

    def _weights(self, index: int) -> list[float]:
        return forecast_weights(self.seen, index, self.options.degree, self.options.ridge)

    def _foretell(self, stream: str, index: int, out: Tensor) -> None:
        """out [rows, hidden] <- the fit's value at forward ``index``, summed in float32 by row chunks."""
        weights = self._weights(index)
        for start, stop in row_chunks(0, out.shape[0]):
            out[start:stop] = _combine(self.kept[stream], weights, start, stop, out.device)

    def _judge(self, h: Tensor, index: int) -> None:
        """How far the sound's forecast for this computed forward would have missed it; a miss is owed a forward."""
        if self.window.full(index) or len(self.seen) < 2:
            return
        weights, rows, moves = self._weights(index), self._rows(h, "audio"), self.streams.audio_moves
        missed, whole = torch.zeros(2, device=rows.device)
        for start, stop in row_chunks(0, rows.shape[0]):
            true = rows[start:stop].float()
            apart = _combine(self.kept["audio"], weights, start, stop, rows.device) - true
            if moves is not None:
                apart, true = apart[moves[start:stop]], true[moves[start:stop]]
            missed, whole = missed + apart.square().sum(), whole + true.square().sum()
        missed, whole = self.read(missed), self.read(whole)
        miss = math.sqrt(missed / whole) if whole > 0 else 0.0
        self.worst = max(self.worst, miss)
        self.owed = miss > self.options.sound_limit

    def _keep(self, h: Tensor, index: int) -> None:
        place = "cpu" if self.options.store == "ram" else h.device
        self.seen = [*self.seen, index][-self.options.window :]
        for stream, kept in self.kept.items():
            full = len(kept) == self.options.window
            buffer = kept.pop(0) if full else torch.empty_like(self._rows(h, stream), device=place)
            kept.append(buffer.copy_(self._rows(h, stream)))

    def planned_calls(self, schedule: Schedule) -> int:
        """Where the sound asks for none beyond the share."""
        own, forwards = self.options, len(schedule.video) - 1
        window = Window(schedule.start + own.warmup, forwards - own.tail)
        planned = place_calls(schedule.video, schedule.audio, schedule.start, window, own.calls)
        return sum(planned[: schedule.num_forwards])

    def bytes(self, layout, config, item: int = 2) -> int:
        rows = len(layout.target_video) + len(layout.target_audio)
        chunk = 2 * min(2048, rows) * config.hidden * 4  # the sum and one summand, float32
        return chunk + (self.options.window * rows * config.hidden * item if self.options.store == "device" else 0)

    def host_bytes(self, layout, config, item: int = 2) -> int:
        rows = len(layout.target_video) + len(layout.target_audio)
        return self.options.window * rows * config.hidden * item if self.options.store == "ram" else 0

    def state(self) -> dict[str, Tensor]:
        counts = [self.computed, self.foretold, self.extra, int(self.owed)]
        worst = torch.tensor([self.worst], dtype=torch.float64)
        state = {"seen": torch.tensor(self.seen), "counts": torch.tensor(counts), "worst": worst}
        return state | {f"{s}{AT_FORWARD}{i}": kept for s in STREAMS for i, kept in zip(self.seen, self.kept[s])}

    def restore(self, state: dict[str, Tensor]) -> None:
        if "seen" not in state:  # nothing was kept: forwards are computed until something is
            return
        place = "cpu" if self.options.store == "ram" else self.device
        self.seen = state["seen"].tolist()
        self.computed, self.foretold, self.extra, owed = state["counts"].tolist()
        self.owed, self.worst = bool(owed), state["worst"].item()
        self.kept = {s: [state[f"{s}{AT_FORWARD}{i}"].to(place) for i in self.seen] for s in STREAMS}

    def stats(self) -> dict:
        return {
            "computed": self.computed,
            "foretold": self.foretold,
            "computed_for_the_sound": self.extra,
            "worst_miss_of_the_sound": self.worst,
        }

    def notes(self) -> list[str]:
        if not self.foretold:
            return [
                f"forecast did not engage: all {self.computed} forwards were computed "
                f"(calls {self.options.calls:g}, warm-up {self.options.warmup}, tail {self.options.tail}); "
                "give more steps or a smaller share"
            ]
        said = f"forecast: {self.foretold} of {self.computed + self.foretold} forwards were foretold"
        return [said + (f", {self.extra} were computed to protect the sound" if self.extra else "")]


def _combine(kept: Sequence[Tensor], weights: Sequence[float], start: int, stop: int, device) -> Tensor:
    """sum_k weights_k kept_k[start:stop], float32 on ``device``."""
    total = kept[0][start:stop].to(device, torch.float32).mul(weights[0])
    for tensor, weight in zip(kept[1:], weights[1:]):
        total.add_(tensor[start:stop].to(device, torch.float32), alpha=weight)
    return total
