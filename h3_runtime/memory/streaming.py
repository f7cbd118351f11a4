"""Layers that do not live where they compute: a ring of slots, one layer computing while the next is copied.

    store (RAM or disk)   L0   L1   L2   L3   L4 ...          slots    0    1   (2 when there is room)
    copy                 [L0→0][L1→1]    [L2→0]  [L3→1]
    compute                    [ L0 in 0 ][ L1 in 1 ][ L2 in 0 ] ...

A slot is overwritten only after the layer that computed from it is done, and computed from only after its copy is
done; nothing else orders the two. Nothing is copied back, nothing is allocated after the ring is made, and the ring
owns its slots: a layer's tensors are views into the slot it stands in. Layers that are not asked for are not copied.

``LayerStream`` is the schedule; a ``Mover`` does what a machine can: ``HostMover`` (no accelerator), ``CudaMover``
(side stream, events), or a virtual clock in the tests, which drive this same code.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..models.attention import CANONICAL, ChunkSizes
from .probe import may_pin

LOG = logging.getLogger("h3_runtime.memory")
ALIGNMENT = 256  # bytes; every tensor of a slot starts on such a boundary


@dataclass(frozen=True)
class Entry:
    """One tensor of a layer inside its flat buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def view(self, flat: Tensor) -> Tensor:
        """This tensor in ``flat`` uint8 [n]."""
        return flat[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class LayerLayout:
    """How a layer's tensors lie in one flat buffer of ``nbytes``."""

    entries: tuple[Entry, ...]
    nbytes: int

    @staticmethod
    def of(module: nn.Module, skip: tuple[str, ...] = ()) -> LayerLayout:
        """Parameters and buffers of ``module`` (those outside its state dict too: a LoRA's factors) but those whose
        names start with one of ``skip``."""
        entries, offset = [], 0
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if skip and name.startswith(skip):
                continue
            entries.append(Entry(name, tensor.dtype, tuple(tensor.shape), offset))
            offset += -(-entries[-1].nbytes // ALIGNMENT) * ALIGNMENT
        return LayerLayout(tuple(entries), offset)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """name -> view into ``flat``."""
        return {entry.name: entry.view(flat) for entry in self.entries}


class LayerStore(Protocol):
    """Where layers come from. ``read`` may run on another thread than the caller's."""

    def layout(self, layer: int) -> LayerLayout: ...

    def read(self, layer: int, out: Tensor) -> None:
        """Fill ``out`` uint8 [>= layout.nbytes] on the host with the layer's bytes."""


def host_buffer(nbytes: int, pin: bool) -> Tensor:
    """uint8 [nbytes] in host memory, page-locked where that is asked, allowed and possible: a system that refuses to
    lock more pages costs speed, never the render."""
    if pin and may_pin():
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            LOG.warning("host memory could not be page-locked (%s): copies are slower", str(error).partition("\n")[0])
    return torch.empty(nbytes, dtype=torch.uint8)


class RamStore:
    """All layers in host memory, one flat buffer each, pinned where that is asked and possible."""

    def __init__(self, layouts: Sequence[LayerLayout], fill: Callable[[int, dict[str, Tensor]], None], pin: bool):
        self.layouts = list(layouts)
        self.flats = []
        for layer, layout in enumerate(self.layouts):
            flat = host_buffer(layout.nbytes, pin)
            fill(layer, layout.views(flat))
            self.flats.append(flat)

    def layout(self, layer: int) -> LayerLayout:
        return self.layouts[layer]

    def read(self, layer: int, out: Tensor) -> None:
        out[: self.layouts[layer].nbytes].copy_(self.flats[layer])

    def host(self, layer: int) -> Tensor:
        """The layer's own buffer: a device copies from it without another step."""
        return self.flats[layer]


class DiskStore:
    """Layers read from the checkpoint each time; host memory holds only the ring."""

    def __init__(self, layouts: Sequence[LayerLayout], fill: Callable[[int, dict[str, Tensor]], None]):
        self.layouts, self.fill = list(layouts), fill

    def layout(self, layer: int) -> LayerLayout:
        return self.layouts[layer]

    def read(self, layer: int, out: Tensor) -> None:
        self.fill(layer, self.layouts[layer].views(out))


class Tally:
    """Bytes that all rings of this process have copied so far; several reading threads may add."""

    def __init__(self):
        self.nbytes = 0
        self._lock = Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes


STREAMED = Tally()


class Mover(Protocol):
    """What the schedule needs of a machine. Tickets are opaque; None means: already true."""

    def copy(self, layer: int, slot: int, after: Any) -> Any:
        """Start bringing ``layer`` into ``slot`` once ``after`` (from ``mark``) holds; returns a copy ticket."""

    def wait(self, ticket: Any) -> None:
        """Compute queued from now on runs after the copy ``ticket``."""

    def mark(self) -> Any:
        """A ticket that holds once all compute queued so far is done."""

    def tensors(self, layer: int, slot: int) -> dict[str, Tensor]:
        """The layer's tensors, views into ``slot``."""

    def drain(self) -> None:
        """Wait for every copy under way (a render was cancelled, or is over)."""


class LayerStream:
    """The schedule: which layer is copied when, and into which slot.

    ``ahead`` layers are copied while one computes; the ring has ``ahead + 1`` slots. ``announce`` says which layers
    will be used, in order; the last may be the first of the next pass, so that its copy starts during this one's end.
    A layer that is used without having been announced is copied on the spot.
    """

    def __init__(self, mover: Mover, ahead: int = 1):
        assert ahead >= 1, ahead
        self.mover, self.ahead = mover, ahead
        self.free: deque[int] = deque(range(ahead + 1))
        self.computed: list[Any] = [None] * (ahead + 1)  # per slot: ticket of the last compute that read it
        self.coming: dict[int, tuple[int, Any]] = {}  # layer -> slot and copy ticket
        self.announced: list[int] = []
        self.copies = 0

    def announce(self, layers: Sequence[int]) -> None:
        """These layers will be used, in this order; what was announced before no longer holds. Copies of the first ones
        start at once: whatever computes before them is time to copy in."""
        self.announced = list(layers)
        self._start_next()

    @contextmanager
    def use(self, layer: int) -> Iterator[dict[str, Tensor]]:
        """The tensors of ``layer`` for as long as the block runs; copies of the next ones start before it."""
        if layer in self.announced:
            del self.announced[: self.announced.index(layer)]
        else:
            self.announced.insert(0, layer)
        try:
            self._start_next()
            slot, ticket = self.coming.pop(layer)
            self.mover.wait(ticket)
            yield self.mover.tensors(layer, slot)
            self.computed[slot] = self.mover.mark()
            self.free.append(slot)
        except BaseException:
            self.reset()
            raise
        del self.announced[0]

    def _start_next(self) -> None:
        self._forget()
        for wanted in self.announced[: self.ahead + 1]:
            self._start_copy(wanted)

    def _start_copy(self, layer: int) -> None:
        if layer not in self.coming:
            slot = self.free.popleft()
            self.coming[layer] = (slot, self.mover.copy(layer, slot, self.computed[slot]))
            self.copies += 1

    def _forget(self) -> None:
        """Give back the slots of layers whose copy was started and that are not among the next ones any more."""
        next_ones = self.announced[: self.ahead + 1]
        for layer in [layer for layer in self.coming if layer not in next_ones]:
            slot, _ = self.coming.pop(layer)
            self.free.append(slot)

    def reset(self) -> None:
        """After a cancel or an error: no copy is under way, every slot is free, nothing is announced."""
        self.mover.drain()
        self.free = deque(range(self.ahead + 1))
        self.coming.clear()
        self.announced.clear()


class HostMover:
    """No accelerator: slots in host memory, filled by one reading thread while the other computes.

    The same schedule and the same code run as on a card; streams and pinning have nothing to do.
    """

    def __init__(self, store: LayerStore, layers: int, slots: int):
        self.store = store
        self.slots = [torch.empty(_slot_bytes(store, layers), dtype=torch.uint8) for _ in range(slots)]
        self.views = _ViewCache(store, self.slots)
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="h3-layer-reader")
        self.pending: list[Future] = []

    def copy(self, layer: int, slot: int, after: None) -> Future:
        self.pending = [future for future in self.pending if not future.done()]
        self.pending.append(self.reader.submit(self._read, layer, slot))
        return self.pending[-1]

    def _read(self, layer: int, slot: int) -> None:
        self.store.read(layer, self.slots[slot])
        STREAMED.add(self.store.layout(layer).nbytes)

    def wait(self, ticket: Future) -> None:
        ticket.result()

    def mark(self) -> None:
        return None

    def tensors(self, layer: int, slot: int) -> dict[str, Tensor]:
        return self.views(layer, slot)

    def drain(self) -> None:
        _settle(self.pending)

    def close(self) -> None:
        self.drain()
        self.reader.shutdown()


class CudaMover:
    """Slots on the card, filled on a side stream. From RAM: one copy out of the layer's own (pinned) buffer. From
    disk: a reading thread fills a pinned staging buffer first; there are as many of them as slots."""

    def __init__(self, store: LayerStore, layers: int, slots: int, device: torch.device, pin: bool = True):
        self.store, self.device = store, device
        size = _slot_bytes(store, layers)
        self.slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(slots)]
        self.views = _ViewCache(store, self.slots)
        self.side = torch.cuda.Stream(device)
        self.side.wait_stream(torch.cuda.current_stream(device))  # the slots' memory may still be in use there
        self.reader: ThreadPoolExecutor | None = None
        self.pending: list[Future] = []
        if not hasattr(store, "host"):
            self.reader = ThreadPoolExecutor(1, thread_name_prefix="h3-layer-reader")
            self.staging = [host_buffer(size, pin) for _ in range(slots)]
            self.staged: list[torch.cuda.Event | None] = [None] * slots

    def copy(self, layer: int, slot: int, after: torch.cuda.Event | None) -> Any:
        if self.reader is None:
            return self._upload(layer, slot, self.store.host(layer), after)
        self.pending = [future for future in self.pending if not future.done()]
        self.pending.append(self.reader.submit(self._read_and_upload, layer, slot, after))
        return self.pending[-1]

    def _read_and_upload(self, layer: int, slot: int, after: torch.cuda.Event | None) -> torch.cuda.Event:
        if self.staged[slot] is not None:  # the staging buffer's last upload must have left it
            self.staged[slot].synchronize()
        self.store.read(layer, self.staging[slot])
        self.staged[slot] = self._upload(layer, slot, self.staging[slot], after)
        return self.staged[slot]

    def _upload(self, layer: int, slot: int, host: Tensor, after: torch.cuda.Event | None) -> torch.cuda.Event:
        size = self.store.layout(layer).nbytes
        with torch.cuda.stream(self.side):
            if after is not None:
                self.side.wait_event(after)
            self.slots[slot][:size].copy_(host[:size], non_blocking=True)
            STREAMED.add(size)
            return self.side.record_event()

    def wait(self, ticket: Any) -> None:
        event = ticket.result() if isinstance(ticket, Future) else ticket
        torch.cuda.current_stream(self.device).wait_event(event)

    def mark(self) -> torch.cuda.Event:
        return torch.cuda.current_stream(self.device).record_event()

    def tensors(self, layer: int, slot: int) -> dict[str, Tensor]:
        return self.views(layer, slot)

    def drain(self) -> None:
        _settle(self.pending)
        self.side.synchronize()

    def close(self) -> None:
        self.drain()
        if self.reader is not None:
            self.reader.shutdown()


