"""What all kinds of batches promise: the same samples at any layout and after any stop; and the shares of blends."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.base.errors import ConfigError
from shardwise.data.reading.hdf5_files import HDF5Shard, HDF5ShardRows
from shardwise.data.rows import IntArray
from shardwise.data.samples import chat_batches
from shardwise.data.samples.batch import IGNORE, Batch, Batches, BlendedBatches
from shardwise.data.samples.causal import DocumentBatches, TokenBatches
from shardwise.data.samples.chat_batches import ConversationBatches
from shardwise.data.samples.order import BlendPattern, MixtureStage, SourceOrder
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


def test_any_part_may_be_asked_for_first_and_is_even(make: Make) -> None:
    expected, batches = make(7).global_batch(0, 120), make(7)
    assert [len(part) for part in batches.draw(3, 0)] == [0, 0], "a batch of a mixture may have none of a source"
    for consumed in (100, 40, 0, 60):
        found = batches.global_batch(consumed, 20)
        for name, array in found.inputs.items():
            assert np.array_equal(array, expected.inputs[name][..., consumed : consumed + 20]), name
    other = make(8).global_batch(0, 120)
    assert not np.array_equal(other.inputs["ids_SB"], expected.inputs["ids_SB"])
    with pytest.raises(ConfigError, match=r"train\.global_batch \(6\) must be a multiple .* \(2 × 2\)"):
        make(0).local_batch(0, 6, 0, 2, 2)
    with pytest.raises(ConfigError, match=r"data-parallel rank \(2\) must be in 0 … 1"):
        make(0).local_batch(0, 8, 2, 2, 2)


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


NAMES = [f"s{number}" for number in range(40)]
unhurried = settings(deadline=None, max_examples=50)
weights_of = st.lists(st.integers(1, 40).map(lambda number: number / 10), min_size=1, max_size=6)


class Numbered(Batches):
    """Samples that tell source, index and epoch."""

    objectives = ("lm",)

    def __init__(self, source: int, num_samples: int) -> None:
        super().__init__(num_samples, seed=source)
        self.source = source

    def collate(self, indices: IntArray, epochs: IntArray, samples: IntArray) -> Batch:
        rows = np.stack([np.full_like(indices, self.source), indices, epochs])
        return Batch({"ids_SB": rows}, np.array([np.count_nonzero(indices >= 0)]), samples)


def blended(weights: list[float], sizes: list[int]) -> BlendedBatches:
    """Sources with letters as names."""
    sources = {NAMES[source]: Numbered(source, size) for source, size in enumerate(sizes)}
    return BlendedBatches(sources, [MixtureStage(0, 0, dict(zip(NAMES, weights, strict=False)))])


def told(batches: list[Batch]) -> list[list[int]]:
    """(source, index, epoch) of each sample."""
    return np.concatenate([batch.inputs["ids_SB"] for batch in batches], axis=1).T.tolist()


def test_weights_are_met_exactly_or_to_a_ten_thousandth() -> None:
    for weights, counts in (
        ([0.7, 0.3], [7, 3]),
        ([70, 30], [7, 3]),
        ([3.5], [1]),
        ([1, 1, 1], [1, 1, 1]),
        ([0.12345, 0.87655], [2469, 17531]),
        ([1 / 3, 2 / 3, 1.0], [1667, 3333, 5000]),
    ):
        assert BlendPattern(weights).counts == counts
    assert BlendPattern([0.7, 0.3]).sources(np.arange(10)).tolist() == [0, 0, 1, 0, 0, 1, 0, 0, 0, 1]
    assert BlendPattern([1, 1]).sources(np.arange(4)).tolist() == [0, 1, 0, 1]
    assert min(BlendPattern([1e9, 1, 2]).counts) == 1, "every source has its turn"


@unhurried
@given(weights=weights_of, start=st.integers(0, 10**9), length=st.integers(1, 2000))
def test_every_beginning_has_each_source_within_one_sample(weights: list[float], start: int, length: int) -> None:
    pattern = BlendPattern(weights)
    samples = np.arange(start, start + length)
    sources = pattern.sources(samples)
    shares = np.array(pattern.counts) / sum(pattern.counts)
    for source, share in enumerate(shares):
        before = pattern.before(source, samples)
        assert np.abs(before - samples * share).max() < 1
        assert np.array_equal(np.diff(before), (sources == source)[:-1]), "samples of a source follow one another"
    assert np.abs(shares - np.array(weights) / sum(weights)).max() < 1e-12


@unhurried
@given(weights=weights_of, data=st.data())
def test_a_stage_goes_on_where_each_source_was(weights: list[float], data: st.DataObject) -> None:
    names = NAMES[: len(weights)]
    begins = sorted(data.draw(st.sets(st.integers(1, 200), min_size=1, max_size=3)))
    stages = [MixtureStage(0, 0, dict(zip(names, weights, strict=True)))]
    for begin in begins:
        chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
        stages.append(MixtureStage(begin, begin, {name: data.draw(st.integers(1, 9)) for name in chosen}))
    order = SourceOrder(names, stages)
    samples = np.arange(300)
    sources = order.sources(samples)
    for source in range(len(names)):
        counted = np.cumsum(sources == source) - (sources == source)
        assert np.array_equal(order.before(source, samples), counted)
    for stage, end in zip(stages, [*begins, 300], strict=True):
        assert {names[source] for source in sources[stage.sample : end]} <= set(stage.weights)


def test_each_source_has_its_own_order_and_epochs() -> None:
    blend = blended([0.5, 0.5], [3, 100])
    found = np.array(told([blend.global_batch(consumed, 8) for consumed in (0, 8, 16)]))
    small = found[found[:, 0] == 0]
    assert small[:, 2].tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert small[:, 1].tolist() == Numbered(0, 3).sampler.indices(0, 12).tolist()
    assert found[found[:, 0] == 1][:, 1].tolist() == Numbered(1, 100).sampler.indices(0, 12).tolist()
    blend = blended([0.7, 0.3], [14, 600])
    assert blend.epochs(1000) == "s0: 50.00 epochs of 14 samples and s1: 0.50 epochs of 600 samples"
    assert blend.repeated(1000) == {"s0": 50.0, "s1": 0.5}
    sources = {name: TokenBatches(np.arange(n), 16, seed=1, tail=True) for name, n in (("a", 20), ("b", 24))}
    blend = BlendedBatches(sources, [MixtureStage(0, 0, {"a": 0.5, "b": 0.5})])
    (batch,) = blend.eval_batches(1, 6, 0, 1, 6)
    assert batch.lengths is not None
    assert batch.lengths.tolist() == [16, 16, 3, 7, 0, 0]


@unhurried
@given(data=st.data())
def test_an_evaluation_goes_through_all_sources(data: st.DataObject) -> None:
    weights = data.draw(weights_of)
    sizes = data.draw(st.lists(st.integers(1, 30), min_size=len(weights), max_size=len(weights)))
    rounds, size = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 12))
    blend = blended(weights, sizes)
    real = [(source, index) for source, index, _ in told([*blend.eval_batches(rounds, size, 0, 1, size)]) if index >= 0]
    expected = min(rounds * size, sum(sizes))
    assert len(real) == len(set(real)) == expected
    for source, number in enumerate(sizes):
        indices = [index for each, index in real if each == source]
        assert indices == list(range(len(indices)))
        assert len(indices) <= number
    # As in training, until a source is exhausted.
    pattern = blend.order.sources(np.arange(expected))
    left = [
        int(np.flatnonzero(np.cumsum(pattern == source) > number)[0])
        for source, number in enumerate(sizes)
        if (pattern == source).sum() > number
    ]
    alike = min(left, default=expected)
    assert [source for source, _ in real[:alike]] == pattern[:alike].tolist()
