"""Samples of several data sets, mixed in fixed proportions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from shardwise.data.samples.batch import Batch, Batches, joined
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


class BlendedBatches(Batches):
    """`Batches` of K sources in the proportions of their weights.

    The sources' samples follow one another as `Pattern` says; each source has its own order and its own epochs, the
    next of which begins when it is exhausted. So a sample is a function of (seed, samples consumed). An evaluation
    has each sample of each source once: where a source is exhausted, the others continue without it.

    Index `begins[s] + i` is sample `i` of source `s`.
    """

    def __init__(self, weights: Sequence[float], sources: Sequence[Batches]) -> None:
        assert len(weights) == len(sources) > 0
        self.pattern = Pattern(weights)
        self.batches = sources
        self.objectives = sources[0].objectives
        self._sizes = [batches.num_samples for batches in sources]
        self._begins = np.cumsum([0, *self._sizes])

    @property
    def num_samples(self) -> int:
        """All samples of all sources."""
        return int(self._begins[-1])

    def draw(self, consumed: int, count: int) -> tuple[IntArray, IntArray]:
        sources = self.pattern.sources(np.arange(consumed, consumed + count))
        indices, epochs = np.empty_like(sources), np.empty_like(sources)
        for source, batches in enumerate(self.batches):
            chosen = np.flatnonzero(sources == source)
            first = int(self.pattern.before(source, np.array([consumed]))[0])
            own, epochs[chosen] = batches.draw(first, len(chosen))
            indices[chosen] = self._begins[source] + own
        return indices, epochs

    def evaluated(self, numbers: IntArray) -> IntArray:
        numbers = self.pattern.once(self._sizes, numbers)
        sources = self.pattern.sources(numbers)
        before = np.stack([self.pattern.before(source, numbers) for source in range(len(self._sizes))])
        indices: IntArray = self._begins[sources] + before[sources, np.arange(len(numbers))]
        return indices

    def collate(self, indices: IntArray, epochs: IntArray, samples: IntArray) -> Batch:
        # A sample that counts nothing is made by the first source.
        sources = np.maximum(np.searchsorted(self._begins, indices, side="right") - 1, 0)
        own = np.where(indices < 0, -1, indices - self._begins[sources])
        places = [np.flatnonzero(sources == source) for source in np.unique(sources)]
        parts = [
            self.batches[sources[chosen[0]]].collate(own[chosen], epochs[chosen], samples[chosen]) for chosen in places
        ]
        return joined(parts, places, samples)


def _allotted(weights: Sequence[float]) -> list[int]:
    """`_BLOCK` samples shared out by weight, the largest remainders rounded up, each share at least 1."""
    exact = [_BLOCK * weight / math.fsum(weights) for weight in weights]
    counts = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda source: counts[source] - exact[source])
    for source in by_remainder[: _BLOCK - sum(counts)]:
        counts[source] += 1
    return [max(count, 1) for count in counts]
