"""torch.compile of the block: its row-wise work is fused; attention and weights stay what they are.

    layer ─▶ compiled( norm · modulate · linears · rotate · gate · feed-forward ) ─▶ h
                                                  └─ attention: outside, so any kernel may run there
    compiling fails ─▶ the plain block from then on, said in the report

One compiled function serves all blocks: weights are its inputs, and what changes from block to block (its index, its
modulation) is kept out of what it is compiled for. Sums may be ordered anew: EXACT MATH. No graphs of the card's driver
are recorded, so nothing holds on to tensors between renders; compiled code itself stays with the process.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..models.attention import AttentionCall, Where
from ..models.dit import ForwardContext
from .base import Accelerator, Options, option

LIMITS = {  # compiled anew for other shapes and tasks up to so often; then an error, never silently the plain code
    "recompile_limit": 64,
    "accumulated_recompile_limit": 1024,
    "fail_on_recompile_limit_hit": True,
}
BACKENDS = ("inductor", "aot_eager", "eager")


@dataclass(frozen=True)
class CompileOptions(Options):
    backend: str = option("inductor", "Compiler; the two eager ones fuse nothing and serve tests.", choices=BACKENDS)


class _Attention:
    """The attention call as the compiled function sees it: not traced, and told outside which block it is for."""

    def __init__(self):
        self.call: AttentionCall | None = None
        self.block = self.forward = 0

    @torch.compiler.disable
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, where: Where) -> Tensor:
        return self.call(q, k, v, where._replace(block=self.block, forward=self.forward))


def _run_layer(forward: Callable, h: Tensor, table: Tensor, context: ForwardContext) -> Tensor:
    return forward(0, h, context._replace(table=lambda index: table))


class CompiledBlock(Accelerator):
    """See the module's picture."""

    name = "compile"
    words = "Compiles the block with torch.compile; the first forwards take longer."
    fidelity = "accelerator/compile"
    Options = CompileOptions
    excludes = {  # noqa: RUF012
        "block-cache": "a step cache beside compiled blocks is unsafe: a failed recording may end the process",
        "forecast": "a step cache beside compiled blocks is unsafe: a failed recording may end the process",
    }
    leaves_out_blocks = False

    def __init__(self, options: Options | None = None):
        super().__init__(options)
        self.failed: str | None = None
        self.compiled_calls = self.plain = 0

    @classmethod
    def missing(cls, options: CompileOptions) -> str | None:
        if importlib.util.find_spec("torch._dynamo") is None:
            return "this torch has no compiler"
        return None if torch.cuda.is_available() else "no GPU here, and on a CPU compiling costs minutes"

    def prepare(self, dit, job, layout, steps) -> None:
        self.failed, self.compiled_calls, self.plain = None, 0, 0
        self.attention = _Attention()
        if importlib.util.find_spec("torch._dynamo") is None:
            self.failed = "this torch has no compiler"
            return
        self.run = torch.compile(_run_layer, backend=self.options.backend, dynamic=False)

    def wrap_layer(self, call: Callable) -> Callable:
        def layer(forward: Callable, index: int, h: Tensor, context: ForwardContext) -> Tensor:
            if self.failed is None:
                spot = self.attention
                spot.call, spot.block, spot.forward = context.attention, index, context.forward
                table = context.table(index)
                before = h.clone()  # a block works in place, and compiling may fail half-way
                try:
                    with torch._dynamo.config.patch(**LIMITS):
                        out = self.run(forward, h, table, context._replace(forward=0, attention=spot, table=_no_table))
                    self.compiled_calls += 1
                    return out
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:
                    self.failed = (str(error).strip() or type(error).__name__).splitlines()[0]
                    h = h.copy_(before)
            self.plain += 1
            return call(forward, index, h, context)

        return layer

    def paths(self) -> tuple[str, ...]:
        return () if self.failed else (self.fidelity,)

    def bytes(self, layout, config, item: int = 2) -> int:
        """The copy of the hidden state that a block goes back to when it cannot be compiled."""
        return layout.num_rows * config.hidden * item

    def state(self) -> dict[str, Tensor]:
        return {"counts": torch.tensor([self.compiled_calls, self.plain])}

    def restore(self, state: dict[str, Tensor]) -> None:
        if "counts" in state:
            self.compiled_calls, self.plain = state["counts"].tolist()

    def stats(self) -> dict:
        return {"compiled_calls": self.compiled_calls, "plain_calls": self.plain, "failed": self.failed}

    def notes(self) -> list[str]:
        if self.failed:
            return [f"compile did not engage, the plain block ran: {self.failed}"]
        return [f"compile: {self.compiled_calls} blocks ran compiled ({self.options.backend})"]


def _no_table(index: int) -> Tensor:
    raise AssertionError(index)
