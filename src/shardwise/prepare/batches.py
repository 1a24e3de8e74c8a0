"""Text in batches to be tokenized, each with its position in the source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.data.reading.sources import Source
from shardwise.data.tokens.cutting import sentence_pieces
from shardwise.data.tokens.encoding import ContentDigest

# Enough for eight threads of a process, and few enough that what `tokenizers` makes of them stays below 100 MiB.
BATCH_CHARACTERS = 1 << 21


@dataclass(frozen=True)
class Position:
    """How much of a source has been read.

    Attributes:
        batches: how many batches that is.
        digest: of the text, as `ContentDigest` makes it.
    """

    batches: int = 0
    documents: int = 0
    characters: int = 0
    bytes: int = 0
    digest: str = ""


@dataclass(frozen=True)
class TextBatch:
    """Texts to be tokenized each by itself: parts of documents, or sentences.

    Attributes:
        ends: how many of the texts lie before the end of each document that ends here.
        before: the position where the batch begins.
        after: the position where it ends.
    """

    texts: list[str]
    ends: list[int]
    before: Position
    after: Position


def text_batches(source: Source, sentences: bool) -> Iterator[TextBatch]:
    """All text of a source; the same source always gives the same batches."""
    digest = ContentDigest()
    texts: list[str] = []
    ends: list[int] = []
    before = Position()
    held = characters = 0
    for pieces, size, ends_document in _units(source, digest, sentences):
        texts += pieces
        held += size
        if ends_document:
            ends.append(len(texts))
        if held >= BATCH_CHARACTERS:
            characters += held
            after = _position(before, ends, characters, digest)
            yield TextBatch(texts, ends, before, after)
            texts, ends, before, held = [], [], after, 0
    if texts or ends:
        yield TextBatch(texts, ends, before, _position(before, ends, characters + held, digest))


def _position(before: Position, ends: list[int], characters: int, digest: ContentDigest) -> Position:
    return Position(before.batches + 1, before.documents + len(ends), characters, digest.bytes, digest.hexdigest())


def _units(source: Source, digest: ContentDigest, sentences: bool) -> Iterator[tuple[list[str], int, bool]]:
    """The texts of each piece, its characters, and whether it ends a document."""
    pieces = digest.watch(source.pieces())
    if sentences:
        for _, cut in sentence_pieces(("train", piece) for piece in pieces):
            yield cut.sentences, cut.characters, cut.ends_document
    else:
        for piece in pieces:
            yield [piece.text], piece.characters, piece.ends_document
