"""The plan of every forward, made before the loop: sigmas of both streams, distinct timesteps, modulation rows.

    forward k:  sigma_v, sigma_a ──▶ one timestep label per packed row
        text              t_v                        guide / reference picture   max(t_v, 0.999), or what it is held at
        target picture    t_v,  masked: min(1 - m * sigma_v, max(t_v, 0.999))
        target sound      t_a,  masked: min(1 - m * sigma_a, 1)        guide / reference sound   1, or held
    ──▶ distinct (timestep, modality) pairs, and runs of packed rows that read the same one

Tables are made for pairs in use only. Up to ``MAX_TABLE_PAIRS`` pairs a render they are computed before the loop; with
more (a feathered mask over many forwards) they are computed forward by forward: the same rows by the same batches, so
the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .job import MODALITY_AUDIO, MODALITY_VIDEO, Masks
from .layout import PackedLayout
from .models.dit import MODALITIES, Run
from .schedule import CONDITION_TIMESTEP, Schedule

MAX_TABLE_PAIRS = 1000  # (timestep, modality) pairs a render; one pair is 3.2 MB over the release's 50 blocks


@dataclass(frozen=True)
class StepPlan:
    """One forward. ``timesteps`` float32 [n] are its distinct labels, ascending; ``pairs`` int64 [P] are
    timestep index * 3 + modality of its modulation rows; ``pair_ids`` [P] and ``timestep_ids`` [n] are the same in
    the render-wide tables of ``Steps``. ``runs`` map packed rows to ``pairs``; ``video_runs`` and ``audio_runs`` map
    the target rows to ``timesteps`` for the final norm."""

    index: int
    video_sigma: float
    video_sigma_next: float
    audio_sigma: float
    audio_sigma_next: float
    timesteps: Tensor
    pairs: Tensor
    timestep_ids: Tensor
    pair_ids: Tensor
    runs: tuple[Run, ...]
    video_runs: tuple[Run, ...]
    audio_runs: tuple[Run, ...]


@dataclass(frozen=True)
class Steps:
    """All forwards of a render, with the distinct ``timesteps`` float32 [N] and ``pairs`` int64 [M] over all of them.

    ``tables_before_loop`` is False when there are too many pairs to hold.
    """

    forwards: tuple[StepPlan, ...]
    timesteps: Tensor
    pairs: Tensor

    @property
    def tables_before_loop(self) -> bool:
        return self.pairs.shape[0] <= MAX_TABLE_PAIRS


@dataclass(frozen=True)
class _Label:
    """Rows start..stop carry one timestep, or one per row when ``timestep`` is a tensor, and one modality."""

    start: int
    stop: int
    timestep: Tensor  # float32 [] or [rows]
    modality: int
    kind: str


def plan_steps(layout: PackedLayout, schedule: Schedule, masks: Masks | None = None) -> Steps:
    """One ``StepPlan`` per forward of ``schedule``'s running part."""
    labelled = []
    for index in range(schedule.start, schedule.stop):
        labelled.append((index, label_rows(layout, schedule.video[index], schedule.audio[index], masks)))
    timesteps = torch.unique(torch.cat([label.timestep.reshape(-1) for _, labels in labelled for label in labels]))
    forwards = [_plan_forward(index, labels, schedule, timesteps) for index, labels in labelled]
    pairs = torch.unique(torch.cat([step.pair_ids for step in forwards]))
    placed = [_place(step, pairs) for step in forwards]
    return Steps(tuple(placed), timesteps, pairs)


