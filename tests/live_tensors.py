"""Bytes of tensors as they are made and freed: what a rank holds itself, on any device and by no allocator's count."""

import time
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveTensors(TorchDispatchMode):
    """Bytes of the tensors that operators returned and that somebody still holds, now and at most.

    With `resized`, storages count as what they have at the moment, which takes time for each operator.
    """

    def __init__(self, ignored: Iterable[Tensor] = (), *, resized: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._all_resized = resized
        self._has_collectives = False
        self.peak = self._now = 0
        self._held: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}
        self._freed: deque[int] = deque()  # threads of collectives let go of tensors too, at any moment
        self._resized: list[Tensor] = []
        for tensor in ignored:
            self._add(tensor, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._has_collectives |= func.namespace == "c10d"
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self._add(tensor, tensor.untyped_storage().nbytes())
        if self.now > self.peak:
            # A peak that falls at once was no peak: a thread of collectives had tensors that nobody needs.
            self.peak = max(self.peak, self.settled(2, self.peak) if self._has_collectives else self.now)
        return result

    def _add(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata

        def gone(_: object) -> None:
            del self._held[key]
            del self._sizes[key]
            self._freed.append(size)

        if key not in self._held:
            self._held[key] = weakref.ref(storage, gone)
            self._sizes[key] = size
            self._now += size

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Follow the sizes of tensors whose storages are resized, which is no operator; they live as long as this."""
        for tensor in tensors:
            self._now -= self._sizes[tensor.untyped_storage()._cdata]
            self._resized.append(tensor)

    @property
    def now(self) -> int:
        if self._all_resized:
            storages = [reference() for reference in list(self._held.values())]
            return sum(storage.nbytes() for storage in storages if storage is not None)
        while self._freed:
            self._now -= self._freed.popleft()
        return self._now + sum(tensor.untyped_storage().nbytes() for tensor in self._resized)

    def settled(self, times: int = 20, enough: int = 0) -> int:
        """What is held once the threads of collectives have let their tensors go, or what falls to `enough`."""
        least = self.now
        for _ in range(times):
            if least <= enough:
                break
            time.sleep(0.001)
            least = min(least, self.now)
        return least
