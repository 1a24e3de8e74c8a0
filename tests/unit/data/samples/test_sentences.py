"""Sentences: the rule, text that arrives in pieces, and chunks found without reading the sentences between."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data.reading.text_sources import TextPiece
from shardwise.data.rows import Part
from shardwise.data.samples.sentence_pairs import ChunkIndex
from shardwise.data.tokens import encoding
from shardwise.data.tokens.encoding import cut_sentences, sentence_pieces
from tests.unit.data.samples.small_batches import arranged

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
    parts: list[tuple[Part, TextPiece]] = [
        ("train", TextPiece("abcdefgh", ends_document=number == 4)) for number in range(5)
    ]
    assert [len(sentence) for sentence in regrouped(parts)[0][1]] == [16, 16, 8]


lengths = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=12), min_size=1, max_size=8)


@unhurried
@given(documents=lengths, room=st.integers(2, 30))
def test_the_chunks_of_a_document_are_its_tokens_each_once(documents: list[list[int]], room: int) -> None:
    sentences = arranged(documents)
    index = ChunkIndex(sentences, room)
    found = index.find(np.arange(index.num_chunks))
    ends = sentences.bounds[sentences.documents[1:]].tolist()
    assert found.start[0] == 0
    assert found.end[-1] == ends[-1]
    assert (found.end[:-1] == found.start[1:]).all()
    assert (found.end > found.start).all()
    assert (found.end - found.start < 2 * room).all()
    assert set(ends) <= set(found.end.tolist())
    assert found.document.tolist() == np.searchsorted(ends, found.end).tolist()
    tokens = np.minimum(found.start + room, ends[-1])
    expected = [min(bound for bound in sentences.bounds if bound >= token) for token in tokens]
    assert (
        index.sentence_end(tokens, found.document).tolist()
        == np.minimum(expected, np.asarray(ends)[found.document]).tolist()
    )


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
