"""When gradients are reduced: each bucket once its gradients are complete, in one order on all ranks.

A round reduces each bucket once. It is a step, or, where gradients are reduced in each backward pass, a backward pass
of a pipeline stage, whose buckets alone take part. A bucket without all of its gradients is reduced at the end of the
round, so that all ranks call the same collectives, whatever parameters their samples reach.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

import torch

from shardwise.distributed.torch_private import after_backward, backward_number
from shardwise.optim.buckets import Bucket

_MOST_UNDER_WAY = 2
"""Reductions under way at once: each may hold a copy of its bucket until it ends."""


class Reductions:
    """The reductions of buckets.

    Attributes:
        each_pass: True if each backward pass is a round; then all ranks must do equally many, each of which reaches a
            parameter.

    Args:
        buckets: buckets of this rank; more may be added to this list.
    """

    def __init__(self, buckets: Sequence[Bucket], *, each_pass: bool) -> None:
        self.each_pass = each_pass
        self._buckets = buckets
        self._under_way: deque[Bucket] = deque()
        self._passes: dict[int, int] = {}
        """The number of the last backward pass of each pipeline stage."""

    def take(self, bucket: Bucket, index: int) -> None:
        """Take the gradient of a parameter in a backward pass that is a round."""
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
        bucket.adopt(index)
        self.ready(bucket, index)

    def ready(self, bucket: Bucket, index: int) -> None:
        """Report that a parameter's gradient is complete for this round. A full bucket starts its reduction at once.

        Buckets start in the same order on every rank, whatever the order of the calls: collectives of two ranks are
        matched by their order alone.
        """
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
        self._under_way.clear()
        self._passes.clear()

    def _round_of(self, stage: int) -> list[Bucket]:
        return [bucket for bucket in self._buckets if bucket.stage == stage or not self.each_pass]

    @torch.no_grad()
    def _end_pass(self, stage: int) -> None:
        for bucket in self._round_of(stage):
            if not bucket.reduced:
                self._start(bucket)

    def _start(self, bucket: Bucket) -> None:
        while len(self._under_way) >= _MOST_UNDER_WAY:
            self._under_way.popleft().finish_reduction()
        bucket.start_reduction()
        self._under_way.append(bucket)
