"""TODO"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shardwise.data.reading.text_sources import TextPiece
from shardwise.data.tokens.tokenizer import Tokenizer

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
