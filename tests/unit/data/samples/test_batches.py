"""What all kinds of batches promise: the same samples at any layout and after any stop, each once in an evaluation."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.base.errors import ConfigError
from shardwise.data.reading.hdf5_files import HDF5Shard, HDF5ShardRows
from shardwise.data.samples import chat_batches
from shardwise.data.samples.batch import IGNORE, Batch, Batches, BlendedBatches
from shardwise.data.samples.causal import DocumentBatches, TokenBatches
from shardwise.data.samples.chat_batches import ConversationBatches
from shardwise.data.samples.order import MixtureStage
from shardwise.data.samples.sentence_pairs import ShardBatches
from tests.unit.data.hdf5_shards import arrays, write
from tests.unit.data.samples.small_batches import ROOM, chats, many, packed_row, pairs, whole

Make = Callable[[int], Batches]


def tokens(seed: int) -> Batches:
    draws = np.random.default_rng(seed)
    length = int(draws.integers(1, 10))
    number = length * draws.integers(1, 60) + draws.integers(1, length + 1)
    return TokenBatches(np.arange(1, number + 1, dtype=np.int32), length, seed)


def documents(seed: int) -> Batches:
    draws = np.random.default_rng(seed)
    lengths = [draws.integers(0, 13, draws.integers(0, 4)).tolist() for _ in range(draws.integers(1, 13))]
    return DocumentBatches(whole([*lengths, [5]]), 4, seed)


def blend(seed: int, *later: MixtureStage) -> Batches:
    draws = np.random.default_rng(seed)
    names = "abcdef"[: draws.integers(1, 7)]
    sources = {name: TokenBatches(np.arange(4 * draws.integers(1, 30) + 1), 4, seed) for name in names}
    weights = {name: int(draws.integers(1, 40)) / 10 for name in names}
    return BlendedBatches(sources, [MixtureStage(0, 0, weights), *later])


KINDS: dict[str, Make] = {
    "tokens": tokens,
    "documents": documents,
    "packed": lambda seed: packed_row(seed=seed),
    "conversations": lambda seed: ConversationBatches(chats(30, seed), ROOM, seed),
    "pairs": lambda seed: pairs(many(12, seed), seed=seed),
    "blend": blend,
}


@pytest.fixture(scope="module", params=[*KINDS, "shards"])
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """Makes batches by their seed, as a process does that has just begun."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_batches, "WINDOW", 16)
        if request.param in KINDS:
            yield KINDS[request.param]
        else:
            folder = tmp_path_factory.mktemp("shards")
            of = {5: arrays(5), 1: arrays(1, 5, predictions=6), 9: arrays(9, 6)}
            # The one that is packed is read whole, the others are mapped.
            paths = [
                write(folder / f"{rows}.hdf5", found, compression="gzip" if rows == 1 else None)
                for rows, found in of.items()
            ]
            shards = [HDF5Shard.open(Path(path), 16) for path in paths]
            yield lambda seed: ShardBatches(HDF5ShardRows(shards, 300, 2), 0, sum(of), seed)


def in_turn(ranks: list[list[Batch]]) -> list[Batch]:
    """The first micro-batches of all ranks, then the second ones."""
    return [batch for micro_batches in zip(*ranks, strict=True) for batch in micro_batches]


def counted(batch: Batch) -> list[int]:
    """The targets of each objective that count."""
    names = [name for name in ("targets_SB", "targets_PB", "next_sentence_B") if name in batch.inputs]
    return [np.count_nonzero(batch.inputs[name] != IGNORE) for name in names]


def expect_same(parts: list[Batch], expected: Batch) -> None:
    for name, array in expected.inputs.items():
        assert np.array_equal(np.concatenate([part.inputs[name] for part in parts], axis=-1), array), name
    assert np.concatenate([part.samples for part in parts]).tolist() == expected.samples.tolist()
    assert sum(part.counts for part in parts).tolist() == expected.counts.tolist() == counted(expected)


sizes = {"dp_size": st.integers(1, 6), "micro_batch": st.integers(1, 4), "accumulation": st.integers(1, 3)}
seeds = st.integers(0, 2**63 - 1)


def expect_the_same_at_any_layout(
    make: Make, seed: int, consumed: int, dp_size: int, micro_batch: int, accumulation: int
) -> None:
    """Each rank begins anew at each batch: nothing but the number of samples is handed on."""
    size = dp_size * micro_batch * accumulation
    parts = [
        batch
        for start in (consumed, consumed + size)
        for batch in in_turn([make(seed).local_batch(start, size, r, dp_size, micro_batch) for r in range(dp_size)])
    ]
    assert {len(part.samples) for part in parts} == {micro_batch}
    expected = make(seed).global_batch(consumed, 2 * size)
    assert expected.samples.tolist() == list(range(consumed, consumed + 2 * size))
    expect_same(parts, expected)


@settings(deadline=None, max_examples=8)
@given(seed=seeds, consumed=st.integers(0, 150), **sizes)
def test_any_layout_and_any_stop_read_the_same_samples(make: Make, **drawn: int) -> None:
    expect_the_same_at_any_layout(make, **drawn)


@settings(deadline=None, max_examples=15)
@given(seed=seeds, consumed=st.integers(0, 300), begin=st.integers(0, 400), **sizes)
def test_so_do_the_stages_of_a_blend(begin: int, **drawn: int) -> None:
    expect_the_same_at_any_layout(lambda seed: blend(seed, MixtureStage(2, begin, {"a": 1.0})), **drawn)


def test_any_part_may_be_asked_for_first(make: Make) -> None:
    expected, batches = make(7).global_batch(0, 120), make(7)
    assert [len(part) for part in batches.draw(3, 0)] == [0, 0], "a batch of a mixture may have none of a source"
    for consumed in (100, 40, 0, 60):
        found = batches.global_batch(consumed, 20)
        for name, array in found.inputs.items():
            assert np.array_equal(array, expected.inputs[name][..., consumed : consumed + 20]), name
    other = make(8).global_batch(0, 120)
    assert not np.array_equal(other.inputs["ids_SB"], expected.inputs["ids_SB"])


@settings(deadline=None, max_examples=10)
@given(seed=seeds, rounds=st.integers(1, 20), **sizes)
def test_each_sample_is_evaluated(
    make: Make, seed: int, rounds: int, dp_size: int, micro_batch: int, accumulation: int
) -> None:
    """In their own order; samples that fill up the last micro-batches are blank."""
    size, batches = dp_size * micro_batch * accumulation, make(seed)
    parts = in_turn([[*make(seed).eval_batches(rounds, size, r, dp_size, micro_batch)] for r in range(dp_size)])
    numbers = np.arange(min(rounds * size, batches.num_samples))
    samples = batches.collate(batches.evaluated(numbers), np.zeros_like(numbers), numbers)
    assert {len(part.samples) for part in parts} == {micro_batch}
    missing = len(parts) * micro_batch - len(numbers)
    blank = batches.blank(missing).inputs
    for name, array in samples.inputs.items():
        expected = np.concatenate([array, blank[name]], axis=-1) if missing else array
        assert np.array_equal(np.concatenate([part.inputs[name] for part in parts], axis=-1), expected), name
    assert sum(part.counts for part in parts).tolist() == samples.counts.tolist()


def test_what_cannot_be_cut_is_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"train\.global_batch \(6\) must be a multiple .* \(2 × 2\)"):
        make(0).local_batch(0, 6, 0, 2, 2)
    with pytest.raises(ConfigError, match=r"data-parallel rank \(2\) must be in 0 … 1"):
        make(0).local_batch(0, 8, 2, 2, 2)
