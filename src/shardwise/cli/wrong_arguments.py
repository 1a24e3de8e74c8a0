"""Sentences on a command line that is wrong, with what was most likely meant.

Imported after a mistake alone: the keys of recipes, among which a suggestion may be, take long to import.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Sequence

from shardwise.base.errors import listing, nearest_name
from shardwise.config.error_texts import known_paths
from shardwise.config.other_names import ACTIONS, COMMANDS
from shardwise.config.recipe_files import recipe_names
from shardwise.config.suggestions import has_other_values, plain_name, reason_without_key, suggestions

_NUMBER = r"-\.?\d"
_NEGATION = r"^(--.*\.|--)no[-_]"
_FLAG_WITH_VALUE = r"(?s)argument (\S+): ignored explicit argument (.+)"
_MISSING = r"the following arguments are required: (.+)"
_WRONG_NUMBER = r"(?s)argument (\S+): invalid (int|float) value: (.+)"
_WRONG_CHOICE = r"(?s)argument (\S+): invalid choice: (.+) \(choose from .*\)"
_WITHOUT_VALUE = r"argument (\S+): expected (one|\d+|at least one) arguments?"
_EXCLUSIVE = r"argument (\S+): not allowed with argument (\S+)"
_ONE_OF = r"one of the arguments (.+) is required"
_NUMBERS = {"int": "a whole number", "float": "a number"}
_EXAMPLES = {
    "RECIPE": "missing RECIPE, e.g. `{command} llama2-tiny` (list: `shardwise recipes`)",
    "CHECKPOINT": "missing CHECKPOINT, e.g. `{command} runs/latest`",
    "RUN": "missing RUN, e.g. `{command} runs/latest`",
}
"""The sentence on a required argument, by its name."""


def unknown_command(arguments: Sequence[str], commands: Collection[str]) -> str:
    """The sentence on a command line whose first word is none of `commands`."""
    word = arguments[0]
    if word in recipe_names() or word.endswith((".yaml", ".yml")):
        return f"unknown command {word!r}: did you mean `shardwise train {' '.join(arguments)}`?"
    kind = "option" if word.startswith("-") else "command"
    meant = COMMANDS.get(plain_name(word)) or nearest_name(word.lower(), [*commands, *COMMANDS])
    return _unknown(kind, word, "shardwise", COMMANDS.get(meant or "", meant))


def unknown_action(command: str, word: str, actions: Collection[str]) -> str:
    """The sentence on a command line whose second word is none of the command's actions."""
    kind = "option" if word.startswith("-") else "action"
    # An action that removes something is suggested for its own mistypings alone.
    harmless = [action for action in actions if action != "prune"]
    near = nearest_name(word.lower(), actions, cutoff=0.8) or nearest_name(word.lower(), harmless, cutoff=0.5)
    ours = ACTIONS.get(word)
    return _unknown(kind, word, f"shardwise {command}", ours if ours in actions else near)


def _unknown(kind: str, word: str, command: str, meant: str | None) -> str:
    if meant is None:
        return f"unknown {kind} {word!r}; `{command} --help` lists what there is"
    return f"unknown {kind} {word!r}: did you mean `{command} {meant}`?"


def problems_of_arguments(
    parser: argparse.ArgumentParser, message: str, arguments: Sequence[str], keys: Collection[str] | None
) -> list[str]:
    """The problems of a command's arguments, each in a sentence.

    Args:
        message: what argparse says.
        arguments: the arguments of the command.
        keys: the keys that the command reads, a section by its name and a dot; None for all.
    """
    # An unknown option is the likelier cause, whatever argparse met first.
    problems = _unknown_options(parser, arguments, keys)
    if problems:
        return problems
    return [_sentence(parser, message)]


