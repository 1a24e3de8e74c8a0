"""Prepare data for training, and look at data."""

from __future__ import annotations

import argparse
import importlib

ACTIONS = {
    "prepare": "make Megatron's .bin and .idx, blocks of arrow or BERT's HDF5 shards of text, once for all runs",
    "inspect": "show what data hold: documents, tokens, lengths, and the first of them decoded",
}
"""Each has a module of its name in this package; that of `inspect` has an underscore, as Python has one too."""
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


def run(arguments: argparse.Namespace) -> int:
    code: int = arguments.call(arguments)
    return code
