"""Running out of memory is not the end of a render: one rung down the ladder, and on from the last finished forward.

    resident ─▶ streamed from RAM ─▶ fewer resident layers, one copied ahead ─▶ H3Error with what to do
        └── forward k failed: the state after forward k - 1 is taken up there, bit for bit

Placement never changes a result, so neither does stepping down; the report says that it happened.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from .errors import H3Error
from .job import RenderJob
from .memory.placement import Placement
from .memory.streaming import DiTLayers
from .models.dit import DiT
from .recovery import KeptState, RunRecovery
from .sampler import SampleResult, sample

Place = Callable[[Placement], tuple[DiT, DiTLayers]]


def sample_under_pressure(
    place: Place,
    placement: Placement,
    job: RenderJob,
    recovery: RunRecovery | None = None,
    **options,
) -> tuple[SampleResult, Placement, list[str]]:
    """``sample`` with the DiT that ``place(placement)`` gives; on torch.OutOfMemoryError with a lower placement.

    Returns the result, the placement it was finished with, and sentences about each step down. ``place`` must let go
    of what it gave before. Raises H3Error when the lowest placement does not fit either.
    """
    state = recovery if recovery is not None else KeptState()
    notes: list[str] = []
    while True:
        try:
            dit, layers = place(placement)
            result = sample(dit, job, layers=layers, recovery=state, **options)
            return result, placement, notes
        except torch.OutOfMemoryError as error:
            reason = str(error).splitlines()[0]
        # outside the except block: the traceback holds every tensor of the forward that failed
        dit = layers = None
        free_memory()
        lower = placement.lower()
        kept = state.load()
        failed = 1 + (job.schedule.start if kept is None else kept.done)
        if lower is None:
            raise H3Error(
                f"forward {failed} does not fit into the device's memory, even {placement} ({reason}): close other "
                "programs, or render fewer frames or a smaller size (plan shows what fits)"
            )
        notes.append(f"forward {failed} ran out of memory ({placement}): went on from it {lower}")
        placement = lower


def free_memory() -> None:
    """Give back what nothing refers to any more, to the device too."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
