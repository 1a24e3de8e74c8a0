"""Long documents in windows of text, whose tokens together are those of the document.

To encode a document at once takes about 120 bytes of memory for each character, and one core. But tokenizers put a
space before any text that they are given, join characters over any distance, and split a text by what follows it. So a
document is cut only at a place where two conditions hold:

1. No token can lie on both sides: a word ends there (words are the parts of a text that a tokenizer encodes one by
   one), or the tokenizer is a BPE whose vocabulary has no token with these two characters next to each other.
2. The tokens on each side do not depend on where the encoded text begins and ends. Texts that overlap are encoded and
   compared: one that begins earlier, one that ends earlier, and each side by itself.

A window begins with a little text of the window before it, its context, whose tokens are then left out. A document
without such a place, for example a single word of a million letters, is one window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shardwise.data.reading.text_sources import TextPiece
from shardwise.data.tokens.tokenizer import Tokenizer

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
