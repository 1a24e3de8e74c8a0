"""Sample order: a pure function of (seed, samples consumed), whatever the layout.

A 64-bit mixing function in integer arithmetic: the same on every machine and in every version of numpy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardwise.base.errors import ConfigError

IntArray = npt.NDArray[np.int64]

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
        outside = np.flatnonzero(values >= self.num_samples)
        while outside.size:
            values[outside] = self._feistel(values[outside], keys)
            outside = outside[values[outside] >= self.num_samples]
        return values.astype(np.int64)

    def _feistel(self, values: npt.NDArray[np.uint64], keys: list[np.uint64]) -> npt.NDArray[np.uint64]:
        """Rounds of `(left, right) → (right, left ⊕ F(right))`; an even number leaves the widths as they began."""
        left_bits, right_bits = self._widths
        left, right = values >> np.uint64(right_bits), values & np.uint64((1 << right_bits) - 1)
        for key in keys:
            mask = np.uint64((1 << left_bits) - 1)
            left, right = right, left ^ (mix(right ^ key) & mask)
            left_bits, right_bits = right_bits, left_bits
        return (left << np.uint64(right_bits)) | right


_MASK = (1 << 64) - 1
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
    """Each hash as an integer of 0 … `limit` - 1, equally likely to within `limit` / 2³²; `limit` is at most 2³²."""
    limits = np.asarray(limit, dtype=np.uint64)
    return (((hashes >> np.uint64(32)) * limits) >> np.uint64(32)).astype(np.int64)


class Draws:
    """Random numbers of samples, a pure function of (seed, epoch, sample) and of what they are drawn for.

    `site` says what for: numbers of different sites are independent of one another, and of the sample order.
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
