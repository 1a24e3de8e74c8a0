"""The output of ranks: rank 0 keeps the terminal, the others write to their logs."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardwise.runs.folder import open_log

if TYPE_CHECKING:
    from pathlib import Path

    from _typeshed import ReadableBuffer

_terminal: int | None = None  # descriptor of the standard error from before `redirect`


def redirect(rank: int, log_path: Path) -> None:
    """Send stdout and stderr of every rank but 0 to `log_path`, native libraries' output included."""
    global _terminal
    if rank == 0:
        return
    if _terminal is None:
        _terminal = os.dup(2)
    with open_log(log_path) as log:
        for stream, target in ((sys.stdout, 1), (sys.stderr, 2)):
            # Before `dup2`: text in the buffer belongs to the terminal.
            stream.flush()
            os.dup2(log.fileno(), target)
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True)


@contextmanager
def output_restored() -> Iterator[None]:
    """Restore stdout and stderr after the `with` statement, though a rank's output was redirected inside."""
    global _terminal
    streams = (("stdout", sys.stdout, 1), ("stderr", sys.stderr, 2))
    before = [(*stream, os.dup(stream[2]), getattr(stream[1], "errors", None)) for stream in streams]
    try:
        yield
    finally:
        for name, stream, target, duplicate, errors in before:
            getattr(sys, name).flush()
            setattr(sys, name, stream)
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors=errors)
            os.dup2(duplicate, target)
            os.close(duplicate)
        if _terminal is not None:
            os.close(_terminal)
            _terminal = None


def tell_past_log(text: str) -> None:
    """Write to the standard error from before `redirect`; nothing if there was no `redirect`."""
    if _terminal is not None:
        with contextlib.suppress(OSError):
            os.write(_terminal, text.encode())


def survive_lost_reader() -> None:
    """Keep a rank's stdout and stderr usable when their terminal, or the reader of their pipe, is gone."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        # A program, such as a notebook, may have put another stream in its place.
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            stream.flush()
            file = io.BufferedWriter(_LastingFile(descriptor, "w", closefd=False))
            lasting = io.TextIOWrapper(file, encoding=stream.encoding, errors=stream.errors, line_buffering=True)
            setattr(sys, name, lasting)


class _LastingFile(io.FileIO):
    """A file that swallows what is written after its reader has gone."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            # Linux answers EIO once the other end of a terminal is gone, and EPIPE once that of a pipe is.
            if error.errno not in (errno.EIO, errno.EPIPE):
                raise
            return memoryview(data).nbytes
