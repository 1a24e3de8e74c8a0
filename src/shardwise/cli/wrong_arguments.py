"""Sentences on a command line that is wrong, with what was most likely meant.

Imported after a mistake alone: the keys of recipes, among which a suggestion may be, take long to import.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from shardwise.base.errors import ConfigError, listing, nearest_name
from shardwise.base.yaml_and_json import parse_yaml
from shardwise.config.other_names import ACTIONS, COMMANDS, UNSURE
from shardwise.config.pydantic_errors import known_paths
from shardwise.config.recipe_files import recipe_names, recipe_text
from shardwise.config.suggestions import (
    is_key_or_option,
    known_name,
    plain_name,
    reason_without_key,
    removed_text,
    suggestions,
)
from shardwise.config.translation import equation, setting_text, translate_settings


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
        keys: the keys that the command reads, a section by its name and a dot; None for all.
    """
    family = _known_values(arguments).get("model.family", "")
    problems = []
    for _, name, value in _unknown_words(parser, arguments, keys, family):
        if name.startswith("--"):
            problems.append(_unknown_option(parser, name, value, keys, family))
    # For argparse, an argument of which there may be none is required too.
    return problems or [f"{message.replace(', key=value', '')}; `{parser.prog} --help` says more"]


def _known_values(arguments: Sequence[str]) -> dict[str, Any]:
    recipe = next((word for word in arguments if not word.startswith("-") and "=" not in word), "")
    try:
        sections = parse_yaml(recipe_text(recipe), recipe)
        return {f"{name}.{key}": value for name, keys in sections.items() for key, value in keys.items()}
    except (ConfigError, AttributeError):
        return {}


def _unknown_words(
    parser: argparse.ArgumentParser, arguments: Sequence[str], keys: Collection[str] | None, family: str
) -> Iterator[tuple[slice, str, str]]:
    """Yield the places, the name and the value of each option and each `key=value` that the command does not know."""
    takes_keys = any(action.dest == "overrides" for action in parser._actions)
    known = {*_valid_keys(keys, family), "model.config"}
    place = 0
    while place < len(arguments) and arguments[place] != "--":
        name, equals, value = arguments[place].partition("=")
        following = arguments[place + 1] if place + 1 < len(arguments) else "--"
        has_value = not equals and not (following.startswith("--") or "=" in following)
        action = parser._option_string_actions.get(name)
        end = place + 1
        if action is not None:
            end += has_value and action.nargs != 0
        elif name.startswith("--"):
            if has_value and following not in recipe_names() and not following.endswith((".yaml", ".yml")):
                end, value = end + 1, following
            yield slice(place, end), name, value
        elif takes_keys and equals and "." in name and name not in known and not _is_own(name, family, known):
            yield slice(place, end), name, value
        place = end


def _is_own(name: str, family: str, known: Collection[str]) -> bool:
    """Return whether a key is of a class of the user's, or inside of a mapping such as launch.environment.A."""
    outer = name.rpartition(".")[0]
    is_inside = outer in known and not any(key.startswith(f"{outer}.") for key in known)
    return is_inside or (":" in family and name.startswith("model."))


def corrected_command(parser: argparse.ArgumentParser, arguments: Sequence[str], keys: Collection[str] | None) -> str:
    """A line with the command as it was most likely meant; empty if nothing in it is surely another spelling."""
    values = _known_values(arguments)
    family = values.get("model.family", "")
    valid = _valid_keys(keys, family)
    options = [option for option in parser._option_string_actions if option.startswith("--")]
    wrong = list(_unknown_words(parser, arguments, keys, family))
    names = {_asked(name, value)[0]: name for _, name, value in wrong}
    words: dict[str, list[str]] = {}
    left_out = []

    def has(target: str) -> bool:
        return is_key_or_option(target, valid, options)

    settings = {asked: value or True for asked, value in (_asked(name, value) for _, name, value in wrong)}
    for row in translate_settings(settings, None, values, has, known_name):
        name = names[row.name]
        meant = suggestions(row.name, valid, options, row.value) if not row.keys and not row.reason else []
        given = dict(row.keys)
        if len(meant) == 1:
            key, _, fixed = meant[0].partition("=")
            given[key] = fixed or row.value
        words[name] = []
        for key, setting in given.items():
            words[name] += [key, setting_text(setting)] if key.startswith("--") else [f"{key}={setting_text(setting)}"]
        if not words[name] and not row.reason.startswith(("leave it out", "nothing")):
            left_out.append(name)
    if len(left_out) == len(words):
        return ""
    # Keys stand behind the recipe, wherever the options were.
    corrected = list(arguments)
    end = corrected.index("--") if "--" in corrected else len(corrected)
    keys_given = {word.partition("=")[0]: word for name in words for word in words[name] if "=" in word}
    corrected[end:end] = keys_given.values()
    for places, name, _ in reversed(wrong):
        corrected[places] = [] if any("=" in word for word in words[name]) else words[name]
    without = f" (without {listing(left_out)})" if left_out else ""
    return f"corrected{without}: {shlex.join([*parser.prog.split(), *corrected])}"


def _asked(name: str, value: str) -> tuple[str, str]:
    """A name as it is looked up and its value, where `--no-name` is not a name of its own."""
    if name.startswith(("--no-", "--no_")) and known_name(name) is None:
        return f"--{name[5:]}", "false"
    return (name if "." not in name else name.lstrip("-")), value


def _unknown_option(
    parser: argparse.ArgumentParser, name: str, value: str, keys: Collection[str] | None, family: str
) -> str:
    if text := removed_text(f"{parser.prog.removeprefix('shardwise ')} {name}"):
        return text
    takes_keys = any(action.dest == "overrides" for action in parser._actions)
    options = [option for option in parser._option_string_actions if option.startswith("--")]
    asked, value = _asked(name, value)
    meant = suggestions(asked, _valid_keys(keys, family) if takes_keys else [], options, value)
    if takes_keys and not set(meant) & set(options) and (reason := reason_without_key(name, value)):
        return f"unknown option {name}: {reason}"
    if not meant and takes_keys and (similar_keys := suggestions(asked, _valid_keys(keys, ""), options, value)):
        return (
            f"unknown option {name}: the family {family} has no key for it; others have {listing(similar_keys, 'or')}"
        )
    if not meant:
        return f"unknown option {name}; `{parser.prog} --help` lists the options"
    record = known_name(asked) or ""
    shown = dict.fromkeys(equation(record, target, value) for target in meant)
    is_one = record in UNSURE or all(target.startswith("model.") for target in meant)
    return f"unknown option {name}: did you mean {listing(shown, 'or' if is_one else 'and')}?"


def _valid_keys(keys: Collection[str] | None, family: str = "") -> list[str]:
    known = [path for path in known_paths(family if ":" not in family else "") if "." in path]
    if keys is None:
        return known
    sections = tuple(key for key in keys if key.endswith("."))
    return [path for path in known if path in keys or path.startswith(sections)]
