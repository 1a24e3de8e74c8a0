"""Rows of tokens, the parts that data are divided into, and the bounds of sentences: the words of all modules here.

Megatron data and HDF5 shards are cut at cumulative shares of their documents or rows (`part_bounds`). Of text,
documents are held out by a hash of their number, or its end if that comes too far from the share asked for
(`formats.text.plan_text_split`). A stream holds documents out by where they begin (`samples.text_stream.HeldOut`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from shardwise.base.errors import listing
from shardwise.base.units import count

IntArray = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
Integers = npt.NDArray[np.integer[Any]]
"""Whole numbers of any width."""
Hashes = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]
AnyArray = npt.NDArray[Any]
TokenArray = npt.NDArray[np.uint16] | npt.NDArray[np.int32]

Part = Literal["train", "eval", "test"]
PART_NAMES: dict[Part, str] = {"train": "training", "eval": "evaluation", "test": "test"}
"""All parts in the order of the weights of `data.split`, as messages call them."""
PARTS: tuple[Part, ...] = tuple(PART_NAMES)


@dataclass(frozen=True)
class Sentences:
    """The bounds of the sentences and the documents of a row of tokens."""

    bounds: IntArray  # first token of each sentence, then the number of tokens: [sentences + 1], increasing
    documents: IntArray  # first sentence of each document, then the number of sentences: [documents + 1], increasing

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


def json_digest(described: Any) -> str:
    """A digest of a description of data, which JSON can spell."""
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def part_bounds(number: int, weights: Sequence[float]) -> list[int]:
    """The first document (or row) of the training, the evaluation and the test part, then `number`.

    The bounds are cumulative shares, each rounded, as Megatron-LM cuts the documents of BERT and the sequences of GPT.
    """
    total = sum(weights)
    return [0, *(round(share * number) for share in accumulate(weight / total for weight in weights))]


def part_sizes_text(sizes: Mapping[Part, int]) -> str:
    """The size of each part of the data, such as "1.2 M training and 40 k evaluation"; without an empty test part."""
    return listing([f"{count(size)} {PART_NAMES[part]}" for part, size in sizes.items() if part != "test" or size])
