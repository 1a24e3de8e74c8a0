"""Fetch data, prepare them for training, and look at them."""

from __future__ import annotations

import argparse
import contextlib
import importlib
from collections.abc import Iterator

from shardwise.errors import ConfigError

ACTIONS = {
    "fetch": "copy files from a URL to this machine: resumable, checked, once however many ask",
    "prepare": "make Megatron's .bin and .idx, blocks of arrow or BERT's HDF5 shards of text, once for all runs",
    "inspect": "show what data hold: documents, tokens, lengths, and the first of them decoded",
}
"""Each has a module of its name in this package, except `inspect_`: `inspect` is one of Python's own modules."""
_ARGUMENTS = {
    "data.config": "--config",
    "data.split": "--split",
    "data.tokenizer": "--tokenizer",
    "data.text_key": "--text-key",
    "set data.format=text": "rename the file",
    "model.family=bert": "BERT",
}
_MODULES = {"inspect": "inspect_"}


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, title="actions")
    for name, summary in ACTIONS.items():
        module = importlib.import_module(f"{__name__}.{_MODULES.get(name, name)}")
        action = actions.add_parser(
            name,
            help=summary,
            description=module.__doc__,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.configure(action)
        action.set_defaults(call=module.run)


@contextlib.contextmanager
def arguments_named(path: str) -> Iterator[None]:
    """Errors name the user's arguments, `path` among them, where a recipe has keys of its section `data`."""
    try:
        yield
    except ConfigError as error:
        problems = error.problems
        for key, argument in {"data.path": path, "data.dataset": path, **_ARGUMENTS}.items():
            problems = [problem.replace(key, argument) for problem in problems]
        raise type(error)(problems) from error


def run(arguments: argparse.Namespace) -> int:
    code: int = arguments.call(arguments)
    return code
