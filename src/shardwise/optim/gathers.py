"""The all-gathers that bring updated parameters to all data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from torch import nn

from shardwise.distributed.collectives import Pending
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
        """Start the gather of each bucket as soon as it is updated; wait for all, unless inside `behind_forward`."""
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
        """Let gathers run behind the next forward pass. Code that reads parameters elsewhere must call `wait` first.

        Args:
            units: modules, each with the parameters that a call of it reads.
            buckets: buckets of these parameters.
        """
        bucket_of = {p: bucket for bucket in buckets for p in bucket.parameters}
        hooks = []
        for module, parameters in units.items():
            needed = list(dict.fromkeys(bucket_of[p] for p in parameters if p in bucket_of))
            if needed:
                # Before other hooks, which may read the parameters.
                hook = module.register_forward_pre_hook(partial(self._wait_for, needed), prepend=True)
                hooks.append(hook)
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

    def _wait_for(self, buckets: list[Bucket], *_: object) -> None:
        if self._pending:
            for bucket in buckets:
                if bucket in self._pending:
                    self._pending.pop(bucket).wait()
