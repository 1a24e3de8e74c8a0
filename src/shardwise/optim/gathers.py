"""New parameters on their way from the rank that has updated them to all others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from torch import nn

from shardwise.comm import Pending
from shardwise.optim.buckets import Bucket


class Gathers:
    """The all-gathers of buckets.

    Each begins once its bucket is updated, so that it runs while the next bucket is. Inside `behind_forward` they also
    run behind the next forward pass: the call of a unit of the model waits for its parameters.
    """

    def __init__(self) -> None:
        self._pending: dict[Bucket, Pending] = {}
        self._is_late = False

    def run(self, buckets: Iterable[Bucket]) -> None:
        """Start the gather of each bucket as it comes; wait for all of them, unless inside `behind_forward`."""
        for bucket in buckets:
            pending = bucket.start_gather()
            if pending is not None:
                self._pending[bucket] = pending
        if not self._is_late:
            self.wait()

    def wait(self) -> None:
        """Wait until all parameters are complete."""
        while self._pending:
            self._pending.pop(next(iter(self._pending))).wait()

    @contextmanager
    def behind_forward(
        self, units: Mapping[nn.Module, Iterable[nn.Parameter]], buckets: Iterable[Bucket]
    ) -> Iterator[None]:
        """Inside, whoever reads a parameter otherwise than in a call of its unit calls `wait` before.

        Args:
            units: modules, each with the parameters that a call of it reads.
            buckets: of these parameters.
        """
        bucket_of = {p: bucket for bucket in buckets for p in bucket.parameters}
        hooks = []
        for module, parameters in units.items():
            needed = list(dict.fromkeys(bucket_of[p] for p in parameters if p in bucket_of))
            if needed:
                hooks.append(module.register_forward_pre_hook(partial(self._wait_for, needed)))
        self._is_late = True
        try:
            yield
            self.wait()  # not after an error: another rank may have ended
        finally:
            self._is_late, self._pending = False, {}
            for hook in hooks:
                hook.remove()

    def _wait_for(self, buckets: list[Bucket], *_: object) -> None:
        if self._pending:
            for bucket in buckets:
                if bucket in self._pending:
                    self._pending.pop(bucket).wait()
