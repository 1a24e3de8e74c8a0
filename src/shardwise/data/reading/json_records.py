"""JSON objects that hold a text among fields of any kind."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

# Numbers are no text, and Python refuses to read those of more than 4,300 digits.
_DECODER = json.JSONDecoder(parse_int=lambda _digits: 0)
_DEPTH = 100
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)


def read_json(text: str) -> Any:
    """What a JSON text holds, with 0 for every whole number; very deep lists and objects are read as empty ones.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return _DECODER.decode(text)
    except RecursionError:
        return _DECODER.decode(_without_depths(text))


def _without_depths(text: str) -> str:
    """A JSON text with empty lists and objects in place of those that lie within more than `_DEPTH` others."""
    kept: list[str] = []
    depth = start = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        if match[0] in ("[", "{"):
            if depth == _DEPTH:
                kept.append(text[start : match.end()])
            depth += 1
        elif match[0] in ("]", "}"):
            depth -= 1
            if depth == _DEPTH:
                start = match.start()
    # What is not closed stays unclosed, and is refused as such.
    return "".join(kept) if depth > _DEPTH else "".join([*kept, text[start:]])


def field_of(record: Mapping[str, Any], key: str) -> Any:
    """The value of a field, or of one within another: `meta.body`. A field whose own name has a dot goes first.

    Raises:
        KeyError: there is none.
    """
    if key in record:
        return record[key]
    for dot in (at for at, letter in enumerate(key) if letter == "."):
        inner = record.get(key[:dot])
        if isinstance(inner, dict):
            with contextlib.suppress(KeyError):
                return field_of(inner, key[dot + 1 :])
    raise KeyError(key)


def field_names(record: Mapping[str, Any]) -> Iterator[str]:
    """The names of all fields, and of those within them, as `field_of` takes them."""
    for name, value in record.items():
        yield from (f"{name}.{inner}" for inner in value) if isinstance(value, dict) and value else [name]


PANDAS_ADVICE = "write it with to_json(…, orient='records', lines=True)"
"""What to do about a table that pandas wrote by columns, by rows or split."""


def other_layout(record: Mapping[str, Any], key: str) -> str | None:
    """What to say of an object that holds many records instead of being one; None where it seems to be one."""
    inner = [value for value in record.values() if isinstance(value, dict)]
    by_number = any(each and all(map(str.isdecimal, each)) for each in [record, *inner])
    if (by_number and len(inner) == len(record)) or record.keys() >= {"columns", "index", "data"}:
        return f"is a whole table, as pandas writes it: {PANDAS_ADVICE}"
    has_text = any(isinstance(value, str) for value in record.values())
    for name, value in record.items():
        if isinstance(value, list) and value and isinstance(value[0], dict) and (key in value[0] or not has_text):
            command = f"jq -c '{entries(name)}'"
            return f"holds objects in the list {name!r}: put each on its own line, for example with `{command}`"
    return None


def entries(name: str) -> str:
    """The program of jq that gives each entry of a list."""
    return f".{name}[]" if name.isidentifier() else f".[{json.dumps(name)}][]"
