"""Masked tokens: how many, which, and what the model sees in their place."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data.samples.batch import IGNORE
from shardwise.data.samples.order import Draws
from shardwise.data.samples.sentence_pairs import Masking

MASK, FIRST, LAST = 3, 10, 999
ORDINARY = np.arange(FIRST, LAST + 1)


def draws(samples: int, epoch: int = 0, seed: int = 7) -> Draws:
    return Draws(seed, np.full(samples, epoch), np.arange(samples))


def within(found: int, trials: int, probability: float) -> bool:
    """Five standard deviations of a binomial."""
    return abs(found - trials * probability) <= 5 * math.sqrt(trials * probability * (1 - probability))


@settings(deadline=None, max_examples=50)
@given(
    candidates=st.lists(st.lists(st.booleans(), min_size=20, max_size=20), min_size=1, max_size=5),
    fraction=st.floats(0.01, 1.0),
    predictions=st.integers(1, 20),
)
def test_how_many_are_predicted(candidates: list[list[bool]], fraction: float, predictions: int) -> None:
    candidates_BS = np.array(candidates)
    ids_BS = FIRST + np.arange(candidates_BS.size).reshape(candidates_BS.shape)
    masking = Masking(fraction, predictions, MASK, ORDINARY)
    masked_BS, positions_BP, targets_BP = masking.apply(ids_BS, candidates_BS, draws(len(ids_BS)))
    assert positions_BP.shape == targets_BP.shape == (len(ids_BS), predictions)
    for ids, allowed, masked, positions, targets in zip(
        ids_BS, candidates_BS, masked_BS, positions_BP, targets_BP, strict=True
    ):
        usable = int(allowed.sum())
        wanted = min(predictions, usable, max(1, math.floor(fraction * usable + 0.5)))
        assert (targets != IGNORE).tolist() == [True] * wanted + [False] * (predictions - wanted)
        assert (np.diff(positions[:wanted]) > 0).all()
        assert allowed[positions[:wanted]].all()
        assert (positions[wanted:] == 0).all()
        assert np.array_equal(targets[:wanted], ids[positions[:wanted]])
        untouched = np.setdiff1d(np.arange(len(ids)), positions[:wanted])
        assert np.array_equal(masked[untouched], ids[untouched])


def test_masking_is_even() -> None:
    """15 % of tokens, at every position alike; four in five hidden, one in ten random, one in ten as they were."""
    samples, length, predictions = 4000, 100, 20
    ids_BS = np.full((samples, length), 5)  # no ordinary token: each random one shows
    candidates_BS = np.ones_like(ids_BS, dtype=bool)
    masking = Masking(0.15, predictions, MASK, ORDINARY)
    masked_BS, positions_BP, targets_BP = masking.apply(ids_BS, candidates_BS, draws(samples))
    chosen_BP = targets_BP != IGNORE
    total = int(chosen_BP.sum())
    assert total == 15 * samples
    for count in np.bincount(positions_BP[chosen_BP], minlength=length).tolist():
        assert within(count, samples, 0.15)
    shown = np.take_along_axis(masked_BS, positions_BP, axis=1)[chosen_BP]
    assert within(int((shown == MASK).sum()), total, 0.8)
    assert within(int((shown == 5).sum()), total, 0.1)
    random = shown[(shown != MASK) & (shown != 5)]
    assert random.min() >= FIRST
    assert random.max() <= LAST
    halves = int((random < (FIRST + LAST + 1) / 2).sum())
    assert within(halves, len(random), 0.5)


def test_draws_depend_on_everything_that_names_them() -> None:
    base = draws(100).hashes(0)
    for other in (draws(100, epoch=1), draws(100, seed=8)):
        assert not np.isin(base, other.hashes(0)).any()
    assert not np.isin(base, draws(100).hashes(1)).any()
    assert np.array_equal(base, draws(200).hashes(0)[:100])
    table = draws(100).table(0, 8)
    assert len(np.unique(table)) == 800
    assert np.array_equal(draws(100).table(0, 4), table[:, :4])
    assert int(base[0]) == 8781942722138690569, "the same on every machine"
