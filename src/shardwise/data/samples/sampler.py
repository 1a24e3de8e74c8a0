"""Sample order: a pure function of (seed, samples consumed), whatever the layout."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardwise.data.samples.hashing import mix, mix_integer
from shardwise.errors import ConfigError

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
