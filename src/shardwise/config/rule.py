"""Rules of several keys as tables of their messages.

A message names the keys that do not go together, and so says itself what breaks its rule:

- `{section.key}`: the rule is broken only if the key has a value other than null, false, 0 and empty. The message has
  the key with its value: `train.steps (10)`.
- `{section.key=value}`: only if the key has this value; shown likewise.
- `{!section.key}`: only if the key has no value, or one of those above; the message has the key alone.
- `{=section.key}`: the value, whatever it is.

A key may also be a property. The messages of a table stand under what else breaks all of them: properties, each with a
`!` where it must be false.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.base.errors import listing

RuleTable = Mapping[str, Sequence[str]]
_PLACE = r"\{([!=]?)([a-z_.]+)(?:=(\w+))?\}"


def broken(table: RuleTable, values: Any, section: str = "") -> list[str]:
    """The messages of the rules that a configuration breaks, or the section of this name."""

    def value(path: str) -> Any:
        current = values
        for name in path.removeprefix(f"{section}.").split("."):
            current = getattr(current, name)
        return current

    def is_met(place: re.Match[str]) -> bool:
        mark, path, only = place.groups()
        if mark == "=":
            return True
        return shown(value(path)) == only if only else bool(value(path)) is not bool(mark)

    def filled(place: re.Match[str]) -> str:
        mark, path, _ = place.groups()
        if mark == "!":
            return path
        return shown(value(path)) if mark else f"{path} ({shown(value(path))})"

    problems = []
    for facts, texts in table.items():
        if all(bool(value(fact.lstrip("!"))) is not fact.startswith("!") for fact in facts.split()):
            problems += [text for text in texts if all(map(is_met, re.finditer(_PLACE, text)))]
    return [re.sub(_PLACE, filled, text) for text in problems]


def shown(value: object) -> str:
    """A value as YAML has it; of a mapping the names."""
    if isinstance(value, Mapping):
        return listing(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(value) if isinstance(value, tuple) else value)
