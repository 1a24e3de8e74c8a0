"""Samples of several data sets, mixed in fixed proportions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from shardwise.data.samples.batch import Batch, SampledBatches, check_division, eval_micro_batches, rows_of_rank
from shardwise.data.samples.sampler import IntArray

_BLOCK = 100_000


class Pattern:
    """Which of K sources each sample of an endless row comes from: a block that repeats.

    Of a block's samples source `s` has `counts[s]`, its weight's part of `_BLOCK` up to one sample (and one at least);
    divided by what the counts have in common, so 0.7 and 0.3 make a block of 10. Its sample `j` in the block is due at
    `(j + ½) / counts[s]`, and samples stand in the order in which they are due: any stretch of the row has each
    source in its proportion, up to a few samples.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        counts = _allotted(weights)
        self.counts = [count // math.gcd(*counts) for count in counts]
        due = np.concatenate([(np.arange(count) + 0.5) / count for count in self.counts])
        self._sources = np.repeat(np.arange(len(counts)), self.counts)[np.argsort(due, kind="stable")]
        self._places = [np.flatnonzero(self._sources == source) for source in range(len(counts))]

    def sources(self, samples: IntArray) -> IntArray:
        """The source of each of these samples."""
        found: IntArray = self._sources[samples % len(self._sources)]
        return found

    def before(self, source: int, samples: IntArray) -> IntArray:
        """How many samples of `source` stand before each of these."""
        blocks, places = np.divmod(samples, len(self._sources))
        found: IntArray = blocks * self.counts[source] + np.searchsorted(self._places[source], places)
        return found

    def once(self, sizes: Sequence[int], places: IntArray) -> IntArray:
        """The samples at `places` of the row without those of sources that are exhausted: `sizes` are all they have.

        Sample `n` of the endless row has `Σ_s min(before(s, n), sizes[s])` before it in that row, which only grows with
        `n`: it is found by halving.
        """

        def left(samples: IntArray) -> IntArray:
            terms = [np.minimum(self.before(source, samples), size) for source, size in enumerate(sizes)]
            total: IntArray = np.sum(terms, axis=0, dtype=np.int64)
            return total

        blocks = max(size // count for size, count in zip(sizes, self.counts, strict=True)) + 1
        low, high = np.zeros_like(places), np.full_like(places, blocks * len(self._sources))
        while (high - low > 1).any():
            middle = (low + high) >> 1
            reached = left(middle) <= places
            low, high = np.where(reached, middle, low), np.where(reached, high, middle)
        return low


class BlendedBatches:
    """`Batches` of K sources in the proportions of their weights.

    The sources' samples follow one another as `Pattern` says; each source has its own order and its own epochs, the
    next of which begins when it is exhausted. So a sample is a function of (seed, samples consumed). An evaluation
    has each sample of each source once: where a source is exhausted, the others continue without it.
    """

    def __init__(self, weights: Sequence[float], sources: Sequence[SampledBatches]) -> None:
        assert len(weights) == len(sources) > 0
        self.pattern = Pattern(weights)
        self.batches = sources

    @property
    def objectives(self) -> tuple[str, ...]:
        return self.batches[0].objectives

    @property
    def num_samples(self) -> int:
        """All samples of all sources."""
        return sum(batches.num_samples for batches in self.batches)

    def blank(self, micro_batch: int) -> Batch:
        return self.batches[0].blank(micro_batch)

    def local_batch(
        self, consumed: int, global_batch: int, dp_rank: int, dp_size: int, micro_batch: int
    ) -> list[Batch]:
        check_division(global_batch, dp_rank, dp_size, micro_batch)
        samples = np.arange(consumed, consumed + global_batch)
        sources = self.pattern.sources(samples)
        indices, epochs = np.empty_like(samples), np.empty_like(samples)
        for source, batches in enumerate(self.batches):
            chosen = np.flatnonzero(sources == source)
            first = int(self.pattern.before(source, samples[:1])[0])
            indices[chosen] = batches.sampler.indices(first, len(chosen))
            epochs[chosen] = (first + np.arange(len(chosen))) // batches.num_samples
        return [
            self._collate(sources[rows], indices[rows], epochs[rows], samples[rows])
            for rows in rows_of_rank(global_batch, dp_rank, dp_size, micro_batch)
        ]

    def eval_batches(
        self, count: int, global_batch: int, dp_rank: int, dp_size: int, micro_batch: int
    ) -> Iterator[Batch]:
        check_division(global_batch, dp_rank, dp_size, micro_batch)
        real = min(count * global_batch, self.num_samples)
        portion = dp_size * micro_batch
        total = eval_micro_batches(self.num_samples, count, global_batch, portion) * portion
        sizes = [batches.num_samples for batches in self.batches]
        for rows in rows_of_rank(total, dp_rank, dp_size, micro_batch):
            samples = np.arange(rows.start, rows.stop)
            numbers = self.pattern.once(sizes, np.minimum(samples, real - 1))
            sources = self.pattern.sources(numbers)
            of_each = np.stack([self.pattern.before(source, numbers) for source in range(len(sizes))])
            indices = of_each[sources, np.arange(len(samples))]
            yield self._collate(sources, np.where(samples < real, indices, -1), np.zeros_like(samples), samples)

    def _collate(self, sources: IntArray, indices: IntArray, epochs: IntArray, samples: IntArray) -> Batch:
        """One batch of samples of several sources: in all inputs the last dimension is the samples'."""
        inputs: dict[str, IntArray] = {}
        counts = np.zeros(len(self.objectives), dtype=np.int64)
        lengths: IntArray | None = None
        for source in np.unique(sources).tolist():
            chosen = np.flatnonzero(sources == source)
            part = self.batches[source].collate(indices[chosen], epochs[chosen], samples[chosen])
            counts += part.counts
            for name, array in part.inputs.items():
                whole = inputs.setdefault(name, np.empty((*array.shape[:-1], len(samples)), dtype=array.dtype))
                whole[..., chosen] = array
            if part.lengths is not None:
                lengths = np.zeros_like(samples) if lengths is None else lengths
                lengths[chosen] = part.lengths
        return Batch(inputs, counts, samples, lengths)


def _allotted(weights: Sequence[float]) -> list[int]:
    """`_BLOCK` samples shared out by weight, the largest remainders rounded up, each share at least 1."""
    exact = [_BLOCK * weight / math.fsum(weights) for weight in weights]
    counts = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda source: counts[source] - exact[source])
    for source in by_remainder[: _BLOCK - sum(counts)]:
        counts[source] += 1
    return [max(count, 1) for count in counts]
