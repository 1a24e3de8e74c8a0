"""Reads JSON and YAML from files that anybody may have written.

The levels and the number of the values are bounded before any code walks through them: a file of a few bytes can
describe more of both than Python's recursion or the memory takes.

YAML is read by the core schema of YAML 1.2, in which `1e-4` is a number and `no` is a word.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.base.errors import ConfigError
from shardwise.base.files import read_plain

if TYPE_CHECKING:
    import yaml

MOST_LEVELS = 64
"""Mappings and lists inside each other: far more than any file has, and far less than Python's recursion takes."""
MOST_VALUES = 100_000
"""Values of a YAML file, where a value counts at each alias that repeats it: far more than any recipe has."""


# ---- JSON


def json_value(text: str | bytes, loads: Callable[[str | bytes], Any] = json.loads) -> Any:
    """The value of a JSON text; ValueError: no JSON in UTF-8, a number too long, or more levels than `MOST_LEVELS`."""
    problem = f"it has more than {MOST_LEVELS} levels of lists and mappings inside each other"
    try:
        value = loads(text)
    except RecursionError:
        raise ValueError(problem) from None
    # Nearly every text has too few brackets for so many levels: to count them is much faster than to walk.
    brackets = text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")
    if brackets > MOST_LEVELS and not _is_within(value, MOST_LEVELS):
        raise ValueError(problem)
    return value


def _is_within(value: Any, levels: int) -> bool:
    """True if a value of JSON has at most so many levels."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        value = []
    return levels > 0 and all(_is_within(inner, levels - 1) for inner in value if isinstance(inner, dict | list))


def json_object(text: str | bytes, file: str) -> dict[str, Any]:
    """The JSON object in the text of a file of a user's, which is `file` in errors; ConfigError if it holds none."""
    try:
        value = json_value(text)
    except ValueError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file} must hold a JSON object")
    return value


# ---- YAML

# As Python reads them: an underscore stands between two digits.
_INTEGER = re.compile(r"[-+]?(0|[1-9](_?[0-9])*)")
_FLOAT = re.compile(r"[-+]?([0-9](_?[0-9])*\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?")
# Far below the 4,300 at which Python refuses to read an integer.
_MOST_DIGITS = 1000
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}
_QUOTED = ("'", '"', "|", ">")
TAG = "tag:yaml.org,2002:"
_STANDARD_TAGS = {TAG + "str", TAG + "map", TAG + "seq"}


