"""Solvers: how both streams move from one sigma to the next once the velocity there is known.

    velocity(x_k, sigma_k) ─▶ Euler                 x_k+1 = x_k + (sigma_k - sigma_k+1) v_k
                           └▶ second order          v_k replaced by v_k + (h_k / 2 h_k-1) (v_k - v_k-1)

The second is the two-step Adams-Bashforth method for unequal steps h (Hairer, Norsett, Wanner, Solving Ordinary
Differential Equations I, III.5): one call of the model a step, as Euler, but of second order. Its correction is a ratio
of steps, so a masked row, whose sigmas are all scaled by its mask, gets the same one; picture and sound use their own
steps. The first step, and the first of a run that starts from a saved state, is Euler's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .schedule import euler_step


class Sigmas(NamedTuple):
    """A stream's sigma before and after a step."""

    now: float
    after: float


class Solver:
    """Euler, the reference's. One object per run; ``stream`` is "video" or "audio"."""

    name = "euler"
    path = "solver/euler"
    words = "The reference's sampler."

    def step(self, stream: str, x: Tensor, velocity: Tensor, sigmas: Sigmas, mask: Tensor | None = None) -> Tensor:
        """x [rows, channels] float32 at ``sigmas.now`` -> at ``sigmas.after``; ``mask`` [rows, 1] as in euler_step."""
        return euler_step(x, velocity, sigmas.now, sigmas.after, mask)

    def state(self) -> dict[str, Tensor]:
        """What recovery saves with the streams."""
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take back what ``state`` gave."""


class SecondOrder(Solver):
    """Two-step Adams-Bashforth on both streams; see the module's picture."""

    name = "second-order"
    path = "solver/second-order"
    words = "Adams-Bashforth of second order on both streams: as many calls as Euler, closer for few steps."

    def __init__(self):
        self.before: dict[str, tuple[Tensor, float]] = {}  # velocity and length of the step before

    def step(self, stream: str, x: Tensor, velocity: Tensor, sigmas: Sigmas, mask: Tensor | None = None) -> Tensor:
        length = sigmas.now - sigmas.after
        led = velocity
        if stream in self.before:
            last, last_length = self.before[stream]
            led = velocity + (length / (2 * last_length)) * (velocity - last.to(velocity.device))
        self.before[stream] = velocity, length
        return euler_step(x, led, sigmas.now, sigmas.after, mask)

    def state(self) -> dict[str, Tensor]:
        saved = {f"velocity.{stream}": velocity for stream, (velocity, _) in self.before.items()}
        lengths = {
            f"length.{stream}": torch.tensor([length], dtype=torch.float64)
            for stream, (_, length) in self.before.items()
        }
        return saved | lengths

    def restore(self, state: dict[str, Tensor]) -> None:
        streams = [key.removeprefix("velocity.") for key in state if key.startswith("velocity.")]
        self.before = {s: (state[f"velocity.{s}"], state[f"length.{s}"].item()) for s in streams}


SOLVERS: dict[str, type[Solver]] = {solver.name: solver for solver in (Solver, SecondOrder)}
