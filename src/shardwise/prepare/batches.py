"""Text in batches to be tokenized, each with its position in the source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from shardwise.data.reading.sources import Source
from shardwise.data.tokens.cutting import PieceTexts, batches, sentence_pieces
from shardwise.data.tokens.encoding import ContentDigest

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
    """Texts, each of which is tokenized by itself: parts of documents, or sentences.

    Attributes:
        ends: for each document that ends in this batch, how many of the texts lie before its end.
        after: the position where it ends.
    """

    texts: list[str]
    ends: list[int]
    after: Position


def text_batches(source: Source, sentences: bool) -> Iterator[TextBatch]:
    """All text of a source; the same source always gives the same batches."""
    digest, position = ContentDigest(), Position()
    # `digest` is that of the text up to the end of a batch, as `batches` reads no further.
    for batch in batches(_pieces(source, digest, sentences), lambda piece: piece.characters, BATCH_CHARACTERS):
        texts = [text for piece in batch for text in piece.texts]
        counts = accumulate(len(piece.texts) for piece in batch)
        ends = [count for count, piece in zip(counts, batch, strict=True) if piece.ends_document]
        documents = position.documents + len(ends)
        characters = position.characters + sum(piece.characters for piece in batch)
        position = Position(position.batches + 1, documents, characters, digest.bytes, digest.hexdigest())
        yield TextBatch(texts, ends, position)


def _pieces(source: Source, digest: ContentDigest, sentences: bool) -> Iterator[PieceTexts]:
    pieces = digest.watch(source.pieces())
    if not sentences:
        return (PieceTexts([piece.text], piece.ends_document) for piece in pieces)
    return (piece for _, piece in sentence_pieces(("train", piece) for piece in pieces))
