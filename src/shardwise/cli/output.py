"""What a command prints itself: results on stdout, progress on stderr."""

from __future__ import annotations

import sys

from shardwise.redaction import redacted


def line(text: str = "") -> None:
    """Print `text` and a line end."""
    sys.stdout.write(f"{text}\n")


def progress(text: str) -> None:
    """Print, on stderr, what takes a moment."""
    sys.stderr.write(f"{redacted(text)}\n")
    sys.stderr.flush()
