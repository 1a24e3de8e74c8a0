"""Sums of squares and norms that have the same bits in any order, and over any ranks."""

import math
from fractions import Fraction
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.optim.exact_sums import NOT_A_NUMBER, atom_elements, atom_squares, exact_sum, joined, limbs, norms
from tests.dist.dense import random

CPU = torch.device("cpu")
UNIT = Fraction(2) ** -320
FLOATS = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.builds(lambda mantissa, exponent: mantissa * 2.0**exponent, st.integers(1, 2**24 - 1), st.integers(-149, 103)),
    st.just(0.0),
)
"""Elements, of which those near 0 and those of any size are drawn alike."""


def squares(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).square()


@given(st.lists(FLOATS, max_size=50), st.randoms(use_true_random=False), st.integers(1, 7))
@settings(deadline=None, max_examples=60)
def test_neither_order_nor_splits_change_a_sum(values: list[float], generator: Random, size: int) -> None:
    whole = exact_sum(squares(values))
    other = list(values)
    generator.shuffle(other)
    assert joined(exact_sum(part) for part in squares(other).split(size)) == whole
    # Nothing is rounded.
    assert whole * UNIT == sum(Fraction(value) ** 2 for value in values)


def test_what_is_not_finite_makes_the_norm_nan() -> None:
    for bad in [math.nan, math.inf, 1e160]:
        total = exact_sum(torch.tensor([1.0, bad * bad, 2.0], dtype=torch.float64))
        assert total == NOT_A_NUMBER
        assert joined([5, total, 7]) == NOT_A_NUMBER
        # It is enough that one rank has it, and another norm is not concerned.
        found = norms(limbs([total, 0], CPU) + limbs([1 << 320, 1 << 320], CPU), 1)
        assert math.isnan(found[0])
        assert found[1] == 1.0


@given(st.lists(st.integers(0, 2**600), min_size=1, max_size=4), st.integers(1, 2000))
@settings(deadline=None, max_examples=40)
def test_limbs_of_many_ranks_hold_the_sum(sums: list[int], ranks: int) -> None:
    """Each of `ranks` ranks has an equal part, of which the divisor makes the whole."""
    found = norms(limbs(sums, CPU) * ranks, ranks)
    assert found == [math.sqrt(math.ldexp(float(total), -320)) for total in sums]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("atom", [1, 8, 32])
@given(
    runs=st.lists(st.integers(1, 40), min_size=1, max_size=5), seed=st.integers(0, 99), threads=st.sampled_from([1, 2])
)
@settings(deadline=None, max_examples=20)
def test_squares_without_neighbours(atom: int, dtype: torch.dtype, runs: list[int], seed: int, threads: int) -> None:
    before = torch.get_num_threads()
    values = random(seed, sum(runs) * atom).to(dtype)
    whole = atom_squares(values, atom)
    torch.set_num_threads(threads)
    try:
        parts = [atom_squares(part, atom) for part in values.split([length * atom for length in runs])]
        copies = [atom_squares(part.clone(), atom) for part in values.split([length * atom for length in runs])]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(torch.cat(copies), whole)
    torch.testing.assert_close(whole, values.double().view(-1, atom).square().sum(1), rtol=1e-5, atol=0)


@given(shape=st.lists(st.integers(1, 96), min_size=0, max_size=3), levels=st.integers(0, 5))
@settings(deadline=None, max_examples=100)
def test_no_layout_cuts_an_atom(shape: list[int], levels: int) -> None:
    grain = 2**levels
    atom = atom_elements(shape, grain)
    length = shape[-1] if shape else 1
    assert 32 % atom == 0, "ZeRO cuts at multiples of 32 elements"
    assert length % atom == 0
    for degree in (2**level for level in range(levels + 1)):
        if length % grain == 0:
            assert length // degree % atom == 0, f"tensor parallelism of degree {degree} cuts the last dim"
    if len(shape) == 1 and length % grain:
        assert atom == 1, "padding may cut a vector anywhere"
