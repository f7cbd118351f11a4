"""How two pictures differ, frame by frame; memory stays at a few frames, however long the clips.

A frame t ─┬─ PSNR, SSIM, MS-SSIM against B frame t
B frame t ─┼─ change since t - 1 in A, in B, in B - A                     flicker
           ├─ gradients of B over those of A                              sharpness
           └─ small grey copies of A[t - 5 .. t + 5] against B's          which frame of B shows which of A
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .measured import IDENTICAL, Measured, decibels, not_measured

WINDOW = 11  # SSIM's Gaussian window, sigma 1.5
MS_SSIM_WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)
MS_SSIM_EDGE = (WINDOW - 1) * 2 ** (len(MS_SSIM_WEIGHTS) - 1) + 1  # 161: the smallest scale still holds one window
REACH = 5  # frames on either side among which a frame's twin is looked for
SMALL = (36, 64)  # pixels of the grey copies
JUMP = 3.0  # a change of the lag must save this many frames' worth of difference
BLACK = 20.0  # of 255; limited-range black and its noise stay below
STILL = 0.05  # of 255, mean change between two frames
FROZEN_RUN = 12  # frames; half a second


@dataclass
class PictureTracks:
    """What was measured of every frame, and of each clip as a whole."""

    psnr: list[float] = field(default_factory=list)
    ssim: list[float | None] = field(default_factory=list)
    ms_ssim: list[float | None] = field(default_factory=list)
    flicker: list[float | None] = field(default_factory=list)  # mean |change of B - change of A|, of 255
    change_a: list[float | None] = field(default_factory=list)
    change_b: list[float | None] = field(default_factory=list)
    sharp_a: list[float] = field(default_factory=list)
    sharp_b: list[float] = field(default_factory=list)
    bright_a: list[float] = field(default_factory=list)
    bright_b: list[float] = field(default_factory=list)
    costs: list[list[float]] = field(default_factory=list)  # [frame of A][lag + REACH]
    size: tuple[int, int] = (0, 0)


def psnr(a: Tensor, b: Tensor) -> float:
    """Peak signal to noise ratio in dB of pictures in 0..1 of any one shape; infinity where they are equal."""
    from kornia.metrics import psnr as kornia_psnr

    return kornia_psnr(a, b, 1.0).item()


def ssim(a: Tensor, b: Tensor) -> float | None:
    """Structural similarity of pictures [1, 3, H, W] in 0..1; None below 11 pixels.

    Wang et al. 2004: Gaussian window of 11 with sigma 1.5, K = 0.01 and 0.03, borders mirrored, the mean over pixels
    and channels (torchmetrics' form; scikit-image leaves the borders out).
    """
    from kornia.metrics import ssim as kornia_ssim

    if min(a.shape[-2:]) < WINDOW:
        return None
    return kornia_ssim(a, b, WINDOW, 1.0, eps=0.0, padding="same").mean().item()


def ms_ssim(a: Tensor, b: Tensor) -> float | None:
    """Multi-scale SSIM of pictures [1, 3, H, W] in 0..1; None below 161 pixels, where the last scale has no window.

    Wang, Simoncelli, Bovik 2003: contrast x structure over whole windows at four scales, halved by 2x2 means, and SSIM
    at the fifth; each the mean over pixels and channels, negative ones 0, to the power of its weight. Odd edges lose
    their last pixel when they are halved; from 161 to 175 pixels, where that would lose the last window, they keep it.
    """
    if min(a.shape[-2:]) < MS_SSIM_EDGE:
        return None
    value, keep_odd = 1.0, min(a.shape[-2:]) >> (len(MS_SSIM_WEIGHTS) - 1) < WINDOW
    for scale, weight in enumerate(MS_SSIM_WEIGHTS):
        last = scale == len(MS_SSIM_WEIGHTS) - 1
        term = ssim(a, b) if last else _contrast(a, b)
        value *= max(0.0, term) ** weight
        if not last:
            a, b = (F.avg_pool2d(x, 2, ceil_mode=keep_odd) for x in (a, b))
    return value


def _contrast(a: Tensor, b: Tensor) -> float:
    """SSIM's contrast x structure term, the mean over every whole window of [1, 3, H, W]."""
    at = torch.arange(WINDOW, dtype=torch.float32) - WINDOW // 2
    taps = torch.exp(-(at**2) / (2 * 1.5**2))
    taps = (taps / taps.sum()).expand(5 * a.shape[1], 1, 1, WINDOW)
    moments = torch.cat([a, b, a * a, b * b, a * b], dim=1)  # [1, 15, H, W]
    moments = moments.contiguous(memory_format=torch.channels_last)  # twice as fast on a CPU
    moments = F.conv2d(moments, taps, groups=moments.shape[1])
    moments = F.conv2d(moments, taps.transpose(2, 3), groups=moments.shape[1])
    mean_a, mean_b, aa, bb, ab = moments.chunk(5, dim=1)
    c2 = 0.03**2
    return ((2 * (ab - mean_a * mean_b) + c2) / (aa - mean_a**2 + bb - mean_b**2 + c2)).mean().item()


class PictureMeter:
    """Takes the frames of both clips one pair at a time."""

    def __init__(self):
        self.tracks = PictureTracks()
        self._last: tuple[Tensor, Tensor] | None = None
        self._small: tuple[deque, deque] = deque(maxlen=REACH + 1), deque(maxlen=REACH + 1)

    @torch.no_grad()
    def add(self, a: np.ndarray, b: np.ndarray) -> None:
        """One frame of each, uint8 [H, W, 3]."""
        tracks, same = self.tracks, np.array_equal(a, b)
        tracks.size = (a.shape[1], a.shape[0])
        a, b = (torch.from_numpy(x).permute(2, 0, 1)[None].float() / 255 for x in (a, b))  # [1, 3, H, W]
        tracks.psnr.append(math.inf if same else psnr(a, b))
        enough = min(a.shape[-2:]) >= WINDOW, min(a.shape[-2:]) >= MS_SSIM_EDGE
        tracks.ssim.append((1.0 if enough[0] else None) if same else ssim(a, b))
        tracks.ms_ssim.append((1.0 if enough[1] else None) if same else ms_ssim(a, b))
        if self._last is None:
            changes = (None, None, None)
        else:
            change_a, change_b = a - self._last[0], b - self._last[1]
            changes = [255 * x.abs().mean().item() for x in (change_a, change_b, change_b - change_a)]
        for track, change in zip((tracks.change_a, tracks.change_b, tracks.flicker), changes):
            track.append(change)
        self._last = a, b
        grey_a, grey_b = (x.mean(dim=1, keepdim=True) for x in (a, b))
        for grey, sharp, bright in (
            (grey_a, tracks.sharp_a, tracks.bright_a),
            (grey_b, tracks.sharp_b, tracks.bright_b),
        ):
            sharp.append(_gradient(grey))
            bright.append(255 * grey.amax().item())
        self._match(grey_a, grey_b)

    def _match(self, grey_a: Tensor, grey_b: Tensor) -> None:
        """Costs of every pair of frames at most REACH apart that this pair completes."""
        size = [min(edge, wanted) for edge, wanted in zip(grey_a.shape[-2:], SMALL)]
        for small, grey in zip(self._small, (grey_a, grey_b)):
            small.append(F.interpolate(grey, size=size, mode="area"))
        costs, now = self.tracks.costs, len(self.tracks.costs)
        costs.append([math.inf] * (2 * REACH + 1))
        for back in range(len(self._small[0])):
            older_a, older_b = self._small[0][-1 - back], self._small[1][-1 - back]
            costs[now][REACH - back] = F.mse_loss(self._small[0][-1], older_b).item()
            costs[now - back][REACH + back] = F.mse_loss(older_a, self._small[1][-1]).item()


def _gradient(grey: Tensor) -> float:
    """Root mean square of the difference to the neighbour, across and down: spreading an edge lowers it."""
    across = (grey[..., :, 1:] - grey[..., :, :-1]).square().mean().item()
    down = (grey[..., 1:, :] - grey[..., :-1, :]).square().mean().item()
    return math.sqrt(across + down)


def summarise(tracks: PictureTracks) -> dict[str, Measured]:
    """The clip's figures. ``*_rest`` leave out the first frame, which a keyframe may have given."""
    made: dict[str, Measured] = {}
    errors = [0.0 if value == math.inf else 10 ** (-value / 10) for value in tracks.psnr]
    pooled = {"": errors, "_rest": errors[1:]}
    for name, part in pooled.items():
        mean = sum(part) / len(part) if part else math.nan
        made[f"psnr{name}"] = decibels(math.inf if mean == 0 else -10 * math.log10(mean) if part else math.nan)
    made["psnr_min"], made["psnr_first"] = decibels(min(tracks.psnr)), decibels(tracks.psnr[0])
    for name, track, edge in (("ssim", tracks.ssim, WINDOW), ("ms_ssim", tracks.ms_ssim, MS_SSIM_EDGE)):
        if None in track:
            why = not_measured(f"it needs {edge} px on both edges, the clips are {tracks.size[0]}x{tracks.size[1]}")
            made |= dict.fromkeys((name, f"{name}_rest", f"{name}_min", f"{name}_first"), why)
            continue
        made[name], made[f"{name}_min"], made[f"{name}_first"] = sum(track) / len(track), min(track), track[0]
        made[f"{name}_rest"] = sum(track[1:]) / len(track[1:]) if track[1:] else not_measured("there is one frame")
    made["worst_frame"] = IDENTICAL if not any(errors) else max(range(len(errors)), key=errors.__getitem__)
    for name, track in (("flicker", tracks.flicker), ("change_a", tracks.change_a), ("change_b", tracks.change_b)):
        made[name] = sum(track[1:]) / len(track[1:]) if track[1:] else not_measured("there is one frame")
    sharp = sum(tracks.sharp_a)
    made["sharpness"] = sum(tracks.sharp_b) / sharp if sharp else not_measured("A is flat")
    lags = frame_lags(tracks.costs)
    made["frame_lag"] = max(sorted(set(lags), key=abs), key=lags.count) if lags else 0
    return made


def frame_lags(costs: list[list[float]]) -> list[int]:
    """For every frame t of A the lag k with which B shows it (B[t + k] is most like A[t]): [frames].

    The path of least cost through costs[t][k], where a change of k costs JUMP frames' mean difference; it stands at 0
    unless the path halves the difference.
    """
    if not costs:
        return []
    # a frame whose twin would lie past an end of the clip has no say about that lag
    costs = [[min(row) if cost == math.inf else cost for cost in row] for row in costs]
    straight = sum(row[REACH] for row in costs)
    toll = JUMP * straight / len(costs) + 1e-12
    best = [cost + (0 if k == REACH else toll) for k, cost in enumerate(costs[0])]
    origins = []
    for row in costs[1:]:
        cheapest = min(range(len(best)), key=best.__getitem__)
        origin = [k if best[k] <= best[cheapest] + toll else cheapest for k in range(len(best))]
        best = [cost + best[o] + (0 if o == k else toll) for k, (cost, o) in enumerate(zip(row, origin))]
        origins.append(origin)
    path = [min(range(len(best)), key=best.__getitem__)]
    for origin in reversed(origins):
        path.append(origin[path[-1]])
    path.reverse()
    walked = sum(row[k] for row, k in zip(costs, path))
    return [k - REACH for k in path] if walked < straight / 2 else [0] * len(costs)


def frame_jumps(costs: list[list[float]]) -> list[dict[str, int]]:
    """Where B lacks frames of A (``dropped`` > 0) or has more (< 0): frame of A (or the one before), how many."""
    lags = frame_lags(costs)
    return [{"frame": t, "dropped": lags[t - 1] - lags[t]} for t in range(1, len(lags)) if lags[t] != lags[t - 1]]


def still_runs(changes: list[float | None]) -> list[tuple[int, int]]:
    """(first frame, frames) of every run of at least FROZEN_RUN frames in which nothing moves."""
    runs, began = [], None
    for index, change in enumerate([*changes, math.inf]):
        still = change is not None and change < STILL
        if still and began is None:
            began = index - 1
        elif not still and began is not None:
            if index - began >= FROZEN_RUN or (began == 0 and index == len(changes)):
                runs.append((began, index - began))
            began = None
    return runs
