"""List the shipped recipes; with NAME print that recipe's commented YAML; with --write copy it to a file to edit.

--schema prints the JSON Schema of recipes, which editors use to complete keys and check values.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from shardwise.base.errors import ConfigError
from shardwise.base.files import write_new
from shardwise.cli import output
from shardwise.config import recipe_names, recipe_text


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="a shipped recipe")
    parser.add_argument("--write", metavar="FILE", type=Path, help="copy the recipe to FILE, which must not exist yet")
    parser.add_argument("--schema", action="store_true", help="print the JSON Schema of recipes, for editors")


def run(arguments: argparse.Namespace) -> int:
    name: str | None = arguments.name
    target: Path | None = arguments.write
    if arguments.schema:
        if name is not None or target is not None:
            raise ConfigError("--schema stands alone: it prints one schema for all recipes")
        # Pydantic's schemas take long to import.
        from shardwise.config.schema import recipe_schema

        output.raw(json.dumps(recipe_schema(), indent=2))
        return 0
    if name is None:
        if target is not None:
            raise ConfigError(
                f"--write {target} needs the NAME of the recipe to copy: shardwise recipes NAME --write FILE"
            )
        output.table([(known, _summary(known)) for known in recipe_names()])
        return 0
    text = recipe_text(name)
    if target is None:
        output.raw(output.text(text.removesuffix("\n")))
        return 0
    write_new(target, text, "--write")
    output.line(f"wrote {target}; train it with: shardwise train {target}")
    return 0


def _summary(name: str) -> str:
    """The first line of the recipe's opening comment."""
    return recipe_text(name).partition("\n")[0].removeprefix("#").strip().removeprefix(f"{name}:").strip()
