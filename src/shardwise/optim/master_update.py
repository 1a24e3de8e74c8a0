"""The update of master weights: the wrapped optimizer's step on the slices that this rank owns.

Masters are the parameters in the optimizer's dtype, such as float32 masters of bfloat16 weights.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardwise.distributed.torch_private import divides_gradients, step_optimizer
from shardwise.optim.buckets import Bucket
from shardwise.optim.wrapped_class import ModelSlices, SliceOptimizer, options_of

_Item = TypeVar("_Item")
_AHEAD = 2  # buckets whose gradients are on their way to the host while it updates another one


class Update:
    """Updates in the optimizer's dtype: each result is rounded to the nearest number of that dtype.

    Args:
        model: buckets of each of its parameter groups, whose masters are its parameters.

    Attributes:
        changed_options: numbers in parameter groups that the wrapped optimizer changes, such as a count of steps.
    """

    def __init__(self, inner: torch.optim.Optimizer, model: ModelSlices) -> None:
        self._inner = inner
        self._model = model
        numbers = [(bucket, number) for number, group in enumerate(model.groups) for bucket in group]
        # Buckets were filled from the last parameter to the first, and equal ones keep their order.
        numbers.reverse()
        self._in_forward_order = dict(sorted(numbers, key=lambda entry: entry[0].order))
        self._due = self._in_forward_order.copy()
        self.changed_options: set[str] = set()
        self._made = list(map(options_of, inner.param_groups))  # a constructor may add some to its groups
        self._numbers: list[dict[str, Any]] = [{} for _ in inner.param_groups]  # those that this step has changed

    def refuse_ahead(self, what: str) -> None:
        """Make all buckets due again; RuntimeError on `what` if this step has updated some of them `ahead`."""
        due, self._due = self._due, self._in_forward_order.copy()
        for numbers in self._numbers:
            numbers.clear()
        if ahead := len(self._due) - len(due):
            done = f"{ahead} of {len(self._due)} buckets"
            raise RuntimeError(f"{what} must be left out with update_in_backward() ({done} done): load a checkpoint")

    def step(self, groups: Sequence[dict[str, Any]], factor: Tensor | float, number: int) -> Iterator[Bucket]:
        """Update all masters by `factor` times their reduced gradients; yield each bucket once its masters are new.

        Buckets come in the order in which the next forward pass uses them.

        Args:
            groups: parameter groups whose options count now; they get back what the wrapped optimizer changed.
            factor: multiplies the gradients: 1 / ranks for their mean, the clipping factor, or both.
            number: number of this step, from 1.
        """
        yield from self._updated(groups, factor, number)
        for outer, inner, numbers in zip(groups, self._inner.param_groups, self._numbers, strict=True):
            outer.update(options_of(inner) | numbers)
            self.changed_options |= numbers.keys()
            numbers.clear()
        self._due = self._in_forward_order.copy()

    def ahead(self, groups: Sequence[dict[str, Any]], factor: float, number: int, bucket: Bucket) -> Iterator[Bucket]:
        """Do the `step` of one bucket, which needs no other one, and yield it; the step itself leaves it out then."""
        others, self._due = self._due, {bucket: self._due.pop(bucket)}
        yield from self._updated(groups, factor, number)
        self._due = others

    def _updated(self, groups: Sequence[dict[str, Any]], factor: Tensor | float, number: int) -> Iterator[Bucket]:
        """Update the due buckets by the options of `groups`, which get the numbers that the class changes in `step`.

        So each bucket of a group begins with the same count of steps, also if it is updated `ahead`.
        """
        for outer, inner, made in zip(groups, self._inner.param_groups, self._made, strict=True):
            given = {"params": inner["params"], **made, **options_of(outer)}
            inner.clear()  # what the class has added there
            inner.update(given)
        yield from self._update(factor, number)
        for outer, inner, numbers in zip(groups, self._inner.param_groups, self._numbers, strict=True):
            numbers |= {
                name: value
                for name, value in inner.items()
                if isinstance(value, int | float) and outer.get(name) != value
            }

    def _update(self, factor: Tensor | float, number: int) -> Iterator[Bucket]:
        if isinstance(self._inner, SliceOptimizer):
            for bucket in self._due:
                bucket.master.grad = scaled_gradient(bucket, factor)
            self._inner.step_slices(self._model)
            for bucket in self._due:
                bucket.master.grad = None
                yield bucket
            return
        divisor = _divisor(factor, self._model.device)
        for group, bucket in self._buckets_with_options():
            is_divided = divides_gradients(self._inner, group)
            # The norm still reads what an update ahead has used, and a class may divide in place.
            copies = divisor is not None and len(self._due) < len(self._in_forward_order)
            bucket.master.grad = scaled_gradient(bucket, 1.0 if is_divided else factor, copies=copies)
            self._step_alone(group, bucket.master, divisor if is_divided else None)
            bucket.master.grad = None
            yield bucket

    def _buckets_with_options(self, without: Collection[int] = ()) -> Iterator[tuple[dict[str, Any], Bucket]]:
        """Yield each due bucket, but for groups `without`, with its parameter group, whose options all buckets share.

        Afterwards the group has the options that the update of its last bucket left: what the class keeps there, such
        as a count of steps, is the same after each.
        """
        options = list(map(options_of, self._inner.param_groups))
        for bucket, number in self._due.items():
            if number not in without:
                group = self._inner.param_groups[number]
                given = {"params": group["params"], **copy.deepcopy(options[number])}
                group.clear()  # a count that begins with the class's first update
                group.update(given)
                yield group, bucket

    def _step_alone(self, group: dict[str, Any], master: nn.Parameter, divisor: Tensor | None = None) -> None:
        """Do a step of the wrapped optimizer as if it had this master alone, whose gradient it may divide."""
        all_groups = self._inner.param_groups
        all_masters = group["params"]
        self._inner.param_groups = [group]
        group["params"] = [master]
        try:
            step_optimizer(self._inner, divisor)
        finally:
            self._inner.param_groups = all_groups
            group["params"] = all_masters


def scaled_gradient(bucket: Bucket, factor: Tensor | float, *, copies: bool = False) -> Tensor:
    """Return `factor` times a bucket's reduced gradients, in the masters' dtype; may use them up, unless it copies."""
    gradient = bucket.gradient.to(bucket.master.dtype, copy=copies)
    return gradient if isinstance(factor, float) and factor == 1.0 else gradient.mul_(factor)


def _divisor(factor: Tensor | float, device: torch.device) -> Tensor | None:
    """Return 1 / factor as a float32 number on the device, which does not wait for it; None for a factor of 1."""
    if isinstance(factor, Tensor):
        return factor.reciprocal().to(device, torch.float32)
    return None if factor == 1.0 else torch.full((), 1.0 / factor, dtype=torch.float32, device=device)


class HostUpdate(Update):
    """Updates by the host of masters and state in its memory, by an elementwise class (ZeRO-Offload, arXiv:2101.06840).

    Each bucket's gradients travel to the host while it updates the buckets before, and the new weights travel back:

        to the host      gradients 1 | gradients 2 | gradients 3
        host                           update 1    | update 2    | update 3
        to the device                                weights 1   | weights 2 | weights 3

    The device keeps parameters and gradients. Masters are pinned, so that the host need not wait for the weights to
    leave.
    """

    def _update(self, factor: Tensor | float, number: int) -> Iterator[Bucket]:
        buckets = list(self._due)
        if not buckets:
            return
        stream = torch.Stream(buckets[0].values.device)
        sent = (_HostCopy(scaled_gradient(bucket, factor), stream) for bucket in buckets)
        for (group, bucket), gradient in zip(self._buckets_with_options(), _ahead(sent, _AHEAD), strict=True):
            bucket.master.grad = gradient.wait()
            self._step_alone(group, bucket.master)
            bucket.master.grad = None
            del gradient
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
    drawn: deque[_Item] = deque()
    for item in items:
        drawn.append(item)
        if len(drawn) > count:
            yield drawn.popleft()
    yield from drawn
