"""JSON objects that hold a text among fields of any kind."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

# Numbers are no text, and Python refuses to read those of more than 4,300 digits.
_DECODER = json.JSONDecoder(parse_int=lambda _digits: 0)
# Far beyond what records have, and far below the about 1,000 calls of Python's recursion limit.
_DEPTH = 100
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)


def read_json(text: str) -> Any:
    """The value of a JSON text, with 0 for every whole number; very deep lists and objects are read as empty ones.

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
    # A bracket that is not closed stays unclosed, and is refused as such.
    if depth <= _DEPTH:
        kept.append(text[start:])
    return "".join(kept)


def field_of(record: Mapping[str, Any], key: str) -> Any:
    """The value of a field, or of one within another: `meta.body`. A field whose name has a dot goes first.

    Raises:
        KeyError: there is none.
    """
    if key in record:
        return record[key]
    for dot, letter in enumerate(key):
        inner = record.get(key[:dot]) if letter == "." else None
        if isinstance(inner, dict):
            with contextlib.suppress(KeyError):
                return field_of(inner, key[dot + 1 :])
    raise KeyError(key)


def field_names(record: Mapping[str, Any]) -> Iterator[str]:
    """The names of all fields, and of those within them, as `field_of` takes them."""
    for name, value in record.items():
        if isinstance(value, dict) and value:
            yield from (f"{name}.{inner}" for inner in value)
        else:
            yield name


PANDAS_ADVICE = "write it with to_json(…, orient='records', lines=True)"
"""The advice about a table that pandas wrote by columns, by rows or split."""


def other_layout(record: Mapping[str, Any], key: str) -> str | None:
    """The end of a message about an object that holds many records; None if it seems to be one record."""
    inner = [value for value in record.values() if isinstance(value, dict)]
    by_number = any(fields and all(map(str.isdecimal, fields)) for fields in [record, *inner])
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
