"""From prepared data to the batches that the model's family trains on."""

from __future__ import annotations

from shardwise.config import Config
from shardwise.data.formats.common import PreparedData
from shardwise.data.samples.batch import Batches
from shardwise.data.tokens.split import Part


def make_batches(config: Config, data: PreparedData, part: Part) -> Batches | None:
    """The batches of one part of `data`; None where it holds less than one sample (two for sentence pairs)."""
    return data.batches(config, part, evaluation=part != "train")


def make_evaluation(config: Config, data: PreparedData, part: Part) -> Batches | None:
    """As `make_batches`, with what is left after the last whole sample: `eval_batches` then gives every token once.

    None where the part holds less than one target (two samples for sentence pairs).
    """
    return data.batches(config, part, evaluation=True, tail=True)
