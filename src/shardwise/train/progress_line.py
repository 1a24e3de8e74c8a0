"""The progress line of a run."""

from __future__ import annotations

import html
import importlib
import math
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shardwise.base import units
from shardwise.train.step_record import StartTotals, StepRecord

_LINES_PER_RUN = 20  # lines of a whole run where there is no terminal: few enough to read the log at once
_LONGEST_SILENCE = 300.0  # seconds after which a line is printed even if it is one more than these
_BAR_MINIMUM = 10  # characters of the progress bar; where fewer are free there is none
_BAR_MAXIMUM = 40
_GAP = "  "
_NOTEBOOK_SECONDS = 0.5  # time between two updates of a notebook's display, each of which is a message to the browser
_NOTEBOOK_HTML = """\
<div style="font-family: monospace; white-space: pre-wrap"><b>{head}</b>
<progress value="{done}" max="{total}" style="width: 20em; vertical-align: middle"></progress>  {texts}
{numbers}</div>"""


class ProgressLine:
    """Progress of a training on one console: a line redrawn in place on a terminal, a line now and then elsewhere.

    Args:
        every_update: print a line at each `update` where there is no terminal, not only about twenty in a run.

    Attributes:
        before_steps: what the run does while it has done no step, for the user.
    """

    def __init__(self, console: Console, totals: StartTotals, done: int, end: int, *, every_update: bool) -> None:
        self._console = console
        self._first = totals.steps_before
        self._began = totals.began
        self._done = done
        self._end = end
        self._every_update = every_update
        self._printed_at = time.perf_counter()
        self._next_line = done + 1
        self._record: StepRecord | None = None
        self.before_steps = "first step under way"
        self._step_seconds = 0.0
        self._rates: Mapping[str, float | None] = {}
        self._display: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._display = Live(self, console=console, refresh_per_second=2)
            self._display.start()

    def update(self, record: StepRecord, step_seconds: float, rates: Mapping[str, float | None], now: float) -> None:
        """Show a finished step, with the recent means of its duration and of its rates."""
        self._record = record
        self._done = record.step
        self._step_seconds = step_seconds
        self._rates = rates
        self._show_step(record, now)

    def _show_step(self, record: StepRecord, now: float) -> None:
        overdue = now - self._printed_at >= _LONGEST_SILENCE
        is_due = self._every_update or record.step >= self._next_line or record.step == self._end or overdue
        if self._display is not None or not is_due:
            return
        progress, (loss, *numbers) = self._parts(now)
        smoothed = f"{record.mean_steps}-step mean {record.mean_loss:.4f}"
        self._console.print(Text(_GAP.join([*progress, loss, smoothed, *numbers])), soft_wrap=True)
        self._printed_at = now
        # At multiples of `every`, also after a line that came out of turn.
        every = max(1, math.ceil((self._end - self._first) / _LINES_PER_RUN))
        self._next_line = self._first + ((record.step - self._first) // every + 1) * every

    def stop(self) -> None:
        if self._display is not None:
            self._display.refresh()
            self._display.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw one line, or two on a narrow terminal: progress with a bar, then the numbers of the last step."""
        progress, numbers = self._parts(time.perf_counter())
        bar = _BAR_MINIMUM + len(_GAP)
        lines = [[*progress, *numbers]]
        if numbers and bar + len(_GAP.join(lines[0])) > options.max_width:
            lines = [progress, numbers]
        for line in lines:
            head, *texts = line
            # The bar takes what the texts leave free, and stands in the first line alone.
            room = min(options.max_width - len(_GAP.join(line)) - len(_GAP), _BAR_MAXIMUM)
            row: list[Text | ProgressBar] = [Text(head, style="bold")]
            if line is lines[0] and room >= _BAR_MINIMUM:
                done = self._done - self._first
                row.append(ProgressBar(total=max(self._end - self._first, 1), completed=done, width=room))
            row.append(Text(_GAP.join(texts), no_wrap=True, overflow="ellipsis"))
            grid = Table.grid(padding=(0, len(_GAP)))
            grid.add_row(*row)
            yield grid

    def _parts(self, now: float) -> tuple[list[str], list[str]]:
        elapsed = f"{units.duration(round(now - self._began, 1))} elapsed"
        record = self._record
        if record is None:
            return [f"step {self._done:,}/{self._end:,}", elapsed, self.before_steps], []
        left = (self._end - record.step) * self._step_seconds
        width = len(f"{self._end:,}")
        progress = [
            f"step {record.step:>{width},}/{self._end:,}",
            elapsed,
            f"{units.duration(left)} left" if record.step < self._end else "done",
            f"{units.duration(self._step_seconds)}/step",
        ]
        loss = f"loss {record.loss:.4f}"
        if record.losses:
            loss += f" ({parts_of_loss(record.losses)})"
        mfu = self._rates.get("mfu")
        numbers = [
            loss,
            f"lr {record.lr:.2e}",
            f"grad norm {record.grad_norm:.3f}",
            f"{units.count(self._rates.get('tokens_per_second') or 0.0)} tokens/s",
            *([] if mfu is None else [f"MFU {mfu:.1%}"]),
            f"memory {units.size(record.peak_memory_bytes)}",
            f"{record.samples:,} samples",
        ]
        if record.timing is not None:
            numbers.append(f"bubble {record.timing.mean_bubble:.1%}")
        return progress, numbers


class NotebookProgress(ProgressLine):
    """Progress of a training in a Jupyter notebook: one display in HTML, which each update replaces.

    IPython alone shows it: the display of rich would need `ipywidgets`, which a kernel may lack.
    """

    def __init__(self, console: Console, totals: StartTotals, done: int, end: int, *, every_update: bool) -> None:
        super().__init__(console, totals, done, end, every_update=every_update)
        ipython: Any = importlib.import_module("IPython.display")
        now = time.perf_counter()
        self._shown_at = now
        self._handle = ipython.display(self._mime_bundle(now), raw=True, display_id=True)

    def _show_step(self, record: StepRecord, now: float) -> None:
        if now - self._shown_at >= _NOTEBOOK_SECONDS:
            self._show(now)

    def stop(self) -> None:
        self._show(time.perf_counter())

    def _show(self, now: float) -> None:
        self._shown_at = now
        self._handle.update(self._mime_bundle(now), raw=True)

    def _mime_bundle(self, now: float) -> dict[str, str]:
        (head, *texts), numbers = self._parts(now)
        page = _NOTEBOOK_HTML.format(
            head=html.escape(head.strip()),
            done=self._done - self._first,
            total=max(self._end - self._first, 1),
            texts=html.escape(_GAP.join(texts)),
            numbers=html.escape(_GAP.join(numbers)),
        )
        return {"text/html": page, "text/plain": _GAP.join([head, *texts, *numbers])}


def parts_of_loss(losses: Mapping[str, float]) -> str:
    """The loss of each objective as text of the progress line: `MLM 6.2146, NSP 0.6931`."""
    return ", ".join(f"{name.upper()} {loss:.4f}" for name, loss in losses.items())
