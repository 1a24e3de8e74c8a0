"""Random numbers that are functions of what they are for, not of a generator's history: the same on every device.

The bits are those of SplitMix64 (Steele, Lea and Flood 2014, section 3): number i of the stream with seed s is
`mixed(s + i · INCREMENT)`, in arithmetic modulo 2^64.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

# SplitMix64's constants, as the negative int64 with the same bits: torch's integers are signed.
INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def hashed(*parts: object) -> int:
    """A 63-bit hash of some names and numbers."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def mixed(x: Tensor) -> Tensor:
    """SplitMix64's number for each 64-bit state; the argument stays as it is."""
    x = x + INCREMENT
    shifted = torch.empty_like(x)
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, None)):
        torch.bitwise_right_shift(x, shift, out=shifted)
        # torch shifts int64 arithmetically: copies of the sign bit come in from the left and are masked away.
        x ^= shifted.bitwise_and_((1 << (64 - shift)) - 1)
        if factor is not None:
            x *= factor
    return x
