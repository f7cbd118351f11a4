"""The seams that an accelerator may use. One object per render: built with its options, folded in, thrown away.

    velocity ── wrap_velocity ──▶ rows ─▶ blocks ── wrap_blocks ──▶ block ── wrap_block ──▶ attention ── wrap_attention

Each ``wrap_`` takes a call and returns a call of the same form; the base class returns it unchanged, so an empty list
costs nothing. Block streaming sits below ``wrap_block``: a block that an accelerator skips is not loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


class Accelerator:
    """Base of all accelerators. Subclasses set ``name``, ``fidelity`` (a registered path) and an Options dataclass."""

    name: str = ""
    fidelity: str = ""

    def prepare(self, dit, job, layout, steps) -> None:
        """Called once before the loop with the model, the job, the packed layout and all step plans."""

    def wrap_attention(self, call: Callable) -> Callable:
        """``call(q, k, v, where) -> out``; q, k, v, out [S, G, D]."""
        return call

    def wrap_block(self, call: Callable) -> Callable:
        """``call(index, h, step) -> h``; h [S, hidden]."""
        return call

    def wrap_blocks(self, call: Callable) -> Callable:
        """``call(h, step, start, stop) -> h`` runs blocks start..stop - 1."""
        return call

    def wrap_velocity(self, call: Callable) -> Callable:
        """``call(rows, step) -> rows``: target rows in, velocity rows out, each (video, audio)."""
        return call

    def bytes(self, layout, config) -> int:
        """What it holds on the device, for the plan."""
        return 0

    def state(self) -> dict[str, Tensor]:
        """Tensors that recovery saves after a forward."""
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take back what ``state`` gave."""

    def stats(self) -> dict[str, Any]:
        """What it did, for the report."""
        return {}


def fold(accelerators: Sequence[Accelerator], seam: str, call: Callable) -> Callable:
    """``call`` wrapped by every accelerator's ``seam`` method, the first in the list outermost."""
    for accelerator in reversed(accelerators):
        call = getattr(accelerator, seam)(call)
    return call
