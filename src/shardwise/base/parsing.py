"""Reads JSON and YAML from files that anybody may have written.

The levels and the number of the values are bounded before any code walks through them: a file of a few bytes can
describe more of both than Python's recursion or the memory takes.

YAML is read by the core schema of YAML 1.2, in which `1e-4` is a number and `no` is a word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from shardwise.base.files import read_plain

MOST_LEVELS = 64
"""Mappings and lists inside each other: far more than any file has, and far less than Python's recursion takes."""
MOST_VALUES = 100_000
"""Values of a YAML file, where a value counts at each alias that repeats it: far more than any recipe has."""


# ---- JSON


def json_value(text: str | bytes, loads: Callable[[str | bytes], Any] = json.loads) -> Any:
    """The value of a JSON text, by a parser such as Python's.

    Raises:
        ValueError: it is no JSON in UTF-8, has a number of thousands of digits, or more levels than `MOST_LEVELS`.
    """
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


# ---- YAML

# libyaml's loader, where PyYAML was built with it, is several times faster. The base loader gives every scalar as text:
# `scalar` decides what a word means.
_LOADER = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?")
_MOST_DIGITS = 1000  # far below the 4,300 at which Python refuses to read an integer
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}
_STARTS = (yaml.SequenceStartEvent, yaml.MappingStartEvent)
_ENDS = (yaml.SequenceEndEvent, yaml.MappingEndEvent)
_QUOTED = ("'", '"', "|", ">")
TAG = "tag:yaml.org,2002:"
_STANDARD_TAGS = {TAG + "str", TAG + "map", TAG + "seq"}


class NotReadError(ValueError):
    """A text is no YAML of plain values.

    Attributes:
        problems: each in a sentence.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = list(problems)


def yaml_value(text: str, origin: str) -> Any:
    """The value that `text` holds; `origin` names it in errors.

    Raises:
        NotReadError: the text is no YAML, has too many levels or values, or keys are given twice; with every such key.
    """
    try:
        _require_small(text, origin)
        root = yaml.compose(text, Loader=_LOADER)
    except yaml.YAMLError as error:
        raise NotReadError([f"{origin} is not valid YAML: {_reason(error)}"]) from None
    if root is None:
        return None
    conversion = _Conversion(origin)
    value = conversion.value(root, ())
    if conversion.problems:
        raise NotReadError(conversion.problems)
    return value


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds.

    Raises:
        OSError: it cannot be read. ValueError: it holds none.
    """
    value = yaml_value(read_plain(path).decode(), "it")
    if not isinstance(value, dict):
        raise ValueError("it is no mapping")
    return value


def scalar(text: str) -> bool | int | float | str | None:
    """The value of a plain word."""
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


def _require_small(text: str, origin: str) -> None:
    """Refuse a text before a tree is made of it: parsing gives events, and takes neither recursion nor much memory."""
    level = 0
    for number, event in enumerate(yaml.parse(text, Loader=_LOADER)):
        if isinstance(event, _STARTS):
            level += 1
        elif isinstance(event, _ENDS):
            level -= 1
        if level > MOST_LEVELS:
            raise NotReadError([_too_deep(origin)])
        if number > 2 * MOST_VALUES:  # a collection has two events
            raise NotReadError([_too_many(origin)])


def _too_deep(origin: str) -> str:
    return f"{origin} must have at most {MOST_LEVELS} levels of lists and mappings inside each other, and it has more"


def _too_many(origin: str) -> str:
    return f"{origin} must have at most {MOST_VALUES:,} values, those that aliases repeat included, and it has more"


class _Conversion:
    """The conversion of a tree to values. An alias is a node that is met again.

    Attributes:
        problems: what is wrong with the tree so far, each in a sentence.
    """

    def __init__(self, origin: str) -> None:
        self.problems: list[str] = []
        self._origin = origin
        self._values = 0

    def value(self, node: yaml.Node, path: tuple[str, ...]) -> Any:
        # `_require_small` has seen each alias as one value; here it counts as what it repeats.
        self._values += 1
        if len(path) > MOST_LEVELS:
            raise NotReadError([_too_deep(self._origin)])
        if self._values > MOST_VALUES:
            raise NotReadError([_too_many(self._origin)])
        if node.tag not in _STANDARD_TAGS:
            self._add(node, f"{'.'.join(path)} has the tag {node.tag}; only plain values are read")
            return None
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, str(index))) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return node.value if node.style in _QUOTED else scalar(node.value)
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
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
    """The problem of a text, with its place where the parser tells it."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    return f"{problem} (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else problem
