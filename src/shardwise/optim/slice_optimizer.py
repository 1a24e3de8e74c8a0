"""The interface of an optimizer that needs whole tensors, and which ZeRO-1 can shard all the same.

ZeRO-1 gives a wrapped optimizer flat slices of many parameters. A class that updates each element by itself needs no
more. A class that looks at a whole tensor derives from `SliceOptimizer` and says how it updates the slices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol, overload

import torch
from torch import Tensor, nn

from shardwise.distributed.placement import Pieces
from shardwise.optim.buckets import Bucket
from shardwise.optim.gradient_norms import CanonicalNorms, ElementRun
from shardwise.optim.sharding import Ranks


@dataclass(frozen=True)
class ModelSlices:
    """The slices of the model that this rank owns, and the ranks that own the others.

    Attributes:
        groups: buckets of each parameter group.
        pieces: pieces of canonical tensors that each parameter holds.
        device: device of the model.
        ranks: the ranks that the optimizer works with.
        sum_dtype: argument of `CanonicalNorms`.
    """

    groups: list[list[Bucket]]
    pieces: Pieces
    device: torch.device
    ranks: Ranks
    sum_dtype: torch.dtype | None

    @cached_property
    def norms(self) -> CanonicalNorms:
        """L2 norms of the canonical tensors. The first use is collective over the world."""
        return CanonicalNorms(self.groups, self.pieces, self.device, self.ranks, self.sum_dtype)


class RoundedSlices(Protocol):
    """Slices whose masters and state are bfloat16: each update is computed in float32, of a chunk of a run at a time.

    A chunk has at most `chunk_elements`. The state that counts is that from before this step, until it is stored.
    """

    def load(self, chunk: ElementRun) -> Tensor:
        """Copy a chunk's masters, gradients and state to float32; return the copy of the masters `[N]`."""
        ...

    def load_direction(self, chunk: ElementRun) -> tuple[Tensor, Tensor]:
        """Load a chunk and take its gradient into the copy of its state; return also its direction `[N]`."""
        ...

    def store(self, chunk: ElementRun) -> None:
        """Round the copies of masters and state, of the chunk that was loaded last, to where the chunk has them."""
        ...


class SliceOptimizer(torch.optim.Optimizer):
    """An optimizer that `ZeroRedundancyOptimizer` steps by `step_slices`, and not one bucket after the other.

    Attributes:
        has_slices: True if the parameters are flat slices; `ZeroRedundancyOptimizer` sets it in a child of its own.
    """

    has_slices: ClassVar[bool] = False

    @classmethod
    def require_tensor(cls, shape: tuple[int, ...], options: dict[str, Any]) -> None:
        """Raise ValueError if no canonical tensor of this `shape` may be in a parameter group with these `options`."""

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient, each as one tensor; `closure` computes the loss before."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.step_tensors()
        return loss

    def step_tensors(self) -> None:
        """Update every parameter that has a gradient, each as one tensor."""
        raise NotImplementedError

    def step_slices(self, model: ModelSlices) -> None:
        """Update the masters of the buckets of `model`, whose gradients are set. Every rank of the model calls this."""
        raise NotImplementedError

    @staticmethod
    def _needs_whole_tensors(group: dict[str, Any]) -> bool:
        """Return whether the update of a parameter group needs more than each element by itself."""
        raise NotImplementedError

    def whole_tensor_groups(self) -> list[int]:
        """Return the numbers of the parameter groups that `_needs_whole_tensors`."""
        return [number for number, group in enumerate(self.param_groups) if self._needs_whole_tensors(group)]

    def step_rounded(self, model: ModelSlices, slices: RoundedSlices) -> None:
        """Update the masters of the `whole_tensor_groups` as `step_slices` does, with stochastic rounding by `slices`.

        The reduced gradients are neither averaged nor clipped yet.
        """
        raise NotImplementedError

    def direction(self, p: nn.Parameter, group: dict[str, Any], out: Tensor) -> Tensor:
        """Take the gradient of p, of the parameter group `group`, into the state, and write the direction to `out`.

        `out` has p's shape `[…]` and may be the gradient's own memory.
        """
        raise NotImplementedError

    def _gradient(self, p: nn.Parameter) -> Tensor:
        """Return the gradient of p in its dtype.

        Raises:
            RuntimeError: it is sparse or complex.
        """
        assert p.grad is not None
        if p.grad.is_sparse or p.is_complex():
            name = type(self).__name__
            raise RuntimeError(f"{name} takes dense and real gradients: make embeddings with sparse=False")
        return p.grad.to(p.dtype)


def gradient_of(bucket: Bucket) -> Tensor:
    """Return the gradient of a bucket's master, which `step_slices` may replace by a direction."""
    assert bucket.master.grad is not None
    return bucket.master.grad
