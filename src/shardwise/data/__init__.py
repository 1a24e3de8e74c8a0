"""Data: files become text, text becomes tokens once, and tokens become the same batches at any layout.

In the order in which data flow:

    hub.py                  files of data sets, tokenizers and models that are named by a hub id, fetched once
    reading/                the files: their kinds, and the text or the tokens in them
    split.py                the documents that are trained on, evaluated and tested
    tokens/                 text → tokens: tokenizers, windows of long documents, sentences, chat templates
    cache.py                tokens that were made once, with their tokenizer
    samples/                tokens → samples → batches; `samples/order.py` decides the order of the data
    formats/                a module for each format of data, which puts these steps together for a run
    open_data.py            `FORMATS`, a record for each format; the entry of every command that opens data
    prepare/                `shardwise data prepare`: text → files of tokens that runs read as they are

Nothing here imports torch. The pages for users import `IndexedFile`, `IndexedWriter` and `train_tokenizer` from here.
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