def _slot_bytes(store: LayerStore, layers: int) -> int:
    return max(store.layout(layer).nbytes for layer in range(layers))


def _settle(pending: list[Future]) -> None:
    """Cancel what has not begun and wait for what has; errors of copies nobody will use are dropped."""
    for future in pending:
        if not future.cancel():
            future.exception()
    pending.clear()


class _ViewCache:
    """(layer, slot) -> tensors: views are made once, then only looked up."""

    def __init__(self, store: LayerStore, slots: Sequence[Tensor]):
        self.store, self.slots = store, slots
        self.known: dict[tuple[int, int], dict[str, Tensor]] = {}

    def __call__(self, layer: int, slot: int) -> dict[str, Tensor]:
        key = (layer, slot)
        if key not in self.known:
            self.known[key] = self.store.layout(layer).views(self.slots[slot])
        return self.known[key]


class ResidentLayers:
    """Layers that stay where they compute: the interface of ``StreamedLayers`` at no cost."""

    notes: tuple[str, ...] = ()

    def __init__(self, modules: Sequence[nn.Module]):
        self.modules = modules

    def __len__(self) -> int:
        return len(self.modules)

    def announce(self, start: int, stop: int, then: int | None = None) -> None:
        """Nothing to prepare."""

    @contextmanager
    def use(self, layer: int) -> Iterator[Callable]:
        """The layer's forward."""
        yield self.modules[layer]

    def __call__(self, layer: int, *arguments: Any) -> Any:
        return self.modules[layer](*arguments)


