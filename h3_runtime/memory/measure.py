"""Memory of a computation, measured without the card it would run on: every live byte counted, none allocated.

    with FakeMemory() as memory:
        model on "cuda", tensors on "cuda" and "cpu"      shapes and devices, no data
        run it
    memory.peak["cuda"], memory.peak["cpu"]               the most that was alive at one time

Attention counts as any fused kernel allocates: its output and one number per row and head. What a card adds of its own
(context, kernel workspaces, the allocator's rounding) is not in these figures.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operators return while the mode is on, from their birth to their death.

    ``now`` and ``peak`` count each storage once, whatever views it has, by kind of device (cuda, cpu). ``hold`` adds
    tensors that exist already.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._alive: dict[int, tuple[str, int]] = {}

    def hold(self, tensors: Iterable[Tensor], counted: bool = True) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._alive or tensor.device.type == "meta":
                continue
            kind, size = tensor.device.type, storage.nbytes() if counted else 0
            self._alive[key] = (kind, size)
            self.now[kind] += size
            self.peak[kind] = max(self.peak[kind], self.now[kind])
            weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        kind, size = self._alive.pop(key)
        self.now[kind] -= size

    def start_peak(self) -> None:
        """Forget the peak so far: it starts again from what is alive now."""
        self.peak = Counter(self.now)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # nothing is born in these, and asking the fake mode costs most of a measurement's time
        if func is DEVICE_OF and hasattr(args[0], "fake_device"):
            return args[0].fake_device
        if func in WRITES_IN_PLACE:
            return args[0]
        if func in WRITES_OUT:
            return kwargs["out"]
        out = func(*args, **(kwargs or {}))
        self.hold(leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
        return out


WRITES_IN_PLACE = frozenset(
    getattr(getattr(torch.ops.aten, name), overload)
    for name, overload in (
        ("copy_", "default"),
        ("add_", "Tensor"),
        ("mul_", "Tensor"),
        ("mul_", "Scalar"),
        ("addcmul_", "default"),
        ("silu_", "default"),
        ("sin_", "default"),
        ("square_", "default"),
    )
)
WRITES_OUT = frozenset((torch.ops.aten.addcmul.out,))
DEVICE_OF = torch.ops.prim.device.default


class FusedAttention(TorchFunctionMode):
    """F.scaled_dot_product_attention on a card that is not there: what a fused kernel allocates, and nothing else.

    Without it a fake tensor takes the unfused path, which holds every score.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not F.scaled_dot_product_attention or args[0].device.type != "cuda":
            return func(*args, **(kwargs or {}))
        query, value = args[0], args[2]
        batch, heads, rows, _ = query.shape
        out = query.new_empty(batch, rows, heads, value.shape[-1]).transpose(1, 2)
        query.new_empty(batch, heads, rows, dtype=torch.float32)  # log of the sums, let go with the kernel
        return out


class FakeMemory:
    """The two modes over PyTorch's fake tensors; ``now``, ``peak`` and ``hold`` as in ``LiveBytes``."""

    def __init__(self) -> None:
        self.live = LiveBytes()
        self._modes = ExitStack()

    def __enter__(self) -> LiveBytes:
        from torch._subclasses.fake_tensor import FakeTensorMode

        modes = (FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), FusedAttention(), self.live)
        for mode in modes:
            self._modes.enter_context(mode)
        return self.live

    def __exit__(self, *error) -> None:
        self._modes.close()
