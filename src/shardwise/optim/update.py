"""How the masters of the buckets get new values from their gradients: by the wrapped optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch_private import step_optimizer
from shardwise.optim.buckets import Bucket
from shardwise.optim.lamb import LAMB
from shardwise.optim.norms import CanonicalNorms

MakeNorms = Callable[[list[list[Bucket]]], CanonicalNorms]
"""The norms of the canonical tensors that the buckets of each parameter group hold. Collective."""


class Update:
    """Updates in the optimizer's dtype: each result is rounded to the nearest number of that dtype.

    Args:
        inner: the wrapped optimizer, whose parameters are the masters of `buckets`.
        make_norms: called at the first step of LAMB.
    """

    def __init__(self, inner: torch.optim.Optimizer, buckets: Sequence[Bucket], make_norms: MakeNorms) -> None:
        bucket_of = {bucket.master: bucket for bucket in buckets}
        self._inner, self._make_norms = inner, make_norms
        self._groups = [[bucket_of[master] for master in group["params"]] for group in inner.param_groups]

    @cached_property
    def _norms(self) -> CanonicalNorms:
        return self._make_norms(self._groups)

    def step(self, groups: Sequence[dict[str, Any]], factor: Tensor | float, number: int) -> Iterator[Bucket]:
        """Update all masters by `factor` times their reduced gradients; yield each bucket once its masters are new.

        Args:
            groups: the parameter groups whose options count now; they get back what the wrapped optimizer changed.
            factor: of the gradients.
            number: of this step, from 1.
        """
        for outer, inner in zip(groups, self._inner.param_groups, strict=True):
            inner.update(options_of(outer))
        yield from self._update(factor, number)
        for outer, inner in zip(groups, self._inner.param_groups, strict=True):
            outer.update(options_of(inner))

    def _update(self, factor: Tensor | float, number: int) -> Iterator[Bucket]:
        if isinstance(self._inner, LAMB):
            buckets = [bucket for group in self._groups for bucket in group]
            for bucket in buckets:
                bucket.master.grad = _scaled_gradient(bucket, factor)
            self._inner.step_slices(self._groups, self._norms)
            for bucket in buckets:
                bucket.master.grad = None
                yield bucket
            return
        for group, bucket in self._in_turn():
            bucket.master.grad = _scaled_gradient(bucket, factor)
            self._step_alone(group, bucket.master)
            bucket.master.grad = None
            yield bucket

    def _in_turn(self) -> Iterator[tuple[dict[str, Any], Bucket]]:
        """Yield each bucket with its parameter group, whose options are the same for every bucket.

        Afterwards the group has the options that the update of its last bucket left: what the class keeps there, such
        as a count of steps, is the same after each.
        """
        for group, buckets in zip(self._inner.param_groups, self._groups, strict=True):
            options = options_of(group)
            for bucket in buckets:
                group.update(copy.deepcopy(options))
                yield group, bucket

    def _step_alone(self, group: dict[str, Any], master: nn.Parameter) -> None:
        """A step of the wrapped optimizer as if it had this master alone."""
        all_groups, all_masters = self._inner.param_groups, group["params"]
        self._inner.param_groups, group["params"] = [group], [master]
        try:
            step_optimizer(self._inner)
        finally:
            self._inner.param_groups, group["params"] = all_groups, all_masters


def _scaled_gradient(bucket: Bucket, factor: Tensor | float) -> Tensor:
    """`factor` times a bucket's reduced gradients, in the dtype of its masters; may use them up."""
    gradient = bucket.gradient.to(bucket.master.dtype)
    return gradient if isinstance(factor, float) and factor == 1.0 else gradient.mul_(factor)


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {key: value for key, value in group.items() if key != "params"}
