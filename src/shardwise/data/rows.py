"""Rows of tokens, the parts that data are divided into, and the bounds of sentences: the words of all modules here."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
TokenArray = npt.NDArray[np.uint16] | npt.NDArray[np.int32]

Part = Literal["train", "eval", "test"]
PART_NAMES: dict[Part, str] = {"train": "training", "eval": "evaluation", "test": "test"}
"""All parts in the order of the weights of `data.split`, as messages call them."""
PARTS: tuple[Part, ...] = tuple(PART_NAMES)


@dataclass(frozen=True)
class Sentences:
    """The bounds of the sentences and the documents of a row of tokens.

    Attributes:
        bounds: first token of each sentence, then the number of tokens: [sentences + 1], increasing.
        documents: first sentence of each document, then the number of sentences: [documents + 1], increasing.
    """

    bounds: IntArray
    documents: IntArray

    def __post_init__(self) -> None:
        for row in (self.bounds, self.documents):
            assert row.ndim == 1
            assert row[0] == 0


@dataclass(frozen=True)
class PairTokens:
    """Ids of the special tokens that sentence pairs are made with."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int


def digest_of(described: Any) -> str:
    """A digest of a value that JSON can describe."""
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
