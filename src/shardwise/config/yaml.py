"""Reads the YAML of recipes and overrides, and writes configurations as YAML."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import yaml

from shardwise.base.errors import ConfigError
from shardwise.base.parsing import TAG, NotReadError, scalar, yaml_value
from shardwise.config.section import with_stand_ins


def parse_yaml(text: str, origin: str) -> Any:
    """The value that `text` holds; `origin` names it in errors.

    Raises:
        ConfigError: the text is no YAML, has too many levels or values, or keys are given twice; with every such key.
    """
    try:
        return yaml_value(text, origin)
    except NotReadError as error:
        raise ConfigError(error.problems) from None


def parse_value(text: str, origin: str) -> Any:
    """The value of a command line's `key=value`: YAML in brackets, braces or quotes, else one plain scalar."""
    return parse_yaml(text.strip(), origin) if is_yaml(text) else scalar(text.strip())


def is_yaml(text: str) -> bool:
    """True if the value of a `key=value` is YAML in brackets, braces or quotes."""
    return text.strip()[:1] in ("[", "{", '"', "'")


def dump_yaml(values: Mapping[str, Any]) -> str:
    """`values` as YAML that `parse_yaml` reads back as the same; a path is written as its text."""
    text: str = yaml.serialize(_node(dict(values)), Dumper=yaml.SafeDumper, width=120, allow_unicode=True)
    return "\n".join(map(_escaped, text.split("\n")))


def _escaped(line: str) -> str:
    """A line with an escape for each character that is not printable: these stand in double quotes alone."""
    return line if line.isprintable() else "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in line)


def _node(value: Any) -> yaml.Node:
    if isinstance(value, Mapping):
        pairs = [(_node(str(key)), _node(item)) for key, item in value.items()]
        return yaml.MappingNode(TAG + "map", pairs, flow_style=False)
    if isinstance(value, (list, tuple)):
        return yaml.SequenceNode(TAG + "seq", [_node(item) for item in value], flow_style=True)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str):
        value = with_stand_ins(value)
        plain = scalar(value) == value and value.isprintable()
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
