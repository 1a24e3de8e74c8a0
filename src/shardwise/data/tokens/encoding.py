"""Text becomes the files of a cache entry: tokens, and for sentence pairs where sentences and documents begin.

Long documents in windows of text, whose tokens together are those of the whole document.

To encode a document as a whole takes about 120 bytes of memory for each character, and one core. But tokenizers put a
space before any text that they are given, join characters over any distance, and split a text by what follows it. So a
document is cut only where two conditions hold:

1. No token can lie on both sides: a word ends there (words are the parts of a text that a tokenizer encodes one by
   one), or the tokenizer is a BPE whose vocabulary has no token with these two characters next to each other.
2. The tokens on each side do not depend on where the encoded text begins and ends. Texts that overlap are encoded and
   compared.

A window begins with a little text of the window before it, whose tokens are then left out. A document without such a
place, for example a single word of a million letters, is one window.

How text is cut into sentences, and pieces of it into batches.

The tokens that a document begins and ends with in the row of tokens that it is joined to.

The held-out part: whole documents where that comes close to the share asked for, else the end of the text.
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
from shardwise.data.parts import PARTS, Part
from shardwise.data.reading.text_sources import PIECE_CHARACTERS, TextPiece
from shardwise.data.samples.order import mix
from shardwise.data.tokens.tokenizer import Tokenizer

_BATCH_CHARACTERS = 1 << 23


class ContentDigest:
    """A digest of all text that passes through `watch`, and of where documents and the text's own parts end.

    Attributes:
        bytes: the size of that text.
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
    begun = False
    with ExitStack() as files:
        writers = token_writers(files, token_dtype(tokenizer.vocab_size), folder)
        for batch in batches(text_windows(parts, tokenizer), lambda item: item[1].characters, _BATCH_CHARACTERS):
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

    Each sentence is encoded by itself. One without tokens is left out, and so is a document without sentences.
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
        begun = dict.fromkeys(PARTS, False)
        for batch in batches(sentence_pieces(parts), lambda item: item[1].characters, _BATCH_CHARACTERS):
            texts = [sentence for _, piece in batch for sentence in piece.texts]
            tokens, sizes = tokenizer.encode_rows(texts, literally=True)
            cuts = np.cumsum([len(piece.texts) for _, piece in batch])[:-1]
            starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])
            pieces = zip(batch, np.split(tokens, starts[cuts]), np.split(sizes, cuts), strict=True)
            for (part, piece), own_tokens, own_sizes in pieces:
                writer, ends = writers[part], bounds[part]
                sentences = own_sizes[own_sizes > 0]
                ends["sentences"].write(writer.length + np.cumsum(sentences))
                writer.write(own_tokens)
                begun[part] = begun[part] or len(sentences) > 0
                if piece.ends_document and begun[part]:
                    ends["documents"].write([ends["sentences"].length - 1])
                    writer.documents += 1
                    begun[part] = False
    return {
        part: {**writer.facts(), "bounds": {name: row.facts() for name, row in bounds[part].items()}}
        for part, writer in writers.items()
    }


def token_writers(files: ExitStack, dtype: np.dtype[Any], folder: Path) -> dict[Part, TokenWriter]:
    """A file of tokens for each part, which `files` closes."""
    return {part: TokenWriter(files.enter_context((folder / f"{part}.bin").open("wb")), dtype) for part in PARTS}


MARGINS = (1 << 10, 1 << 14)
"""Characters on both sides of the end of a piece among which a place is looked for; the second where the first fail."""
SHIFT = 127
"""By how many characters the texts that are compared begin and end apart: a prime, as repetitions must not fit it."""
_MOST_TRIES = 6
# Whole words on each side of a cut show that a tokenizer splits the compared texts at the same places.
_WORDS = 2
_Key = TypeVar("_Key")


