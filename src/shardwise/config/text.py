"""Reads and writes YAML by the core schema of YAML 1.2, in which `1e-4` is a number and `no` is a word."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from shardwise.errors import ConfigError

_LOADER = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?")
_MOST_DIGITS = 1000
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}
_QUOTED = ("'", '"', "|", ">")
_TAG = "tag:yaml.org,2002:"
_STANDARD_TAGS = {_TAG + "str", _TAG + "map", _TAG + "seq"}


def parse_yaml(text: str, origin: str) -> Any:
    """The value that `text` holds; `origin` names it in errors.

    Raises:
        ConfigError: the text is no YAML, or keys are given twice; with every such key.
    """
    try:
        node = yaml.compose(text, Loader=_LOADER)
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin} is not valid YAML: {_reason(error)}") from None
    if node is None:
        return None
    problems: list[str] = []
    value = _value(node, origin, (), problems)
    if problems:
        raise ConfigError(problems)
    return value


def parse_value(text: str, origin: str) -> Any:
    """The value of a command line's `key=value`: YAML in brackets, braces or quotes, else one plain scalar."""
    text = text.strip()
    return parse_yaml(text, origin) if text[:1] in ("[", "{", '"', "'") else _scalar(text)


def dump_yaml(values: Mapping[str, Any]) -> str:
    """`values` as YAML that `parse_yaml` reads back as the same."""
    text: str = yaml.serialize(_node(dict(values)), Dumper=yaml.SafeDumper, width=120, allow_unicode=True)
    return text


def _scalar(text: str) -> bool | int | float | str | None:
    word = text if text in _WORDS else text.lower()
    if word in _WORDS and text in (word, word.capitalize(), word.upper()):
        return _WORDS[word]
    if _INTEGER.fullmatch(text):
        # Python refuses to read thousands of digits. As a float they are infinite, which no key accepts.
        return int(text) if len(text) < _MOST_DIGITS else float(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def _value(node: yaml.Node, origin: str, path: tuple[str, ...], problems: list[str]) -> Any:
    line = node.start_mark.line + 1
    if node.tag not in _STANDARD_TAGS:
        problems.append(f"{origin}, line {line}: {'.'.join(path)} has the tag {node.tag}; only plain values are read")
        return None
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, origin, (*path, str(index)), problems) for index, item in enumerate(node.value)]
    if isinstance(node, yaml.ScalarNode):
        return node.value if node.style in _QUOTED else _scalar(node.value)
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            problems.append(f"{origin}, line {key_node.start_mark.line + 1}: a key must be a word")
            continue
        key_path = (*path, key_node.value)
        if key_node.value in mapping:
            problems.append(f"{origin}, line {key_node.start_mark.line + 1}: {'.'.join(key_path)} is given twice")
        mapping[key_node.value] = _value(value_node, origin, key_path, problems)
    return mapping


def _node(value: Any) -> yaml.Node:
    if isinstance(value, Mapping):
        pairs = [(_node(str(key)), _node(item)) for key, item in value.items()]
        return yaml.MappingNode(_TAG + "map", pairs, flow_style=False)
    if isinstance(value, (list, tuple)):
        return yaml.SequenceNode(_TAG + "seq", [_node(item) for item in value], flow_style=True)
    if isinstance(value, str):
        plain = _scalar(value) == value and value.isprintable()
        return yaml.ScalarNode(_TAG + "str", value, style=None if plain else '"')
    if value is None:
        return yaml.ScalarNode(_TAG + "null", "null")
    if isinstance(value, bool):
        return yaml.ScalarNode(_TAG + "bool", "true" if value else "false")
    if isinstance(value, int):
        return yaml.ScalarNode(_TAG + "int", str(value))
    # YAML 1.1 readers (PyYAML's own among them) take 1e-05 for a word and 1.0e-05 for a number.
    text = repr(float(value))
    return yaml.ScalarNode(_TAG + "float", text if "." in text else text.replace("e", ".0e"))


def _reason(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    return f"{problem} (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else problem
