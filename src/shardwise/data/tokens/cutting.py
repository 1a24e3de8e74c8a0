"""How text is cut into sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shardwise.data.parts import Part
from shardwise.data.reading.sources import PIECE_CHARACTERS, Piece

RULE = 1
"""Belongs to the key of every cache entry that holds sentences: raise it when they are cut in another way."""

_AFTER_A_SENTENCE = re.compile(r"(?<=[.!?])\s+|(?<!\s)[^\S\n]*\n\s*")


@dataclass(frozen=True)
class CutPiece:
    """Whole sentences of a document; the next piece continues it unless `ends_document`."""

    sentences: list[str]
    ends_document: bool

    @property
    def characters(self) -> int:
        """Its size."""
        return sum(map(len, self.sentences))


def cut_sentences(text: str) -> list[str]:
    """The sentences of `text`; together they are `text`.

    A sentence ends before white space that follows `.`, `!` or `?`, or that holds a line end. The white space goes to
    the sentence that it precedes: there byte-level tokenizers cut as well, so that sentences have the tokens of the
    whole. No list of abbreviations, no quotation marks: the same on every machine, and right for most text.
    """
    cuts = [match.start() for match in _AFTER_A_SENTENCE.finditer(text)]
    starts = [0, *cuts]
    return [text[start:end] for start, end in zip(starts, [*cuts, len(text)], strict=True) if end > start]


def sentence_pieces(parts: Iterable[tuple[Part, Piece]]) -> Iterator[tuple[Part, CutPiece]]:
    """Each part's documents in sentences.

    A sentence that a piece's end cuts is joined again, unless it grows beyond `PIECE_CHARACTERS`. A document that the
    split cuts becomes two. Sentences of nothing but white space are dropped.
    """
    tail = ""
    unfinished: Part | None = None
    for part, piece in parts:
        if unfinished is not None and unfinished != part:
            yield unfinished, _cut_piece([tail], ends_document=True)
            tail = ""
        sentences = cut_sentences(tail + piece.text)
        keep = not piece.ends_document and sentences and len(sentences[-1]) <= PIECE_CHARACTERS
        tail = sentences.pop() if keep else ""
        yield part, _cut_piece(sentences, piece.ends_document)
        unfinished = None if piece.ends_document else part


def _cut_piece(sentences: list[str], ends_document: bool) -> CutPiece:
    return CutPiece([sentence for sentence in sentences if not sentence.isspace() and sentence], ends_document)