@dataclass(frozen=True)
class TextWindow:
    """Text of one document that is encoded at once; the next window continues the document unless `ends_document`.

    Attributes:
        context: characters at the beginning of `text` that belong to the window before.
        context_tokens: the number of their tokens.
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


def text_windows(pieces: Iterable[tuple[_Key, TextPiece]], tokenizer: Tokenizer) -> Iterator[tuple[_Key, TextWindow]]:
    """The documents of `pieces` in windows, each with the key of its pieces; a text ends where the key changes."""
    blocks: list[str] = []
    begun: tuple[_Key, int, int] | None = None  # the key, the context and its tokens
    for key, piece in pieces:
        if begun is not None and begun[0] != key:
            yield begun[0], TextWindow("".join(blocks), False, *begun[1:])
            blocks, begun = [], None
        cut = None if begun is None else _find_cut(blocks[-1], piece.text, tokenizer)
        if begun is not None and cut is not None:
            around, place, tokens = cut
            blocks[-1], context = blocks[-1][: len(blocks[-1]) - around], blocks[-1][-around:]
            yield key, TextWindow("".join([*blocks, (context + piece.text)[:place]]), False, *begun[1:])
            blocks, begun = [context], (key, place, tokens)
        blocks.append(piece.text)
        begun = begun or (key, 0, 0)
        if piece.ends_document:
            yield key, TextWindow("".join(blocks), True, *begun[1:])
            blocks, begun = [], None
    if begun is not None:
        yield begun[0], TextWindow("".join(blocks), False, *begun[1:])


def encode_windows(
    windows: Sequence[TextWindow], tokenizer: Tokenizer
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """The ids of all windows one after another, without their contexts, and how many each window has."""
    return tokenizer.encode_rows(
        [window.text for window in windows], contexts=[window.context_tokens for window in windows]
    )


def _find_cut(left: str, right: str, tokenizer: Tokenizer) -> tuple[int, int, int] | None:
    """A place near the end of `left` where the document can be cut; None where there is none.

    Returns:
        A number of characters at the end of `left`; the place, counted from there; and the tokens before it.
    """
    for margin in MARGINS:
        # With half of a piece on each side, the cuts at its ends do not meet.
        if min(len(left), len(right)) >= 2 * margin:
            cut = _find_place(left[-margin:] + right[:margin], tokenizer)
            if cut is not None:
                return margin, *cut
    return None


def _find_place(text: str, tokenizer: Tokenizer) -> tuple[int, int] | None:
    """A place in `text` where any document that contains it can be cut, and the number of tokens before it."""
    whole = _Encoded(text, tokenizer)
    middle = len(text) // 2
    places = {whole.ends[n - 1] for n in range(1, len(whole.ids)) if whole.is_parted(n)}
    if not places:
        return None
    later, shorter = _Encoded(text[SHIFT:], tokenizer), _Encoded(text[:-SHIFT], tokenizer)
    for place in sorted(places, key=lambda place: abs(place - middle))[:_MOST_TRIES]:
        if not SHIFT < place < len(text) - SHIFT:
            break
        before, after_shift = _Encoded(text[:place], tokenizer).ids, _Encoded(text[SHIFT:place], tokenizer).ids
        n, m = len(before), len(after_shift)
        if (
            whole.ids[:n] == shorter.ids[:n] == before
            and later.ids[:m] == after_shift
            and later.ids[m:] == whole.ids[n:]
            and whole.is_parted(n)
            and shorter.is_parted(n)
            and later.is_parted(m)
            and whole.ends[n - 1] == shorter.ends[n - 1] == later.ends[m - 1] + SHIFT
        ):
            return place, n
    return None


class _Encoded:
    """An encoded text.

    Attributes:
        ids: of its tokens.
        ends: the character at which each token ends; some tokenizers leave spaces out.
    """

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        encoding = tokenizer.encoding(text)
        self._text, self._neighbours = text, tokenizer.neighbours
        self.ids: list[int] = encoding.ids
        self.ends = [end for _, end in encoding.offsets]
        # Only marks that are put around a text belong to no word.
        self._words = [word or 0 for word in encoding.word_ids]
        self._tokens = encoding.tokens

    def is_parted(self, n: int) -> bool:
        """Whether no token can lie on both sides of the end of the first `n` tokens, whatever else the text has."""
        if not 0 < n < len(self.ids):
            return False
        words = self._words
        if words[n - 1] == words[n]:
            pair = self._tokens[n - 1][-1:] + self._tokens[n][:1]
            return self._neighbours is not None and pair not in self._neighbours
        # Where white space is split depends on all of it, so a cut comes after something else.
        return (
            words[n - 1] - words[0] >= _WORDS
            and words[-1] - words[n] >= _WORDS
            and not self._text[self.ends[n - 1] - 1].isspace()
        )


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


@dataclass(frozen=True)
class DocumentMarks:
    """The ids that are put before and after the tokens of each document; None for none."""

    begin: int | None
    end: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, append_eod: bool | None, prepend_bos: bool | None) -> Self:
        """The tokenizer's marks that keys of `data` ask for; None: a document is closed, and nothing precedes it.

        Raises:
            DataError: the tokenizer has no token that begins a text, or none that ends a document.
        """
        token = tokenizer.begin_of_document if prepend_bos else None
        begin = None if token is None else tokenizer.token_id(token)
        if prepend_bos and begin is None:
            raise DataError(
                "data.prepend_bos (true) needs a token that begins a text, such as <s>, and data.tokenizer has none: "
                "name one as bos_token in a tokenizer_config.json beside it"
            )
        return cls(begin, None if append_eod is False else tokenizer.required_end())

    def put(
        self, tokens: npt.NDArray[np.int32], sizes: npt.NDArray[np.int64], ends: Sequence[bool], *, begun: bool
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """The tokens of consecutive pieces with the marks between them, and how many each piece has then.

        Args:
            sizes: of the pieces, [pieces].
            ends: whether each piece is the last of its document.
            begun: whether the first piece continues a document.
        """
        after = np.cumsum(sizes)
        begins = [not begun, *ends][: len(ends)]
        marked = np.stack([begins, ends], axis=1) & [self.begin is not None, self.end is not None]
        ids = np.broadcast_to(np.array([self.begin or 0, self.end or 0], dtype=np.int32), marked.shape)
        places = np.stack([after - sizes, after], axis=1)
        # Row by row, so that marks at one place keep the order of their documents.
        return np.insert(tokens, places[marked], ids[marked]), sizes + marked.sum(axis=1)


_WHOLE_DOCUMENTS_LEAST = 0.75


@dataclass(frozen=True)
class Split:
    """Which documents are held out (a mask), or at which character of the whole text the held-out end begins."""

    documents: npt.NDArray[np.bool_] | None
    boundary: int

    def parts(self, pieces: Iterable[TextPiece]) -> Iterator[tuple[Part, TextPiece]]:
        """Each piece with its part; the piece with the boundary becomes two, cut at the next line if there is one."""
        if self.documents is not None:
            document = 0
            for piece in pieces:
                yield ("eval" if self.documents[document] else "train"), piece
                document += piece.ends_document
            return
        start = 0
        for piece in pieces:
            end = start + len(piece.text)
            if end <= self.boundary:
                yield "train", piece
            elif start >= self.boundary:
                yield "eval", piece
            else:
                cut = self.boundary - start
                line = piece.text.find("\n", cut) + 1
                if 0 < line < len(piece.text):
                    cut = line
                yield "train", TextPiece(piece.text[:cut], ends_document=False)
                yield "eval", TextPiece(piece.text[cut:], piece.ends_document)
            start = end


def plan_split(characters: npt.NDArray[np.int64], weights: Sequence[float]) -> Split:
    """Holds out the evaluation share, the second weight's, of documents of these lengths.

    Documents are taken in the order of a hash of their index, those above a quarter of the share left out so that
    the last one taken decides little. Where that yields under three quarters of the share (a single long file), the
    end of the text is held out instead.
    """
    total = int(characters.sum())
    share = int(total * (weights[1] / sum(weights)))
    if share == 0:
        return Split(None, total)
    order = np.argsort(mix(np.arange(len(characters), dtype=np.uint64)), kind="stable")
    order = order[characters[order] <= share / 4]
    taken = order[np.cumsum(characters[order]) <= share]
    if int(characters[taken].sum()) < _WHOLE_DOCUMENTS_LEAST * share:
        return Split(None, total - share)
    documents = np.zeros(len(characters), dtype=np.bool_)
    documents[taken] = True
    return Split(documents, total)