def label_rows(layout: PackedLayout, video_sigma: float, audio_sigma: float, masks: Masks | None) -> list[_Label]:
    """The timestep and modality of every packed row at one pair of sigmas, as few labels as possible."""
    one = torch.ones((), dtype=torch.float32)
    sigma_v, sigma_a = torch.tensor(video_sigma, dtype=torch.float32), torch.tensor(audio_sigma, dtype=torch.float32)
    t_video, t_audio = one - sigma_v, one - sigma_a
    pinned = torch.maximum(t_video, torch.tensor(CONDITION_TIMESTEP, dtype=torch.float32))
    labels = []
    for segment in layout.segments:
        if segment.kind == "text":
            labels += _text_labels(layout.text_tags, t_video)
            continue
        if segment.held is not None:
            timestep = torch.tensor(segment.held, dtype=torch.float32)
        elif segment.kind == "video":
            m = None if masks is None else masks.video_tokens
            timestep = t_video if m is None else torch.minimum(one - m * sigma_v, pinned)
        elif segment.kind == "audio":
            m = None if masks is None else masks.audio_tokens
            timestep = t_audio if m is None else torch.minimum(one - m * sigma_a, one)
        else:
            timestep = pinned if segment.is_video else one
        modality = MODALITY_VIDEO if segment.is_video else MODALITY_AUDIO
        labels.append(_Label(segment.start, segment.stop, timestep, modality, segment.kind))
    return labels


def _text_labels(tags: Tensor, timestep: Tensor) -> list[_Label]:
    """One label per run of equal tags (vision-block rows read the video modality)."""
    cuts = [0, *((tags[1:] != tags[:-1]).nonzero().flatten() + 1).tolist(), tags.shape[0]]
    return [_Label(a, b, timestep, int(tags[a]), "text") for a, b in itertools.pairwise(cuts)]


def _plan_forward(index: int, labels: Sequence[_Label], schedule: Schedule, all_timesteps: Tensor) -> StepPlan:
    timesteps = torch.unique(torch.cat([label.timestep.reshape(-1) for label in labels]))
    timestep_ids = torch.searchsorted(all_timesteps, timesteps)
    rows = []  # (label, local timestep index: int or tensor)
    for label in labels:
        local = torch.searchsorted(timesteps, label.timestep.reshape(-1))
        rows.append((label, int(local) if label.timestep.ndim == 0 else local))
    wanted = [torch.as_tensor(local).reshape(-1) * MODALITIES + label.modality for label, local in rows]
    pairs = torch.unique(torch.cat(wanted))
    runs, finals = [], {"video": (), "audio": ()}
    for (label, local), want in zip(rows, wanted):
        where = torch.searchsorted(pairs, want)
        row = int(where) if isinstance(local, int) else where
        if runs and isinstance(row, int) and isinstance(runs[-1].row, int) and runs[-1].row == row:
            runs[-1] = Run(runs[-1].start, label.stop, row)
        else:
            runs.append(Run(label.start, label.stop, row))
        if label.kind in finals:
            finals[label.kind] = (Run(label.start, label.stop, local),)
    return StepPlan(
        index=index,
        video_sigma=schedule.video[index],
        video_sigma_next=schedule.video[index + 1],
        audio_sigma=schedule.audio[index],
        audio_sigma_next=schedule.audio[index + 1],
        timesteps=timesteps,
        pairs=pairs,
        timestep_ids=timestep_ids,
        pair_ids=timestep_ids[pairs // MODALITIES] * MODALITIES + pairs % MODALITIES,
        runs=tuple(runs),
        video_runs=finals["video"],
        audio_runs=finals["audio"],
    )


def _place(step: StepPlan, all_pairs: Tensor) -> StepPlan:
    """``step`` with ``pair_ids`` turned from pair values into rows of the render-wide table."""
    return replace(step, pair_ids=torch.searchsorted(all_pairs, step.pair_ids))


def on_device(step: StepPlan, device: torch.device) -> StepPlan:
    """``step`` with the per-row indices of its runs on ``device``."""

    def move(runs: tuple[Run, ...]) -> tuple[Run, ...]:
        return tuple(r._replace(row=r.row.to(device)) if isinstance(r.row, Tensor) else r for r in runs)

    return replace(step, runs=move(step.runs), video_runs=move(step.video_runs), audio_runs=move(step.audio_runs))
