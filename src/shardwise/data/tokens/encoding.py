"""Text becomes the files of a cache entry: tokens, and for sentence pairs the bounds of sentences and documents.

`encode_documents` puts marks around documents; `encode_sentences` cuts text into sentences and encodes each by itself.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from shardwise.base.errors import DataError
from shardwise.config import DataConfig
from shardwise.data.cache import BOUNDS, BOUNDS_DTYPE, ArrayWriter, TokenWriter, token_dtype
from shardwise.data.reading.text_sources import PIECE_CHARACTERS, TextPiece
from shardwise.data.rows import PARTS, Int32Array, IntArray, Part
from shardwise.data.tokens.tokenizer import Tokenizer

# Text that is encoded at once: enough to keep all cores busy, in bounded memory.
_BATCH_CHARACTERS = 1 << 23
_LONGEST = 1 << 20
"""Characters that are encoded as one text at most, but for its last piece: each takes about 120 bytes of memory."""


_Key = TypeVar("_Key")
_Item = TypeVar("_Item")


class ContentDigest:
    """A digest of all text of a source that passes through `watch`, and of the ends of documents and of parts."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self.bytes = 0

    def watch(self, pieces: Iterable[TextPiece]) -> Iterator[TextPiece]:
        """The pieces, unchanged, each added to the digest."""
        for piece in pieces:
            encoded = piece.text.encode()
            self._digest.update(encoded)
            self.bytes += len(encoded)
            if piece.ends_document:
                self._digest.update(b"\xff")  # in no UTF-8 text
            yield piece

    def end_part(self) -> None:
        self._digest.update(b"\xfe")  # in no UTF-8 text either

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def encode_documents(
    parts: Iterable[tuple[Part, TextPiece]], tokenizer: Tokenizer, marks: DocumentMarks, folder: Path
) -> dict[str, Any]:
    """Tokenizes the documents of each part, with their marks, into files; returns the manifest's records."""
    with ExitStack() as files:
        writers = token_writers(files, token_dtype(tokenizer.vocab_size), folder)
        for part, row, ends_document in document_tokens(parts, tokenizer, marks, _BATCH_CHARACTERS):
            writers[part].write(row)
            writers[part].documents += ends_document
    return {part: writer.facts() for part, writer in writers.items()}


def document_tokens(
    pieces: Iterable[tuple[_Key, TextPiece]], tokenizer: Tokenizer, marks: DocumentMarks, characters: int
) -> Iterator[tuple[_Key, Int32Array, bool]]:
    """The tokens of each document with its marks, or of the parts of a long one: key, tokens, True if it ends there.

    Args:
        pieces: text, with a key; a document whose key changes is encoded as two texts.
        characters: size of the text that is encoded at once, on all cores.
    """
    begun = False  # True if the next text continues a document
    for batch in group_by_size(document_texts(pieces), lambda item: item[1].characters, characters):
        ends = [text.ends_document for _, text in batch]
        tokens, sizes = marks.put(
            *tokenizer.encode_rows([text for _, piece in batch for text in piece.texts]), ends, begun=begun
        )
        for (key, text), row in zip(batch, np.split(tokens, np.cumsum(sizes)[:-1]), strict=True):
            yield key, row, text.ends_document
        begun = not ends[-1]


def document_texts(pieces: Iterable[tuple[_Key, TextPiece]]) -> Iterator[tuple[_Key, _PieceTexts]]:
    """The documents of `pieces`, each with their key; one of more than a million characters is cut where a piece ends.

    That is after a word if possible, where most tokenizers cut as well: others may give a few other tokens there.
    """
    blocks: list[str] = []
    last: _Key | None = None
    for key, piece in pieces:
        if blocks and last is not None and (key != last or sum(map(len, blocks)) >= _LONGEST):
            yield last, _PieceTexts(["".join(blocks)], ends_document=False)
            blocks = []
        blocks.append(piece.text)
        last = key
        if piece.ends_document:
            yield key, _PieceTexts(["".join(blocks)], ends_document=True)
            blocks = []
    if blocks and last is not None:
        yield last, _PieceTexts(["".join(blocks)], ends_document=False)


