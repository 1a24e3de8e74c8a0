"""The collectives of buckets: the sums of gradients, and the all-gathers of updated parameters.

Each bucket is reduced once its gradients are complete, in one order on all ranks.

A round reduces each bucket once. It is a step, or, where gradients are reduced in each backward pass, a backward pass
of a pipeline stage, whose buckets alone take part. A bucket without all of its gradients is reduced at the end of the
round, so that all ranks call the same collectives, whatever parameters their samples reach.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from shardwise.distributed import collectives, placement
from shardwise.distributed.collectives import Pending
from shardwise.distributed.mesh import Group
from shardwise.distributed.torch_private import after_backward, backward_number
from shardwise.optim.buckets import Bucket

_MOST_UNDER_WAY = 2  # reductions under way at once: each may hold a copy of its bucket until it ends


class Reductions:
    """The reductions of buckets.

    Attributes:
        each_pass: True if each backward pass is a round; then all ranks must do equally many, each of which reaches a
            parameter.
        overlaps: True if the present backward pass is the last one of the step: full buckets start at once.
        is_local: True while backward passes leave each rank the gradients of its own samples.
        update_reduced: called with each bucket that is reduced while others still wait for gradients; None: nothing.

    Args:
        buckets: buckets of this rank; more may be added to this list.
        places: bucket of each trained parameter, and its number there.
    """

    def __init__(
        self, buckets: Sequence[Bucket], places: Mapping[nn.Parameter, tuple[Bucket, int]], *, each_pass: bool
    ) -> None:
        self.each_pass = each_pass
        self.update_reduced: Callable[[Bucket], object] | None = None
        self.overlaps = False
        self.is_local = False
        self._buckets = buckets
        self._places = places
        self._under_way: deque[Bucket] = deque()
        self._passes: dict[int, int] = {}
        """The number of the last backward pass of each pipeline stage."""

    @torch.no_grad()
    def take(self, parameter: Tensor) -> None:
        """Take the gradient of a parameter that a backward pass has added to."""
        bucket, index = self._places[parameter]  # type: ignore[index]
        begins_rounds = self.each_pass and bucket.group.size > 1 and not self.is_local
        if bucket.reduced and not begins_rounds:
            raise RuntimeError(
                "backward() came after this step's gradients were reduced: put all but the step's last backward() "
                "under `with optimizer.accumulate():`, or drop the reduced ones by optimizer.zero_grad()"
            )
        if begins_rounds:
            self._begin_round(bucket)
        if self.is_local:
            bucket.keep_local(index)
        else:
            bucket.adopt(index)
        if begins_rounds or (self.overlaps and not self.is_local):
            self.ready(parameter)

    def _begin_round(self, bucket: Bucket) -> None:
        """Begin another round of a bucket's pipeline stage, if this is its first gradient or a second one."""
        number = backward_number()
        is_new = self._passes.get(bucket.stage) != number
        if is_new:
            self._passes[bucket.stage] = number
            after_backward(partial(self._end_pass, bucket.stage))
        elif bucket.reduced:
            self._end_pass(bucket.stage)
        if is_new or bucket.reduced:
            for bucket_of_round in self._round_of(bucket.stage):
                bucket_of_round.reduced = False
                bucket_of_round.ready.clear()
        while bucket.is_reducing:
            self._under_way.popleft().finish_reduction()

    @torch.no_grad()
    def ready(self, parameter: Tensor) -> None:
        """Report that a parameter's gradient is complete for this round. A full bucket starts its reduction at once.

        Buckets start in the same order on every rank, whatever the order of the calls: collectives of two ranks are
        matched by their order alone.
        """
        bucket, index = self._places[parameter]  # type: ignore[index]
        bucket.ready.add(index)
        for candidate in self._round_of(bucket.stage):
            if candidate.reduced:
                continue
            if len(candidate.ready) < len(candidate.parameters):
                break
            self._start(candidate)

    def finish(self) -> None:
        """Reduce what is left of the step's last round, and wait for all."""
        for bucket in self._buckets:
            if not bucket.reduced:
                self._start(bucket)
        for bucket in self._buckets:
            bucket.finish_reduction()
        self._under_way.clear()

    def reset(self) -> None:
        """Begin a new step; the buckets are reset too."""
        self.overlaps = False
        self.update_reduced = None
        self._under_way.clear()
        self._passes.clear()

    def _round_of(self, stage: int) -> Sequence[Bucket]:
        if not self.each_pass:
            return self._buckets
        # Some parameters are cut over fewer ranks than others, down to one: such gradients are summed once a step.
        return [bucket for bucket in self._buckets if bucket.stage == stage and bucket.group.size > 1]

    @torch.no_grad()
    def _end_pass(self, stage: int) -> None:
        for bucket in self._round_of(stage):
            if not bucket.reduced:
                self._start(bucket)

    def _start(self, bucket: Bucket) -> None:
        while len(self._under_way) >= _MOST_UNDER_WAY:
            reduced = self._under_way.popleft()
            reduced.finish_reduction()
            if self.update_reduced is not None:
                self.update_reduced(reduced)
        bucket.start_reduction()
        self._under_way.append(bucket)


