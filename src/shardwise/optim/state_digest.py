"""The hash of a training's state, which no layout changes: its arithmetic, and its texts.

A tensor x of shape [n_1, …, n_d] has the sum

    S = Σ over all elements of  bits(x[i_1, …, i_d]) · f_1(i_1) · … · f_d(i_d)  modulo 2^64,

where the factors f are odd 64-bit numbers of SplitMix64. Elements are added in any order, and on any rank. A sum over a
box is taken one dimension at a time, so that most elements cost one multiplication and one addition. One changed
element always changes S, since its factor is odd. Other changes leave S as it is with a probability below 2^-50; if
they are in the exponents of float32 alone, which are high bits, about 2^-40, and in sign bits alone, 2^-26. A hash is
for tensors of one's own: whoever knows the factors can make tensors of equal sums.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shardwise.base.tensor_box import Box

Factors: TypeAlias = npt.NDArray[np.uint64]
TensorSums: TypeAlias = Mapping[str, Mapping[str, int]]
"""State (`model`, `exp_avg`, …) → canonical name → sum of the tensor, from 0 to 2^64 − 1."""
LOW_FACTOR = 0x9FB21C651E98DF25 - 2**64
"""An element of 8 bytes counts as its high 4 bytes, plus this number times its low 4 bytes."""
_INCREMENT = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
_STREAM = 0xD1B54A32D192ED03  # distance of the first states of two dimensions' streams
_DIGITS = 8  # hexadecimal digits of a tensor's digest, enough to tell which tensors differ


@functools.lru_cache(maxsize=64)
def dimension_factors(dim: int, count: int) -> Factors:
    """Return a state digest's odd factors of the indices of a dimension; `dim` counts from the last one, which is 0."""
    x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_INCREMENT)
    x += np.uint64(_STREAM * (dim + 1) % 2**64)
    for shift, factor in _ROUNDS:
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    return x | np.uint64(1)


def _box_factors(shape: Sequence[int], box: Box) -> list[Factors]:
    last = len(shape) - 1
    return [
        dimension_factors(last - dim, shape[dim])[start : start + size]
        for dim, (start, size) in enumerate(zip(box.start, box.size, strict=True))
    ]


def box_sum(values: npt.NDArray[Any], shape: Sequence[int], box: Box) -> int:
    """Return the part of a tensor's sum in a state digest that comes from a box.

    Args:
        values: the box's elements, of shape `box.size`; their bits count, whatever their dtype.
        shape: shape of the whole canonical tensor.
    """
    x = np.ascontiguousarray(values).reshape(values.shape)
    x = x.view(f"<i{x.itemsize}").astype(np.int64)
    if values.itemsize == 8:
        x = (x >> 32) + (x & 0xFFFF_FFFF) * np.int64(LOW_FACTOR)
    total: npt.NDArray[np.uint64] = x.view(np.uint64)
    for factor in reversed(_box_factors(shape, box)):
        total = (total * factor).sum(axis=-1, dtype=np.uint64)
    return int(total)


@dataclass(frozen=True)
class StateHash:
    """The digest of weights and optimizer state after a step, and of the place in the training."""

    place: Mapping[str, int]  # numbers that say how far the training is, and its seed
    sums: TensorSums

    @property
    def text(self) -> str:
        """The hash of all: 16 hexadecimal digits."""
        lines = [f"{name}={number}" for name, number in sorted(self.place.items())]
        lines += [f"{state}/{name}={number:016x}" for state, name, number in self._entries()]
        return _digest("\n".join(lines), 16)

    def digests(self) -> dict[str, str]:
        """Return for each state the digests of its tensors, 8 digits each, in the order of their names."""
        texts: dict[str, str] = {}
        for state, name, number in self._entries():
            texts[state] = texts.get(state, "") + _digest(f"{state}/{name}={number:016x}", _DIGITS)
        return texts

    def names(self) -> dict[str, list[str]]:
        """Return for each state the names of its tensors, in their order."""
        return {state: sorted(by_name) for state, by_name in sorted(self.sums.items())}

    def recorded(self) -> dict[str, Any]:
        """Return the hash as a checkpoint's manifest has it."""
        sums = {
            state: {name: f"{number:016x}" for name, number in by_name.items()} for state, by_name in self.sums.items()
        }
        return {"hash": self.text, "sums": sums}

    def _entries(self) -> Iterator[tuple[str, str, int]]:
        for state, names in self.names().items():
            for name in names:
                yield state, name, self.sums[state][name]


def digest_place(step: int, samples: int, tokens: int, position: int, seed: int) -> dict[str, int]:
    """Return the part of a state digest that is no tensor: the place in the data, and what random numbers follow."""
    return {"step": step, "samples": samples, "tokens": tokens, "position": position, "seed": seed}


def digests_by_tensor(digests: Mapping[str, str], names: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the digest of each tensor of optimizer state by `STATE/NAME`, from `StateHash.digests` and `names`."""
    return {
        f"{state}/{name}": digests.get(state, "")[number * _DIGITS : (number + 1) * _DIGITS]
        for state, of_state in names.items()
        for number, name in enumerate(of_state)
    }


def _digest(text: str, digits: int) -> str:
    return hashlib.blake2b(text.encode(), digest_size=digits // 2).hexdigest()
