"""The text of device files: a figure on each line, each with its source."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.base.errors import ConfigError


def figure(value: float, source: str) -> dict[str, Any]:
    """A figure to four digits, with its source."""
    return {"value": float(f"{value:.4g}"), "source": source}


def dump(values: Mapping[str, Any]) -> str:
    """The values as a device file: a figure on each line."""
    lines = ["# Written by shardwise. Rates are those of one rank and one direction; GB are 10^9 bytes."]
    for key, value in values.items():
        if isinstance(value, Mapping) and "value" not in value:
            lines += [f"{key}:", *(f"  {inner}: {_inline(figure)}" for inner, figure in value.items())]
        else:
            lines.append(f"{key}: {_inline(value)}")
    return "\n".join(lines) + "\n"


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        number = repr(value["value"])
        if "e" in number and "." not in number:
            number = number.replace("e", ".0e")  # YAML takes 2e-05 for a text
        return f"{{value: {number}, source: {_quoted(value['source'])}}}"
    return _quoted(value)


def _quoted(text: Any) -> str:
    return json.dumps(str(text), ensure_ascii=False)


def require_suffix(path: Path, option: str) -> None:
    """Refuse a name by which `--device` would not know a file.

    Raises:
        ConfigError: it has another ending than .yaml.
    """
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{option} ({path}) must end in .yaml, by which --device knows a file")
