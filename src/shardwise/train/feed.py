"""Brings samples to the device: read ahead of the step by one rank of each tensor-parallel group, sent to the others.

Legend: M = micro-batches that travel at once, N = numbers of one of them, K = objectives of the loss.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardwise import comm
from shardwise.config import Config
from shardwise.data import Batch, Batches, StreamBatches
from shardwise.data.samples.batch import eval_micro_batches, rows_of_rank
from shardwise.inference.micro_batch import MicroBatch
from shardwise.mesh import Mesh

_IntArray = npt.NDArray[np.int64]


class Feed:
    """The micro-batches of this rank, of any global batch and of the evaluation.

    The first rank of a tensor-parallel group reads: `data.workers` threads are as many global batches ahead. What they
    read becomes one int64 tensor [M, N], which the others of the group receive by one broadcast a step. Micro-batches
    have the same names and shapes throughout (`Batches.blank`), so nothing else needs to be said of them. What is read
    depends on the position alone: neither on workers nor on what was read before.

    Attributes:
        seconds: waited for the reading threads since this was last set to 0.
    """

    def __init__(self, config: Config, mesh: Mesh, batches: Batches, evaluation: Batches | None) -> None:
        self._config, self._mesh = config, mesh
        self._batches, self._evaluation = batches, evaluation
        self._reads = mesh.tp.rank == 0
        self._threads: ThreadPoolExecutor | None = None
        self._ahead: deque[tuple[int, Future[list[Batch]]]] = deque()
        self._blanks: dict[int, Batch] = {}
        self.seconds = 0.0

    def at(self, position: int, more: int = 0) -> list[MicroBatch]:
        """The micro-batches of the global batch that follows `position` samples. Collective over tensor parallelism.

        more: global batches that will be asked for after this one, at most: no others are read ahead.

        Raises:
            DataError: on the rank that reads.
        """
        train, dp = self._config.train, self._mesh.dp
        found = self._read(position, more) if self._reads else None
        rows = rows_of_rank(train.global_batch, dp.rank, dp.size, train.micro_batch)
        return self._shared(self._batches, found, [np.arange(row.start, row.stop) + position for row in rows])

    def evaluation(self, at_once: int) -> Iterator[list[MicroBatch]]:
        """Those of an evaluation, as `eval_batches` has them, `at_once` at a time. Collective likewise."""
        batches, train, dp = self._evaluation, self._config.train, self._mesh.dp
        assert batches is not None
        portion = dp.size * train.micro_batch
        total = eval_micro_batches(batches.num_samples, train.eval_batches, train.global_batch, portion)
        reading = batches.eval_batches(train.eval_batches, train.global_batch, dp.rank, dp.size, train.micro_batch)
        rows = rows_of_rank(total * portion, dp.rank, dp.size, train.micro_batch)

        def read() -> list[Batch]:
            return list(islice(reading, at_once))

        coming = self._submit(read) if self._reads else None
        for first in range(0, total, at_once):
            here = rows[first : first + at_once]
            found = None if coming is None else self._await(coming)
            if coming is not None and first + at_once < total:
                coming = self._submit(read)
            yield self._shared(batches, found, [np.arange(row.start, row.stop) for row in here])

    def close(self) -> None:
        """End the reading threads; what they are reading is dropped."""
        self._ahead.clear()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None
        if isinstance(self._batches, StreamBatches):
            self._batches.close()

    def _read(self, position: int, more: int) -> list[Batch]:
        train, dp = self._config.train, self._mesh.dp

        def read(start: int) -> list[Batch]:
            return self._batches.local_batch(start, train.global_batch, dp.rank, dp.size, train.micro_batch)

        if not self._ahead or self._ahead[0][0] != position:
            self._ahead.clear()
            self._ahead.append((position, self._submit(read, position)))
        coming = self._ahead.popleft()[1]
        for number in range(len(self._ahead) + 1, min(self._config.data.workers, more) + 1):
            start = position + number * train.global_batch
            self._ahead.append((start, self._submit(read, start)))
        return self._await(coming)

    def _submit(self, read: Callable[..., list[Batch]], *arguments: Any) -> Future[list[Batch]]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._config.data.workers, thread_name_prefix="reader")
        return self._threads.submit(read, *arguments)

    def _await(self, coming: Future[list[Batch]]) -> list[Batch]:
        start = time.perf_counter()
        found = coming.result()
        self.seconds += time.perf_counter() - start
        return found

    def _shared(self, batches: Batches, found: list[Batch] | None, samples: list[_IntArray]) -> list[MicroBatch]:
        """Micro-batches as the reading rank has `found` them, on all ranks of the group."""
        shapes = _shapes(self._blank(batches))
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        if found is not None:
            whole = torch.from_numpy(np.stack([_packed(batch) for batch in found])).to(self._mesh.device)
        else:
            whole = torch.zeros(len(samples), sum(sizes.values()), dtype=torch.int64, device=self._mesh.device)
        made = []
        for row, numbers in zip(comm.broadcast_(whole, self._mesh.tp), samples, strict=True):
            parts = zip(shapes.items(), row.split(list(sizes.values())), strict=True)
            inputs = {name: part.view(shape) for (name, shape), part in parts}
            made.append(MicroBatch(inputs, inputs.pop(_COUNTS), numbers))
        return made

    def _blank(self, batches: Batches) -> Batch:
        if id(batches) not in self._blanks:
            self._blanks[id(batches)] = batches.blank(self._config.train.micro_batch)
        return self._blanks[id(batches)]


_COUNTS = "counts"


def _arrays(batch: Batch) -> dict[str, _IntArray]:
    return {**dict(sorted(batch.inputs.items())), _COUNTS: batch.counts}


def _shapes(batch: Batch) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in _arrays(batch).items()}


def _packed(batch: Batch) -> _IntArray:
    return np.concatenate([array.ravel() for array in _arrays(batch).values()])
