"""A 64-bit mixing function in integer arithmetic: the same on every machine and in every version of numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

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