def encode_sentences(parts: Iterable[tuple[Part, TextPiece]], tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """Writes each part's tokens and the bounds of its sentences and documents; returns the manifest's records.

    Each sentence is encoded by itself. Sentences without tokens are left out, and so are documents without sentences.
    """
    with ExitStack() as files:
        writers = token_writers(files, token_dtype(tokenizer.vocab_size), folder)
        bounds = bounds_writers(files, BOUNDS, folder)
        for part in PARTS:
            for row in bounds[part].values():
                row.write([0])
        has_sentences = dict.fromkeys(PARTS, False)  # True for a part whose last document has some already
        for batch in group_by_size(sentence_pieces(parts), lambda item: item[1].characters, _BATCH_CHARACTERS):
            texts = [sentence for _, piece in batch for sentence in piece.texts]
            tokens, sizes = tokenizer.encode_rows(texts, literally=True)
            # All sentences of a batch are encoded at once, and then divided into those of each piece again.
            cuts = np.cumsum([len(piece.texts) for _, piece in batch])[:-1]
            starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])
            pieces = zip(batch, np.split(tokens, starts[cuts]), np.split(sizes, cuts), strict=True)
            for (part, piece), piece_tokens, piece_sizes in pieces:
                writer = writers[part]
                ends = bounds[part]
                sentences = piece_sizes[piece_sizes > 0]
                ends["sentences"].write(writer.length + np.cumsum(sentences))
                writer.write(piece_tokens)
                has_sentences[part] = has_sentences[part] or len(sentences) > 0
                if piece.ends_document and has_sentences[part]:
                    ends["documents"].write([ends["sentences"].length - 1])
                    writer.documents += 1
                    has_sentences[part] = False
    return part_facts(writers, bounds)


def bounds_writers(files: ExitStack, names: Sequence[str], folder: Path) -> dict[Part, dict[str, ArrayWriter]]:
    """Writers of cached bounds, one of each name for each part, which `files` closes."""
    return {
        part: {
            name: ArrayWriter(files.enter_context((folder / f"{part}.{name}.bin").open("wb")), BOUNDS_DTYPE)
            for name in names
        }
        for part in PARTS
    }


def part_facts(writers: Mapping[Part, TokenWriter], bounds: Mapping[Part, Mapping[str, ArrayWriter]]) -> dict[str, Any]:
    """The manifest's record of each part's tokens and bounds, once its files are closed."""
    return {
        part: {**writer.facts(), "bounds": {name: row.facts() for name, row in bounds[part].items()}}
        for part, writer in writers.items()
    }


def part_digests(parts: Mapping[str, Any]) -> list[str]:
    return [row["sha256"] for facts in parts.values() for row in (facts, *facts.get("bounds", {}).values())]


def token_writers(files: ExitStack, dtype: np.dtype[Any], folder: Path) -> dict[Part, TokenWriter]:
    """Writers of cached tokens, one for each part, which `files` closes."""
    return {part: TokenWriter(files.enter_context((folder / f"{part}.bin").open("wb")), dtype) for part in PARTS}


RULE = 1
"""Belongs to the key of every cache entry that holds sentences: raise it when they are cut in another way."""

# White space after the end of a sentence, or white space with a line end in it.
_AFTER_A_SENTENCE = re.compile(r"(?<=[.!?])\s+|(?<!\s)[^\S\n]*\n\s*")


@dataclass(frozen=True)
class _PieceTexts:
    """Texts of a document, each of which is tokenized by itself: its sentences, or all of it.

    The next texts continue the document unless `ends_document`.
    """

    texts: list[str]
    ends_document: bool

    @property
    def characters(self) -> int:
        return sum(map(len, self.texts))


