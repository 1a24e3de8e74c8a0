"""Fetch data."""

from __future__ import annotations

import argparse
import importlib

ACTIONS = {
    "fetch": "copy files from a URL to this machine: resumable, checked, once however many ask",
}
"""Each has a module of its name in this package."""


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, title="actions")
    for name, summary in ACTIONS.items():
        module = importlib.import_module(f"{__name__}.{name}")
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
