"""Sentence pairs: what a sample holds and what decides it; which tokens are masked; where sentences and chunks end."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data.reading.text_sources import TextPiece
from shardwise.data.rows import Part
from shardwise.data.samples.batch import IGNORE, Batch
from shardwise.data.samples.order import Draws
from shardwise.data.samples.sentence_pairs import ChunkIndex, Masking, SentencePairBatches
from shardwise.data.tokens import encoding
from shardwise.data.tokens.encoding import cut_sentences, sentence_pieces
from tests.unit.data.samples.small_batches import FIRST, SPECIAL, arranged, many, pairs


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
        places = np.array([a[0], a[-1], b[0], b[-1]]) - FIRST
        first, last, other, other_last = np.searchsorted(ends, places, side="right")
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


MASK, LOWEST, HIGHEST = 3, 10, 999
ORDINARY = np.arange(LOWEST, HIGHEST + 1)


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
    ids_BS = LOWEST + np.arange(candidates_BS.size).reshape(candidates_BS.shape)
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
    assert random.min() >= LOWEST
    assert random.max() <= HIGHEST
    halves = int((random < (LOWEST + HIGHEST + 1) / 2).sum())
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


unhurried = settings(deadline=None, max_examples=50)


def test_where_sentences_end() -> None:
    for text, expected in (
        ("One. Two!  Three?\tFour", ["One.", " Two!", "  Three?", "\tFour"]),
        ("A line\nanother \n\n last", ["A line", "\nanother", " \n\n last"]),
        ("Version 3.11 costs 2.50 ...", ["Version 3.11 costs 2.50 ..."]),
        ("\n led by a line end", ["\n led by a line end"]),
        ("", []),
    ):
        assert cut_sentences(text) == expected
    text = "a" + " " * 2_000_000 + "b"
    assert cut_sentences(text) == [text]


def regrouped(parts: list[tuple[Part, TextPiece]]) -> list[tuple[Part, list[str]]]:
    """The sentences of each document."""
    documents: list[tuple[Part, list[str]]] = []
    begun = False
    for part, piece in sentence_pieces(parts):
        if not begun:
            documents.append((part, []))
        assert documents[-1][0] == part
        documents[-1][1].extend(piece.texts)
        begun = not piece.ends_document
    assert not begun
    return documents


@unhurried
@given(texts=st.lists(st.text("ab.!? \n\t", max_size=12), min_size=1, max_size=6))
def test_pieces_have_the_sentences_of_the_whole(texts: list[str]) -> None:
    whole = "".join(texts)
    pieces: list[tuple[Part, TextPiece]] = [("train", TextPiece(text, ends_document=False)) for text in texts[:-1]]
    pieces.append(("train", TextPiece(texts[-1], ends_document=True)))
    expected = [sentence for sentence in cut_sentences(whole) if not sentence.isspace()]
    assert regrouped(pieces) == [("train", expected)]
    assert "".join(cut_sentences(whole)) == whole


def test_a_sentence_without_end_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "PIECE_CHARACTERS", 10)
    parts: list[tuple[Part, TextPiece]]
    parts = [("train", TextPiece("abcdefgh", ends_document=number == 4)) for number in range(5)]
    assert [len(sentence) for sentence in regrouped(parts)[0][1]] == [16, 16, 8]


lengths = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=12), min_size=1, max_size=8)


@unhurried
@given(documents=lengths, room=st.integers(2, 30))
def test_the_chunks_of_a_document_are_its_tokens_each_once(documents: list[list[int]], room: int) -> None:
    sentences = arranged(documents)
    index = ChunkIndex(sentences, room)
    found = index.find(np.arange(index.num_chunks))
    ends = sentences.bounds[sentences.documents[1:]].tolist()
    assert (found.start[0], found.end[-1]) == (0, ends[-1])
    assert (found.end[:-1] == found.start[1:]).all()
    assert (found.end > found.start).all()
    assert (found.end - found.start < 2 * room).all()
    assert set(ends) <= set(found.end.tolist())
    assert found.document.tolist() == np.searchsorted(ends, found.end).tolist()
    tokens = np.minimum(found.start + room, ends[-1])
    expected = [min(bound for bound in sentences.bounds if bound >= token) for token in tokens]
    limited = np.minimum(expected, np.asarray(ends)[found.document]).tolist()
    assert index.sentence_end(tokens, found.document).tolist() == limited


@unhurried
@given(documents=lengths, room=st.integers(40, 90))
def test_a_sentence_belongs_to_the_chunk_that_its_start_falls_in(documents: list[list[int]], room: int) -> None:
    """The definition, sentence by sentence, where none is longer than a chunk."""
    expected = []
    for document in documents:
        starts = np.cumsum([0, *document[:-1]])
        expected += [int((starts // room == place).sum()) for place in range(int(starts[-1]) // room + 1)]
    index = ChunkIndex(arranged(documents), room)
    found = index.find(np.arange(index.num_chunks))
    assert found.sentences.tolist() == expected
    assert found.first_sentence.tolist() == np.cumsum([0, *expected[:-1]]).tolist()
