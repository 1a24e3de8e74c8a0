"""Text becomes the files of a cache entry: tokens, and for sentence pairs the bounds of sentences and documents.

`encode_documents` encodes documents in windows and puts marks around them; `encode_sentences` cuts text into sentences
and encodes each by itself.

A long document is encoded in windows, whose tokens together are those of the document. To encode a document at once
takes about 120 bytes of memory for each character, and one core. But tokenizers put a space before any text that they
are given, join characters over any distance, and split a text by what follows it. So a document is cut only at a place
where two conditions hold:

1. No token can lie on both sides: a word ends there (words are the parts of a text that a tokenizer encodes one by
   one), or the tokenizer is a BPE whose vocabulary has no token with these two characters next to each other.
2. The tokens on each side do not depend on where the encoded text begins and ends. Texts that overlap are encoded and
   compared: one that begins earlier, one that ends earlier, and each side by itself.

A window begins with a little text of the window before it, its context, whose tokens are then left out. A document
without such a place, for example a single word of a million letters, is one window.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from shardwise.base.errors import DataError
from shardwise.data.cache import BOUNDS, BOUNDS_DTYPE, ArrayWriter, TokenWriter, token_dtype
from shardwise.data.reading.text_sources import PIECE_CHARACTERS, TextPiece
from shardwise.data.split import PARTS, Part
from shardwise.data.tokens.tokenizer import Tokenizer

# Text that is encoded at once: enough to keep all cores busy, in bounded memory.
_BATCH_CHARACTERS = 1 << 23


class ContentDigest:
    """A digest of all text that passes through `watch`, and of the ends of documents and of the text's parts.

    Attributes:
        bytes: size of that text.
    """

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
    """Writes each part's tokens, documents with their marks; returns the manifest's records."""
    begun = False  # True if the next window continues a document
    with ExitStack() as files:
        writers = token_writers(files, token_dtype(tokenizer.vocab_size), folder)
        for batch in group_by_size(text_windows(parts, tokenizer), lambda item: item[1].characters, _BATCH_CHARACTERS):
            windows = [window for _, window in batch]
            ends = [window.ends_document for window in windows]
            tokens, sizes = marks.put(*encode_windows(windows, tokenizer), ends, begun=begun)
            for (part, window), row in zip(batch, np.split(tokens, np.cumsum(sizes)[:-1]), strict=True):
                writers[part].write(row)
                writers[part].documents += window.ends_document
            begun = not ends[-1]
    return {part: writer.facts() for part, writer in writers.items()}


def encode_sentences(parts: Iterable[tuple[Part, TextPiece]], tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """Writes each part's tokens and the bounds of its sentences and documents; returns the manifest's records.

    Each sentence is encoded by itself. Sentences without tokens are left out, and so are documents without sentences.
    """
    with ExitStack() as files:
        writers = token_writers(files, token_dtype(tokenizer.vocab_size), folder)
        bounds = {
            part: {
                name: ArrayWriter(files.enter_context((folder / f"{part}.{name}.bin").open("wb")), BOUNDS_DTYPE)
                for name in BOUNDS
            }
            for part in PARTS
        }
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
    return {
        part: {**writer.facts(), "bounds": {name: row.facts() for name, row in bounds[part].items()}}
        for part, writer in writers.items()
    }


def token_writers(files: ExitStack, dtype: np.dtype[Any], folder: Path) -> dict[Part, TokenWriter]:
    """A file of tokens for each part, which `files` closes."""
    return {part: TokenWriter(files.enter_context((folder / f"{part}.bin").open("wb")), dtype) for part in PARTS}


RULE = 1
"""Belongs to the key of every cache entry that holds sentences: raise it when they are cut in another way."""

# White space after the end of a sentence, or white space with a line end in it.
_AFTER_A_SENTENCE = re.compile(r"(?<=[.!?])\s+|(?<!\s)[^\S\n]*\n\s*")
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class PieceTexts:
    """Sentences of a document, each of which is tokenized by itself.

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
    the text. There is no list of abbreviations and no rule for quotation marks: the result is the same on every
    machine, and right for most text.
    """
    cuts = [match.start() for match in _AFTER_A_SENTENCE.finditer(text)]
    starts = [0, *cuts]
    return [text[start:end] for start, end in zip(starts, [*cuts, len(text)], strict=True) if end > start]


def sentence_pieces(parts: Iterable[tuple[Part, TextPiece]]) -> Iterator[tuple[Part, PieceTexts]]:
    """The documents of each part in sentences.

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


def _cut_piece(sentences: list[str], ends_document: bool) -> PieceTexts:
    return PieceTexts([sentence for sentence in sentences if sentence.strip()], ends_document)


def group_by_size(items: Iterable[_Item], characters_of: Callable[[_Item], int], least: int) -> Iterator[list[_Item]]:
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
        self, tokens: npt.NDArray[np.int32], sizes: npt.NDArray[np.int64], ends: Sequence[bool], *, begun: bool
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
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


MARGINS = (1 << 10, 1 << 14)
"""Characters on both sides of the end of a piece among which a place is looked for; the second if the first fail."""
SHIFT = 127
"""Characters by which the texts that are compared begin and end apart: a prime, as repetitions must not fit it."""
# Each try encodes two texts. Where the places nearest to the middle fail, those further away fail too.
_MOST_TRIES = 6
# Words on each side of a cut that show that a tokenizer splits the compared texts at the same places.
_WORDS = 2
_Key = TypeVar("_Key")


