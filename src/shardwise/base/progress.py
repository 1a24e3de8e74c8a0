"""Progress of long work on standard error: a bar on a terminal, a line every half minute in a log."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TextIO

from shardwise.base.errors import visible
from shardwise.base.redaction import redacted
from shardwise.base.units import counted, duration, size

AFTER_SECONDS = 1.5  # work that takes less shows no bar
EVERY_SECONDS = 30.0  # between two lines of a log
_REFRESH_SECONDS = 0.25
_TEXT = 68  # columns that a text takes at most, nearly always
_SAMPLES = 60  # a second apart at least; the speed is that since the oldest one


@contextlib.contextmanager
def progress(
    doing: str, total: int | None = None, noun: str = "", *, shown: bool = True, done: Callable[[], int] | None = None
) -> Iterator[Callable[[int], None]]:
    """Show the progress of the body of the `with` statement, which calls what it gets with each amount it has done.

    `total`: the amount of all, if it is known. `noun`: what is counted, in the singular; bytes if it is empty. `shown`:
    False shows nothing, as on all ranks but the first. `done`: returns the amount so far, of a body that tells none; it
    is called from another thread.
    """
    work = Work(visible(redacted(doing)), total, noun, done)
    ended = threading.Event()
    # A thread, as the body may be a single call.
    thread = threading.Thread(target=work.show, args=(sys.stderr, ended), daemon=True)
    if shown:
        thread.start()
    try:
        yield work.advance
    finally:
        ended.set()
        if shown:
            thread.join()


class Work:
    """The state of work that `progress` shows."""

    def __init__(self, doing: str, total: int | None, noun: str, ask: Callable[[], int] | None = None) -> None:
        self._doing = doing
        self._total = total
        self._noun = noun
        self._ask = ask
        self._before = 0 if ask is None else ask()
        self._done = 0
        self._samples = deque([(time.monotonic(), 0)], _SAMPLES)
        self._began = self._samples[0][0]

    def advance(self, amount: int) -> None:
        self._done += amount
        now = time.monotonic()
        if now - self._samples[-1][0] >= 1:
            self._samples.append((now, self._done))

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
            task = bar.add_task(self._text(), total=self._total, completed=self._done)
            while not ended.wait(_REFRESH_SECONDS):
                bar.update(task, description=self._text(), completed=self._done, refresh=True)

    def _text(self) -> str:
        """The amounts, the speed and the time that is left."""
        if self._ask is not None:
            self.advance(self._ask() - self._before - self._done)
        total, noun = self._total, self._noun
        done = min(self._done, total or self._done)  # a last portion may be filled up
        now = time.monotonic()
        begin, before = self._samples[0]
        rate = (done - before) / max(now - begin, 1e-9)
        amount = f"{done:,}" if noun else size(done)
        left = f"{duration(now - self._began)} elapsed"
        if total:
            amount = f"{amount} of {counted(total, noun) if noun else size(total)}, {done / total:.0%}"
            if rate > 0 and done < total:
                left = f"{duration((total - done) / rate)} left"
        speed = f"{size(rate)}/s" if rate > 0 and not noun else ""
        return f"{self._doing}: " + ", ".join(filter(None, (amount if done or total else "", speed, left)))
