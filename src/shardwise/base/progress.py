"""Progress of long work on standard error: a bar on a terminal, a line every half minute in a log."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from shardwise.base.errors import visible
from shardwise.base.redaction import redacted
from shardwise.base.units import counted, duration, size

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table

AFTER_SECONDS = 1.5
"""Work that takes less shows no bar."""
EVERY_SECONDS = 30.0
"""Time between two lines where there is no terminal."""
_REFRESH_SECONDS = 0.25
_SAMPLES = 60
"""Samples of which the speed is the mean, a second apart at least."""
BAR_MINIMUM = 10
"""Characters of a bar; where fewer are free there is none."""
_BAR_MAXIMUM = 40
GAP = "  "


@contextlib.contextmanager
def progress(
    doing: str,
    total: int | None = None,
    noun: str = "",
    *,
    shown: bool = True,
    done: Callable[[], int] | None = None,
) -> Iterator[Callable[[int], None]]:
    """Show the progress of the body of the `with` statement, which calls what it gets with the amount just done.

    Args:
        doing: what is done, for the user.
        total: amount of the whole work; None if it is unknown.
        noun: what is counted, in the singular; empty: bytes.
        shown: False shows nothing, as on all ranks but the first.
        done: returns the amount done so far, where the body cannot tell it; called from another thread.
    """
    work = Work(visible(redacted(doing)), total, noun, done)
    if not shown:
        yield work.advance
        return
    ended = threading.Event()
    # Of its own, as the body may be a single call.
    thread = threading.Thread(target=work.show, args=(sys.stderr, ended), name="progress", daemon=True)
    thread.start()
    try:
        yield work.advance
    finally:
        ended.set()
        thread.join()


class Work:
    """The state of work that `progress` shows."""

    def __init__(self, doing: str, total: int | None, noun: str, poll: Callable[[], int] | None = None) -> None:
        self._doing = doing
        self._total = total
        self._noun = noun
        self._poll = poll
        self._done = 0
        self._began = time.monotonic()
        self._samples = deque([(self._began, 0)], _SAMPLES)

    def advance(self, amount: int) -> None:
        self._done += amount
        now = time.monotonic()
        if now - self._samples[-1][0] >= 1:
            self._samples.append((now, self._done))

    def show(self, stream: TextIO, ended: threading.Event) -> None:
        """Show the work on a stream until it has ended, or the terminal has gone away."""
        with contextlib.suppress(OSError, ValueError):
            if stream.isatty() and not ended.wait(AFTER_SECONDS):
                self._draw(stream, ended)
            while not ended.wait(EVERY_SECONDS):
                stream.write(f"{self._doing}: {', '.join(self._texts())}\n")
                stream.flush()

    def _draw(self, stream: TextIO, ended: threading.Event) -> None:
        """Draw a bar until the work has ended, if the terminal can erase it."""
        from rich.console import Console  # costly to import, and needed for long work alone
        from rich.live import Live

        console = Console(file=stream)
        if console.is_terminal and not console.is_dumb_terminal:
            # What is printed to a file must not go to the terminal.
            redirected = sys.stdout.isatty()
            with Live(self, console=console, auto_refresh=False, transient=True, redirect_stdout=redirected) as live:
                console.show_cursor()  # a signal may end the process here
                while not ended.wait(_REFRESH_SECONDS):
                    live.refresh()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        yield bar_line(self._doing, self._texts(), self._done, self._total, options.max_width)

    def _texts(self) -> list[str]:
        """The amounts, the speed and the time that is left."""
        if self._poll is not None:
            self.advance(self._poll() - self._done)
        total, done, noun = self._total, self._done, self._noun
        now = time.monotonic()
        begin, before = self._samples[0]
        rate = (done - before) / max(now - begin, 1e-9)
        if total:
            amount = f"{done:,} of {counted(total, noun)}" if noun else f"{size(done)} of {size(total)}"
            texts = [amount, f"{done / total:.0%}"]
        else:
            texts = [counted(done, noun)] if noun else [size(done)] if done else []
        if rate > 0 and not noun:
            texts.append(f"{size(rate)}/s")
        if total and rate > 0 and done < total:
            return [*texts, f"{duration((total - done) / rate)} left"]
        return [*texts, f"{duration(now - self._began)} elapsed"]


def bar_line(head: str, texts: Sequence[str], done: int, total: int | None, width: int, *, bar: bool = True) -> Table:
    """A line of a terminal: a bold head, with `bar` a bar in the room that the texts leave, and the texts.

    Args:
        total: end of the bar; None if it is unknown.
        width: columns of the terminal.
    """
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    room = min(width - len(GAP.join([head, *texts])) - len(GAP), _BAR_MAXIMUM)
    row: list[Text | ProgressBar] = [Text(head, style="bold", no_wrap=True, overflow="ellipsis")]
    if bar and room >= BAR_MINIMUM:
        row.append(ProgressBar(total=total, completed=done, width=room, pulse=total is None))
    row.append(Text(GAP.join(texts), no_wrap=True, overflow="ellipsis"))
    grid = Table.grid(padding=(0, len(GAP)))
    grid.add_row(*row)
    return grid
