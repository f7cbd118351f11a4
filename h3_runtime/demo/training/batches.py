"""Examples side by side as one batch: the product's packed sequence per example, texts filled up to the longest.

    [ text, filled up | guides or reference | target sound | target picture ]   rows, positions, modality, timestep slot
    slots of the four timesteps that a row can have:  0 t_v   1 t_a   2 max(t_v, 0.999)   3 clean

Noise levels, noise and masks are drawn here, from a seed that is the step's own: a run may stop and go on anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ...geometry import Canvas
from ...job import MODALITY_AUDIO, MODALITY_VIDEO, Masks, pool_tokens
from ...layout import ConditionShape, PackedLayout, audio_to_rows, patchify_video
from ...schedule import AUDIO_SHIFT, CONDITION_TIMESTEP, VIDEO_SHIFT, shift_sigma
from .clips import Example

MASKED = 0.25  # share of text-only examples that are trained as edits
ROWS = 2400  # of a batch, about


@dataclass(frozen=True)
class Batch:
    """B examples of one group. ``hidden`` [B, L, 64], ``there`` bool [B, S] (False: filling), ``positions`` [B, S, 3],
    ``rows`` int64 [B, S] = slot * 3 + modality, ``timesteps`` [B, 4]; ``conditions`` [B, C, 96]; fed rows ``video``
    [B, V, 96] and ``audio`` [B, A, 32]; what the velocity should be, ``video_target`` and ``audio_target``, and where
    it counts, ``video_counts`` [B, V] and ``audio_counts`` [B, A]."""

    hidden: Tensor
    there: Tensor
    positions: Tensor
    rows: Tensor
    timesteps: Tensor
    conditions: Tensor
    video: Tensor
    audio: Tensor
    video_target: Tensor
    audio_target: Tensor
    video_counts: Tensor
    audio_counts: Tensor


@lru_cache(maxsize=4096)
def placed(length: int, canvas: tuple[int, int, int], guides: tuple[int, ...], reference: tuple | None):
    """(positions float32 [S, 3], rows of the conditions, of the sound) of a layout with ``length`` text rows."""
    fitted = Canvas.fit(canvas[2], canvas[:2])
    still = (1, fitted.latent_h, fitted.latent_w)
    conditions = [ConditionShape(still, frame_index=place) for place in guides]
    if reference is not None:
        conditions.append(ConditionShape(reference, kind="image"))
    target = (fitted.latent_t, fitted.latent_h, fitted.latent_w)
    layout = PackedLayout.build(torch.ones(length, dtype=torch.int64), target, fitted.audio_t, conditions)
    return layout.positions.float(), layout.target_audio.start - length, len(layout.target_audio)


def draw_base(count: int, generator: torch.Generator) -> Tensor:
    """[count] base sigmas: even over the grid, a quarter of them nearer its clean end."""
    base = torch.rand(count, generator=generator)
    late = torch.rand(count, generator=generator) < 0.25
    return torch.where(late, base * 0.25, base).clamp(min=1e-3)


def collate(examples: list[Example], generator: torch.Generator, base: Tensor | None = None) -> Batch:
    """A batch of ``examples`` (of one kind and canvas; references of one size), noise drawn from ``generator``."""
    count, longest = len(examples), max(len(example.hidden) for example in examples)
    base = draw_base(count, generator) if base is None else base
    sigma_v, sigma_a = shift_sigma(base, VIDEO_SHIFT), shift_sigma(base, AUDIO_SHIFT)
    pinned = (1 - sigma_v).clamp(min=CONDITION_TIMESTEP)
    timesteps = torch.stack([1 - sigma_v, 1 - sigma_a, pinned, torch.ones(count)], dim=1)
    parts = [_row(example, longest, (sigma_v[i], sigma_a[i]), generator) for i, example in enumerate(examples)]
    return Batch(timesteps=timesteps, **{name: torch.stack([part[name] for part in parts]) for name in parts[0]})


def _row(example: Example, longest: int, sigmas: tuple[Tensor, Tensor], generator: torch.Generator) -> dict:
    length, filling = len(example.hidden), longest - len(example.hidden)
    reference = None if example.reference is None else tuple(example.reference.shape[1:])
    guides = tuple(place for place, _ in example.guides)
    where, conditions, sounds = placed(length, example.canvas, guides, reference)
    held = [latent for _, latent in example.guides] + ([] if example.reference is None else [example.reference])
    held = [patchify_video(latent[None].float()) for latent in held]
    held = torch.cat(held) if held else torch.zeros(0, 96)
    noise = torch.randn(held.shape, generator=generator)
    video, audio = patchify_video(example.video[None].float()), audio_to_rows(example.audio[None].float())
    mask_v, mask_a = draw_masks(example, generator)
    fed_v, target_v = _noised(video, sigmas[0], mask_v, CONDITION_TIMESTEP, generator)
    fed_a, target_a = _noised(audio, sigmas[1], mask_a, 1.0, generator)
    slots = torch.cat([torch.full((conditions,), 2), torch.where(mask_a > 0, 1, 3), torch.where(mask_v > 0, 0, 2)])
    kinds = torch.cat(
        [
            torch.full((conditions,), MODALITY_VIDEO),
            torch.full((sounds,), MODALITY_AUDIO),
            torch.full((len(video),), MODALITY_VIDEO),
        ]
    )
    return {
        "hidden": torch.cat([example.hidden.float(), torch.zeros(filling, example.hidden.shape[1])]),
        "there": torch.cat([torch.arange(longest) < length, torch.ones(len(slots), dtype=torch.bool)]),
        "positions": torch.cat([where[:length], torch.zeros(filling, 3), where[length:]]),
        "rows": torch.cat([example.tags, torch.ones(filling, dtype=torch.int64), slots * 3 + kinds]),
        "conditions": CONDITION_TIMESTEP * held + (1 - CONDITION_TIMESTEP) * noise,
        "video": fed_v,
        "audio": fed_a,
        "video_target": target_v,
        "audio_target": target_a,
        "video_counts": mask_v,
        "audio_counts": mask_a,
    }


def _noised(clean: Tensor, sigma: Tensor, mask: Tensor, kept: float, generator: torch.Generator):
    """(fed rows, velocity) of ``clean`` at ``sigma``; kept rows are fed nearly clean."""
    noise = torch.randn(clean.shape, generator=generator)
    mixed = (1 - sigma) * clean + sigma * noise
    return torch.where(mask[:, None] > 0, mixed, kept * clean + (1 - kept) * noise), clean - noise


def draw_masks(example: Example, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Token masks [V], [A], 1 made anew: mostly all; else a box, the clip's end or one stream."""
    _, frames, height, width = example.video.shape
    video, audio = torch.ones(frames, height, width), torch.ones(2, example.audio.shape[2])

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    if example.kind == "text" and float(torch.rand((), generator=generator)) < MASKED:
        way = number(0, 5)
        if way <= 1:
            high, wide = number(height // 3, height), number(width // 3, width)
            top, left = number(0, height - high + 1), number(0, width - wide + 1)
            video.zero_()[:, top : top + high, left : left + wide] = 1
            audio *= way
        elif way == 2:
            first = number(1, frames - 1)
            video[:first] = 0
            audio[:, : round(audio.shape[1] * first / frames)] = 0
        else:
            (video if way == 3 else audio).zero_()
    return pool_tokens(Masks(video).video).flatten(), audio.flatten()


def batch_size(example: Example, longest: int) -> int:
    """How many examples like this one make about ``ROWS`` rows."""
    _, conditions, sounds = placed(
        len(example.hidden),
        example.canvas,
        tuple(place for place, _ in example.guides),
        None if example.reference is None else tuple(example.reference.shape[1:]),
    )
    tokens = example.video.shape[1] * example.video.shape[2] * example.video.shape[3] // 4
    return max(2, ROWS // (longest + conditions + sounds + tokens))
