"""Brings samples to the device: one rank of each tensor-parallel group reads ahead and sends them to the others.

Here the prepared data of `shardwise.data` become the micro-batches of a training.

Legend: M = micro-batches that travel at once, N = numbers of one of them, K = objectives of the loss.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardwise.base.errors import DataError
from shardwise.config import Config
from shardwise.data import EvaluationSets, PreparedData, make_batches
from shardwise.data.samples.batch import Batch, Batches
from shardwise.distributed import collectives, devices
from shardwise.distributed.mesh import Mesh
from shardwise.models.masks import DocumentSizes
from shardwise.train.mean_loss import MicroBatch

_IntArray = npt.NDArray[np.int64]
_COUNTS = "counts"
_DOCUMENTS = "documents"
_LENGTHS = "lengths"


class Feed:
    """This rank's micro-batches of any global batch and of the evaluation.

    The first rank of a tensor-parallel group reads: `data.workers` threads read as many global batches ahead. Their
    micro-batches become one int64 tensor [M, N], which the other ranks of the group receive by one broadcast per step.
    All micro-batches have the names and shapes of `Batches.blank`, so that no description travels with them. They
    depend on the position alone, neither on the number of threads nor on earlier reads.

    Attributes:
        evaluation_batches: samples of the evaluation part; None where the data hold too few.
        seconds: time spent in waiting for the reading threads since this was last set to 0.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        batches: Batches,
        evaluation_batches: Batches | None,
        sets: EvaluationSets | None = None,
    ) -> None:
        self._config = config
        self._mesh = mesh
        self.batches = batches
        self.evaluation_batches = evaluation_batches
        self.sets = EvaluationSets() if sets is None else sets
        for part in (batches, evaluation_batches, *self.sets.batches.values()):
            if part is not None:
                part.is_consecutive = config.is_bit_equal
        self._reads = mesh.tp.rank == 0
        self._threads: ThreadPoolExecutor | None = None
        self._pending: deque[tuple[int, Future[list[Batch]]]] = deque()
        self._blanks: dict[tuple[int, bool], dict[str, _IntArray]] = {}
        self.seconds = 0.0

    @staticmethod
    def open(config: Config, mesh: Mesh, data: PreparedData, sets: EvaluationSets | None = None) -> Feed:
        """The feed of a training on these data, and of its evaluations on further sets.

        Raises:
            DataError: they hold less than one sample.
        """
        batches = make_batches(config, data, "train")
        if batches is None:
            raise DataError(
                "the training data hold less than one sample of train.sequence_length "
                f"({config.train.sequence_length}): give more text or a shorter sequence"
            )
        return Feed(config, mesh, batches, make_batches(config, data, "eval"), sets)

    def at(self, position: int, following: int = 0) -> list[MicroBatch]:
        """The micro-batches of the global batch that follows `position` samples. Collective over tensor parallelism.

        At most `following` global batches after this one are read ahead.

        Raises:
            DataError: the data cannot be read; raised on the rank that reads.
        """
        train = self._config.train
        dp = self._mesh.dp
        local = self._read(position, following) if self._reads else None
        places_MB = self.batches.places_of_rank(train.global_batch, dp.rank, dp.size, train.micro_batch)
        return self._share(self.batches, local, position + places_MB)

    def evaluation(self, batches: Batches, at_once: int) -> Iterator[list[MicroBatch]]:
        """The micro-batches of an evaluation (`Batches.eval_batches`), `at_once` at a time. Collective as `at`."""
        train = self._config.train
        dp = self._mesh.dp
        portion = dp.size * train.micro_batch
        total = batches.eval_micro_batches(train.eval_batches, train.global_batch, portion)
        reading = batches.eval_batches(train.eval_batches, train.global_batch, dp.rank, dp.size, train.micro_batch)
        places_MB = batches.places_of_rank(total * portion, dp.rank, dp.size, train.micro_batch)

        def read() -> list[Batch]:
            return list(islice(reading, at_once))

        # One round is read while the model works on the round before.
        pending = self._submit(read) if self._reads else None
        for first in range(0, total, at_once):
            local = None if pending is None else self._await(pending)
            if pending is not None and first + at_once < total:
                pending = self._submit(read)
            samples_MB = places_MB[first : first + at_once]
            # The last sample may be a partial one, and samples that only fill up a micro-batch come after it.
            is_last = samples_MB[-1, -1] >= batches.num_samples - 1
            yield self._share(batches, local, samples_MB, has_padding=is_last)

    def close(self) -> None:
        """End the reading threads, and drop the batches that they read."""
        self._pending.clear()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None
        self.batches.close()

    def _read(self, position: int, following: int) -> list[Batch]:
        """This rank's part of the global batch at a position; reads up to `following` batches after it ahead."""
        train = self._config.train
        of_rank = (train.global_batch, self._mesh.dp.rank, self._mesh.dp.size, train.micro_batch)
        if not self._pending or self._pending[0][0] != position:
            # Nothing was read ahead for this position, as at the start.
            self._pending.clear()
            self._pending.append((position, self._submit(self.batches.local_batch, position, *of_rank)))
        _, pending = self._pending.popleft()
        for number in range(len(self._pending) + 1, min(self._config.data.workers, following) + 1):
            start = position + number * train.global_batch
            self._pending.append((start, self._submit(self.batches.local_batch, start, *of_rank)))
        return self._await(pending)

    def _submit(self, read: Callable[..., list[Batch]], *arguments: Any) -> Future[list[Batch]]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._config.data.workers, thread_name_prefix="reader")
        return self._threads.submit(read, *arguments)

    def _await(self, pending: Future[list[Batch]]) -> list[Batch]:
        start = time.perf_counter()
        local = pending.result()
        self.seconds += time.perf_counter() - start
        return local

    def _share(
        self, batches: Batches, local: list[Batch] | None, samples_MB: _IntArray, *, has_padding: bool = False
    ) -> list[MicroBatch]:
        """The micro-batches that the first rank of the group has as `local`, on all its ranks.

        With `has_padding` some of them may have sequences that are padded.
        """
        # Training and evaluation may have inputs of other shapes; each is described once.
        key = (id(batches), has_padding)
        if key not in self._blanks:
            self._blanks[key] = _arrays(batches.blank(self._config.train.micro_batch), has_padding)
        blank = self._blanks[key]
        sizes = [array.size for array in blank.values()]
        # One tensor and one broadcast: each message costs its latency, and the arrays are small.
        if local is not None:
            packed = np.stack([np.hstack([*map(np.ravel, _arrays(batch, has_padding).values())]) for batch in local])
            numbers_MN = devices.to_device(torch.from_numpy(packed), self._mesh.device)
        else:
            numbers_MN = torch.zeros(len(samples_MB), sum(sizes), dtype=torch.int64, device=self._mesh.device)
        collectives.broadcast_(numbers_MN, self._mesh.tp)
        on_device_MB = devices.to_device(torch.from_numpy(samples_MB), self._mesh.device)
        documents_M: list[DocumentSizes | None] = [None] * len(samples_MB)
        if _DOCUMENTS in blank and self._tells_documents:
            # They are last. A rank that did not read them waits for the device, once.
            sizes_M2 = numbers_MN[:, -2:] if local is None else packed[:, -2:]
            documents_M = [DocumentSizes(number, longest) for number, longest in sizes_M2.tolist()]
        micro_batches = []
        for numbers_N, sample_numbers, samples_B, documents in zip(
            numbers_MN, samples_MB, on_device_MB, documents_M, strict=True
        ):
            inputs = {}
            for (name, array), part in zip(blank.items(), numbers_N.split(sizes), strict=True):
                inputs[name] = part.view(array.shape)
            inputs.pop(_DOCUMENTS, None)
            lengths_B = inputs.pop(_LENGTHS, None)
            batch = MicroBatch(inputs, inputs.pop(_COUNTS), sample_numbers, samples_B, lengths_B, documents)
            micro_batches.append(batch.part(self._mesh.cp))
        return micro_batches

    @cached_property
    def _tells_documents(self) -> bool:
        """True if attention may need the sizes of documents (`AttentionMask.form`)."""
        config = self._config
        device = self._mesh.device
        if config.shapes is None or config.is_bit_equal or self._mesh.cp.size > 1 or device.type == "cpu":
            return False
        dtype: torch.dtype = getattr(torch, config.precision.resolved(True).parameter)
        return devices.attends_by_document(device, dtype, config.shapes.head_dim)


def _arrays(batch: Batch, has_padding: bool) -> dict[str, _IntArray]:
    """The arrays of a batch by name, in the same order on every rank.

    The lengths are there where sequences may be padded, and the sizes of documents where these attend by themselves.
    """
    arrays = {**dict(sorted(batch.inputs.items())), _COUNTS: batch.counts}
    if has_padding and batch.lengths is not None:
        arrays[_LENGTHS] = batch.lengths
    documents = DocumentSizes.of(batch.inputs.get("starts_SB"))
    if documents is not None:
        arrays[_DOCUMENTS] = np.array(documents)
    return arrays
