"""The way in which the layers of a model compute, chosen for the whole model before it is made.

A layer reads it in its constructor, beside its own arguments, and is then what it is. So a model of the user's own,
which makes layers itself, gets what a family gets:

    with made_with(Execution(overlap="pieces")):
        model = MyModel(group=mesh.tp)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

from shardwise.distributed.mesh import ExpertRanks, Group
from shardwise.layers.loss import ChunkLosses
from shardwise.layers.matmul import Overlap

if TYPE_CHECKING:
    from shardwise.layers.balance import Balance
    from shardwise.layers.fp8 import Scaling


class Compiler(Protocol):
    """The compiler to which layers of a model give their blocks while it is made."""

    compiles_blocks: bool

    def add_block(self, block: nn.Module, path: str, layer: int | None = None) -> None:
        """Let a block that was just made compute by a compiled function.

        Args:
            path: name of the block in the model, for messages, if its tensors have none.
            layer: number of a family's block; None in a model of the user's own.
        """

    def losses(self) -> ChunkLosses:
        """Return the function of an output head in the place of `chunk_losses`."""


@dataclass(frozen=True)
class Execution:
    """The way in which the layers of a model compute."""

    # Way in which column- and row-parallel layers communicate during their matmuls (`layers/matmul.py`); None: in turn
    # with them.
    overlap: Overlap | None = None
    # True if column-parallel layers under sequence parallelism gather their inputs again for the backward pass, and do
    # not keep them.
    regathers: bool = False
    fp8: bool = False  # true if column- and row-parallel layers multiply in fp8 in training (`layers/fp8.py`)
    # True if ranks that share samples pass their keys and values round, false if they gather them.
    passes_keys: bool = False
    context_group: Group = field(default_factory=Group)
    experts: ExpertRanks = field(default_factory=ExpertRanks)  # the ranks over which the experts of a block are divided
    balance: Balance | None = None  # objectives of routers (`layers/balance.py`); None: they have none
    # Function of the user's in the place of an output head's cross-entropy: whole logits `[S, B, V]` and targets `[S,
    # B]` → the sum of their losses.
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    compiler: Compiler | None = None  # compiles blocks and the loss of the head; None: they stay eager

    def scaling(self, group: Group, *, cuts_outputs: bool) -> Scaling | None:
        """Return the scales of a linear layer whose outputs, or else inputs, a group shares; None without fp8."""
        if not self.fp8:
            return None
        from shardwise.layers.fp8 import Scaling

        return Scaling(group, cuts_outputs, self.context_group)


_current: ContextVar[Execution] = ContextVar("_current", default=Execution())  # noqa: B039


def execution() -> Execution:
    """Return how layers that are made now compute."""
    return _current.get()


@contextmanager
def made_with(chosen: Execution) -> Iterator[None]:
    """Let all layers that are made inside compute as chosen."""
    token = _current.set(chosen)
    try:
        yield
    finally:
        _current.reset(token)
