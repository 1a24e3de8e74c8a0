"""The tokens that a document begins and ends with in the row of tokens that it is joined to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from shardwise.data.tokens.tokenizer import Tokenizer
from shardwise.errors import DataError


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
