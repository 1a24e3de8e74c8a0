"""The all-gathers of parameters with ZeRO-3: of a unit's while the unit uses them.

The weights of a unit of the model, such as a block, are on a rank only while the unit uses them:

    forward pass     gather unit i, start the gather of unit i + 1, compute unit i, release unit i
    backward pass    gather unit i, start the gather of unit i - 1, compute its gradients, release unit i

A hook of the module gathers a unit's buckets before its forward pass, and a hook of its output's gradient does so
before its backward pass. After the backward pass they are released once all gradients of the unit are complete, or at
the end of the pass if some parameters have none. A bucket that several units use is released by the last of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from shardwise.distributed.torch_private import after_backward, tensors_in
from shardwise.layers.embedding import ParallelEmbedding, ParallelLMHead
from shardwise.layers.units import parameters_by_unit, unit_roots
from shardwise.optim.buckets import Bucket, weak_hook
from shardwise.optim.freed_buckets import FreedWeights


class _Unit:
    """A module whose passes need some buckets.

    Attributes:
        neighbors: the units inside the pipeline stage, in the order of the forward pass; a stage itself is not in it.
        trained: parameters of the unit whose gradients its backward pass completes.
        has_backward: True if the unit's backward pass needs its weights. An embedding's does not, and a head computes
            its gradients in the forward pass (`linear_cross_entropy`), unless the loss is the user's.
        keeps: True if a forward pass of training does not release the buckets, since the backward pass follows.
        incomplete: those of `trained` whose gradients the present backward pass has not completed; None outside of a
            backward pass of this unit.
    """

    def __init__(self, buckets: Iterable[FreedWeights], trained: Iterable[nn.Parameter], *, has_backward: bool) -> None:
        self.buckets = list(dict.fromkeys(buckets))
        self.trained = frozenset(trained)
        self.has_backward = has_backward
        self.neighbors: list[_Unit] = []
        self.keeps = False
        self.incomplete: set[nn.Parameter] | None = None

    def following(self, step: int, count: int) -> Sequence[_Unit]:
        """Return the next `count` units of the pipeline stage in a direction: 1 forward, -1 backward."""
        in_order = [unit for unit in self.neighbors[::step] if step > 0 or unit.has_backward]
        # The passes of a whole stage begin before those of the units inside it.
        first = in_order.index(self) + 1 if self in in_order else 0
        return in_order[first : first + count]


class UnitWeights:
    """Gathers and releases the freed buckets of a model, as the passes of its units need them.

    Args:
        prefetch: number of units whose gather is started ahead.
        once_a_step: True to release nothing until the update, so that each bucket is gathered once a step.
    """

    def __init__(self, model: nn.Module, buckets: Iterable[Bucket], prefetch: int, *, once_a_step: bool) -> None:
        bucket_of = {p: bucket for bucket in buckets for p in bucket.parameters}
        self._prefetch = prefetch
        self._releases = not once_a_step
        self._users: dict[FreedWeights, set[object]] = {}
        self._units_of: dict[nn.Parameter, list[_Unit]] = {}
        self._in_backward: set[_Unit] = set()
        self._of_stages: list[FreedWeights] = []
        for path, parameter in model.named_parameters():
            cast(Any, parameter).path = path
        for stage in unit_roots(model):
            in_order: list[_Unit] = []
            last: _Unit | None = None
            for module, parameters in parameters_by_unit(stage).items():
                trained = [p for p in parameters if p in bucket_of]
                has_backward = not isinstance(module, ParallelEmbedding | ParallelLMHead)
                buckets_of_unit = [bucket_of[p] for p in trained]
                freed = (bucket for bucket in buckets_of_unit if isinstance(bucket, FreedWeights))
                unit = _Unit(freed, trained, has_backward=has_backward)
                if unit.buckets:
                    self._watch(module, unit)
                    unit.neighbors = in_order
                    if module is stage:
                        self._of_stages += unit.buckets
                    else:
                        in_order.append(unit)
                    if has_backward:
                        last = unit
            if last is not None:
                last.keeps = True

    def _watch(self, module: nn.Module, unit: _Unit) -> None:
        for bucket in unit.buckets:
            self._users.setdefault(bucket, set())
        for p in unit.trained:
            if p not in self._units_of:
                self._units_of[p] = []
                # Python cannot collect a cycle through a parameter's hooks. Those of modules keep this object.
                p.register_post_accumulate_grad_hook(weak_hook(self._on_gradient))
            self._units_of[p].append(unit)
        module.register_forward_pre_hook(partial(self._before_forward, unit))
        module.register_forward_hook(partial(self._after_forward, unit))

    @contextmanager
    def gathered(self, *, all_units: bool) -> Iterator[None]:
        """Inside, weights are on every rank, and changes of them count afterwards. Collective.

        all_units: False for those alone that are in no embedding, block or head: these gather theirs when they run.
        """
        user = object()
        buckets = list(self._users) if all_units else self._of_stages
        for bucket in buckets:
            bucket.begin_gather()
            self._users[bucket].add(user)
        outermost = [bucket for bucket in buckets if not bucket.keeps_values]
        for bucket in buckets:
            bucket.finish_gather()
            bucket.keeps_values = True
        try:
            yield
        finally:
            for bucket in buckets:
                bucket.take_values()
                self._users[bucket].discard(user)
            for bucket in outermost:
                bucket.keeps_values = False
                if not self._users[bucket]:
                    bucket.release_values()

    # ---- passes

    def _acquire(self, unit: _Unit, step: int) -> None:
        """Gather a unit, and start to gather the next ones in a direction."""
        for needed in (unit, *unit.following(step, self._prefetch)):
            for bucket in needed.buckets:
                bucket.begin_gather()
                self._users[bucket].add(needed)
        for bucket in unit.buckets:
            bucket.finish_gather()

    def _release(self, unit: _Unit) -> None:
        for bucket in unit.buckets:
            users = self._users[bucket]
            users.discard(unit)
            if not users and self._releases:
                bucket.release_values()

    def _before_forward(self, unit: _Unit, *_: object) -> None:
        if unit.incomplete is None:
            self._acquire(unit, 1)

    def _after_forward(self, unit: _Unit, module: nn.Module, _arguments: object, output: object) -> None:
        # While a backward pass computes a unit again, it needs the weights until its end.
        if unit.incomplete is not None:
            return
        tensors: list[Tensor] = []
        if not isinstance(module, ParallelEmbedding):
            tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        for tensor in tensors:
            tensor.register_hook(partial(self._before_backward, unit))
        if not (tensors and unit.keeps):
            self._release(unit)

    def _before_backward(self, unit: _Unit, _gradient: Tensor) -> None:
        if unit.incomplete is None:
            if not self._in_backward:
                after_backward(self._after_backward)
            self._in_backward.add(unit)
            unit.incomplete = set(unit.trained)
            self._acquire(unit, -1)

    def _on_gradient(self, parameter: Tensor) -> None:
        for unit in self._units_of[cast(nn.Parameter, parameter)]:
            if unit.incomplete is not None:
                unit.incomplete.discard(parameter)
                if not unit.incomplete:
                    self._end_backward(unit)

    def _after_backward(self) -> None:
        for unit in list(self._in_backward):
            self._end_backward(unit)

    def _end_backward(self, unit: _Unit) -> None:
        unit.incomplete = None
        self._in_backward.discard(unit)
        self._release(unit)
