"""New parameters on their way from the rank that has updated them to all others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from shardwise.comm import Pending
from shardwise.optim.buckets import Bucket


class Gathers:
    """The all-gathers of buckets.

    Each begins once its bucket is updated, so that it runs while the next bucket is. Inside `behind_forward` they also
    run behind the next forward pass: a module waits for its own parameters, when its forward is called.
    """

    def __init__(self) -> None:
        self._pending: dict[Bucket, Pending] = {}
        self._bucket_of: dict[nn.Parameter, Bucket] = {}

    def run(self, buckets: Iterable[Bucket]) -> None:
        """Start the gather of each bucket as it comes; wait for all of them, unless inside `behind_forward`."""
        for bucket in buckets:
            pending = bucket.start_gather()
            if pending is not None:
                self._pending[bucket] = pending
        if not self._bucket_of:
            self.wait()

    def wait(self) -> None:
        """Wait until all parameters are complete."""
        while self._pending:
            self._pending.pop(next(iter(self._pending))).wait()

    @contextmanager
    def behind_forward(self, model: nn.Module, buckets: Iterable[Bucket]) -> Iterator[None]:
        """Inside, whoever reads a parameter otherwise than in the forward of its module calls `wait` before.

        Args:
            model: each of its modules reads no other parameters than its own, before it calls its submodules.
            buckets: of its parameters.
        """
        self._bucket_of = {p: bucket for bucket in buckets for p in bucket.parameters}
        hooks = [
            module.register_forward_pre_hook(self._before_forward)
            for module in model.modules()
            if any(p in self._bucket_of for p in module.parameters(recurse=False))
        ]
        try:
            yield
            self.wait()  # not after an error: another rank may have ended
        finally:
            self._bucket_of, self._pending = {}, {}
            for hook in hooks:
                hook.remove()

    def _before_forward(self, module: nn.Module, _: object) -> None:
        if self._pending:
            for p in module.parameters(recurse=False):
                bucket = self._bucket_of.get(p)  # type: ignore[call-overload]
                if bucket in self._pending:
                    self._pending.pop(bucket).wait()
