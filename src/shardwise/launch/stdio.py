"""Where a rank's output goes: rank 0 keeps the terminal, the others write to their logs."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path


def redirect(rank: int, log_path: Path) -> None:
    """Send stdout and stderr of every rank but 0 to `log_path`, native libraries' output included."""
    if rank == 0:
        return
    log_path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log_path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
    for stream, target in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(descriptor, target)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    os.close(descriptor)
