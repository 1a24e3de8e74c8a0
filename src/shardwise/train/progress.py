"""How far a run is, in one line."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shardwise import units
from shardwise.train.record import StepRecord

_LINES_A_RUN = 20
_LINE_AT_LEAST_EVERY = 300.0
_BAR_MINIMUM, _BAR_MAXIMUM = 10, 40
_GAP = "  "


class ProgressLine:
    """The progress line: redrawn in place on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, first: int, end: int) -> None:
        self._console, self._first, self._end = console, first, end
        self._live = console.is_terminal and not console.is_dumb_terminal
        self._display: Live | None = None
        self._started = self._printed_at = time.perf_counter()
        self._next_line = first + 1
        self._record: StepRecord | None = None
        self._step_seconds = self._tokens_per_second = 0.0

    def start(self, now: float) -> None:
        self._started = self._printed_at = now
        if self._live:
            self._display = Live(self, console=self._console, refresh_per_second=2)
            self._display.start()

    def update(self, record: StepRecord, step_seconds: float, tokens_per_second: float, now: float) -> None:
        self._record, self._step_seconds, self._tokens_per_second = record, step_seconds, tokens_per_second
        if self._live:
            return
        overdue = now - self._printed_at >= _LINE_AT_LEAST_EVERY
        if record.step >= self._next_line or record.step == self._end or overdue:
            self._console.print(Text(_GAP.join(part for parts in self._parts(now) for part in parts)), soft_wrap=True)
            self._printed_at = now
            every = max(1, (self._end - self._first) // _LINES_A_RUN)
            self._next_line = self._first + ((record.step - self._first) // every + 1) * every

    def stop(self) -> None:
        if self._display is not None:
            self._display.refresh()
            self._display.stop()
            self._display = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """One line, or two where the terminal is too narrow: progress with a bar, then the step's numbers."""
        progress, numbers = self._parts(time.perf_counter())
        bar = _BAR_MINIMUM + len(_GAP)
        lines = [[*progress, *numbers]]
        if numbers and bar + len(_GAP.join(lines[0])) > options.max_width:
            lines = [progress, numbers]
        for line in lines:
            head, *rest = line
            room = min(options.max_width - len(_GAP.join(line)) - len(_GAP), _BAR_MAXIMUM)
            row: list[Text | ProgressBar] = [Text(head, style="bold")]
            if line is lines[0] and room >= _BAR_MINIMUM:
                done = self._record.step - self._first if self._record else 0
                row.append(ProgressBar(total=max(self._end - self._first, 1), completed=done, width=room))
            row.append(Text(_GAP.join(rest), no_wrap=True, overflow="ellipsis"))
            grid = Table.grid(padding=(0, len(_GAP)))
            grid.add_row(*row)
            yield grid

    def _parts(self, now: float) -> tuple[list[str], list[str]]:
        """What is shown: how far the run is, and the last step's numbers."""
        elapsed = f"{units.duration(round(now - self._started, 1))} elapsed"
        record = self._record
        if record is None:
            return [f"step {self._first:,}/{self._end:,}", elapsed, "first step under way"], []
        left = (self._end - record.step) * self._step_seconds
        width = len(f"{self._end:,}")
        progress = [
            f"step {record.step:>{width},}/{self._end:,}",
            elapsed,
            f"{units.duration(left)} left" if record.step < self._end else "done",
            f"{units.duration(self._step_seconds)}/step",
        ]
        return progress, [
            f"loss {record.loss:.4f}" + (f" ({parts_of_loss(record.losses)})" if record.losses else ""),
            f"lr {record.lr:.2e}",
            f"grad norm {record.grad_norm:.3f}",
            f"{units.count(self._tokens_per_second)} tokens/s",
            f"{record.samples:,} samples",
            *([] if record.timing is None else [f"bubble {record.timing.mean_bubble:.1%}"]),
        ]


def parts_of_loss(losses: Mapping[str, float]) -> str:
    """Each objective's loss, as people read it."""
    return ", ".join(f"{name.upper()} {loss:.4f}" for name, loss in losses.items())
