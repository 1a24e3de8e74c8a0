"""Arrays that all rooms of data share, and the hash of integers that orders and divides data on every machine alike."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

_MASK = (1 << 64) - 1
# The constants of SplitMix64: 2^64 divided by the golden ratio, and the multipliers of Stafford's "Mix13", which were
# found by a search for the best avalanche.
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


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


@dataclass(frozen=True)
class Sentences:
    """The bounds of the sentences and the documents of a row of tokens.

    Attributes:
        bounds: first token of each sentence, then the number of tokens: [sentences + 1], increasing.
        documents: first sentence of each document, then the number of sentences: [documents + 1], increasing.
    """

    bounds: IntArray
    documents: IntArray

    def __post_init__(self) -> None:
        for row in (self.bounds, self.documents):
            assert row.ndim == 1
            assert row[0] == 0
