"""Blends: proportions, and that nothing but the number of samples decides what comes next."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data.rows import IntArray
from shardwise.data.samples.batch import Batch, Batches, BlendedBatches
from shardwise.data.samples.causal import TokenBatches
from shardwise.data.samples.order import BlendPattern, MixtureStage, SourceOrder

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


def test_partial_sequences_of_several_sources_keep_their_lengths() -> None:
    sources = {name: TokenBatches(np.arange(n), 16, seed=1, tail=True) for name, n in (("a", 20), ("b", 24))}
    blend = BlendedBatches(sources, [MixtureStage(0, 0, {"a": 0.5, "b": 0.5})])
    (batch,) = blend.eval_batches(1, 6, 0, 1, 6)
    assert batch.lengths is not None
    assert batch.lengths.tolist() == [16, 16, 3, 7, 0, 0]
