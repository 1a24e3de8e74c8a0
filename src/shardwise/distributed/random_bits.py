"""Random numbers that are functions of what they are for, not of a generator's history: the same on every device.

Two kinds: 64 bits by SplitMix64 (Steele, Lea and Flood 2014, section 3), whose number i of the stream with seed s is
`splitmix64(s + i · INCREMENT)` modulo 2^64; and 32 bits by `scramble_`, in a third of the time on a CPU.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

# Constants above the largest signed integer stand as the negative one with the same bits: torch's integers are signed.
INCREMENT = 0x9E3779B97F4A7C15 - 2**64
INCREMENT_32 = 0x9E3779B9 - 2**32
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64
_FIRST_32 = 0x7FEB352D
_SECOND_32 = 0x846CA68B - 2**32


def hashed(*parts: object) -> int:
    """A 63-bit hash of some names and numbers, for seeds of random numbers."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def splitmix64(x: Tensor) -> Tensor:
    """The random bits of SplitMix64 for each 64-bit state; the argument stays as it is."""
    x = x + INCREMENT
    shifted = torch.empty_like(x)
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, None)):
        _fold_(x, shift, shifted)
        if factor is not None:
            x *= factor
    return x


def scramble_(x: Tensor, key: int | Tensor) -> Tensor:
    """Replace int32 numbers by random ones; different numbers stay different. A tensor as key is int32, `[]`.

    It is lowbias32 (Wellons 2018, https://github.com/skeeto/hash-prospector) with a key between its two rounds, so that
    the same numbers under two keys give results that have nothing in common.
    """
    shifted = torch.empty_like(x)
    _fold_(x, 16, shifted)
    x *= _FIRST_32
    x ^= key if isinstance(key, Tensor) else wrapped(key, 32)
    _fold_(x, 15, shifted)
    x *= _SECOND_32
    _fold_(x, 16, shifted)
    return x


def _fold_(x: Tensor, shift: int, shifted: Tensor) -> None:
    """`x ^= x >> shift`; torch's shift of signed integers copies the sign bit from the left, which is masked away."""
    torch.bitwise_right_shift(x, shift, out=shifted)
    x ^= shifted.bitwise_and_((1 << (8 * x.itemsize - shift)) - 1)


def wrapped(number: int, bits: int) -> int:
    """A random number as a signed integer of so many bits, as torch has them: equal to `number` modulo 2^bits."""
    half = 1 << (bits - 1)
    return (number + half) % (2 * half) - half
