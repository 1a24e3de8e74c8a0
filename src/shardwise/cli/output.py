"""What a command prints itself: results on stdout, errors on stderr, and those once for all ranks."""

from __future__ import annotations

import sys

from shardwise.errors import ConfigError, ShardwiseError
from shardwise.launch.environment import joined
from shardwise.launch.failure import report_failure


def line(text: str = "") -> None:
    """Print `text` and a line end."""
    sys.stdout.write(f"{text}\n")


def progress(text: str) -> None:
    """Print, on stderr, what takes a moment."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def complain(text: str) -> None:
    """Print an error for the user."""
    sys.stdout.flush()
    sys.stderr.write(f"shardwise: {text}\n")
    sys.stderr.flush()


def fail(error: ShardwiseError) -> int:
    """Show an error that every rank of a job meets alike, once, and return its exit code."""
    text = error_text(error)
    place = joined()
    if place is None or (not report_failure(place.rank, text, error.exit_code) and place.rank == 0):
        complain(text)
    return error.exit_code


def error_text(error: ShardwiseError) -> str:
    """One problem as it is; several under their number."""
    if isinstance(error, ConfigError) and len(error.problems) > 1:
        return f"{len(error.problems)} errors\n{error}"
    return str(error)
