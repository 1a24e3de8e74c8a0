"""From prepared data to the batches that the model's family trains on."""

from __future__ import annotations

from shardwise.config import Config
from shardwise.data.batch import Batches
from shardwise.data.preparation import PreparedData
from shardwise.data.split import Part
from shardwise.data.tokens import TokenBatches


def make_batches(config: Config, data: PreparedData, part: Part) -> Batches | None:
    """The batches of one part of `data`; None where it holds less than one sample."""
    tokens = data.train_tokens if part == "train" else data.eval_tokens
    length = config.train.sequence_length
    return TokenBatches(tokens, length, config.train.seed) if len(tokens) > length else None
