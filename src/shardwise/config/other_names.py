"""Names of other programs by what they mean here, as `other_names.yaml` records them.

Imported after a mistake alone, as the file is read then.
"""

from __future__ import annotations

from pathlib import Path

from shardwise.base.parsing import read_mapping

_RECORD = read_mapping(Path(__file__).with_suffix(".yaml"))

OTHER_NAMES: dict[str, tuple[str, ...]] = {}
"""Another program's name → our keys, `key=value` or options; each that is valid is an answer."""
for _target, _names in _RECORD["names"].items():
    for _name in _names:
        OTHER_NAMES[_name] = (*OTHER_NAMES.get(_name, ()), _target)
OTHER_VALUES = frozenset[str](_RECORD["other_values"])
WITHOUT_KEY: dict[str, str] = {name: entry["reason"] for entry in _RECORD["without_key"] for name in entry["names"]}
SECTIONS: dict[str, str] = _RECORD["sections"]
ACTIONS: dict[str, str] = _RECORD["actions"]
COMMANDS: dict[str, str] = _RECORD["commands"]

ARGUMENTS: dict[str, dict[str, str]] = {
    owner: {name: entry["advice"] for entry in entries for name in entry["names"]}
    for owner, entries in _RECORD["arguments"].items()
}
"""Arguments that a class or function of the same name in another library takes, and ours does not: what to do instead.

They are those of `layers` (losses too) and of the `optimizer`.
"""
