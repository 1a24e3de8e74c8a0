"""Documents become tokens: a long one in parts."""

import pytest

from shardwise.data.reading.text_sources import TextPiece
from shardwise.data.tokens import encoding
from shardwise.data.tokens.encoding import DocumentMarks, document_texts, document_tokens
from shardwise.data.tokens.tokenizer import train_tokenizer

TEXT = "The quick brown fox jumps over the lazy dog. " * 20


def test_a_long_document_has_the_tokens_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that splits text into words gives them; the document has one end."""
    monkeypatch.setattr(encoding, "_LONGEST", 100)
    tokenizer = train_tokenizer([TEXT], 280, "text")
    words = TEXT.split(" ")
    pieces = [("", TextPiece(word if number == 0 else f" {word}", False)) for number, word in enumerate(words)]
    pieces[-1] = ("", TextPiece(pieces[-1][1].text, ends_document=True))
    texts = [text for _, text in document_texts([*pieces, *pieces])]
    assert "".join(text.texts[0] for text in texts) == TEXT * 2
    assert max(text.characters for text in texts) < 110
    assert sum(text.ends_document for text in texts) == 2
    marks = DocumentMarks.of(tokenizer, append_eod=True, prepend_bos=False)
    found = [token for _, row, _ in document_tokens(pieces, tokenizer, marks, 300) for token in row.tolist()]
    assert found == [*tokenizer.encode(TEXT).tolist(), tokenizer.required_end()]


def test_a_document_in_two_parts_of_the_data_is_two_texts() -> None:
    pieces = [("train", TextPiece("a b", False)), ("eval", TextPiece(" c", True)), ("eval", TextPiece("d", True))]
    found = [(part, text.texts, text.ends_document) for part, text in document_texts(pieces)]
    assert found == [("train", ["a b"], False), ("eval", [" c"], True), ("eval", ["d"], True)]
