"""Sample order and batches: the same at any layout, each sample once an epoch."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.base.errors import ConfigError
from shardwise.data.samples.batch import IGNORE, Batch
from shardwise.data.samples.causal import TokenBatches
from shardwise.data.samples.order import SampleOrder, mix, mix_integer


def joined(batches: list[Batch]) -> tuple[np.ndarray, np.ndarray]:
    ids_SB, targets_SB = (
        np.concatenate([b.inputs[name] for b in batches], axis=1) for name in ("ids_SB", "targets_SB")
    )
    return ids_SB, targets_SB


unhurried = settings(deadline=None)


@unhurried
@given(num_samples=st.integers(1, 3000), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 10**6))
def test_an_epoch_holds_every_sample_once(num_samples: int, seed: int, epoch: int) -> None:
    order = SampleOrder(num_samples, seed).indices(epoch * num_samples, num_samples)
    assert np.array_equal(np.sort(order), np.arange(num_samples))


@unhurried
@given(
    num_samples=st.integers(1, 500),
    seed=st.integers(0, 2**63 - 1),
    start=st.integers(0, 2000),
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=6),
)
def test_order_does_not_depend_on_where_a_run_stops(num_samples: int, seed: int, start: int, counts: list[int]) -> None:
    whole = SampleOrder(num_samples, seed).indices(start, sum(counts))
    parts = []
    for count in counts:
        parts.append(SampleOrder(num_samples, seed).indices(start, count))
        start += count
    assert np.array_equal(np.concatenate(parts), whole)


def test_epochs_and_seeds_differ() -> None:
    first = SampleOrder(1000, 1).indices(0, 3000).reshape(3, 1000)
    other = SampleOrder(1000, 2).indices(0, 1000)
    for a, b in ((first[0], first[1]), (first[1], first[2]), (first[0], other), (first[0], np.arange(1000))):
        assert np.mean(a == b) < 0.02


def test_shuffling_is_even() -> None:
    """Each sample lands at each position equally often: χ² over 4,000 seeds, 81 degrees of freedom."""
    counts = np.zeros((10, 10))
    for seed in range(4000):
        counts[np.arange(10), SampleOrder(10, seed).indices(0, 10)] += 1
    assert ((counts - 400) ** 2 / 400).sum() < 140


def test_order_is_the_same_on_every_machine() -> None:
    """Checkpoints and golden curves rest on these numbers."""
    assert SampleOrder(10, 1234).indices(0, 20).tolist() == [8, 7, 0, 4, 3, 2, 1, 6, 5, 9, 6, 2, 9, 7, 3, 0, 4, 8, 5, 1]
    large = SampleOrder(3_000_000_007, 7).indices(2**40, 1000)
    assert hashlib.sha256(large.astype("<i8").tobytes()).hexdigest()[:16] == "95027a6a7d7b5e5d"


def test_mixing_is_the_same_for_arrays_and_integers() -> None:
    values = [0, 1, 2**63, 2**64 - 1]
    assert mix(np.array(values, dtype=np.uint64)).tolist() == [mix_integer(value) for value in values]


@pytest.mark.parametrize(("samples", "epochs"), [(1, "0.003"), (150, "0.50"), (300, "1.00"), (450_000, "1,500.00")])
def test_a_run_tells_how_often_it_reads_the_data(samples: int, epochs: str) -> None:
    assert TokenBatches(np.arange(601, dtype=np.int32), 2, seed=3).epochs(samples) == f"{epochs} epochs of 300 samples"


@settings(unhurried, max_examples=60)
@given(data=st.data())
def test_any_layout_reads_the_same_global_batches(data: st.DataObject) -> None:
    dp_size = data.draw(st.integers(1, 8))
    micro_batch = data.draw(st.integers(1, 4))
    accumulation = data.draw(st.integers(1, 4))
    length = data.draw(st.integers(1, 9))
    tokens = np.arange(length * data.draw(st.integers(1, 60)) + data.draw(st.integers(1, length)), dtype=np.int32)
    consumed = data.draw(st.integers(0, 500))
    size = dp_size * micro_batch * accumulation
    batches = TokenBatches(tokens, length, seed=3)
    ranks = [batches.local_batch(consumed, size, rank, dp_size, micro_batch) for rank in range(dp_size)]
    assert all(len(batch) == accumulation for batch in ranks)
    inputs_SB, targets_SB = joined([ranks[rank][m] for m in range(accumulation) for rank in range(dp_size)])
    whole = TokenBatches(tokens, length, seed=3).global_batch(consumed, size)
    assert np.array_equal(inputs_SB, whole.inputs["ids_SB"])
    assert np.array_equal(targets_SB, whole.inputs["targets_SB"])
    ordered = np.concatenate([ranks[rank][m].samples for m in range(accumulation) for rank in range(dp_size)])
    assert ordered.tolist() == whole.samples.tolist() == list(range(consumed, consumed + size))
    assert sum(int(batch.counts[0]) for rank in ranks for batch in rank) == size * length == whole.counts[0]
    assert np.array_equal(inputs_SB + 1, targets_SB)
    assert np.array_equal(inputs_SB[0] // length, batches.sampler.indices(consumed, size))


def test_a_run_resumed_at_another_degree_continues() -> None:
    """Stopped after 3 steps at DP 4, resumed at DP 2 with other micro-batches: the samples of one process."""
    tokens = np.arange(16 * 50 + 1, dtype=np.uint16)

    def step(number: int, dp_size: int, micro_batch: int) -> np.ndarray:
        ranks = [
            TokenBatches(tokens, 16, 5).local_batch(number * 8, 8, r, dp_size, micro_batch) for r in range(dp_size)
        ]
        return np.sort(np.concatenate([batch.inputs["ids_SB"][0] for rank in ranks for batch in rank]))

    for number in range(12):
        dp_size, micro_batch = (4, 1) if number < 3 else (2, 4)
        assert np.array_equal(step(number, dp_size, micro_batch), step(number, 1, 8))


def test_batches_are_int64_and_contiguous() -> None:
    batches = TokenBatches(np.arange(65, dtype=np.uint16), 16, seed=0)
    chosen = (batches.local_batch(0, 4, 0, 1, 2)[0], next(batches.eval_batches(1, 4, 0, 1, 2)))
    for array in (array for batch in chosen for array in batch.inputs.values()):
        assert array.shape == (16, 2)
        assert array.dtype == np.int64
        assert array.flags.c_contiguous


@unhurried
@given(
    dp_size=st.integers(1, 5),
    micro_batch=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    count=st.integers(1, 4),
    samples=st.integers(1, 40),
)
def test_evaluation_counts_each_sample_once(
    dp_size: int, micro_batch: int, accumulation: int, count: int, samples: int
) -> None:
    length = 4
    size = dp_size * micro_batch * accumulation
    batches = TokenBatches(np.arange(1, samples * length + 2, dtype=np.int32), length, seed=0)
    ranks = [list(batches.eval_batches(count, size, rank, dp_size, micro_batch)) for rank in range(dp_size)]
    assert len({len(batch) for batch in ranks}) == 1
    assert {batch.inputs["ids_SB"].shape for rank in ranks for batch in rank} == {(length, micro_batch)}
    ordered = [ranks[rank][m] for m in range(len(ranks[0])) for rank in range(dp_size)]
    inputs_SB, targets_SB = joined(ordered)
    expected = min(count * size, samples)
    real = (targets_SB != IGNORE).all(axis=0)
    assert sum(int(batch.counts[0]) for batch in ordered) == expected * length
    assert real.tolist() == [True] * expected + [False] * (len(real) - expected)
    assert (targets_SB[:, ~real] == IGNORE).all()
    assert (inputs_SB[:, ~real] == 0).all()
    assert np.array_equal(inputs_SB[:, real].T.ravel(), np.arange(1, expected * length + 1))
    assert np.array_equal(targets_SB[:, real], inputs_SB[:, real] + 1)


def test_what_cannot_be_cut_is_refused() -> None:
    batches = TokenBatches(np.arange(65, dtype=np.uint16), 16, seed=0)
    with pytest.raises(ConfigError, match=r"train\.global_batch \(6\) must be a multiple .* \(2 × 2\)"):
        batches.local_batch(0, 6, 0, 2, 2)
    with pytest.raises(ConfigError, match=r"data-parallel rank \(2\) must be in 0 … 1"):
        batches.local_batch(0, 8, 2, 2, 2)
    with pytest.raises(ConfigError, match=r"the tokens \(16\) must be at least train\.sequence_length \+ 1 \(17\)"):
        TokenBatches(np.arange(16, dtype=np.uint16), 16, seed=0)
    with pytest.raises(ConfigError, match=r"number of samples \(0\)"):
        SampleOrder(0, 0)


@pytest.mark.parametrize("length", [1, 4, 16, 100])
@pytest.mark.parametrize("tokens", [2, 16, 17, 18, 64, 65, 66])
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


def test_a_tail_needs_one_target() -> None:
    with pytest.raises(ConfigError, match=r"the tokens \(1\) must be at least 2"):
        TokenBatches(np.arange(1, dtype=np.uint16), 16, seed=0, tail=True)
