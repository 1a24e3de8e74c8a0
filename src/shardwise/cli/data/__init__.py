"""Fetch data, prepare them for training, and look at them."""

from __future__ import annotations

from contextlib import AbstractContextManager

from shardwise.errors import keys_renamed

ACTIONS = {
    "fetch": "copy files from a URL to this machine: resumable, checked, once however many ask",
    "prepare": "make Megatron's .bin and .idx, blocks of arrow or BERT's HDF5 shards of text, once for all runs",
    "inspect": "show what data hold: documents, tokens, lengths, and the first of them decoded",
}
_ARGUMENTS = {
    "data.config": "--config",
    "data.split": "--split",
    "data.tokenizer": "--tokenizer",
    "data.text_key": "--text-key",
    "set data.format=text": "rename the file",
    "model.family=bert": "BERT",
}


def arguments_named(path: str) -> AbstractContextManager[None]:
    """Makes errors name the command's arguments instead of a recipe's keys; `path`: the one that names the data."""
    return keys_renamed({"data.path": path, "data.dataset": path, **_ARGUMENTS})
