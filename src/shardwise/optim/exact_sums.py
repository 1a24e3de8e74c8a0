"""Sums of squares that do not depend on the order of their terms, nor on the ranks that hold them.

The squares of `atom` neighbouring elements are added first, by one kernel whose result for an atom depends on its
elements alone. These sums are then added without rounding, as whole numbers of 2^-320, in any order (in bins of
exponents, as in Demmel and Nguyen, "Fast reproducible floating-point summation", 2013).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shardwise.optim.bucket_layout import ALIGNMENT, LIMBS

_LOWEST = -320  # exponent of the unit. Squares of float32 numbers are multiples of 2^-298; what is smaller counts as 0
_HIGHEST = 320
_BITS = 24  # bits of a limb, of which 2^39 ranks can add up theirs in an int64
assert (LIMBS - 1) * _BITS >= _HIGHEST - _LOWEST + 56, "a limb marks NaN, the others have room for 2^56 terms"

_SMALLEST, _LARGEST = 2.0**-40, 2.0**40
"""Norms of atoms between these have squares that float32 represents."""

NOT_A_NUMBER = -1
"""The sum in which a term is infinite or not a number; all other sums are at least 0."""


def atom_squares(values: Tensor, atom: int) -> Tensor:
    """Return the sum of squares of each atom in float64; the length is a multiple of `atom`."""
    by_atom = values.view(-1, atom)
    if values.dtype != torch.float32 or values.device.type != "cpu":
        # Here float64 also leaves almost nothing to the order in which a kernel adds an atom.
        norms: Tensor = torch.linalg.vector_norm(by_atom.double(), dim=1)
        return norms.square()
    norms = torch.linalg.vector_norm(by_atom, dim=1)
    # Rounded to float32, a square has few bits: its exact sum takes fewer steps.
    squares = norms.square().double()
    if not norms.numel() or (norms.amin() > _SMALLEST and norms.amax() < _LARGEST):
        return squares
    needs_float64 = ~((norms > _SMALLEST) & (norms < _LARGEST))
    atoms = by_atom[needs_float64]
    # Most of them are 0, such as gradients of tokens that a batch does not have.
    if atoms.any():
        squares[needs_float64] = torch.linalg.vector_norm(atoms.double(), dim=1).square()
    return squares


def exact_sum(terms: Tensor) -> int:
    """Return the sum of numbers that are at least 0, without rounding, in units of 2^-320."""
    if not terms.numel():
        return 0
    largest = float(terms.amax())
    if not largest < 2.0**_HIGHEST:
        return NOT_A_NUMBER
    # Terms of fewer bits than these have an exact sum in float64, and so have the roundings below.
    bits = 51 - len(terms).bit_length()
    exponent = math.frexp(largest)[1]
    remainder = terms
    total = 0
    while exponent > _LOWEST:
        exponent = max(exponent - bits, _LOWEST)
        unit = 2.0**exponent
        # Adding 1.5 · 2^52 units rounds to a multiple of the unit; what is cut off goes to the next bin.
        anchor = 1.5 * 2.0**52 * unit
        rounded = (remainder + anchor).sub_(anchor)
        total += int(float(rounded.sum()) / unit) << (exponent - _LOWEST)
        remainder = remainder - rounded
        if not remainder.any():
            break
    return total


def joined(sums: Iterable[int]) -> int:
    """Return the sum of exact sums."""
    known = list(sums)
    return NOT_A_NUMBER if NOT_A_NUMBER in known else sum(known)


def limbs(sums: Sequence[int], device: torch.device) -> Tensor:
    """Return exact sums as int64 numbers `[n, LIMBS]`, which ranks can add up."""
    rows = []
    for total in sums:
        if total == NOT_A_NUMBER:
            rows.append([0] * (LIMBS - 1) + [1])
        else:
            rows.append([(total >> (_BITS * number)) & (2**_BITS - 1) for number in range(LIMBS - 1)] + [0])
    return torch.tensor(rows, dtype=torch.int64, device=device).view(-1, LIMBS)


def norms(added_limbs: Tensor, divisor: int) -> list[float]:
    """Return the norm of each exact sum of squares divided by `divisor`, from the ranks' added limbs `[n, LIMBS]`."""
    roots = []
    for *numbers, mark in added_limbs.tolist():
        total = sum(number << (_BITS * place) for place, number in enumerate(numbers))
        roots.append(math.sqrt(math.ldexp(float(total // divisor), _LOWEST)) if not mark else math.nan)
    return roots


def atom_elements(shape: Sequence[int], grain: int) -> int:
    """Return the elements of an atom of a tensor that lies in memory with this shape, in the whole model.

    No layout cuts an atom: ZeRO cuts at multiples of `ALIGNMENT` elements, and tensor parallelism cuts rows of a matrix
    into at most `grain` equal parts, or leaves them whole. A vector may be cut anywhere: runs of a fused bias, and of
    one with padding, have lengths that its own does not tell.
    """
    if len(shape) < 2:
        return 1
    length = shape[-1]
    if length % grain == 0:
        return math.gcd(ALIGNMENT, length // grain)
    return math.gcd(ALIGNMENT, length)
