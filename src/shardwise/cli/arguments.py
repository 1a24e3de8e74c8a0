"""Arguments that several commands have."""

from __future__ import annotations

import argparse

from shardwise.base.parsing import whole_number


def count(text: str) -> int:
    """The value of an option that counts something, for argparse: a whole number of at least 1."""
    number = whole_number(text)
    if not number:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number of at least 1")
    return number


def add_recipe(parser: argparse.ArgumentParser, *, is_required: bool = True) -> None:
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        nargs=None if is_required else "?",
        help="a shipped recipe's name, or a YAML file",
    )


def add_overrides(parser: argparse.ArgumentParser, example: str, owner: str = "recipe") -> None:
    """Add the arguments `key=value`; `owner`: what has the keys that they replace."""
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", help=f"replaces a key of the {owner}, such as {example}"
    )


def add_json(parser: argparse.ArgumentParser, of_several: str = "") -> None:
    parser.add_argument("--json", action="store_true", help=f"print one JSON object{of_several}")
