"""Text in batches to be tokenized, each with its position in the source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from shardwise.data.parts import Part
from shardwise.data.reading.sources import Source, TextPiece
from shardwise.data.tokens.cutting import PieceTexts, batches, sentence_pieces
from shardwise.data.tokens.encoding import ContentDigest
from shardwise.data.tokens.tokenizer import Tokenizer
from shardwise.data.tokens.windows import TextWindow, text_windows

# Enough for eight threads of a process, and few enough that what `tokenizers` makes of them stays below 100 MiB.
BATCH_CHARACTERS = 1 << 21


@dataclass(frozen=True)
class Position:
    """How much of a source has been read.

    Attributes:
        batches: the number of batches.
        digest: of the text, as `ContentDigest` makes it.
    """

    batches: int = 0
    documents: int = 0
    characters: int = 0
    bytes: int = 0
    digest: str = ""


@dataclass(frozen=True)
class TextBatch:
    """Texts, each of which is tokenized by itself: windows of documents, or sentences.

    Attributes:
        contexts: the number of tokens at the beginning of each text that belong to the text before.
        ends: for each document that ends in this batch, how many of the texts lie before its end.
        after: the position where it ends.
    """

    texts: list[str]
    contexts: list[int]
    ends: list[int]
    after: Position


def text_batches(source: Source, tokenizer: Tokenizer, sentences: bool) -> Iterator[TextBatch]:
    """All text of a source; the same source and tokenizer always give the same batches.

    Args:
        tokenizer: the one that the texts are for, where they are not sentences.
    """
    digest, position = ContentDigest(), Position()
    # `digest` is that of the text up to the end of a batch, or of one piece more where it ends within a document.
    for batch in batches(
        _pieces(source, digest, tokenizer, sentences), lambda piece: piece.characters, BATCH_CHARACTERS
    ):
        texts = [text for piece in batch for text in piece.texts]
        contexts = [tokens for piece in batch for tokens in piece.contexts]
        counts = accumulate(len(piece.texts) for piece in batch)
        ends = [count for count, piece in zip(counts, batch, strict=True) if piece.ends_document]
        documents = position.documents + len(ends)
        characters = position.characters + sum(piece.characters for piece in batch)
        position = Position(position.batches + 1, documents, characters, digest.bytes, digest.hexdigest())
        yield TextBatch(texts, contexts, ends, position)


def _pieces(
    source: Source, digest: ContentDigest, tokenizer: Tokenizer, sentences: bool
) -> Iterator[PieceTexts | TextWindow]:
    pieces: Iterator[tuple[Part, TextPiece]] = (("train", piece) for piece in digest.watch(source.pieces()))
    if sentences:
        return (piece for _, piece in sentence_pieces(pieces))
    return (window for _, window in text_windows(pieces, tokenizer))