class StreamedLayers:
    """Layers 0..n - 1 of a model: the first ``resident`` stay on the device, the rest come through a ring.

    ``skeletons`` are the modules, the streamed ones with their tensors on the meta device; a streamed layer is run by
    ``torch.func.functional_call`` on its skeleton, so nothing is assigned and nothing is left behind. The mover's
    store counts layers from ``resident`` on. ``notes``: sentences about where they come from.
    """

    def __init__(
        self, skeletons: Sequence[nn.Module], resident: int, mover: Mover, ahead: int = 1, notes: tuple[str, ...] = ()
    ):
        self.skeletons, self.resident, self.notes = skeletons, resident, notes
        self.stream = LayerStream(mover, ahead)

    def __len__(self) -> int:
        return len(self.skeletons)

    def announce(self, start: int, stop: int, then: int | None = None) -> None:
        """Layers start..stop - 1 will run in order, then (if it is certain) ``then`` and those after it."""
        order = [*range(start, stop), *([] if then is None else [max(then, self.resident)])]
        self.stream.announce([layer - self.resident for layer in order if layer >= self.resident])

    @contextmanager
    def use(self, layer: int) -> Iterator[Callable]:
        """The layer's forward, as often as the block calls it."""
        if layer < self.resident:
            yield self.skeletons[layer]
            return
        with self.stream.use(layer - self.resident) as tensors:
            yield lambda *arguments: functional_call(self.skeletons[layer], tensors, arguments)

    def __call__(self, layer: int, *arguments: Any) -> Any:
        with self.use(layer) as function:
            return function(*arguments)