@dataclass(frozen=True)
class TextWindow:
    """Text of one document that is encoded at once; the next window continues the document unless `ends_document`.

    Attributes:
        context: number of characters at the beginning of `text` that belong to the window before.
        context_tokens: number of their tokens.
    """

    text: str
    ends_document: bool
    context: int = 0
    context_tokens: int = 0

    @property
    def characters(self) -> int:
        """The size of the text without its context."""
        return len(self.text) - self.context

    @property
    def texts(self) -> list[str]:
        return [self.text]

    @property
    def contexts(self) -> list[int]:
        return [self.context_tokens]


@dataclass(frozen=True)
class _Cut:
    """A place where a document can be cut, near the end of a piece of it.

    Attributes:
        context: number of characters at the end of the piece with which the next window begins.
        place: place of the cut, counted from the beginning of the context.
        tokens: number of tokens between the beginning of the context and the cut.
    """

    context: int
    place: int
    tokens: int


def text_windows(pieces: Iterable[tuple[_Key, TextPiece]], tokenizer: Tokenizer) -> Iterator[tuple[_Key, TextWindow]]:
    """The documents of `pieces` in windows, each with the key of its pieces; a text ends where the key changes."""
    blocks: list[str] = []  # text of the window that is not complete yet
    begun: tuple[_Key, int, int] | None = None  # the key of that window, its context and the context's tokens
    for key, piece in pieces:
        if begun is not None and begun[0] != key:
            yield begun[0], TextWindow("".join(blocks), False, *begun[1:])
            blocks = []
            begun = None
        if begun is not None and (cut := _find_cut(blocks[-1], piece.text, tokenizer)) is not None:
            context = blocks[-1][-cut.context :]
            blocks[-1] = blocks[-1][: -cut.context]
            # This window ends at the cut, which may lie in the next piece; the next one begins with the context.
            yield key, TextWindow("".join([*blocks, (context + piece.text)[: cut.place]]), False, *begun[1:])
            blocks = [context]
            begun = (key, cut.place, cut.tokens)
        blocks.append(piece.text)
        begun = begun or (key, 0, 0)
        if piece.ends_document:
            yield key, TextWindow("".join(blocks), True, *begun[1:])
            blocks = []
            begun = None
    if begun is not None:
        yield begun[0], TextWindow("".join(blocks), False, *begun[1:])


def encode_windows(
    windows: Sequence[TextWindow], tokenizer: Tokenizer
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """The ids of all windows one after another, without their contexts, and the number of ids of each window."""
    return tokenizer.encode_rows(
        [window.text for window in windows], contexts=[window.context_tokens for window in windows]
    )


def _find_cut(left: str, right: str, tokenizer: Tokenizer) -> _Cut | None:
    """A place near the end of `left` where the document can be cut; None if there is none."""
    for margin in MARGINS:
        # With half of a piece on each side, the cuts at its ends do not meet.
        if min(len(left), len(right)) >= 2 * margin:
            found_place = _find_place(left[-margin:] + right[:margin], tokenizer)
            if found_place is not None:
                return _Cut(margin, *found_place)
    return None


def _find_place(text: str, tokenizer: Tokenizer) -> tuple[int, int] | None:
    """A place in `text` where any document that contains it can be cut, and the number of tokens before it.

    In three texts, the given one, one without its beginning and one without its end, the same tokens must stand before
    the place and after it, and no token may lie on both sides. The part before the place, encoded by itself, must have
    these tokens too: then the cut itself changes nothing.
    """
    full = _EncodedText(text, tokenizer)
    middle = len(text) // 2
    places = {full.ends[n - 1] for n in range(1, len(full.ids)) if full.is_parted(n)}
    if not places:
        return None
    begins_later = _EncodedText(text[SHIFT:], tokenizer)
    ends_earlier = _EncodedText(text[:-SHIFT], tokenizer)
    for place in sorted(places, key=lambda place: abs(place - middle))[:_MOST_TRIES]:
        # The shifted texts must have the place too; the next ones are further from the middle.
        if not SHIFT < place < len(text) - SHIFT:
            break
        before = _EncodedText(text[:place], tokenizer).ids
        before_shifted = _EncodedText(text[SHIFT:place], tokenizer).ids
        n = len(before)
        m = len(before_shifted)
        if (
            full.ids[:n] == ends_earlier.ids[:n] == before
            and begins_later.ids[:m] == before_shifted
            and begins_later.ids[m:] == full.ids[n:]
            and full.is_parted(n)
            and ends_earlier.is_parted(n)
            and begins_later.is_parted(m)
            and full.ends[n - 1] == ends_earlier.ends[n - 1] == begins_later.ends[m - 1] + SHIFT
        ):
            return place, n
    return None


class _EncodedText:
    """An encoded text.

    Attributes:
        ids: ids of the tokens.
        ends: character at which each token ends; some tokenizers leave spaces out.
    """

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        encoding = tokenizer.encoding(text)
        self._text = text
        self._neighbours = tokenizer.neighbours
        self.ids: list[int] = encoding.ids
        self.ends = [end for _, end in encoding.offsets]
        # Only marks that are put around a text belong to no word.
        self._words = [word or 0 for word in encoding.word_ids]
        self._tokens = encoding.tokens

    def is_parted(self, n: int) -> bool:
        """True if no token can lie on both sides of the end of the first `n` tokens, in any text with these words."""
        if not 0 < n < len(self.ids):
            return False
        words = self._words
        if words[n - 1] == words[n]:
            pair = self._tokens[n - 1][-1:] + self._tokens[n][:1]
            return self._neighbours is not None and pair not in self._neighbours
        # White space is split by the rule of all of it, so a cut comes after another character.
        return (
            words[n - 1] - words[0] >= _WORDS
            and words[-1] - words[n] >= _WORDS
            and not self._text[self.ends[n - 1] - 1].isspace()
        )
