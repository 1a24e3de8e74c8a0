"""Fetch data, prepare them for training, and look at them."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager

from shardwise.base.errors import keys_renamed

ACTIONS = {
    "fetch": "copy files from a URL to this machine: resumable, checked, and only once for all processes",
    "prepare": "make Megatron's .bin and .idx of text or of raw tokens, once for all runs",
    "inspect": "show what data hold: documents, tokens, lengths, and the first documents as text",
}
_ARGUMENTS = {
    "data.config": "--config",
    "data.split": "--split",
    "data.tokenizer": "--tokenizer",
    "data.text_key": "--text-key",
    "data.format=chat": "--read-as chat",
    "set data.append_eod=false": "give --no-append-eod",
    "data.append_eod": "--append-eod",
    "data.prepend_bos": "--prepend-bos",
    "set data.format=text": "give --read-as text",
    "model.family=bert": "BERT",
}


def arguments_named(path: str) -> AbstractContextManager[None]:
    """Make the errors of `shardwise data` name its arguments instead of a recipe's keys."""
    return keys_renamed({"data.path": path, "data.dataset": path, **_ARGUMENTS})


def add_reading(parser: argparse.ArgumentParser, *formats: str) -> None:
    """Adds the options for reading files of text; `formats`: further values of data.format that the command reads."""
    parser.add_argument("--text-key", metavar="KEY", help="the field or column with the text (text)")
    read_as_help = "how files of text are read (default: as their content says)"
    parser.add_argument("--read-as", choices=("text", "jsonl", "parquet", *formats), help=read_as_help)


def add_marks(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Adds the options for the tokens at the beginning and the end of each document of text."""
    append_eod_help = "close each document by the tokenizer's end of document (default: yes)"
    parser.add_argument("--append-eod", action=argparse.BooleanOptionalAction, help=append_eod_help)
    prepend_bos_help = "begin each document with the tokenizer's begin of text, such as <s> (default: no)"
    parser.add_argument("--prepend-bos", action=argparse.BooleanOptionalAction, help=prepend_bos_help)
