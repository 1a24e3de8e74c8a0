"""The evaluation sets of a run: further texts, whose tokens are those of the run's tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shardwise.base.errors import ConfigError, DataError, raise_problems
from shardwise.config import Config, ModelConfig
from shardwise.config.evaluation import as_keys_of_set
from shardwise.data.formats import prepared_data
from shardwise.data.open_data import prepare_data
from shardwise.data.reading.dataset_tables import fetch_dataset
from shardwise.data.request import Announce
from shardwise.data.rows import IntArray
from shardwise.data.samples.batch import Batches
from shardwise.data.tokens.tokenizer import Tokenizer


@dataclass(frozen=True)
class EvaluationSets:
    """The texts of `evaluation.sets`, on which a model is evaluated."""

    # Samples of each text by its name; an evaluation predicts each token once.
    batches: Mapping[str, Batches] = field(default_factory=dict)
    bytes_V: IntArray | None = None  # `vocabulary_byte_counts` of the run's tokenizer, [vocabulary of the model]

    @property
    def note(self) -> str | None:
        """The lack of the sets, for the user; None where it is nothing."""
        if self.bytes_V is not None or not any(batches.objectives == ("lm",) for batches in self.batches.values()):
            return None
        return "evaluation sets: no bits per byte, as the data hold only tokens: data.tokenizer names what made them"


def prepare_evaluation_sets(
    config: Config, data: prepared_data.PreparedData, announce: Announce = None
) -> EvaluationSets:
    """Open `evaluation.sets` by the tokenizer of `data`, the run's; DataError with the problems of all sets."""
    batches: dict[str, Batches] = {}
    problems: list[str] = []
    for name in config.evaluation.sets:
        try:
            batches[name] = _open(evaluation_set_config(config, name, data.tokenizer_path), announce)
        except ConfigError as error:
            problems += [evaluation_set_problem(text, name) for text in error.problems]
    raise_problems(DataError, problems)
    return EvaluationSets(batches, vocabulary_byte_counts(config.model, data.tokenizer_path) if batches else None)


def evaluation_set_problem(text: str, name: str) -> str:
    """A message on the data of an evaluation set, with its key."""
    shown = as_keys_of_set(text, name)
    key = f"evaluation.sets.{name}"
    return shown if key in shown else f"{key}: {shown}"


def vocabulary_byte_counts(model: ModelConfig, tokenizer: Path | None) -> IntArray | None:
    """The UTF-8 bytes of the text of each id, for bits per byte: [vocabulary of the model].

    None where no tokenizer is known, or the model does not predict the next token.
    """
    if model.objectives != ("lm",) or tokenizer is None:
        return None
    counts = Tokenizer.load(tokenizer).byte_counts()
    return np.pad(counts, (0, model.vocab_size - len(counts)))


def evaluation_set_config(config: Config, name: str, tokenizer: Path | None) -> Config:
    """The configuration whose data are an evaluation set, all of them in one part."""
    changes: dict[str, object] = {
        "data": config.evaluation.sets[name].model_copy(update={"tokenizer": tokenizer and str(tokenizer)}),
        "train": config.train.model_copy(update={"eval_every": 0}),
        # The set is read by the tokenizer of the run, which fits the weights or is warned of.
        "checkpoint": config.checkpoint.model_copy(update={"load": None}),
        "hooks": config.hooks.model_copy(update={"data": None}),
    }
    return config.model_copy(update=changes)


def _open(config: Config, announce: Announce) -> Batches:
    data = config.data
    fetch_dataset(data, announce)
    prepared = prepare_data(config, announce=announce, any_size=True)
    batches = prepared_data.make_evaluation_batches(config, prepared, "train")
    if batches is None:
        least = "2 tokens" if config.model.objectives == ("lm",) else "2 samples"
        if data.is_chat:
            least = "an answer within train.sequence_length + 1 tokens of a conversation"
        raise DataError(f"{data.key} ({data.name}) must hold at least {least}, and it holds {prepared.count('train')}")
    return batches
