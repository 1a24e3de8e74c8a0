"""Optimizer state in the host's memory, updated by the host (ZeRO-Offload, arXiv:2101.06840).

Each bucket's gradients travel to the host while it updates the buckets before, and the new weights travel back:

    to the host      gradients 1 | gradients 2 | gradients 3
    host                           update 1    | update 2    | update 3
    to the device                                weights 1   | weights 2 | weights 3

The device keeps parameters and gradients. Masters are pinned, so that the host need not wait for the weights to leave.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from shardwise.base.errors import ConfigError
from shardwise.optim.buckets import Bucket
from shardwise.optim.master_update import Update, scaled_gradient
from shardwise.optim.slice_optimizer import SliceOptimizer

_Item = TypeVar("_Item")
_AHEAD = 2
"""Buckets whose gradients are on their way while the host updates another one."""


def require_offloadable(optimizer_class: type[torch.optim.Optimizer], *, rounds: bool) -> None:
    """Raise ConfigError for a class or rounding whose update is not made for the host."""
    if issubclass(optimizer_class, SliceOptimizer):
        raise ConfigError(
            f"offload (True) must be False with {optimizer_class.__name__}, which needs whole tensors: give an "
            "elementwise class, such as torch.optim.AdamW"
        )
    if rounds:
        raise ConfigError(
            "offload (True) must be False with rounding='stochastic' or a state_dtype, whose random bits the device "
            "draws: leave them out, with optimizer_dtype=torch.float32"
        )


class HostUpdate(Update):
    """Updates of masters that are in the host's memory, by an elementwise class."""

    def _update(self, factor: Tensor | float, number: int) -> Iterator[Bucket]:
        buckets = [bucket for _, bucket in self._in_forward_order]
        if not buckets:
            return
        stream = torch.Stream(buckets[0].values.device)
        sent = (_HostCopy(scaled_gradient(bucket, factor), stream) for bucket in buckets)
        for (group, bucket), copy in zip(self._buckets_with_options(), _ahead(sent, _AHEAD), strict=True):
            bucket.master.grad = copy.wait()
            self._step_alone(group, bucket.master)
            bucket.master.grad = None
            del copy
            yield bucket


class _HostCopy:
    """A copy of a tensor in pinned memory that is under way, behind other work of the device."""

    def __init__(self, tensor: Tensor, stream: torch.Stream) -> None:
        self._source = tensor  # whose memory must stay until the copy has ended
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        stream.wait_stream(torch.accelerator.current_stream(tensor.device))
        with stream:
            self._copy.copy_(tensor, non_blocking=True)
        self._event = stream.record_event()

    def wait(self) -> Tensor:
        self._event.synchronize()
        del self._source
        return self._copy


def _ahead(items: Iterable[_Item], count: int) -> Iterator[_Item]:
    """Yield items, each once `count` further ones were drawn."""
    drawn: deque[_Item] = deque()
    for item in items:
        drawn.append(item)
        if len(drawn) > count:
            yield drawn.popleft()
    yield from drawn
