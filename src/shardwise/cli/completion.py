"""Completion of commands, options, recipes and keys by a shell, as a script that the library shtab writes."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from shardwise.base.errors import ConfigError, listing
from shardwise.cli.help import COMMAND_GROUPS, module_of
from shardwise.config.pydantic_errors import known_paths
from shardwise.config.recipe_files import recipe_names

SHELLS = ("bash", "zsh", "fish")
_FOLDERS = ("DIR", "RUN", "A", "B")  # names of arguments that are folders, or mostly so


_BASH = """
_shardwise_recipe_files() {{ compgen -W '{recipes}' -- "$1"; compgen -f -- "$1"; }}
_shardwise_keys() {{ compgen -W '{keys}' -- "$1"; }}
"""
_BASH_COMMAND = """
# No blank follows a key, whose value comes next.
_shardwise() { _shtab_shardwise "$@"; [[ ${COMPREPLY[*]} == *= ]] && compopt -o nospace; return 0; }
complete -o bashdefault -F _shardwise shardwise
"""
_ZSH = """
_shardwise_recipe_files() {{
  _alternative 'recipes:recipe:({recipes})' "files:file:_files -g '*.(yaml|yml)'"
}}
_shardwise_keys() {{
  if compset -P '*='; then _files; else compadd -S '' -- {keys}; fi
}}
"""


def completion_script(shell: str) -> str:
    """The script for a shell; ConfigError if none is written for it, or shtab is not installed."""
    if shell not in SHELLS:
        raise ConfigError(f"--completion ({shell}) must be {listing(SHELLS, 'or')}")
    from shardwise.base.registered import optional_library

    shtab = optional_library("shtab", "--completion needs", "completion")
    parser = argparse.ArgumentParser(prog="shardwise")
    commands = parser.add_subparsers()
    for group in COMMAND_GROUPS.values():
        for name, summary in group.items():
            _add_command(commands, (name,), summary, shtab)
    script = str(shtab.complete(parser, shell))
    if shell == "bash":
        return f"{script}\n{_BASH_COMMAND}"
    # In zsh, shtab lets an argument that may be repeated occur once.
    return script.replace('"(*)::', '"*:').replace('"(*):', '"*:') if shell == "zsh" else script


def _add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    words: tuple[str, ...],
    summary: str,
    shtab: ModuleType,
) -> None:
    module = importlib.import_module(module_of(*words))
    parser = commands.add_parser(words[-1], help=summary)
    if hasattr(module, "ACTIONS"):
        actions = parser.add_subparsers()
        for action, action_summary in module.ACTIONS.items():
            _add_command(actions, (*words, action), action_summary, shtab)
    else:
        module.configure(parser)
        _set_candidates(parser._actions, shtab)


def _set_candidates(actions: Iterable[argparse.Action], shtab: ModuleType) -> None:
    recipes = " ".join(recipe_names())
    keys = " ".join(f"{path}=" for path in known_paths() if "." in path)
    preamble = {"bash": _BASH.format(recipes=recipes, keys=keys), "zsh": _ZSH.format(recipes=recipes, keys=keys)}
    for action in actions:
        if action.metavar == "RECIPE":
            names = {**dict.fromkeys(preamble, "_shardwise_recipe_files"), "fish": f"{recipes} {shtab.FILE['fish']}"}
            action.complete = {**names, "preamble": preamble}  # type: ignore[attr-defined]
        elif action.dest == "overrides":
            names = {**dict.fromkeys(preamble, "_shardwise_keys"), "fish": keys}
            action.complete = {**names, "preamble": preamble}  # type: ignore[attr-defined]
        elif action.metavar in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.type is Path or action.metavar in ("FILE", "PATH", "CHECKPOINT"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
