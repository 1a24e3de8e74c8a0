"""Data: files become text, text becomes tokens once, and tokens become the same batches at any layout.

In the order in which data flow:

    rows.py                 the words of all modules: rows of tokens, parts, bounds of sentences
    hub.py                  files of data sets, tokenizers and models that are named by a hub id, fetched once
    cache.py                tokens that were made once, with their tokenizer
    reading/                the files: their kinds, and the text or the tokens in them
    tokens/                 text → tokens: tokenizers, windows of long documents, sentences, chat templates
    samples/                tokens → samples → batches; `samples/order.py` decides the order of the data
    request.py              what a run asks of its data
    formats/                a module for each format of data, which puts these steps together for a run
    open_data.py            data of any format, opened for a run
    evaluation_sets.py      further texts of evaluations
    training_data.py        all of this that a training imports
    describe.py             what a dry run and `shardwise data inspect` say of data
    prepare/                `shardwise data prepare`: text → files of tokens that runs read as they are

Imports go up this list only, and nothing here imports torch. Pages for users import
`IndexedFile`, `IndexedWriter` and `train_tokenizer` from here.
"""

from importlib import import_module

# Loaded when they are first used, as most commands import this package and need none of them.
_DOCUMENTED = {
    "IndexedFile": "shardwise.data.reading.megatron_files",
    "IndexedWriter": "shardwise.data.reading.megatron_files",
    "train_tokenizer": "shardwise.data.tokens.tokenizer",
}


def __getattr__(name: str) -> object:
    if name not in _DOCUMENTED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_DOCUMENTED[name]), name)
