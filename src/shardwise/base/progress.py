"""Progress of long work on standard error: a bar on a terminal, a line every half minute in a log."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from shardwise.base.errors import visible
from shardwise.base.redaction import redacted
from shardwise.base.units import counted, duration, size

AFTER_SECONDS = 1.5  # work that takes less shows no bar
EVERY_SECONDS = 30.0  # between two lines of a log
_TEXT = 68  # columns that a text takes at most, nearly always


@dataclass
class progress:
    """A terminal's bar, or lines of a log, for a `with` statement's body, which calls a function with amounts done."""

    doing: str
    total: int | None = None  # amount of all the work; None if it is unknown
    noun: str = ""  # what is counted, in the singular; empty: bytes
    shown: bool = True  # False shows nothing, as on all ranks but the first
    # Returns the amount so far, of a body that tells none; called from another thread.
    done: Callable[[], int] | None = None

    def __post_init__(self) -> None:
        self._before = 0 if self.done is None else self.done()
        self._amount = 0
        self._began = time.monotonic()
        self._samples = deque([(self._began, 0)], maxlen=60)  # a second apart at least, for the speed
        self._ended = threading.Event()
        # A thread, as the body may be a single call.
        self._thread = threading.Thread(target=self.show, args=(sys.stderr, self._ended), daemon=True)

    def __enter__(self) -> Callable[[int], None]:
        if self.shown:
            self._thread.start()
        return self.advance

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self.shown:
            self._thread.join()

    def advance(self, amount: int) -> None:
        self._amount += amount
        now = time.monotonic()
        if now - self._samples[-1][0] >= 1:
            self._samples.append((now, self._amount))

    def show(self, stream: TextIO, ended: threading.Event) -> None:
        """Show the work on a stream until it has ended, or the terminal has gone away."""
        with contextlib.suppress(OSError, ValueError):
            if stream.isatty() and os.environ.get("TERM") != "dumb" and not ended.wait(AFTER_SECONDS):
                self._draw(stream, ended)
            while not ended.wait(EVERY_SECONDS):
                stream.write(f"{self._text()}\n")
                stream.flush()

    def _draw(self, stream: TextIO, ended: threading.Event) -> None:
        from rich.console import Console  # costly to import, and for long work alone
        from rich.progress import BarColumn, Progress, TextColumn

        console = Console(file=stream)
        columns = (BarColumn(max(1, min(40, console.width - _TEXT))), TextColumn("{task.description}", markup=False))
        # What is printed to a file meanwhile must not come to the terminal.
        redirected = sys.stdout.isatty()
        with Progress(*columns, console=console, auto_refresh=False, transient=True, redirect_stdout=redirected) as bar:
            console.show_cursor()  # a signal may end the process here
            task = bar.add_task(self._text(), total=self.total, completed=self._amount)
            while not ended.wait(0.25):
                bar.update(task, description=self._text(), completed=self._amount, refresh=True)

    def _text(self) -> str:
        if self.done is not None:
            self.advance(self.done() - self._before - self._amount)
        total, noun = self.total, self.noun
        done = min(self._amount, total or self._amount)  # a last portion may be filled up
        now = time.monotonic()
        begin, before = self._samples[0]
        rate = (done - before) / max(now - begin, 1e-9)
        amount = f"{done:,}" if noun else size(done)
        left = f"{duration(now - self._began)} elapsed"
        if total:
            amount = f"{amount} of {counted(total, noun) if noun else size(total)}, {done / total:.0%}"
            if rate > 0 and done < total:
                left = f"{duration((total - done) / rate)} left"
        texts = [amount] * bool(done or total) + [f"{size(rate)}/s"] * (rate > 0 and not noun) + [left]
        return f"{visible(redacted(self.doing))}: {', '.join(texts)}"
