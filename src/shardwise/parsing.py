"""JSON from a file that anybody may have written: what it holds is bounded before any code walks through it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

MOST_LEVELS = 64
"""Of mappings and lists inside each other: far more than any file has, and far less than Python's recursion takes."""


def json_value(text: str | bytes, loads: Callable[[str | bytes], Any] = json.loads) -> Any:
    """The value of a JSON text, by a parser such as Python's.

    Raises:
        ValueError: it is no JSON in UTF-8, has a number of thousands of digits, or more levels than `MOST_LEVELS`.
    """
    try:
        value = loads(text)
    except RecursionError:
        raise ValueError(_too_deep()) from None
    opened = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, opened)) > MOST_LEVELS and not _is_within(value, MOST_LEVELS):  # type: ignore[arg-type]
        raise ValueError(_too_deep())
    return value


def _too_deep() -> str:
    return f"it has more than {MOST_LEVELS} levels of lists and mappings inside each other"


def _is_within(value: Any, levels: int) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_is_within(one, levels - 1) for one in inside if isinstance(one, dict | list))