class DiTLayers(NamedTuple):
    """Where a DiT's weights come from while it runs: its ``blocks`` (all but their AdaLN projection) and the
    projections, ``adaln``, which are needed once before the loop (or in every forward, where tables are too big).
    ``chunks``: the sizes that the blocks work in; smaller than canonical only where those do not fit. ``refiner``: a
    context that brings the refiner's blocks, which run once before the loop; None: they are in the module."""

    blocks: ResidentLayers | StreamedLayers
    adaln: ResidentLayers | StreamedLayers
    chunks: ChunkSizes = CANONICAL
    refiner: Callable[[], AbstractContextManager[StreamedLayers]] | None = None

    @staticmethod
    def resident(blocks: Sequence[nn.Module]) -> DiTLayers:
        """The modules' own weights."""
        return DiTLayers(ResidentLayers(blocks), ResidentLayers([block.adaln_proj for block in blocks]))


def run_in_order(
    layers: ResidentLayers | StreamedLayers, start: int = 0, stop: int | None = None
) -> Iterator[Callable]:
    """Each layer's forward in turn; a layer stays until the next one is asked for (layer-major work)."""
    stop = len(layers) if stop is None else stop
    layers.announce(start, stop)
    for layer in range(start, stop):
        with layers.use(layer) as function:
            yield function