def parse_yaml(text: str, origin: str) -> Any:
    """The value of a YAML text of any origin, which errors name.

    Raises:
        ConfigError: the text is no YAML, has too many levels or values, or keys are given twice; with every such key.
    """
    # Costly to import, for readers of JSON.
    import yaml

    # libyaml's loader, where PyYAML was built with it, is several times faster. The base loader gives every scalar as
    # text: `yaml_scalar` decides what a word means.
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    try:
        root = yaml.compose(text, Loader=loader)
    except RecursionError:
        raise ConfigError(_too_deep(origin)) from None
    except yaml.YAMLError as error:
        # libyaml has a limit of its own.
        invalid = f"{origin} is not valid YAML: {_reason(error)}"
        raise ConfigError(_too_deep(origin) if "nesting depth" in invalid else invalid) from None
    except UnicodeError:  # bytes of the command line
        raise ConfigError(f"{origin} must be UTF-8 where its value is in brackets or quotes") from None
    if root is None:
        return None
    conversion = _Conversion(origin)
    value = conversion.value(root, ())
    if conversion.problems:
        raise ConfigError(conversion.problems)
    return value


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds; OSError if it cannot be read, ValueError if it holds none."""
    value = parse_yaml(read_plain(path).decode(), "it")
    if not isinstance(value, dict):
        raise ValueError("it is no mapping")
    return value


def yaml_scalar(text: str) -> bool | int | float | str | None:
    """The value of a plain word in YAML."""
    # `null`, `Null` and `NULL` are the word; `nULL` is a text.
    word = text if text in _WORDS else text.lower()
    if word in _WORDS and text in (word, word.capitalize(), word.upper()):
        return _WORDS[word]
    if _INTEGER.fullmatch(text):
        # Python refuses to read thousands of digits. As a float they are infinite, which no key accepts.
        return int(text) if len(text) < _MOST_DIGITS else float(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def _too_deep(origin: str) -> str:
    return f"{origin} must have at most {MOST_LEVELS} levels of lists and mappings inside each other, and it has more"


class _Conversion:
    """The conversion of a tree to values. An alias is a node that is met again."""

    def __init__(self, origin: str) -> None:
        self.problems: list[str] = []
        self._origin = origin
        self._values = 0

    def value(self, node: Any, path: tuple[str, ...]) -> Any:
        # An alias counts as what it repeats: a short text can describe more values than the memory takes.
        self._values += 1
        if len(path) > MOST_LEVELS:
            raise ConfigError(_too_deep(self._origin))
        if self._values > MOST_VALUES:
            too_many = f"must have at most {MOST_VALUES:,} values, those that aliases repeat included, and it has more"
            raise ConfigError(f"{self._origin} {too_many}")
        if node.tag not in _STANDARD_TAGS:
            self._add(node, f"{'.'.join(path)} has the tag {node.tag}; only plain values are read")
            return None
        if node.id == "sequence":
            return [self.value(item, (*path, str(index))) for index, item in enumerate(node.value)]
        if node.id == "scalar":
            return node.value if node.style in _QUOTED else yaml_scalar(node.value)
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.id != "scalar":
                self._add(key_node, "a key must be a word")
                continue
            key_path = (*path, key_node.value)
            if key_node.value in mapping:
                self._add(key_node, f"{'.'.join(key_path)} is given twice")
            mapping[key_node.value] = self.value(value_node, key_path)
        return mapping

    def _add(self, node: yaml.Node, problem: str) -> None:
        self.problems.append(f"{self._origin}, line {node.start_mark.line + 1}: {problem}")


def _reason(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    return f"{problem} (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else problem


# Beyond any step, byte or FLOP; arithmetic with them stays exact, and finite.
_LARGEST_COUNT = 10**18


def count_of(value: Any) -> int | None:
    """A value of JSON if it is a whole number from 0 on; None for anything else."""
    return value if type(value) is int and 0 <= value <= _LARGEST_COUNT else None


def whole_number(text: str) -> int | None:
    """The whole number from 0 on that a text of digits gives; None for anything else."""
    return count_of(int(text)) if text.isdecimal() and len(text) < _MOST_DIGITS else None


def parse_value(text: str, origin: str) -> Any:
    """The YAML value in a command line's `key=value`: any in brackets, braces or quotes, else one plain scalar."""
    text = text.strip()
    return parse_yaml(text, origin) if text.startswith(("[", "{", '"', "'")) else yaml_scalar(text)


def dump_yaml(values: Mapping[str, Any]) -> str:
    """A mapping as YAML text that `parse_yaml` reads back as the same; a path is written as its text."""
    import yaml

    text: str = yaml.serialize(_node(dict(values)), Dumper=yaml.SafeDumper, width=120, allow_unicode=True)
    # Characters that are not printable stand in double quotes alone, which take escapes.
    return "".join(c if c == "\n" or c.isprintable() else f"\\U{ord(c):08x}" for c in text)


def _node(value: Any) -> yaml.Node:
    import yaml

    if isinstance(value, Mapping):
        pairs = [(_node(str(key)), _node(item)) for key, item in value.items()]
        return yaml.MappingNode(TAG + "map", pairs, flow_style=False)
    if isinstance(value, (list, tuple)):
        return yaml.SequenceNode(TAG + "seq", [_node(item) for item in value], flow_style=True)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str):
        plain = yaml_scalar(value) == value and value.isprintable()
        return yaml.ScalarNode(TAG + "str", value, style=None if plain else '"')
    if value is None:
        return yaml.ScalarNode(TAG + "null", "null")
    if isinstance(value, bool):
        return yaml.ScalarNode(TAG + "bool", "true" if value else "false")
    if isinstance(value, int):
        return yaml.ScalarNode(TAG + "int", str(value))
    # YAML 1.1 readers (PyYAML's own among them) take 1e-05 for a word and 1.0e-05 for a number.
    text = repr(float(value))
    return yaml.ScalarNode(TAG + "float", text if "." in text else text.replace("e", ".0e"))


_DEEPEST = 20
"""Levels of a configuration that are compared key by key: one from an unknown source may be nested without end."""


def by_dotted_key(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of parsed YAML by dotted keys: a nested mapping as one level."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and prefix.count(".") < _DEEPEST:
            flat |= by_dotted_key(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
