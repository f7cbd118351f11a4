"""Sigma grids, the Euler step and the mixes with noise: all the arithmetic of the denoising clock.

    sigma  1.0 ────────────────────────────▶ 0.0      the same base grid linspace(1, 0, forwards + 1), bent by a shift
    video  shift 12:  1.000 .998 .996 ... .20 0.0     most forwards at high noise
    audio  shift 3:   1.000 .993 .986 ... .06 0.0     both streams step together, each on its own grid

``num_forwards`` counts model evaluations; a grid has one point more. Everything is float32 on the CPU, as in the
reference (diffusers ``MiniMaxH3Scheduler``); timesteps are t = 1 - sigma, 1 = clean.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import H3Error
from .geometry import is_number, is_whole

VIDEO_SHIFT = 12.0
AUDIO_SHIFT = 3.0
DEFAULT_FORWARDS = 49
MAX_FORWARDS = 1000
CONDITION_TIMESTEP = 0.999  # visual conditions are mixed to, and labelled, this t; sound conditions are clean (1.0)


def shift_sigma(base: Tensor, shift: float) -> Tensor:
    """s * b / (1 + (s - 1) * b): bends base sigmas in [0, 1] towards 1 (shift > 1)."""
    return shift * base / (1 + (shift - 1) * base)


def map_sigma(sigma: Tensor, from_shift: float, to_shift: float) -> Tensor:
    """The sigma on ``to_shift``'s schedule at the base point that ``sigma`` has on ``from_shift``'s.

    Inverting one shift and applying the other gives k * s / (1 + (k - 1) * s) with k = to / from.
    """
    return shift_sigma(sigma, to_shift / from_shift)


def sigma_grid(points: int, shift: float) -> Tensor:
    """[points] float32 sigmas from 1 to 0: linspace shifted, consecutive duplicates collapsed."""
    base = torch.linspace(1.0, 0.0, points, dtype=torch.float32)
    return torch.unique_consecutive(shift_sigma(base, shift))


def euler_step(x: Tensor, velocity: Tensor, sigma: float, sigma_next: float, mask: Tensor | None = None) -> Tensor:
    """One Euler step (eta 0) from ``sigma`` to ``sigma_next``, float32, any shape.

    x0 = x + (1 - t) * v with t = 1 - sigma (the float32 round trip is kept: it is what the model was told), then
    x <- r * x + (1 - r) * x0 with r = sigma_next / sigma. With a per-token ``mask`` m (broadcast over channels) the
    token lives at m * sigma, so x0 = x + m * (1 - t) * v while r is unchanged; tokens at m = 0 do not move.
    """
    sigma_t = torch.tensor(sigma, dtype=torch.float32, device=x.device)
    from_timestep = 1 - (1 - sigma_t)
    ratio = torch.tensor(sigma_next, dtype=torch.float32, device=x.device) / sigma_t
    if mask is None:
        x0 = x + from_timestep * velocity
        return ratio * x + (1 - ratio) * x0
    x0 = x + (mask * from_timestep) * velocity
    return torch.where(mask == 0, x, ratio * x + (1 - ratio) * x0)


def mix(clean: Tensor, noise: Tensor, timestep: float) -> Tensor:
    """t * clean + (1 - t) * noise in float32, t rounded to float32 first (as the reference holds it)."""
    t = torch.tensor(timestep, dtype=torch.float32, device=clean.device)
    return t * clean + (1 - t) * noise


def start_point(source: Tensor | None, noise: Tensor, sigma: float, mask: Tensor | None = None) -> Tensor:
    """Where a stream starts: (1 - m * sigma) * source + m * sigma * noise; without a source pure noise."""
    if source is None:
        assert mask is None
        return noise.clone()
    level = torch.tensor(sigma, dtype=torch.float32, device=noise.device)
    if mask is not None:
        level = mask * level
    return (1 - level) * source + level * noise


@dataclass(frozen=True)
class Schedule:
    """The sigmas that a render walks. ``video`` and ``audio``: [n + 1] float32 values as Python floats.

    ``start``..``stop`` (forwards start..stop - 1) is the part that runs; ``video[0]``, ``audio[0]`` are the first
    sigmas of the denoise cut, which masks use as sigma0, and ``skipped`` counts the intervals cut off before them.
    """

    video: tuple[float, ...]
    audio: tuple[float, ...]
    start: int
    stop: int
    skipped: int = 0

    @property
    def from_noise(self) -> bool:
        """Whether it begins at the grid's first point. (Its sigma there may be one ulp off 1, as in the reference.)"""
        return self.start == 0 and self.skipped == 0

    @property
    def num_forwards(self) -> int:
        return self.stop - self.start

    @property
    def reaches_zero(self) -> bool:
        return self.video[self.stop] == 0.0


def plan_schedule(
    num_forwards: int = DEFAULT_FORWARDS,
    denoise: float = 1.0,
    start: int = 0,
    stop: int | None = None,
    video_shift: float = VIDEO_SHIFT,
    audio_shift: float = AUDIO_SHIFT,
) -> Schedule:
    """The last ``num_forwards`` intervals of a grid of round(num_forwards / denoise) forwards, then start..stop of it.

    Raises H3Error for a count, strength, range or shift that cannot be used.
    """
    check_forwards(num_forwards)
    if not (is_number(denoise) and 0 < denoise <= 1):
        raise H3Error(f"denoise is {denoise!r}: give more than 0 and at most 1 (1 = from pure noise)")
    stop = num_forwards if stop is None else stop
    for name, shift in (("video shift", video_shift), ("audio shift", audio_shift)):
        if not (is_number(shift) and 0 < shift <= 1000):
            raise H3Error(f"{name} is {shift!r}: give more than 0 and at most 1000 (the model was trained at 12 and 3)")
    if not (is_whole(start) and is_whole(stop) and 0 <= start < stop <= num_forwards):
        raise H3Error(
            f"start {start!r} and stop {stop!r} do not fit {num_forwards} forwards: 0 <= start < stop <= {num_forwards}"
        )
    longest = MAX_FORWARDS * 10
    if num_forwards > longest * denoise:  # before dividing: a denoise near 0 would overflow
        raise H3Error(
            f"denoise {denoise} with {num_forwards} forwards needs a grid of more than {longest}: raise denoise"
        )
    total = round(num_forwards / denoise)
    grids = []
    for shift in (video_shift, audio_shift):
        grid = sigma_grid(total + 1, shift).tolist()
        if not (math.isfinite(grid[0]) and all(a > b for a, b in itertools.pairwise(grid))):  # 0 / 0 in float32
            raise H3Error(f"shift {shift} is too near 0 for a grid of float32 numbers: raise it, 12 and 3 were trained")
        if len(grid) != total + 1:
            raise H3Error(f"shift {shift} collapses the grid of {total} forwards: lower the shift or the count")
        grids.append(tuple(grid[total - num_forwards :]))
    return Schedule(grids[0], grids[1], start, stop, total - num_forwards)


def check_forwards(num_forwards: int) -> None:
    if not (is_whole(num_forwards) and 1 <= num_forwards <= MAX_FORWARDS):
        raise H3Error(f"steps (forwards) is {num_forwards!r}: give a whole number from 1 to {MAX_FORWARDS}")


def check_seed(seed: int) -> None:
    if not (is_whole(seed) and 0 <= seed < 2**64):
        raise H3Error(f"seed is {seed!r}: give a whole number from 0 to 2^64 - 1")
