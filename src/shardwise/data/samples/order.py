"""The order of the data: which sample comes when, as a pure function of (seed, samples consumed), whatever the layout.

`SampleOrder` shuffles samples in each epoch, `BlendPattern` says which source of a blend each sample comes from, and
`Draws` are the random numbers of a sample. Documents of a Megatron data set (`causal.DocumentBatches`) and those of a
stream (`streaming.TextStream`) are shuffled by a `SampleOrder` too.

All of it rests on a 64-bit mixing function in integer arithmetic: the same on every machine and in every version of
numpy, and without a state to save.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shardwise.base.errors import ConfigError

IntArray = npt.NDArray[np.int64]

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
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        if num_samples < 1:
            raise ConfigError(f"the number of samples ({num_samples}) must be at least 1")
        self.num_samples = num_samples
        self.seed = seed
        # Two bits at least, so that each half has one.
        bits = max(2, (num_samples - 1).bit_length())
        self._widths = (bits // 2, bits - bits // 2)

    def indices(self, consumed: int, count: int) -> IntArray:
        """Samples number `consumed` to `consumed + count` of the endless order."""
        parts = []
        while count > 0:
            epoch, start = divmod(consumed, self.num_samples)
            taken = min(count, self.num_samples - start)
            parts.append(self._permuted(np.arange(start, start + taken, dtype=np.uint64), epoch))
            consumed += taken
            count -= taken
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _permuted(self, positions: npt.NDArray[np.uint64], epoch: int) -> IntArray:
        keys = [np.uint64(mix_integer(self.seed, epoch, number)) for number in range(_ROUNDS)]
        values = self._feistel(positions, keys)
        # The walk along a cycle ends, as the cycle leads back to the position itself, which is a sample's number. Of
        # three samples or more there are more than half as many as values, so it takes less than two steps on average.
        outside = np.flatnonzero(values >= self.num_samples)
        while outside.size:
            values[outside] = self._feistel(values[outside], keys)
            outside = outside[values[outside] >= self.num_samples]
        return values.astype(np.int64)

    def _feistel(self, values: npt.NDArray[np.uint64], keys: list[np.uint64]) -> npt.NDArray[np.uint64]:
        """Rounds of `(left, right) → (right, left ⊕ F(right))`.

        A round can be undone from its result, as `right` is part of it: so the rounds permute whatever `F` is.
        """
        left_bits, right_bits = self._widths
        left = values >> np.uint64(right_bits)
        right = values & np.uint64((1 << right_bits) - 1)
        for key in keys:
            mask = np.uint64((1 << left_bits) - 1)
            left, right = right, left ^ (mix(right ^ key) & mask)
            left_bits, right_bits = right_bits, left_bits
        return (left << np.uint64(right_bits)) | right


_MASK = (1 << 64) - 1
# The constants of SplitMix64: 2^64 divided by the golden ratio, and the multipliers of Stafford's "Mix13", which were
# found by a search for the best avalanche.
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_DRAWS = 0x6472617773  # "draws": keeps their hashes apart from the sample order's


def mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64 of each value (Steele, Lea and Flood 2014, section 3): a bijection of 64 bits."""
    values = values + np.uint64(_GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_FIRST)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_SECOND)
    return values ^ (values >> np.uint64(31))


def mix_integer(*values: int) -> int:
    """One hash of several integers; for a single one the same as `mix`."""
    state = 0
    for value in values:
        state = ((state ^ value) + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * _FIRST) & _MASK
        state = ((state ^ (state >> 27)) * _SECOND) & _MASK
        state ^= state >> 31
    return state


def below(hashes: npt.NDArray[np.uint64], limit: npt.NDArray[np.int64] | int) -> npt.NDArray[np.int64]:
    """Each hash as an integer of 0 … `limit` - 1, equally likely to within `limit` / 2³²; `limit` is at most 2³².

    The first 32 bits of a hash are a fraction of 1 in units of 2⁻³²; the result is that fraction of the limit, rounded
    down. Both factors are below 2³² or equal to it, so their product fits 64 bits.
    """
    limits = np.asarray(limit, dtype=np.uint64)
    return (((hashes >> np.uint64(32)) * limits) >> np.uint64(32)).astype(np.int64)


class Draws:
    """Random numbers of samples, a pure function of (seed, epoch, sample) and of the purpose (`site`).

    Numbers of different sites are independent of one another, and of the sample order.
    """

    def __init__(self, seed: int, epochs_B: npt.NDArray[np.int64], indices_B: npt.NDArray[np.int64]) -> None:
        start = np.uint64(mix_integer(_DRAWS, seed))
        self._keys_B = mix(mix(start ^ epochs_B.astype(np.uint64)) ^ indices_B.astype(np.uint64))

    def hashes(self, site: int) -> npt.NDArray[np.uint64]:
        """One 64-bit hash a sample, [B]."""
        return mix(self._keys_B ^ np.uint64(site))

    def table(self, site: int, columns: int) -> npt.NDArray[np.uint64]:
        """`columns` 64-bit hashes a sample, [B, columns]."""
        return mix(self.hashes(site)[:, None] ^ np.arange(columns, dtype=np.uint64))

    def below(self, site: int, limits: npt.NDArray[np.int64] | int) -> npt.NDArray[np.int64]:
        """One integer of 0 … limit - 1 a sample, [B]."""
        return below(self.hashes(site), limits)


# The weights of a blend are met to five decimal places, and the arrays of a pattern stay below 2 MB.
_PATTERN_SAMPLES = 100_000


class BlendPattern:
    """The order in which samples of K sources follow one another: a block that repeats without end.

    Source `s` has `counts[s]` samples of a block: its weight's share of `_PATTERN_SAMPLES`, rounded, and at least one;
    all counts are divided by their greatest common divisor, so 0.7 and 0.3 make a block of 10.

    If the samples of a source were spread evenly over a block of length 1, sample `j` would stand in the middle of its
    slot, at `(j + ½) / counts[s]`: that is when it is due. Samples stand in the order in which they are due, so any run
    of the row has each source in its proportion, up to a few samples.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        counts = _samples_in_pattern(weights)
        self.counts = [count // math.gcd(*counts) for count in counts]
        due = np.concatenate([(np.arange(count) + 0.5) / count for count in self.counts])
        # The sort is stable, so that of samples that are due at once the first source's comes first everywhere.
        self._sources = np.repeat(np.arange(len(counts)), self.counts)[np.argsort(due, kind="stable")]
        self._places = [np.flatnonzero(self._sources == source) for source in range(len(counts))]

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
    """`_PATTERN_SAMPLES` shared out by weight, the largest remainders rounded up, each share at least 1."""
    exact = [_PATTERN_SAMPLES * weight / math.fsum(weights) for weight in weights]
    counts = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda source: counts[source] - exact[source])
    for source in by_remainder[: _PATTERN_SAMPLES - sum(counts)]:
        counts[source] += 1
    return [max(count, 1) for count in counts]
