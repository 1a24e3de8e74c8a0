"""List the shipped recipes; with NAME print that recipe's commented YAML; with --write copy it to a file to edit.

--from FILE makes a recipe of another program's file: a script with arguments of Megatron-LM, a config of torchtitan or
OLMo-core, TrainingArguments of transformers, a script of Neuron's tutorials, DeepSpeed's JSON. It prints what carries
over and what does not; nothing in the file is executed. Keys beside it, as key=value, count instead of the file's.

--schema prints the JSON Schema of recipes, which editors use to complete keys and check values.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.base.errors import ConfigError
from shardwise.base.files import write_new
from shardwise.base.registered import provided
from shardwise.base.yaml_and_json import dump_yaml, parse_yaml
from shardwise.cli import output
from shardwise.cli.help import add_json, add_overrides
from shardwise.config import recipe_name, recipe_names, recipe_text

_NEEDED = {
    "model": "model.config=FOLDER",
    "model.config": "model.config=FOLDER",
    "optimizer": "optimizer.lr=VALUE",
    "train": "train.steps=VALUE train.global_batch=VALUE train.sequence_length=VALUE",
}
"""What to give where a whole section is missing."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="a shipped recipe")
    add_overrides(parser, "train.steps=100, with --from")
    from_help = "make a recipe of another program's file; PATH.py:NAME of one config of several"
    parser.add_argument("--from", metavar="FILE", dest="source", help=from_help)
    parser.add_argument("--write", metavar="FILE", type=Path, help="write the recipe to FILE, which must not exist yet")
    parser.add_argument("--schema", action="store_true", help="print the JSON Schema of recipes, for editors")
    add_json(parser, ", of the list or of NAME")


def run(arguments: argparse.Namespace) -> int:
    name: str | None = arguments.name
    target: Path | None = arguments.write
    if arguments.source is not None:
        if arguments.json:
            raise ConfigError(f"--json must go without --from ({arguments.source}), which tells what carries over")
        if arguments.schema or (name is not None and "=" not in name):
            raise ConfigError(f"--from {arguments.source} goes with --write and key=value alone")
        return _from_other(arguments.source, [*([name] if name else []), *arguments.overrides], target)
    if arguments.overrides:
        raise ConfigError(f"{arguments.overrides[0]} must go with --from FILE: a copy of a recipe is edited by hand")
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
        recipes = [{"name": known, "summary": _summary(known, recipe_text(known))} for known in recipe_names()]
        if arguments.json:
            output.json({"recipes": recipes})
        else:
            output.table([[*recipe.values()] for recipe in recipes])
        return 0
    text = recipe_text(name)
    if target is not None:
        write_new(target, text, "--write")
    if arguments.json:
        facts = {"name": recipe_name(name), "summary": _summary(name, text), "recipe": parse_yaml(text, name)}
        output.json({**facts, "path": target and str(target)})
    elif target is None:
        output.raw(output.text(text.removesuffix("\n")))
    else:
        output.line(f"wrote {target}; train it with: shardwise train {target}")
    return 0


def _summary(name: str, text: str) -> str:
    return text.partition("\n")[0].removeprefix("#").strip().removeprefix(f"{name}:").strip()


def _from_other(source: str, overrides: list[str], target: Path | None) -> int:
    # Costly to import, for this option alone.
    from shardwise.config.other_names import PROGRAMS
    from shardwise.config.translation import setting_text

    made = provided("recipe_of")(source, overrides)
    program = PROGRAMS[made.program]

    def block(title: str, rows: list[Any], cells: Callable[[Any], list[str]]) -> None:
        if rows:
            output.line(title)
            output.table([[f"{row.name} = {setting_text(row.value)}", *cells(row)] for row in rows], indent=2)

    carried = [row for row in made.rows if row.keys]
    same = [row for row in made.rows if not row.keys and row.reason.startswith(("leave it out", "nothing"))]
    without = [row for row in made.rows if not row.keys and row.reason and row not in same]
    unknown = [row for row in made.rows if not row.keys and not row.reason]

    def cells(row: Any) -> list[str]:
        keys = " ".join(f"{key}={setting_text(value)}" for key, value in row.keys.items())
        return [f"→ {keys}{' (its default)' if row.is_default else row.reason and f' ({row.reason})'}"]

    block(f"{program.title}: carried over", carried, cells)
    block(
        "nothing to set", same, lambda row: [row.reason.removeprefix("nothing to set").removeprefix("leave it out: ")]
    )
    block("no counterpart", without, lambda row: [row.reason])
    block("not understood", unknown, lambda row: [])
    if program.note:
        output.prose(program.note)
    if made.problems:
        named = "\n".join(problem for problem in made.problems if ": unknown key" not in problem)
        keys = dict.fromkeys(re.findall(r"^[a-z]+(?:\.\w+)*", named, re.MULTILINE))
        words = " ".join(_NEEDED.get(key, f"{key}=VALUE") for key in keys)
        fix = f"give keys beside it: `shardwise recipes --from {shlex.quote(source)} {words} --write my.yaml`"
        raise ConfigError([*made.problems, *([fix] if words else [])])
    data = made.sections.get("data", {})
    text = f"# Made of {Path(source).name} ({program.title}) by `shardwise recipes --from`.\n"
    if not data.keys() & {"path", "blend", "dataset", "mixture"} and not made.sections.get("hooks", {}).get("data"):
        output.line("missing: data; give data.path=YOUR_TEXT.jsonl to `shardwise train`, or data.dataset")
        text += "# Your own data: data.path=YOUR_TEXT.jsonl\n"
    text += dump_yaml(made.sections)
    if target is None:
        output.raw(output.text(text.removesuffix("\n")))
        return 0
    write_new(target, text, "--write")
    nodes = made.sections.get("launch", {}).get("nodes", 1)
    options = "".join(f" {option} {shlex.quote(str(value))}" for option, value in made.options.items())
    if nodes > 1:
        # The ranks that the file starts are those of a node.
        options = options.replace("--nproc ", "launch.ranks_per_node=")
    command = "submit" if nodes > 1 else "train"
    output.line(f"wrote {target}; train it with: shardwise {command} {target}{options}")
    return 0
