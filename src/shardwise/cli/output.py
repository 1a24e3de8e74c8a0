"""What a command prints itself: results on stdout, errors on stderr, and those once for all ranks."""

from __future__ import annotations

import sys
import time

from shardwise.errors import ConfigError, ShardwiseError
from shardwise.launch.environment import Rank, joined
from shardwise.redaction import redacted

_TURN_SECONDS = 2.0


def line(text: str = "") -> None:
    """Print `text` and a line end."""
    sys.stdout.write(f"{text}\n")


def progress(text: str) -> None:
    """Print, on stderr, what takes a moment."""
    sys.stderr.write(f"{redacted(text)}\n")
    sys.stderr.flush()


def complain(text: str) -> None:
    """Print an error for the user."""
    sys.stdout.flush()
    sys.stderr.write(f"shardwise: {redacted(text)}\n")
    sys.stderr.flush()


def fail(error: ShardwiseError) -> int:
    """Show an error and return its exit code."""
    text, place = error_text(error), joined()
    if place is None:
        complain(text)
    else:
        complain_as_rank(place, text, error.exit_code)
    return error.exit_code


def complain_as_rank(place: Rank, text: str, exit_code: int, *, waited: bool = False) -> None:
    """Show a rank's error once for the whole job: through the launcher, else from the first rank that meets it."""
    from shardwise.launch.failure import report_failure  # costly to import, and only a failing rank needs it

    if report_failure(place.rank, redacted(text), exit_code, waited=waited):
        return
    if exit_code == ConfigError.exit_code and place.rank != 0:
        # torchrun ends every rank when the first one exits. Rank 0 speaks for all where it meets the error too; what
        # only another node meets, its first rank says, and what only this rank meets is still said.
        time.sleep(_TURN_SECONDS * (2 if place.local_rank else 1))
        text = f"rank {place.rank}: {text}"
    complain(text)


def error_text(error: ShardwiseError) -> str:
    """One problem as it is; several under their number."""
    if isinstance(error, ConfigError) and len(error.problems) > 1:
        return f"{len(error.problems)} errors\n{error}"
    return str(error)
