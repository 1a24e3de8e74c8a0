"""Data: files become text, text becomes tokens once, and tokens become the same batches at any layout.

In the order in which data flow:

    rows.py                 the words of all modules: rows of tokens, parts, bounds of sentences
    cache.py                tokens that were made once, with their tokenizer
    reading/                the files: their kinds, and the text or the tokens in them
    tokens/                 text → tokens: tokenizers, windows of long documents, sentences, chat templates
    samples/                tokens → samples → batches; `samples/order.py` decides the order of the data
    request.py              what a run asks of its data
    formats/                a module for each format of data, which puts these steps together for a run
    open_data.py            data of any format, opened for a run
    evaluation_sets.py      further texts of evaluations
    preview.py              what a dry run and `shardwise data inspect` say of data
    prepare/                `shardwise data prepare`: text → files of tokens that runs read as they are

Imports go up this list only, and nothing here imports torch. A training imports all that it needs of its data from
here; pages for users import `IndexedFile`, `IndexedWriter` and `train_tokenizer`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.data.evaluation_sets import EvaluationSets, prepare_evaluation_sets
    from shardwise.data.formats.prepared_data import PreparedData, make_batches, random_tokens
    from shardwise.data.reading.dataset_tables import fetch_dataset
    from shardwise.data.request import continued_stages
    from shardwise.data.tokens.tokenizer import Tokenizer

# Loaded when they are first used, as most commands import this package and need none of them.
_NAMES = {
    "shardwise.data.evaluation_sets": "EvaluationSets prepare_evaluation_sets",
    "shardwise.data.formats.prepared_data": "PreparedData make_batches random_tokens",
    "shardwise.data.reading.dataset_tables": "fetch_dataset",
    "shardwise.data.reading.megatron_files": "IndexedFile IndexedWriter",
    "shardwise.data.request": "continued_stages",
    "shardwise.data.tokens.tokenizer": "Tokenizer train_tokenizer",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "EvaluationSets", "PreparedData", "Tokenizer", "continued_stages", "fetch_dataset",
    "make_batches", "prepare_evaluation_sets", "random_tokens",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
