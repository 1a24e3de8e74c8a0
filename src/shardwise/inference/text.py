"""Turns tokens into text, one by one."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.data import Tokenizer

_UNFINISHED = "\ufffd"
_CONTEXT = 8


class Detokenizer:
    """The text that tokens add to a prompt, piece by piece.

    A character whose bytes lie in several tokens is shown with the last of them. The text of a token may depend on the
    one before (a leading space): so the last few tokens are decoded together, and a piece is what their text gained.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-_CONTEXT:])
        self._shown = tokenizer.decode(self._ids)

    def push(self, token: int) -> str:
        """The text that is complete with one more token; empty while a character is incomplete."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if text.endswith(_UNFINISHED) or len(text) <= len(self._shown):
            return ""
        return self._show(text)

    def finish(self) -> str:
        """The rest of the text, complete or not."""
        return self._show(self._tokenizer.decode(self._ids))

    def _show(self, text: str) -> str:
        piece = text[len(self._shown) :]
        self._ids = self._ids[-_CONTEXT:]
        self._shown = self._tokenizer.decode(self._ids)
        return piece
