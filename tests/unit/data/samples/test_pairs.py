"""Sentence pairs: what a sample holds, and that nothing but seed, epoch and index decides it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data.samples.batch import IGNORE, Batch
from shardwise.data.samples.sentence_pairs import SentencePairBatches
from tests.unit.data.samples.small_batches import FIRST, SPECIAL, many, pairs
from tests.unit.data.samples.test_masking import within


def segments(batch: Batch) -> list[tuple[list[int], list[int], int]]:
    """A, B and the label of each sample, masking undone, once its form is checked."""
    ids_SB = batch.inputs["ids_SB"].copy()
    targets_PB, positions_PB = batch.inputs["targets_PB"], batch.inputs["positions_PB"]
    kept_PB = targets_PB != IGNORE
    columns = np.nonzero(kept_PB)[1]
    ids_SB[positions_PB[kept_PB], columns] = targets_PB[kept_PB]
    found = []
    for column in range(ids_SB.shape[1]):
        ids, types = ids_SB[:, column], batch.inputs["token_types_SB"][:, column]
        mask = batch.inputs["mask_SB"][:, column]
        length = int(mask.sum())
        assert mask.tolist() == [1] * length + [0] * (len(mask) - length)
        assert (ids[length:] == SPECIAL.pad).all()
        assert ids[0] == SPECIAL.cls
        middle, end = np.flatnonzero(ids == SPECIAL.sep).tolist()
        assert end == length - 1
        assert types.tolist() == [0] * (middle + 1) + [1] * (end - middle) + [0] * (len(ids) - length)
        label = int(batch.inputs["next_sentence_B"][column])
        found.append((ids[1:middle].tolist(), ids[middle + 1 : end].tolist(), label))
    return found


def epoch_of(batches: SentencePairBatches, epoch: int) -> Batch:
    """All samples, in the order of their indices."""
    indices = np.arange(batches.num_samples)
    return batches.collate(indices, np.full_like(indices, epoch), indices)


def equal(batch: Batch, expected: Batch) -> bool:
    return all(np.array_equal(batch.inputs[name], array) for name, array in expected.inputs.items())


corpora = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=9), min_size=2, max_size=9)


@settings(deadline=None, max_examples=40)
@given(documents=corpora, length=st.integers(5, 40), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 10**6))
def test_pairs_are_well_formed(documents: list[list[int]], length: int, seed: int, epoch: int) -> None:
    """A and B are runs of the text; B follows A in its document, or is from another one."""
    batches = pairs(documents, length, seed)
    ends = np.cumsum([sum(document) for document in documents])
    batch = batches.global_batch(epoch * batches.num_samples, batches.num_samples)
    for a, b, label in segments(batch):
        assert a == list(range(a[0], a[0] + len(a)))
        assert b == list(range(b[0], b[0] + len(b)))
        assert len(a) + len(b) <= length - 3
        first, last, other, other_last = np.searchsorted(
            ends, np.array([a[0], a[-1], b[0], b[-1]]) - FIRST, side="right"
        )
        assert first == last
        assert other == other_last
        if label == 0:
            assert first == other
            assert b[0] > a[-1]
            if len(a) + len(b) < length - 3:  # nothing was cut
                assert b[0] == a[-1] + 1
        else:
            assert first != other


def test_half_of_the_second_sentences_are_random() -> None:
    batches = pairs(many(200), length=48)
    labels = batches.global_batch(0, 20 * batches.num_samples).inputs["next_sentence_B"]
    assert within(int(labels.sum()), len(labels), 0.5)
    by_sample = labels.reshape(20, -1)
    assert (by_sample.min(axis=0) != by_sample.max(axis=0)).mean() > 0.99


def test_random_sentences_come_from_everywhere() -> None:
    """Of the other documents, each as often as it is long, and never of the own one."""
    documents = [[5] * 12, [5] * 24, [5] * 36, [5] * 48]
    batches = pairs(documents, length=63)
    ends = np.cumsum([sum(document) for document in documents])
    found = np.zeros((4, 4))
    for epoch in range(400):
        for a, b, label in segments(epoch_of(batches, epoch)):
            if label:
                own, other = np.searchsorted(ends, [a[0] - FIRST, b[0] - FIRST], side="right")
                found[own, other] += 1
    for own in range(4):
        weights = np.array([1.0, 2.0, 3.0, 4.0])
        weights[own] = 0
        for other in range(4):
            assert within(int(found[own, other]), int(found[own].sum()), weights[other] / weights.sum())


def test_each_epoch_has_its_own_pairs_and_masks() -> None:
    batches = pairs(many(), length=48)
    first, second, again = (epoch_of(batches, epoch) for epoch in (0, 1, 0))
    assert equal(again, first)
    same_pair = [a == b for a, b in zip(segments(first), segments(second), strict=True)]
    same_mask = (first.inputs["positions_PB"] == second.inputs["positions_PB"]).all(axis=0)
    assert np.mean(same_pair) < 0.2
    assert same_mask.mean() < 0.05
    assert not equal(epoch_of(pairs(many(), length=48, seed=4), 0), first)
    # The epoch that `consumed` lies in decides, also within a batch that spans two.
    batches = pairs(many(), length=48)
    samples = batches.num_samples
    batch = batches.global_batch(samples - 2, 4)
    epochs = np.array([0, 0, 1, 1])
    assert equal(batches.collate(batches.sampler.indices(samples - 2, 4), epochs, batch.samples), batch)


@pytest.mark.parametrize("documents", [[[70]], [[1] * 70], [[40], [1]], [[1], [1]], [[500], [3, 500]]])
def test_a_short_corpus_works(documents: list[list[int]]) -> None:
    """One document takes its random sentences from its other chunks; single tokens are followed by random ones."""
    batches = pairs(documents, length=32)
    chunks = batches.chunks.find(np.arange(batches.num_samples))
    for epoch in range(30):
        for index, (a, b, label) in enumerate(segments(epoch_of(batches, epoch))):
            inside = chunks.start[index] <= b[0] - FIRST < chunks.end[index]
            assert inside == (label == 0)
            assert chunks.start[index] <= a[0] - FIRST <= a[-1] - FIRST < chunks.end[index]
