"""How text is cut into sentences, and pieces of it into batches."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from shardwise.data.parts import Part
from shardwise.data.reading.sources import PIECE_CHARACTERS, TextPiece

RULE = 1
"""Belongs to the key of every cache entry that holds sentences: raise it when they are cut in another way."""

_AFTER_A_SENTENCE = re.compile(r"(?<=[.!?])\s+|(?<!\s)[^\S\n]*\n\s*")
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class PieceTexts:
    """Texts of a document that are each tokenized by itself: whole sentences, or one piece of it.

    The next texts continue the document unless `ends_document`.
    """

    texts: list[str]
    ends_document: bool

    @property
    def characters(self) -> int:
        return sum(map(len, self.texts))

    @property
    def contexts(self) -> list[int]:
        """The tokens of each text that belong to the text before: none."""
        return [0] * len(self.texts)


def cut_sentences(text: str) -> list[str]:
    """The sentences of `text`; together they are `text`.

    A sentence ends before white space that follows `.`, `!` or `?`, or that contains a line end. The white space
    belongs to the sentence after it: byte-level tokenizers cut there as well, so the sentences have the same tokens as
    the whole. There is no list of abbreviations and no rule for quotation marks: the result is the same on every
    machine, and right for most text.
    """
    cuts = [match.start() for match in _AFTER_A_SENTENCE.finditer(text)]
    starts = [0, *cuts]
    return [text[start:end] for start, end in zip(starts, [*cuts, len(text)], strict=True) if end > start]


def sentence_pieces(parts: Iterable[tuple[Part, TextPiece]]) -> Iterator[tuple[Part, PieceTexts]]:
    """Each part's documents in sentences.

    A sentence that is cut by the end of a piece is joined again, unless it grows beyond `PIECE_CHARACTERS`. A document
    that lies in two parts becomes two documents. Sentences of white space alone are dropped.
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


def _cut_piece(sentences: list[str], ends_document: bool) -> PieceTexts:
    return PieceTexts([sentence for sentence in sentences if sentence.strip()], ends_document)


def batches(items: Iterable[_Item], characters_of: Callable[[_Item], int], least: int) -> Iterator[list[_Item]]:
    """Consecutive items in lists that have `least` characters or more; the last list may have fewer.

    No item is taken from `items` beyond those that were returned.
    """
    batch: list[_Item] = []
    characters = 0
    for item in items:
        batch.append(item)
        characters += characters_of(item)
        if characters >= least:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
