"""The order of the data: which sample comes when, as a pure function of (seed, samples consumed), whatever the layout.

`SampleOrder` shuffles samples in each epoch, `SourceOrder` says which source of a mixture each sample comes from, and
`Draws` are the random numbers of a sample. Documents of a Megatron data set (`causal.DocumentBatches`) and those of a
stream (`text_stream.TextStream`) are shuffled by a `SampleOrder` too.

All of it rests on a 64-bit mixing function in integer arithmetic: the same on every machine and in every version of
numpy, and without a state to save.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np

from shardwise.base.errors import ConfigError
from shardwise.data.rows import Hashes, IntArray

# Four rounds of random functions make a permutation that nobody can tell from a random one (Luby and Rackoff 1988,
# "How to construct pseudorandom permutations"). That holds for wide halves; those of small data have a few bits, so
# there are twice as many. The number is even, so that both halves have their first widths again at the end.
_ROUNDS = 8


class SampleOrder:
    """The global order of `num_samples` samples, shuffled in each epoch, without a state to save.

    Position `p` of epoch `e` holds sample `π(p)`, where `π` is a Feistel permutation keyed by (seed, e) on the
    smallest power of two that is at least `num_samples`; a value beyond them is permuted again until it is one of them
    ("cycle walking": Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, section 3). Any position is
    found in constant time, and integer arithmetic makes it the same everywhere.

    Args:
        together: samples that follow each other as they do in the data: these blocks are shuffled, of which
            `num_samples` is a multiple.
    """

    def __init__(self, num_samples: int, seed: int, together: int = 1) -> None:
        if num_samples < 1:
            raise ConfigError(f"the number of samples ({num_samples}) must be at least 1")
        assert num_samples % together == 0
        self.num_samples = num_samples
        self.seed = seed
        self.together = together
        self._blocks = num_samples // together
        # Two bits at least, so that each half has one.
        bits = max(2, (self._blocks - 1).bit_length())
        self._widths = (bits // 2, bits - bits // 2)

    def indices(self, consumed: int, count: int) -> IntArray:
        """Samples number `consumed` to `consumed + count` of the endless order."""
        block = first = consumed // self.together
        end = -(-(consumed + count) // self.together)
        blocks = np.empty(end - first, dtype=np.int64)
        while block < end:
            epoch, start = divmod(block, self._blocks)
            taken = min(end - block, self._blocks - start)
            positions = np.arange(start, start + taken, dtype=np.uint64)
            blocks[block - first : block - first + taken] = self._permuted(positions, epoch)
            block += taken
        if self.together == 1:
            return blocks
        numbers, places = np.divmod(np.arange(consumed, consumed + count), self.together)
        return np.asarray(blocks[numbers - first] * self.together + places)

    def _permuted(self, positions: Hashes, epoch: int) -> IntArray:
        keys = [np.uint64(mix_integer(self.seed, epoch, number)) for number in range(_ROUNDS)]
        values = self._feistel(positions, keys)
        # The walk along a cycle ends, as the cycle leads back to the position itself, which is a sample's number. Of
        # three samples or more there are more than half as many as values, so it takes less than two steps on average.
        outside = np.flatnonzero(values >= self._blocks)
        while outside.size:
            values[outside] = self._feistel(values[outside], keys)
            outside = outside[values[outside] >= self._blocks]
        return values.astype(np.int64)

    def _feistel(self, values: Hashes, keys: list[np.uint64]) -> Hashes:
        """Rounds of `(left, right) → (right, left ⊕ F(right))`.

        A round can be undone from its result, as `right` is part of it: so the rounds permute whatever `F` is.
        """
        left_bits, right_bits = self._widths
        left = values >> np.uint64(right_bits)
        right = values & np.uint64((1 << right_bits) - 1)
        for key in keys:
            mask = np.uint64((1 << left_bits) - 1)
            left, right = right, left ^ (mix_bits(right ^ key) & mask)
            left_bits, right_bits = right_bits, left_bits
        return (left << np.uint64(right_bits)) | right


_MASK = (1 << 64) - 1
# The constants of SplitMix64: 2^64 divided by the golden ratio, and the multipliers of Stafford's "Mix13", which were
# found by a search for the best avalanche.
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_DRAWS = 0x6472617773  # "draws": keeps their hashes apart from the sample order's


def mix_bits(values: Hashes) -> Hashes:
    """SplitMix64 of each value, by which samples are shuffled (Steele, Lea and Flood 2014, section 3)."""
    values = values + np.uint64(_GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_FIRST)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_SECOND)
    return values ^ (values >> np.uint64(31))


def mix_integer(*values: int) -> int:
    """The hash that shuffles the order of samples, of several integers; for a single one the same as `mix_bits`."""
    state = 0
    for value in values:
        state = ((state ^ value) + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * _FIRST) & _MASK
        state = ((state ^ (state >> 27)) * _SECOND) & _MASK
        state ^= state >> 31
    return state


def hashes_below(hashes: Hashes, limit: IntArray | int) -> IntArray:
    """Each sample's hash as an integer of 0 … `limit` - 1, equally likely to within `limit` / 2³²; `limit` ≤ 2³².

    The first 32 bits of a hash are a fraction of 1 in units of 2⁻³²; the result is that fraction of the limit, rounded
    down. Both factors are below 2³² or equal to it, so their product fits 64 bits.
    """
    limits = np.asarray(limit, dtype=np.uint64)
    return (((hashes >> np.uint64(32)) * limits) >> np.uint64(32)).astype(np.int64)


class Draws:
    """Random numbers for samples of data, a pure function of (seed, epoch, sample) and of the purpose (`site`).

    Numbers of different sites are independent of one another, and of the sample order.
    """

    def __init__(self, seed: int, epochs_B: IntArray, indices_B: IntArray) -> None:
        start = np.uint64(mix_integer(_DRAWS, seed))
        self._keys_B = mix_bits(mix_bits(start ^ epochs_B.astype(np.uint64)) ^ indices_B.astype(np.uint64))

    def hashes(self, site: int) -> Hashes:
        """One 64-bit hash a sample, [B]."""
        return mix_bits(self._keys_B ^ np.uint64(site))

    def table(self, site: int, columns: int) -> Hashes:
        """`columns` 64-bit hashes a sample, [B, columns]."""
        return mix_bits(self.hashes(site)[:, None] ^ np.arange(columns, dtype=np.uint64))

    def below(self, site: int, limits: IntArray | int) -> IntArray:
        """One integer of 0 … limit - 1 a sample, [B]."""
        return hashes_below(self.hashes(site), limits)


_MOST_IN_PATTERN = 100_000
"""The most samples in a block: its arrays stay below 2 MB, and it takes half a second to make."""
_ROUNDED_TO = 10_000
"""The samples in a block if more than `_MOST_IN_PATTERN` would be needed: weights are met to four decimal places."""


class BlendPattern:
    """The order in which samples of a blend's K sources follow one another: a block that repeats without end.

    Source `s` has `counts[s]` of the M samples of a block, in the exact proportion of the weights as decimal numbers if
    M is then at most `_MOST_IN_PATTERN`: 0.7 and 0.3 make a block of 10. Else a count is the weight's share of
    `_ROUNDED_TO`, rounded, and at least one.

    The first n samples have less than one sample more or less of each source than its share of n. So sample `j` of
    source `s` stands at place `floor(j·M / counts[s])` at the earliest, and at `ceil((j + 1)·M / counts[s]) - 1` at the
    latest. Of the samples that may stand at a place, the one whose latest place is the first is taken: if there is such
    an order, this rule gives one, and there is one for all weights (Tijdeman 1980, "The chairman assignment problem").
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.counts = _samples_in_pattern(weights)
        total = sum(self.counts)
        waiting = [(0, -(-total // count) - 1, source) for source, count in enumerate(self.counts)]
        ready: list[tuple[int, int]] = []
        order = []
        placed = [0] * len(self.counts)
        heapq.heapify(waiting)
        for place in range(total):
            while waiting and waiting[0][0] <= place:
                _, latest, source = heapq.heappop(waiting)
                heapq.heappush(ready, (latest, source))
            _, source = heapq.heappop(ready)
            order.append(source)
            placed[source] += 1
            earliest = placed[source] * total // self.counts[source]
            latest = -(-(placed[source] + 1) * total // self.counts[source]) - 1
            if placed[source] < self.counts[source]:
                heapq.heappush(waiting, (earliest, latest, source))
        self._sources = np.array(order, dtype=np.int64)
        self._places = [np.flatnonzero(self._sources == source) for source in range(len(self.counts))]

    def sources(self, samples: IntArray) -> IntArray:
        """The source of each of these samples."""
        return np.asarray(self._sources[samples % len(self._sources)])

    def before(self, source: int, samples: IntArray) -> IntArray:
        """Number of samples of `source` that stand before each of these."""
        blocks, places = np.divmod(samples, len(self._sources))
        return np.asarray(blocks * self.counts[source] + np.searchsorted(self._places[source], places))

    def without_repeats(self, sizes: Sequence[int], places: IntArray) -> IntArray:
        """The samples of the endless row at `places` of the row that has each sample of each source once.

        In that row, where source `s` has `sizes[s]` samples, `Σ_s min(before(s, n), sizes[s])` samples stand before
        sample `n` of the endless row. That number grows with `n`, so `n` is found by a binary search: it is the last
        one before which no more than `places` samples stand.
        """
        blocks = max(size // count for size, count in zip(sizes, self.counts, strict=True)) + 1
        low = np.zeros_like(places)
        high = np.full_like(places, blocks * len(self._sources))
        while (high - low > 1).any():
            middle = (low + high) >> 1
            terms = [np.minimum(self.before(source, middle), size) for source, size in enumerate(sizes)]
            reached = np.sum(terms, axis=0, dtype=np.int64) <= places
            low = np.where(reached, middle, low)
            high = np.where(reached, high, middle)
        return low


def _samples_in_pattern(weights: Sequence[float]) -> list[int]:
    fractions = [Fraction(repr(weight)) for weight in weights]
    common = math.lcm(*(fraction.denominator for fraction in fractions))
    counts = [int(fraction * common) for fraction in fractions]
    counts = [count // math.gcd(*counts) for count in counts]
    if sum(counts) <= _MOST_IN_PATTERN:
        return counts
    # The largest remainders are rounded up.
    exact = [_ROUNDED_TO * weight / math.fsum(weights) for weight in weights]
    counts = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda source: counts[source] - exact[source])
    for source in by_remainder[: _ROUNDED_TO - sum(counts)]:
        counts[source] += 1
    return [max(count, 1) for count in counts]


def concatenated_ranges(starts: IntArray, sizes: IntArray) -> IntArray:
    """Ranges `start, start + 1, …` of these sizes, one after another.

    Place `i` of the result lies in the run that begins at place `end - size`: its value is `start - (end - size) + i`.
    """
    ends = np.cumsum(sizes)
    return np.repeat(starts - (ends - sizes), sizes) + np.arange(ends[-1] if len(ends) else 0)


@dataclass(frozen=True)
class MixtureStage:
    """A stage of the order of samples: the weights of its sources from a sample on, which `step` steps are before."""

    step: int
    sample: int
    weights: Mapping[str, float]


class SourceOrder:
    """The source of each sample of a run, whose stages have a `BlendPattern` each.

    A source goes on in a later stage where it was in the stages before. Of samples that may stand at one place, that of
    the first name in the alphabet comes first.

    Attributes:
        chosen: numbers of the sources of each stage, in the order of its pattern.

    Args:
        stages: stages in their order; the first begins with sample 0.
    """

    def __init__(self, names: Sequence[str], stages: Sequence[MixtureStage]) -> None:
        assert stages[0].sample == 0
        self.names = tuple(names)
        self.stages = tuple(stages)
        self._begins = np.array([stage.sample for stage in stages])
        # Sorted, as a manifest does not keep the order of the weights.
        weights = [sorted(stage.weights.items()) for stage in stages]
        self.patterns = [_pattern(tuple(float(weight) for _, weight in pairs)) for pairs in weights]
        self.chosen = [np.array([self.names.index(name) for name, _ in pairs]) for pairs in weights]
        # [stages, K]: samples of each source before a stage.
        self._earlier = np.zeros((len(stages), len(names)), dtype=np.int64)
        for number, (begin, end) in enumerate(pairwise(self._begins.tolist())):
            self._earlier[number + 1] = self._earlier[number]
            for local, source in enumerate(self.chosen[number].tolist()):
                self._earlier[number + 1, source] += self.patterns[number].before(local, np.array([end - begin]))[0]

    def sources(self, samples: IntArray) -> IntArray:
        """The number of the source of each of these samples."""
        sources = np.empty_like(samples)
        for number, chosen in self._by_stage(samples):
            local = self.patterns[number].sources(samples[chosen] - self._begins[number])
            sources[chosen] = self.chosen[number][local]
        return sources

    def before(self, source: int, samples: IntArray) -> IntArray:
        """Number of samples of `source` that stand before each of these."""
        before = np.empty_like(samples)
        for number, chosen in self._by_stage(samples):
            before[chosen] = self._earlier[number, source]
            for local in np.flatnonzero(self.chosen[number] == source).tolist():
                before[chosen] += self.patterns[number].before(local, samples[chosen] - self._begins[number])
        return before

    def _by_stage(self, samples: IntArray) -> Iterator[tuple[int, IntArray]]:
        stages = np.searchsorted(self._begins, samples, side="right") - 1
        for number in np.unique(stages).tolist():
            yield number, np.flatnonzero(stages == number)


_pattern = functools.cache(BlendPattern)  # the pattern of a tuple of weights, which takes up to half a second to make
