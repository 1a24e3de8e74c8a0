"""A terminal for what a command shows of long work, whatever time it takes."""

import io
import os
import pty
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, TextIO

import pytest

from shardwise.base import progress as module


class Ended(threading.Event):
    """The end of work: the first wait takes until the end and says that it has not come, so that the end is shown."""

    def __init__(self) -> None:
        super().__init__()
        self._waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        self._waits += 1
        return super().wait() and self._waits > 1


class Log:
    """A file as standard error."""

    def __init__(self) -> None:
        self.stream: TextIO = io.StringIO()

    def text(self) -> str:
        """All that was written."""
        self.stream.seek(0)
        return self.stream.read()

    def close(self) -> None:
        self.stream.close()


class Screen(Log):
    """A pseudo terminal as standard error."""

    def __init__(self) -> None:
        self._reader, writer = pty.openpty()
        os.set_blocking(self._reader, False)
        self.stream: TextIO = os.fdopen(writer, "w", encoding="utf-8")
        self._text = b""

    def text(self) -> str:
        """All that was written."""
        self.stream.flush()
        try:
            while block := os.read(self._reader, 1 << 16):
                self._text += block
        except BlockingIOError:
            pass
        return self._text.decode()

    def close(self) -> None:
        self.stream.close()
        os.close(self._reader)


def shown_on(to: Log, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Standard error of 120 columns, on which all work is shown once, when it ends."""
    monkeypatch.setattr(module, "threading", SimpleNamespace(Event=Ended, Thread=threading.Thread))
    # Not `sys.stderr`, in whose place pytest puts its own for each test.
    monkeypatch.setattr(module, "sys", SimpleNamespace(stderr=to.stream, stdout=sys.stdout))
    for name, value in {"TERM": "xterm", "COLUMNS": "120"}.items():
        monkeypatch.setenv(name, value)
    yield to
    to.close()
