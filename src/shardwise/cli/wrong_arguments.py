"""Sentences on a command line that is wrong, with what was most likely meant.

Imported after a mistake alone: the keys of recipes, among which a suggestion may be, take long to import.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from itertools import takewhile

from shardwise.base.errors import listing, nearest_name, removed_text
from shardwise.config.error_texts import known_paths
from shardwise.config.other_names import ACTIONS, COMMANDS
from shardwise.config.recipe_files import recipe_names
from shardwise.config.suggestions import plain_name, reason_without_key, suggestions


def unknown_command(arguments: Sequence[str], commands: Collection[str]) -> str:
    """The sentence on a command line whose first word is none of `commands`."""
    word = arguments[0]
    if word in recipe_names() or word.endswith((".yaml", ".yml")):
        return f"unknown command {word!r}: did you mean `shardwise train {' '.join(arguments)}`?"
    meant = COMMANDS.get(plain_name(word)) or nearest_name(word.lower(), [*commands, *COMMANDS])
    return _unknown_word("command", word, "shardwise", COMMANDS.get(meant or "", meant))


def unknown_action(command: str, word: str, actions: Collection[str]) -> str:
    """The sentence on a command line whose second word is none of the command's actions."""
    meant = ACTIONS.get(word, word)
    return _unknown_word("action", word, f"shardwise {command}", nearest_name(meant.lower(), actions, cutoff=0.75))


def _unknown_word(kind: str, word: str, command: str, meant: str | None) -> str:
    kind = "option" if word.startswith("-") else kind
    if meant is None:
        return f"unknown {kind} {word!r}; `{command} --help` lists what there is"
    return f"unknown {kind} {word!r}: did you mean `{command} {meant}`?"


def problems_of_arguments(
    parser: argparse.ArgumentParser, message: str, arguments: Sequence[str], keys: Collection[str] | None
) -> list[str]:
    """The problems of a command's arguments, each in a sentence.

    Args:
        message: what argparse says; an unknown option is the likelier cause, whatever argparse met first.
        arguments: the arguments of the command.
        keys: the keys that the command reads, a section by its name and a dot; None for all.
    """
    problems = []
    for word in takewhile(lambda word: word != "--", arguments):
        name, _, value = word.partition("=")
        if name.startswith("--") and name not in parser._option_string_actions:
            problems.append(_unknown_option(parser, name, value, keys))
    # For argparse, an argument of which there may be none is required too.
    return problems or [f"{message.replace(', key=value', '')}; `{parser.prog} --help` says more"]


def _unknown_option(parser: argparse.ArgumentParser, name: str, value: str, keys: Collection[str] | None) -> str:
    """The sentence on an option: what replaces it, or the keys and options that were most likely meant."""
    if text := removed_text(f"{parser.prog.removeprefix('shardwise ')} {name}"):
        return text
    takes_keys = any(action.dest == "overrides" for action in parser._actions)
    options = [option for option in parser._option_string_actions if option.startswith("--")]
    is_negated = name.startswith(("--no-", "--no_"))
    asked, value = (f"--{name[5:]}", "false") if is_negated else (name, value)
    meant = suggestions(asked, _valid_keys(keys) if takes_keys else [], options, value)
    if takes_keys and not set(meant) & set(options) and (reason := reason_without_key(name)):
        return f"unknown option {name}: {reason}"
    if not meant:
        return f"unknown option {name}; `{parser.prog} --help` lists the options"
    meant = [target if target.startswith("--") or "=" in target else f"{target}=VALUE" for target in meant]
    return f"unknown option {name}: did you mean {listing(meant, 'or')}?"


def _valid_keys(keys: Collection[str] | None) -> list[str]:
    """All keys of recipes, or those that a command reads."""
    known = [path for path in known_paths() if "." in path]
    if keys is None:
        return known
    sections = tuple(key for key in keys if key.endswith("."))
    return [path for path in known if path in keys or path.startswith(sections)]
