"""The seams that an accelerator may use. One object per render: built with its options, folded in, thrown away.

    velocity ── wrap_velocity ──▶ rows ─▶ blocks ── wrap_blocks ──▶ block ── wrap_block ──▶ layer ── wrap_layer ──▶
    attention ── wrap_attention

Each ``wrap_`` takes a call and returns a call of the same form; the base class returns it unchanged, so an empty list
costs nothing. Block streaming sits below ``wrap_block``: a block that an accelerator skips is not loaded. What
``wrap_layer`` runs is a block whose weights are there.

``Options`` is a dataclass of ``option`` fields: they are checked where it is made, and the command line and the nodes
are built from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import H3Error
from ..geometry import is_number, is_whole
from ..layout import PackedLayout, Segment
from ..schedule import Schedule

# options of one name say the same everywhere: the page translates them by name
WARMUP = "Forwards at the start that run in full."
TAIL = "Forwards at the end that run in full."
AT_FORWARD = "@"  # in a state's key, before the forward it was kept at: under this key the tensor never changes


def option(default, words: str, low: float | None = None, high: float | None = None, choices: tuple[str, ...] = ()):
    """A field of an accelerator's Options: its default, what it does in one sentence, and what it may be."""
    return field(default=default, metadata={"words": words, "low": low, "high": high, "choices": choices})


@dataclass(frozen=True)
class Options:
    """Base of all Options; H3Error for a value outside what its field allows."""

    def __post_init__(self):
        for spec in fields(self):
            _check(spec, getattr(self, spec.name))


def _check(spec: Field, value: Any) -> None:
    limits, name = spec.metadata, spec.name
    if limits["choices"]:
        if value not in limits["choices"]:
            raise H3Error(f"{name} is {value!r}: give one of {', '.join(limits['choices'])}")
        return
    if isinstance(spec.default, bool):
        if not isinstance(value, bool):
            raise H3Error(f"{name} is {value!r}: give true or false")
        return
    right = is_whole(value) if isinstance(spec.default, int) else is_number(value)
    if not right or not limits["low"] <= value <= limits["high"]:
        kind = "a whole number" if isinstance(spec.default, int) else "a number"
        raise H3Error(f"{name} is {value!r}: give {kind} from {limits['low']:g} to {limits['high']:g}")


class Streams(NamedTuple):
    """Target rows of picture and sound in the packed sequence, and which of them the render moves: bool [rows], True
    where a mask lets it change (None: all)."""

    video: Segment
    audio: Segment
    video_moves: Tensor | None
    audio_moves: Tensor | None

    @staticmethod
    def of(job, layout: PackedLayout, device) -> Streams:
        masks = job.masks
        moves = [None, None]
        for index, tokens in enumerate((masks.video_tokens, masks.audio_tokens) if masks is not None else ()):
            moves[index] = None if tokens is None else (tokens > 0).to(device)
        return Streams(layout.target_video, layout.target_audio, *moves)


class Window(NamedTuple):
    """The forwards of a run that are always computed in full: before ``begin`` and from ``end`` on."""

    begin: int
    end: int

    @staticmethod
    def of(job, steps, warmup: int, tail: int) -> Window:
        """``warmup`` forwards from where this run begins, ``tail`` before the schedule's end."""
        return Window(steps.forwards[0].index + warmup, job.num_forwards - tail)

    def full(self, forward: int) -> bool:
        return not self.begin <= forward < self.end


class Accelerator:
    """Base of all accelerators. Subclasses set ``name``, ``fidelity`` (a registered path), an Options dataclass and
    ``words``; ``excludes`` names others that cannot run beside it, with the reason. ``leaves_out_blocks`` False: every
    forward runs every block, so that the next one's weights may be fetched early. ``keeps_state``: ``state`` is as
    large as what it holds, and recovery takes a copy of it through host memory."""

    name: str = ""
    words: str = ""
    fidelity: str = ""
    Options: type[Options] = Options
    excludes: dict[str, str] = {}  # noqa: RUF012  (a constant)
    leaves_out_blocks: bool = True
    keeps_state: bool = False

    def __init__(self, options: Options | None = None):
        self.options = self.Options() if options is None else options

    @classmethod
    def missing(cls, options: Options) -> str | None:
        """Why this machine cannot run it with ``options``, so that a preset leaves it out; None: it can."""
        return None

    def prepare(self, dit, job, layout, steps) -> None:
        """Called once before the loop with the model, the job, the packed layout and all step plans: a fresh start."""

    def wrap_attention(self, call: Callable) -> Callable:
        """``call(q, k, v, where) -> out``; q, k, v, out [S, G, D]."""
        return call

    def wrap_layer(self, call: Callable) -> Callable:
        """``call(forward, index, h, context) -> h``: ``forward`` is the block with its weights in place."""
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

    def read(self, value: Tensor) -> float:
        """A number that a decision needs, fetched from the device."""
        return float(value)

    def paths(self) -> tuple[str, ...]:
        """Names in the fidelity registry of what it runs; after ``prepare``, what it will run on this machine."""
        return (self.fidelity,) if self.fidelity else ()

    def bytes(self, layout, config, item: int = 2) -> int:
        """What it holds on the device at most, for the plan; ``item`` is the compute dtype's size in bytes."""
        return 0

    def host_bytes(self, layout, config, item: int = 2) -> int:
        """What it holds in host memory at most."""
        return 0

    def planned_calls(self, schedule: Schedule) -> int:
        """How many forwards of ``schedule`` run the blocks, as far as its options alone decide it."""
        return schedule.num_forwards

    def state(self) -> dict[str, Tensor]:
        """Tensors that recovery saves after a forward. A key ``name@12`` says that the tensor was kept at forward 12
        and stays the same for as long as it is named: it is written once."""
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take back what ``state`` gave."""

    def stats(self) -> dict[str, Any]:
        """What it did, for the report."""
        return {}

    def notes(self) -> list[str]:
        """Sentences for the person who switched it on, first of all when it did not engage."""
        return []


def fold(accelerators: Sequence[Accelerator], seam: str, call: Callable) -> Callable:
    """``call`` wrapped by every accelerator's ``seam`` method, the first in the list outermost."""
    for accelerator in reversed(accelerators):
        call = getattr(accelerator, seam)(call)
    return call
