"""All that a training needs of its data, in one place: the data opened, their batches, and the texts of evaluations."""

from shardwise.data.evaluation_sets import EvaluationSets, prepare_sets
from shardwise.data.formats.common import PreparedData, make_batches, random_text
from shardwise.data.open_data import prepare
from shardwise.data.reading.dataset_tables import fetch_dataset
from shardwise.data.request import continued_stages
from shardwise.data.tokens.tokenizer import Tokenizer

__all__ = [
    "EvaluationSets",
    "PreparedData",
    "Tokenizer",
    "continued_stages",
    "fetch_dataset",
    "make_batches",
    "prepare",
    "prepare_sets",
    "random_text",
]
