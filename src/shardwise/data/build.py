"""From prepared data to the batches that the model's family trains on."""

from __future__ import annotations

from shardwise.config import Config
from shardwise.data.batch import Batches
from shardwise.data.pairs import SentencePairBatches, chunk_room
from shardwise.data.preparation import PreparedData
from shardwise.data.sentences import ChunkIndex
from shardwise.data.split import Part
from shardwise.data.tokens import TokenBatches


def make_batches(config: Config, data: PreparedData, part: Part) -> Batches | None:
    """The batches of one part of `data`; None where it holds less than one sample (two for sentence pairs)."""
    return _make(config, data, part, tail=False)


def make_evaluation(config: Config, data: PreparedData, part: Part) -> Batches | None:
    """As `make_batches`, with what is left after the last whole sample: `eval_batches` then gives every token once.

    None where the part holds less than one target (two samples for sentence pairs).
    """
    return _make(config, data, part, tail=True)


def _make(config: Config, data: PreparedData, part: Part, *, tail: bool) -> Batches | None:
    tokens = data.train_tokens if part == "train" else data.eval_tokens
    length, seed = config.train.sequence_length, config.train.seed
    if data.pair_tokens is None:
        least = 1 if tail else length
        return TokenBatches(tokens, length, seed, tail=tail) if len(tokens) > least else None
    sentences = data.sentences[part]
    if ChunkIndex(sentences, chunk_room(length)).num_chunks < 2:
        return None
    return SentencePairBatches(
        tokens,
        sentences,
        length,
        seed,
        special=data.pair_tokens,
        vocab_size=data.vocab_size,
        masked_fraction=config.data.masked_fraction,
        max_predictions=config.data.predictions(length),
    )
