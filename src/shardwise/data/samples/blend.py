"""Samples of several data sets, mixed in fixed proportions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from shardwise.data.samples.batch import Batch, Batches, joined, shown_epochs
from shardwise.data.samples.sampler import IntArray
from shardwise.units import counted

_BLOCK = 100_000


class Pattern:
    """Which of K sources each sample of an endless row comes from: a block that repeats.

    Source `s` has `counts[s]` samples of a block: its weight's share of `_BLOCK`, rounded, and at least one; all counts
    are divided by their greatest common divisor, so 0.7 and 0.3 make a block of 10. Sample `j` of a source in the block
    is due at `(j + ½) / counts[s]`, and samples stand in the order in which they are due: any run of the row has each
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
        return np.asarray(self._sources[samples % len(self._sources)])

    def before(self, source: int, samples: IntArray) -> IntArray:
        """How many samples of `source` stand before each of these."""
        blocks, places = np.divmod(samples, len(self._sources))
        return np.asarray(blocks * self.counts[source] + np.searchsorted(self._places[source], places))

    def once(self, sizes: Sequence[int], places: IntArray) -> IntArray:
        """Which samples of the endless row are at `places` of the row that has each sample of each source once.

        In that row, where source `s` has `sizes[s]` samples, `Σ_s min(before(s, n), sizes[s])` samples stand before
        sample `n` of the endless row. That number grows with `n`, so `n` is found by a binary search.
        """
        blocks = max(size // count for size, count in zip(sizes, self.counts, strict=True)) + 1
        low, high = np.zeros_like(places), np.full_like(places, blocks * len(self._sources))
        while (high - low > 1).any():
            middle = (low + high) >> 1
            terms = [np.minimum(self.before(source, middle), size) for source, size in enumerate(sizes)]
            reached = np.sum(terms, axis=0, dtype=np.int64) <= places
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

    def epochs(self, samples: int) -> str:
        drawn = [int(self.pattern.before(source, np.array([samples]))[0]) for source in range(len(self._sizes))]
        each = sorted(count / size for count, size in zip(drawn, self._sizes, strict=True))
        of = f"{counted(len(each), 'data set')} with {self.num_samples:,} samples"
        return f"{shown_epochs(each[0])} to {shown_epochs(each[-1])} epochs of {of}"

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
        return np.asarray(self._begins[sources] + before[sources, np.arange(len(numbers))])

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
