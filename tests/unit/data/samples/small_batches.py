"""Small batches of each kind, whose tokens tell where they come from."""

from pathlib import Path

import numpy as np

from shardwise.data.reading.megatron_files import IndexedFile, MegatronDocuments
from shardwise.data.rows import IntArray, PairTokens, Sentences
from shardwise.data.samples.chat_batches import Conversations
from shardwise.data.samples.packing import PackedBatches, PackedSamples
from shardwise.data.samples.sentence_pairs import SentencePairBatches

ROOM = 20
"""Tokens of a packed sample."""
SPECIAL = PairTokens(pad=0, unk=1, cls=2, sep=3, mask=4)
FIRST = 5
"""Of the ordinary tokens of pairs. Token `FIRST + i` stands at place `i` of the text."""


def bounds_of(lengths: list[int]) -> IntArray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def arranged(documents: list[list[int]]) -> Sentences:
    """Of documents given by the lengths of their sentences."""
    lengths = [length for document in documents for length in document]
    return Sentences(bounds_of(lengths), bounds_of([*map(len, documents)]))


def pairs(
    documents: list[list[int]], length: int = 32, seed: int = 3, fraction: float = 0.15, predictions: int = 5
) -> SentencePairBatches:
    sentences = arranged(documents)
    tokens = np.arange(FIRST, FIRST + sentences.bounds[-1], dtype=np.int32)
    options = {"special": SPECIAL, "vocab_size": FIRST + len(tokens), "max_predictions": predictions}
    return SentencePairBatches(tokens, sentences, length, seed, masked_fraction=fraction, **options)


def many(documents: int = 40, seed: int = 0) -> list[list[int]]:
    """The lengths of sentences of documents."""
    generator = np.random.default_rng(seed)
    return [generator.integers(1, 15, generator.integers(1, 20)).tolist() for _ in range(documents)]


def made(documents: list[list[int]]) -> IndexedFile:
    """Documents given by the lengths of their sequences; token `i` of the data set is `i`."""
    sizes = np.array([length for document in documents for length in document], dtype=np.int32)
    pointers = np.concatenate([[0], np.cumsum(sizes[:-1], dtype=np.int64) * 4])[: len(sizes)]
    tokens = np.arange(sizes.sum(), dtype=np.int32)
    return IndexedFile(Path("data"), tokens, sizes, pointers, bounds_of([*map(len, documents)]))


def whole(documents: list[list[int]]) -> MegatronDocuments:
    return MegatronDocuments(made(documents), 0, len(documents), 1 << 30)


def packed_row(number: int = 30, seed: int = 7) -> PackedBatches:
    """Documents of tokens that tell their places, of which some are longer than a sample."""
    bounds = bounds_of(np.random.default_rng(0).integers(1, 3 * ROOM, number).tolist())
    tokens = np.arange(1, bounds[-1] + 1, dtype=np.int32)
    return PackedBatches(tokens, PackedSamples.from_bounds(bounds, ROOM), seed)


def chats(number: int, seed: int = 0, longest: int = 12) -> Conversations:
    """Conversations of distinct tokens, each with one answer or two."""
    draws = np.random.default_rng(seed)
    bounds = bounds_of(draws.integers(4, longest + 1, number).tolist())
    answers = []
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        middle = (begin + end) // 2
        answers += [(begin + 1, middle), (middle + 1, end)] if draws.random() < 0.5 else [(middle, end)]
    return Conversations(np.arange(1, bounds[-1] + 1, dtype=np.int32), bounds, np.array(answers))