def cut_sentences(text: str) -> list[str]:
    """The sentences of `text`; together they are `text`.

    A sentence ends before white space that follows `.`, `!` or `?`, or that contains a line end. The white space
    belongs to the sentence after it: byte-level tokenizers cut there as well, so the sentences have the same tokens as
    the text. There is no list of abbreviations and no rule for quotation marks: the result is the same on every
    machine, and right for most text.
    """
    cuts = [match.start() for match in _AFTER_A_SENTENCE.finditer(text)]
    starts = [0, *cuts]
    return [text[start:end] for start, end in zip(starts, [*cuts, len(text)], strict=True) if end > start]


def sentence_pieces(parts: Iterable[tuple[Part, TextPiece]]) -> Iterator[tuple[Part, _PieceTexts]]:
    """The documents of each part, cut into sentences to be tokenized.

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
        tail = ""
        if not piece.ends_document and sentences and len(sentences[-1]) <= PIECE_CHARACTERS:
            tail = sentences.pop()
        yield part, _cut_piece(sentences, piece.ends_document)
        unfinished = None if piece.ends_document else part


def _cut_piece(sentences: list[str], ends_document: bool) -> _PieceTexts:
    return _PieceTexts([sentence for sentence in sentences if sentence.strip()], ends_document)


def group_by_size(items: Iterable[_Item], characters_of: Callable[[_Item], int], least: int) -> Iterator[list[_Item]]:
    """Lists of consecutive texts, to be tokenized at once, of `least` characters or more; the last may have fewer.

    No item is taken from `items` beyond those that were returned.
    """
    batch: list[_Item] = []
    characters = 0
    for item in items:
        batch.append(item)
        characters += characters_of(item)
        if characters >= least:
            yield batch
            batch = []
            characters = 0
    if batch:
        yield batch


@dataclass(frozen=True)
class DocumentMarks:
    """The ids that are put before and after the tokens of each document; None for none."""

    begin: int | None
    end: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, append_eod: bool | None, prepend_bos: bool | None) -> Self:
        """The tokenizer's marks that keys of `data` ask for.

        Args:
            append_eod: False if documents are not closed; None is the default, True.
            prepend_bos: True if a token begins each document; None is the default, False.

        Raises:
            DataError: the tokenizer has no token that begins a text, or none that ends a document.
        """
        begin = None
        if prepend_bos:
            token = tokenizer.begin_of_document
            if token is not None:
                begin = tokenizer.token_id(token)
            if begin is None:
                raise DataError(
                    "data.prepend_bos (true) needs a token that begins a text, such as <s>, and data.tokenizer has "
                    "none: name one as bos_token in a tokenizer_config.json beside it"
                )
        return cls(begin, None if append_eod is False else tokenizer.required_end())

    def put(
        self, tokens: Int32Array, sizes: IntArray, ends: Sequence[bool], *, begun: bool
    ) -> tuple[Int32Array, IntArray]:
        """The tokens of consecutive pieces with the marks between them, and the number of tokens of each piece then.

        Args:
            sizes: tokens of each piece, [pieces].
            ends: True for each piece that is the last of its document.
            begun: True if the first piece continues a document.
        """
        stops = np.cumsum(sizes)
        # A piece begins a document if the one before ended one.
        begins = [not begun, *ends][: len(ends)]
        marked = np.stack([begins, ends], axis=1) & [self.begin is not None, self.end is not None]
        ids = np.broadcast_to(np.array([self.begin or 0, self.end or 0], dtype=np.int32), marked.shape)
        places = np.stack([stops - sizes, stops], axis=1)
        # Row by row, so that marks at one place keep the order of their documents.
        return np.insert(tokens, places[marked], ids[marked]), sizes + marked.sum(axis=1)


def document_marks(data: DataConfig, tokenizer: Tokenizer) -> DocumentMarks:
    """The tokens that each document of text begins and ends with; DataError if the tokenizer lacks one."""
    return DocumentMarks.of(tokenizer, append_eod=data.append_eod, prepend_bos=data.prepend_bos)
