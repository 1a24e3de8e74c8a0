"""Output of commands: lines, tables and JSON on stdout, and progress on stderr.

What is printed may come from a stranger's file, so a character that a terminal would obey is printed as its code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardwise.base.errors import visible
from shardwise.base.redaction import redacted
from shardwise.base.terminal import fit_to_terminal, printable


def raw(text: str) -> None:
    """Print `text` as it is, which comes from this package or is encoded, and a line end."""
    sys.stdout.write(f"{text}\n")


def json(value: Any, *, indent: int | None = 2) -> None:
    """Print a value as JSON in ASCII, which every terminal shows; `indent` None: in one line."""
    # Only a command that prints JSON pays for this import.
    from shardwise.runs.folder import json_text

    raw(json_text(value, indent=indent, ascii=True))


def answer(facts: Mapping[str, Any], lines: Iterable[str], *, as_json: bool) -> None:
    """Print what a command found or did: its facts as one JSON object, or the lines that tell them."""
    if as_json:
        json(facts)
        return
    for told in lines:
        line(told)


def text(text: str) -> str:
    """Lines of any origin for stdout: a file gets them as they are, a terminal gets control characters as escapes."""
    return visible(text) if sys.stdout.isatty() else text


def line(text: str = "") -> None:
    raw(printable(text))


def prose(text: str) -> None:
    """Print a sentence, wrapped at words where stdout is a terminal."""
    raw(fit_to_terminal(printable(text), sys.stdout))


def progress(text: str) -> None:
    """Print a line on stderr."""
    sys.stderr.write(f"{fit_to_terminal(redacted(printable(text)), sys.stderr)}\n")
    sys.stderr.flush()


def table(
    rows: Sequence[Sequence[str]], head: Sequence[str] = (), right: Sequence[int] = (), indent: int = 0, gap: int = 2
) -> None:
    """Print columns as wide as they need; `right`: the numbers of those that are set flush right."""
    cells = [[printable(cell) for cell in row] for row in (head, *rows) if row]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        fields = [row[i].rjust(n) if i in right else row[i].ljust(n) for i, n in enumerate(widths)]
        raw(fit_to_terminal(f"{' ' * indent}{(' ' * gap).join(fields)}".rstrip(), sys.stdout))