class PartialGradients:
    """The owned parts of gradients that must still be summed over some ranks, as placements say."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.summed = False
        self._views: dict[Group, list[Tensor]] = {}
        for bucket in buckets:
            for index, p in enumerate(bucket.parameters):
                for piece in placement.of_or_whole(p).pieces:
                    if piece.partial and piece.copies.size > 1:
                        views = self._views.setdefault(piece.copies, [])
                        runs = bucket.owned_runs(index, piece.local)
                        views += [bucket.gradient[start : start + length] for start, length in runs]

    def sum_(self) -> None:
        """Sum them, unless they are `summed` already; one all-reduce for each group."""
        if self.summed:
            return
        self.summed = True
        for group, views in self._views.items():
            if views:
                total = collectives.all_reduce_(torch.cat(views), group)
                for view, part in zip(views, total.split([v.numel() for v in views]), strict=True):
                    view.copy_(part)


class Gathers:
    """The all-gathers of buckets.

    Each begins once its bucket is updated, so that it runs while the next bucket is. Inside `behind_forward` they also
    run behind the next forward pass: the call of a unit of the model waits for its parameters.
    """

    def __init__(self) -> None:
        self._pending: dict[Bucket, Pending] = {}
        self._is_late = False

    def run(self, buckets: Iterable[Bucket]) -> None:
        """Start the gather of each bucket as soon as it is updated; wait for all, unless inside `behind_forward`."""
        for bucket in buckets:
            self.wait([bucket])
            pending = bucket.start_gather()
            if pending is not None:
                self._pending[bucket] = pending
        if not self._is_late:
            self.wait()

    def wait(self, buckets: Iterable[Bucket] | None = None, *_: object) -> None:
        """Wait until the parameters of some buckets, or of all, are complete. Hooks give a module and its input too."""
        for bucket in list(self._pending) if buckets is None else buckets:
            if bucket in self._pending:
                self._pending.pop(bucket).wait()

    @contextmanager
    def behind_forward(
        self, units: Mapping[nn.Module, Iterable[nn.Parameter]], buckets: Iterable[Bucket]
    ) -> Iterator[None]:
        """Let gathers run behind the next forward pass. Code that reads parameters elsewhere must call `wait` first.

        Args:
            units: modules, each with the parameters that a call of it reads.
        """
        bucket_of = {p: bucket for bucket in buckets for p in bucket.parameters}
        hooks = []
        for module, parameters in units.items():
            needed = list(dict.fromkeys(bucket_of[p] for p in parameters if p in bucket_of))
            if needed:
                # Before other hooks, which may read the parameters.
                hooks.append(module.register_forward_pre_hook(partial(self.wait, needed), prepend=True))
        self._is_late = True
        try:
            yield
            # Not after an error: another rank may have ended, and would never send its part.
            self.wait()
        finally:
            self._is_late = False
            self._pending = {}
            for hook in hooks:
                hook.remove()
