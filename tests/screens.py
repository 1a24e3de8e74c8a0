"""A terminal for what a command shows of long work, whatever time it takes."""

from __future__ import annotations

import os
import pty
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TextIO

import pytest

from shardwise.base import progress as module


class Ended(threading.Event):
    """The end of work: the first wait takes until the end and says that it has not come, so that the end is shown."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        Ended.made += 1
        self._waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        self._waits += 1
        return super().wait() and self._waits > 1


class Screen:
    """A pseudo terminal, or a log, as standard error."""

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


def show_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """All work is shown once, when it ends."""
    monkeypatch.setattr(Ended, "made", 0)
    monkeypatch.setattr(module, "threading", SimpleNamespace(Event=Ended, Thread=threading.Thread))


def screens(monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    """A terminal of 120 columns as standard error, on which all work is shown when it ends."""
    show_ends(monkeypatch)
    for name, value in {"TERM": "xterm", "COLUMNS": "120"}.items():
        monkeypatch.setenv(name, value)
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen.stream)
    yield screen
    screen.close()
