"""The interface of an optimizer that needs whole tensors, and which ZeRO-1 can shard all the same.

ZeRO-1 gives a wrapped optimizer flat slices of many parameters. A class that updates each element by itself needs no
more. A class that looks at a whole tensor derives from `SliceOptimizer` and says how it updates the slices.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.optim.buckets import Bucket
from shardwise.optim.gradient_norms import CanonicalNorms


class SliceOptimizer(torch.optim.Optimizer):
    """An optimizer that `ZeroRedundancyOptimizer` steps by `step_slices`, and not one bucket after the other.

    Stochastic rounding computes the step a chunk at a time: u by `direction`, then w ← w − lr · r · u, with the ratio r
    of each canonical tensor by `trust_ratio`. A class that has no such ratios need not define these three methods, and
    cannot be rounded stochastically.
    """

    def step_slices(self, groups: list[list[Bucket]], norms: CanonicalNorms) -> None:
        """Update the masters of these buckets, whose gradients are set. Every rank of the model calls this.

        Args:
            groups: buckets of each parameter group.
            norms: measures L2 norms of the canonical tensors that the buckets hold.
        """
        raise NotImplementedError

    def adapted_groups(self) -> list[int]:
        """Return the numbers of the parameter groups whose tensors have trust ratios."""
        raise NotImplementedError

    def trust_ratio(self, weight_norm: Tensor, direction_norm: Tensor) -> Tensor:
        """Return the ratios `[N]` of N tensors by the norms `[N]` of their weights and of their directions."""
        raise NotImplementedError

    def direction(self, p: nn.Parameter, group: dict[str, Any], out: Tensor) -> Tensor:
        """Take the gradient of p, of the parameter group `group`, into the state, and write the direction to `out`."""
        raise NotImplementedError


def updates_slices(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Return whether a class updates slices as its `step` updates whole tensors.

    A child that replaces `step` alone does not: its `step_slices` is still that of its parent.
    """
    if not issubclass(optimizer_class, SliceOptimizer):
        return False
    ancestors: list[type[torch.optim.Optimizer]] = [
        ancestor for ancestor in optimizer_class.__mro__ if "step_slices" in vars(ancestor)
    ]
    return inspect.unwrap(optimizer_class.step) is inspect.unwrap(ancestors[0].step)  # torch wraps `step` to profile it
