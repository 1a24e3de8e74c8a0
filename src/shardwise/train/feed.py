"""Brings samples to the device: one rank of each tensor-parallel group reads ahead and sends them to the others.

Legend: M = micro-batches that travel at once, N = numbers of one of them, K = objectives of the loss.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardwise.config import Config
from shardwise.data.samples.batch import Batch, Batches, eval_micro_batches, rows_of_rank
from shardwise.data.samples.streaming import StreamBatches
from shardwise.distributed import collectives
from shardwise.distributed.devices import to_device
from shardwise.distributed.mesh import Mesh
from shardwise.train.micro_batch import MicroBatch

_IntArray = npt.NDArray[np.int64]


class Feed:
    """This rank's micro-batches of any global batch and of the evaluation.

    The first rank of a tensor-parallel group reads: `data.workers` threads read as many global batches ahead. Their
    micro-batches become one int64 tensor [M, N], which the others of the group receive by one broadcast per step. All
    micro-batches have the names and shapes of `Batches.blank`, so that no description travels with them. They depend on
    the position alone, neither on the number of threads nor on what was read before.

    Attributes:
        seconds: spent in waiting for the reading threads since this was last set to 0.
    """

    def __init__(self, config: Config, mesh: Mesh, batches: Batches, evaluation: Batches | None) -> None:
        self._config, self._mesh = config, mesh
        self._batches, self._evaluation = batches, evaluation
        self._reads = mesh.tp.rank == 0
        self._threads: ThreadPoolExecutor | None = None
        self._ahead: deque[tuple[int, Future[list[Batch]]]] = deque()
        self._blanks: dict[int, dict[str, _IntArray]] = {}
        self.seconds = 0.0

    def at(self, position: int, more: int = 0) -> list[MicroBatch]:
        """The micro-batches of the global batch that follows `position` samples. Collective over tensor parallelism.

        At most `more` global batches after this one are read ahead.

        Raises:
            DataError: on the rank that reads.
        """
        train, dp = self._config.train, self._mesh.dp
        local = self._read(position, more) if self._reads else None
        rows = rows_of_rank(train.global_batch, dp.rank, dp.size, train.micro_batch)
        return self._shared(self._batches, local, [np.arange(row.start, row.stop) + position for row in rows])

    def evaluation(self, at_once: int) -> Iterator[list[MicroBatch]]:
        """The micro-batches of an evaluation (`Batches.eval_batches`), `at_once` at a time. Collective as `at`."""
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
            local = None if coming is None else self._await(coming)
            if coming is not None and first + at_once < total:
                coming = self._submit(read)
            yield self._shared(batches, local, [np.arange(row.start, row.stop) for row in here])

    def close(self) -> None:
        """End the reading threads, and drop the batches that they read."""
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
        local = coming.result()
        self.seconds += time.perf_counter() - start
        return local

    def _shared(self, batches: Batches, local: list[Batch] | None, samples: list[_IntArray]) -> list[MicroBatch]:
        """The micro-batches that the first rank of the group has as `local`, on all its ranks."""
        if id(batches) not in self._blanks:
            self._blanks[id(batches)] = _arrays(batches.blank(self._config.train.micro_batch))
        blank = self._blanks[id(batches)]
        sizes = [array.size for array in blank.values()]
        if local is not None:
            packed = [np.concatenate([array.ravel() for array in _arrays(batch).values()]) for batch in local]
            whole_MN = to_device(torch.from_numpy(np.stack(packed)), self._mesh.device)
        else:
            whole_MN = torch.zeros(len(samples), sum(sizes), dtype=torch.int64, device=self._mesh.device)
        samples_MB = to_device(torch.from_numpy(np.stack(samples)), self._mesh.device)
        micro_batches = []
        for row_N, numbers, samples_B in zip(
            collectives.broadcast_(whole_MN, self._mesh.tp), samples, samples_MB, strict=True
        ):
            parts = zip(blank.items(), row_N.split(sizes), strict=True)
            inputs = {name: part.view(array.shape) for (name, array), part in parts}
            micro_batches.append(MicroBatch(inputs, inputs.pop(_COUNTS), numbers, samples_B))
        return micro_batches


_COUNTS = "counts"


def _arrays(batch: Batch) -> dict[str, _IntArray]:
    """The arrays of a batch by name, in the same order on every rank."""
    return {**dict(sorted(batch.inputs.items())), _COUNTS: batch.counts}
