"""Whether a render can be a clip at all: noise, emptiness and overflow look like success until somebody looks.

    a clip      neighbouring cells are alike, values a few units around 0
    noise       neighbours have nothing in common, values spread by exactly 1    (a broken kernel, a run never finished)
    constant    no spread at all                                                 (an empty latent, a dead stream)
    overflow    values far beyond what the VAEs were trained on

    frames, as they are decoded ─▶ brightness and spread of each ─▶ black or flat picture, an end without a picture,
                                                                    a beat of 17 frames, a flash at either end

Warnings, not errors: a clip may be meant to be odd.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import fmean, median

import torch
from torch import Tensor

from .geometry import CLIP_FRAMES
from .job import AVLatent

WARNING = "WARNING: "  # how a sentence about such a render begins in a report
STILL = 1e-3  # spread below which a stream holds one value
NOISE_SPREAD = 0.06  # how near to 1 the spread of drawn noise is
NOISE_LIKENESS = 0.06  # correlation of neighbours below which they have nothing in common
LARGEST = 30.0  # latents are normalised: beyond this the decoders see what no clip gives
FLAT = 2 / 255  # spread of a frame's values below which it shows nothing
BROKEN_OFF = 5 * FLAT  # spread of the last frame that shows something: what fades out or leaves the picture has less
BEAT = 3 / 255  # how far every 17th frame must leave its neighbours to be told
DRIFT = 1.15  # of contrast over all clips of a row
FLASH = 0.1  # a jump of brightness at an end of the clip
EDGE = 3  # frames that a flash lasts at most
QUIET = 6  # frames beside a flash that have to be steady: next to a moving light it is none


def judge_latent(latent: AVLatent) -> list[str]:
    """Sentences about streams that cannot be a clip's; empty for a sound one."""
    said = []
    for name, stream in (("picture", latent.video), ("sound", latent.audio)):
        values = stream.float()
        spread, largest = values.std().item(), values.abs().max().item()
        if spread < STILL:
            what = "empty (all zeros)" if largest == 0 else f"the constant {values.mean().item():.3g}"
            said.append(f"the {name} latent is {what}: it was not rendered, or the render failed")
        elif largest > LARGEST:
            said.append(f"the {name} latent reaches {largest:.3g}, far beyond the decoder's range: check the render")
        elif abs(spread - 1) < NOISE_SPREAD and all(abs(value) < NOISE_LIKENESS for value in _likeness(values)):
            said.append(f"the {name} latent is pure noise: the render was stopped at its start, or its kernels failed")
    return said


def _likeness(stream: Tensor) -> list[float]:
    """Correlation of neighbours along each axis after the channels: [1, C, ...] -> one number per axis of length > 1.

    The axis of left and right (length 2) is left out: both may carry one sound.
    """
    axes = range(2, stream.ndim)
    values = stream - stream.mean(dim=tuple(axes), keepdim=True)
    power = values.square().mean()
    found = []
    for axis in axes:
        length = stream.shape[axis]
        if length > 2:
            pairs = values.narrow(axis, 0, length - 1) * values.narrow(axis, 1, length - 1)
            found.append((pairs.mean() / power).item())
    return found


class FrameLevels:
    """Brightness and spread of every frame of a clip, kept while it is decoded."""

    def __init__(self):
        self.brightness: list[float] = []
        self.spread: list[float] = []

    def add(self, frames: Tensor) -> None:
        """float [1, 3, f, H, W] in 0..1, in order."""
        spread, brightness = torch.std_mean(frames, dim=(0, 1, 3, 4), correction=0)
        self.brightness += brightness.tolist()
        self.spread += spread.tolist()

    @property
    def contrast(self) -> float:
        """Mean spread of the frames."""
        return fmean(self.spread)

    def judge(self) -> list[str]:
        """Sentences about a picture that is none, or that beats or flashes; empty for a sound one. Frames count from
        0."""
        if not self.spread:
            return []
        said = self._judge_flatness()
        return said or [*self._judge_beat(), *self._judge_ends()]

    def _judge_flatness(self) -> list[str]:
        count = len(self.spread)
        shown = [index for index, spread in enumerate(self.spread) if spread >= FLAT]
        if not shown:
            what = "black" if max(self.brightness) < FLAT else "one flat colour"
            return [f"every frame of the picture is {what}: the render failed, or its weights do not belong together"]
        first = shown[-1] + 1
        if first == count or self.spread[first - 1] < BROKEN_OFF:
            return []
        return [
            f"the picture breaks off: frames {first} to {count - 1} are one flat colour; check the attention kernel"
        ]

    def _judge_beat(self) -> list[str]:
        """Every 17th frame (a chunk of the decoder) darker or brighter than its neighbours, all others not."""
        levels = self.brightness
        leaves = [
            level - median(levels[max(0, index - 2) : index] + levels[index + 1 : index + 3])
            for index, level in enumerate(levels)
        ]
        for first in range(CLIP_FRAMES):
            beats = leaves[first::CLIP_FRAMES]
            others = [abs(leave) for index, leave in enumerate(leaves) if index % CLIP_FRAMES != first]
            if len(beats) < 3 or min(map(abs, beats)) < max(BEAT, 3 * fmean(others)):
                continue
            if all(beat < 0 for beat in beats) or all(beat > 0 for beat in beats):
                how = "darker" if beats[0] < 0 else "brighter"
                places = ", ".join(str(first + CLIP_FRAMES * index) for index in range(3))
                return [
                    f"every {CLIP_FRAMES}th frame is {how} than its neighbours ({places} ...): the decode is broken"
                ]
        return []

    def _judge_ends(self) -> list[str]:
        said = []
        for end, levels in (("first", self.brightness), ("last", self.brightness[::-1])):
            for length in range(1, EDGE + 1):
                edge, beside = levels[:length], levels[length : length + QUIET]
                if len(beside) < QUIET or max(beside) - min(beside) > FLASH / 3:
                    continue
                jumps = [level - fmean(beside) for level in edge]
                if min(map(abs, jumps)) > FLASH and (max(jumps) < 0 or min(jumps) > 0):
                    how = "brighter" if jumps[0] > 0 else "darker"
                    which = f"the {end} frame is" if length == 1 else f"the {end} {length} frames are"
                    said.append(f"{which} {how} than those beside by {abs(fmean(jumps)):.0%} of full white: a flash")
                    break
        return said


def judge_clips(contrasts: Sequence[float]) -> list[str]:
    """A sentence about clips in a row whose contrast climbs or falls from each to the next: what was handed on went
    through pixels, or a LoRA works on its own output."""
    levels = [max(contrast, FLAT) for contrast in contrasts]
    steps = [later / earlier for earlier, later in itertools.pairwise(levels)]
    if len(steps) < 2 or not (all(step > 1 for step in steps) or all(step < 1 for step in steps)):
        return []
    change = levels[-1] / levels[0]
    if max(change, 1 / change) < DRIFT:
        return []
    figures = ", ".join(f"{contrast:.3f}" for contrast in contrasts)
    how = "climbs" if change > 1 else "falls"
    return [f"contrast {how} from clip to clip ({figures}): hand the latents on (H3 Extend Clip), not the frames"]