def _sentence(parser: argparse.ArgumentParser, message: str) -> str:
    """The message of argparse as `quantity (value) must …`."""
    if matched := re.fullmatch(_FLAG_WITH_VALUE, message):
        return f"{matched[1]} takes no value, and {matched[2]} is given: leave the value out"
    if matched := re.fullmatch(_WRONG_NUMBER, message):
        return f"{matched[1]} ({matched[3]}) must be {_NUMBERS[matched[2]]}"
    if matched := re.fullmatch(_WITHOUT_VALUE, message):
        count = "a value" if matched[2] in ("one", "1") else f"{matched[2]} values"
        return f"{matched[1]} must have {count}"
    if matched := re.fullmatch(_EXCLUSIVE, message):
        return f"{matched[1]} must not go with {matched[2]}: leave one of them out"
    if matched := re.fullmatch(_ONE_OF, message):
        return f"{listing(matched[1].split(), 'or')} must be given"
    if matched := re.fullmatch(_WRONG_CHOICE, message):
        choices = [str(choice) for choice in _choices(parser, matched[1])]
        near = nearest_name(matched[2].strip("'\""), choices)
        return f"{matched[1]} ({matched[2]}) must be {listing(choices, 'or')}" + (
            f"; did you mean {near}?" if near else ""
        )
    if matched := re.fullmatch(_MISSING, message):
        return missing_arguments(parser.prog, [name for name in matched[1].split(", ") if name != "key=value"])
    return message


def missing_arguments(command: str, names: Sequence[str]) -> str:
    """The sentence on required arguments that are left out."""
    sentence = "missing {names}; `{command} --help` says what it needs"
    if len(names) == 1:
        sentence = _EXAMPLES.get(names[0], sentence)
    return sentence.format(command=command, names=listing(names))


def _choices(parser: argparse.ArgumentParser, shown: str) -> list[object]:
    """The choices of the argument that argparse shows by this name."""
    for action in parser._actions:
        if shown in ("/".join(action.option_strings), action.metavar, action.dest):
            return list(action.choices or ())
    return []


def _unknown_options(
    parser: argparse.ArgumentParser, arguments: Sequence[str], keys: Collection[str] | None
) -> list[str]:
    """The sentences on all options that a command does not have."""
    options = parser._option_string_actions
    problems = []
    for place, word in enumerate(arguments):
        if word == "--":
            break
        name, equals, value = word.partition("=")
        is_known = name in options or (word[:2] in options and not word.startswith("--"))
        if not word.startswith("-") or word == "-" or is_known or re.match(_NUMBER, word):
            continue
        following = arguments[place + 1] if place + 1 < len(arguments) else ""
        if not equals and (not following.startswith("-") or re.match(_NUMBER, following)):
            value = following
        problems.append(_unknown_option(parser, name, value, keys))
    return problems


def _unknown_option(parser: argparse.ArgumentParser, name: str, value: str, keys: Collection[str] | None) -> str:
    """The sentence on an option: the key with the value, or the option with it, that was most likely meant."""
    takes_keys = any(action.dest == "overrides" for action in parser._actions)
    valid = _valid_keys(keys) if takes_keys else []
    options = [option for option in parser._option_string_actions if option.startswith("--")]
    positive = re.sub(_NEGATION, r"\1", name)
    if takes_keys and positive != name:
        value = "false"
        meant = [
            target for target in suggestions(positive, valid, options, value) if "=" in target or _is_switch(target)
        ]
    else:
        meant = suggestions(name, valid, options, value)
    if takes_keys and not set(meant) & set(options) and (reason := reason_without_key(name)):
        return f"unknown option {name}: {reason}"
    if not meant:
        return f"unknown option {name}; `{parser.prog} --help` lists the options"
    meant = [_with_value(parser, name, value, target) for target in meant]
    return f"unknown option {name}: did you mean {listing(meant, 'or')}?"


def _with_value(parser: argparse.ArgumentParser, name: str, value: str, target: str) -> str:
    """A key or an option with the value that was given to `name`, where that means the same."""
    if "=" in target or has_other_values(name):
        return target
    if target.startswith("--"):
        takes_value = parser._option_string_actions[target].nargs != 0
        return f"{target} {value}" if takes_value and value else target
    return f"{target}={value or ('true' if _is_switch(target) else 'VALUE')}"


def _is_switch(target: str) -> bool:
    """True for a key whose values are true and false."""
    return target in known_paths() and known_paths()[target].annotation is bool


def _valid_keys(keys: Collection[str] | None) -> list[str]:
    """All keys of recipes, or those that a command reads."""
    known = [path for path in known_paths() if "." in path]
    if keys is None:
        return known
    sections = tuple(key for key in keys if key.endswith("."))
    return [path for path in known if path in keys or (sections and path.startswith(sections))]
