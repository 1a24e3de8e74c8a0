"""Rows and tables as plain text, and a bar for what takes long.

What is shown may come from a stranger's file: characters that a terminal would obey are shown by their code.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from shardwise.cli import output
from shardwise.redaction import redacted
from shardwise.units import duration

if TYPE_CHECKING:
    from shardwise.checkpoint_format.folders import Found


def shown(text: object) -> str:
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in str(text))


def line(text: str = "") -> None:
    output.line(shown(text))


def progress(text: str) -> None:
    """A line on stderr."""
    output.progress(shown(text))


def rows(pairs: Sequence[tuple[str, str]]) -> None:
    """Names and values, the values under each other."""
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        line(f"{name:<{width}}  {value}".rstrip())


def table(head: Sequence[str], body: Sequence[Sequence[str]], right: Sequence[int] = (), indent: int = 0) -> None:
    """Columns as wide as they need; `right`: those that are set flush right."""
    cells = [[shown(cell) for cell in row] for row in (head, *body)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    for row in cells:
        set_ = (
            cell.rjust(n) if i in right else cell.ljust(n) for i, (cell, n) in enumerate(zip(row, widths, strict=True))
        )
        line(f"{' ' * indent}{'  '.join(set_)}".rstrip())


def age(found: Found) -> str:
    """How long ago a checkpoint was made; empty where nothing tells."""
    try:
        created = datetime.fromisoformat(found.manifest.created) if found.manifest is not None else None
        seconds = (datetime.now(UTC) - created).total_seconds() if created is not None else None
    except (ValueError, TypeError):
        return ""
    return "" if seconds is None else duration(max(seconds, 0.0))


def of(number: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@contextlib.contextmanager
def bar(what: str, total: int | None) -> Iterator[Callable[[int], None] | None]:
    """A bar on a terminal, on stderr, to be advanced by bytes, of `total` where that is known; None elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns: list[Any] = [
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(redacted(shown(what)), total=total)
        yield lambda count: progress.advance(task, count)
