"""Names of other programs by what they mean here, as `other_names.yaml` records them.

Imported after a mistake alone, as the file is read then, and by what reads files of other programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.base.yaml_and_json import read_mapping

_RECORD = read_mapping(Path(__file__).with_suffix(".yaml"))

NO = ("false", "no", "off", "0", "none", "null")
"""Values, in lower case, by which a switch is off."""
OTHER_NAMES: dict[str, tuple[str, ...]] = {}
"""Another program's name → our keys, `key=value` or options; each that is valid is an answer."""
FORMULAS: dict[tuple[str, str], str] = {}
"""Another program's name and our key → our value, by that of the name (VALUE) and those of other keys."""
for _target, _names in _RECORD["names"].items():
    for _name in _names:
        OTHER_NAMES[_name] = (*OTHER_NAMES.get(_name, ()), _target)
for _equation, _names in _RECORD["conversions"].items():
    for _name in _names:
        _key, _, _formula = _equation.partition(" = ")
        OTHER_NAMES[_name] = (*OTHER_NAMES.get(_name, ()), _key)
        FORMULAS[_name, _key] = _formula.strip()
WORDS: dict[str, dict[str, Any]] = {
    owner: {str(word).lower(): mapped for word, mapped in words.items()} for owner, words in _RECORD["words"].items()
}
"""Another program's name, or our key → their value in lower case → ours, several keys, or why there is none."""
UNSURE = frozenset[str](_RECORD["unsure"])
"""Names that do not say which of their targets is meant, or how."""
ABSENT: dict[str, Any] = _RECORD["absent"]
"""Our key → the value that says what a family without the key does."""
OTHER_VALUES = frozenset(
    {name for name, _ in FORMULAS} | {name for name, keys in OTHER_NAMES.items() if WORDS.keys() & {name, *keys}}
)
"""Names whose values are of another unit or kind than those of our key."""
WITHOUT_KEY: dict[str, str] = {name: entry["reason"] for entry in _RECORD["without_key"] for name in entry["names"]}
FACTS: dict[str, str] = {name: fact for fact, names in _RECORD["facts"].items() for name in names}
"""Another program's name → the fact on the model's family that it tells, or `fact=value` for a switch."""
FACT_WORDS: dict[str, Any] = _RECORD["fact_words"]
FAMILY_FACTS: dict[str, dict[str, Any]] = _RECORD["families"]
VARIABLES: list[str] = _RECORD["variables"]
"""Variables of a script's environment that count as settings, in lower case."""
SECTIONS: dict[str, str] = _RECORD["sections"]
ACTIONS: dict[str, str] = _RECORD["actions"]
COMMANDS: dict[str, str] = _RECORD["commands"]


@dataclass(frozen=True)
class _Program:
    """A program whose files are read."""

    title: str
    marks: frozenset[str]  # names of settings by which a file is known to be its own
    defaults: dict[str, Any]  # what it does where a setting is left out
    ignored: str  # pattern of settings, as `name=value`, that say nothing on a training here
    keys: dict[str, Any]  # values of keys of ours that say what it always does
    note: str  # what our training does otherwise

    @property
    def names(self) -> frozenset[str]:
        """The names of its own that the record has."""
        return self.marks | self.defaults.keys()


PROGRAMS: dict[str, _Program] = {
    name: _Program(**{**entry, "marks": frozenset(entry["marks"])}) for name, entry in _RECORD["programs"].items()
}

ARGUMENTS: dict[str, dict[str, str]] = {
    owner: {name: entry["advice"] for entry in entries for name in entry["names"]}
    for owner, entries in _RECORD["arguments"].items()
}
"""Arguments that a class or function of the same name in another library takes, and ours does not: what to do instead.

They are those of `layers` (losses too) and of the `optimizer`.
"""
