"""How the masters of the buckets get new values from their gradients: by the wrapped optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

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

    def step(self, groups: Sequence[dict[str, Any]], factor: Tensor | float, number: int) -> None:
        """Update all masters by `factor` times their reduced gradients.

        Args:
            groups: the parameter groups whose options count now; they get back what the wrapped optimizer changed.
            factor: of the gradients.
            number: of this step, from 1.
        """
        for outer, inner in zip(groups, self._inner.param_groups, strict=True):
            inner.update(options_of(outer))
        self._update(factor, number)
        for outer, inner in zip(groups, self._inner.param_groups, strict=True):
            outer.update(options_of(inner))

    def _update(self, factor: Tensor | float, number: int) -> None:
        buckets = [bucket for group in self._groups for bucket in group]
        for bucket in buckets:
            gradient = bucket.gradient.to(bucket.master.dtype)
            bucket.master.grad = gradient if isinstance(factor, float) and factor == 1.0 else gradient.mul_(factor)
        if isinstance(self._inner, LAMB):
            self._inner.step_slices(self._groups, self._norms)
        else:
            step_optimizer(self._inner)
        for bucket in buckets:
            bucket.master.grad = None


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {key: value for key, value in group.items() if key != "params"}
