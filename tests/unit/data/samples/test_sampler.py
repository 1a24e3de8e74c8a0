"""The order of samples, each once an epoch, and the samples of a row of tokens."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.base.errors import ConfigError
from shardwise.data.samples.batch import IGNORE
from shardwise.data.samples.causal import TokenBatches
from shardwise.data.samples.order import SampleOrder, mix_bits, mix_integer

seeds = st.integers(0, 2**63 - 1)


@settings(deadline=None, max_examples=50)
@given(num_samples=st.integers(1, 3000), seed=seeds, epoch=st.integers(0, 10**6))
def test_an_epoch_holds_every_sample_once(num_samples: int, seed: int, epoch: int) -> None:
    order = SampleOrder(num_samples, seed).indices(epoch * num_samples, num_samples)
    assert np.array_equal(np.sort(order), np.arange(num_samples))


@settings(deadline=None, max_examples=40)
@given(
    num_samples=st.integers(1, 500),
    seed=seeds,
    start=st.integers(0, 2000),
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=6),
)
def test_order_does_not_depend_on_where_a_run_stops(num_samples: int, seed: int, start: int, counts: list[int]) -> None:
    whole = SampleOrder(num_samples, seed).indices(start, sum(counts))
    starts = start + np.cumsum([0, *counts])
    parts = [SampleOrder(num_samples, seed).indices(int(a), count) for a, count in zip(starts, counts, strict=False)]
    assert np.array_equal(np.concatenate(parts), whole)


def test_orders_differ_and_are_the_same_on_every_machine() -> None:
    first = SampleOrder(1000, 1).indices(0, 3000).reshape(3, 1000)
    other = SampleOrder(1000, 2).indices(0, 1000)
    for a, b in ((first[0], first[1]), (first[1], first[2]), (first[0], other), (first[0], np.arange(1000))):
        assert np.mean(a == b) < 0.02
    # Checkpoints and golden curves rest on these numbers.
    assert SampleOrder(10, 1234).indices(0, 20).tolist() == [8, 7, 0, 4, 3, 2, 1, 6, 5, 9, 6, 2, 9, 7, 3, 0, 4, 8, 5, 1]
    large = SampleOrder(3_000_000_007, 7).indices(2**40, 1000)
    assert hashlib.sha256(large.astype("<i8").tobytes()).hexdigest()[:16] == "95027a6a7d7b5e5d"
    values = [0, 1, 2**63, 2**64 - 1]
    assert mix_bits(np.array(values, dtype=np.uint64)).tolist() == [mix_integer(value) for value in values]


def test_shuffling_is_even() -> None:
    """Each sample lands at each position equally often: χ² over 1,000 seeds, 81 degrees of freedom."""
    counts = np.zeros((10, 10))
    for seed in range(1000):
        counts[np.arange(10), SampleOrder(10, seed).indices(0, 10)] += 1
    assert ((counts - 100) ** 2 / 100).sum() < 140


@pytest.mark.parametrize(("length", "number"), [(1, 2), (4, 65), (9, 100), (16, 17)])
def test_samples_follow_one_another_in_the_row(length: int, number: int) -> None:
    batches = TokenBatches(np.arange(number, dtype=np.int32), length, seed=3)
    batch = batches.global_batch(5, 3 * batches.num_samples)
    ids_SB, targets_SB = batch.inputs["ids_SB"], batch.inputs["targets_SB"]
    assert np.array_equal(ids_SB[0], batches.sampler.indices(5, 3 * batches.num_samples) * length)
    assert np.array_equal(ids_SB, ids_SB[0] + np.arange(length)[:, None])
    assert np.array_equal(targets_SB, ids_SB + 1)
    assert batch.counts.tolist() == [3 * batches.num_samples * length]
    assert (batches.blank(2).inputs["ids_SB"] == 0).all()


@pytest.mark.parametrize("length", [1, 16, 100])
@pytest.mark.parametrize("tokens", [2, 17, 18, 64])
def test_with_its_tail_every_token_is_a_target_once(tokens: int, length: int) -> None:
    row = np.arange(1000, 1000 + tokens, dtype=np.uint16)
    batches = TokenBatches(row, length, seed=0, tail=True)
    found, counted = [], 0
    for rank in range(3):
        for batch in batches.eval_batches(batches.num_samples, 6, rank, 3, 2):
            ids_SB, targets_SB = batch.inputs["ids_SB"], batch.inputs["targets_SB"]
            assert ids_SB.shape == targets_SB.shape == (length, 2)
            real = targets_SB != IGNORE
            assert (targets_SB[real] == ids_SB[real] + 1).all(), "a target follows its input"
            found += targets_SB[real].tolist()
            counted += int(batch.counts[0])
    assert sorted(found) == row[1:].tolist()
    assert counted == tokens - 1


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"the tokens \(16\) must be at least train\.sequence_length \+ 1 \(17\)"):
        TokenBatches(np.arange(16, dtype=np.uint16), 16, seed=0)
    with pytest.raises(ConfigError, match=r"the tokens \(1\) must be at least 2"):
        TokenBatches(np.arange(1, dtype=np.uint16), 16, seed=0, tail=True)
    with pytest.raises(ConfigError, match=r"number of samples \(0\)"):
        SampleOrder(0, 0)
