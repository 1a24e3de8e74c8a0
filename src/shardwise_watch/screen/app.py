"""`shardwise top` on a terminal. Frames are read in a thread; the screen only draws the newest one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Horizontal, Vertical
from textual.events import Resize
from textual.widget import Widget
from textual.widgets import ContentSwitcher

from shardwise.base.terminal import printable_line
from shardwise_watch.screen import drawing, panels, views
from shardwise_watch.screen.frame import SPANS, UNEXPECTED, Frame, ShownRuns, Span

VIEWS = ("overview", "ranks", "pipeline", "nodes", "events", "log")
LEAST = (80, 20)
"""Columns and lines without which the screen would not fit."""


Draw = Callable[[Frame, int, int], Sequence[Text]]


class Panel(Widget):
    """A rectangle of the screen, drawn by a function of the frame, its width and its height."""

    def __init__(self, draw: Draw, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._draw = draw

    def render(self) -> Text:
        frame = self.top.frame
        width, height = self.content_size
        if frame is None:
            return Text(" reading the run…", drawing.FAINT)
        try:
            lines = list(self._draw(frame, width, height))[:height]
        except UNEXPECTED as error:
            # A value of another type in a file of the run.
            text = f"a file of the run is not as expected ({type(error).__name__}: {error})"
            lines = drawing.sentences(width, text, drawing.WARN)[:height]
        for line in lines:
            line.truncate(width)
            # Texts of a run's files may have characters that a terminal obeys.
            line.plain = printable_line(line.plain)
        return Text("\n", no_wrap=True).join(lines)

    @property
    def top(self) -> TopScreen:
        assert isinstance(self.app, TopScreen)
        return self.app


class TopScreen(App[None]):
    """The screen of a run, which can be changed for another one.

    Args:
        read: `FrameReader.read`; called in a thread, never twice at once.
        interval: seconds from one reading to the next; 0: it is read once.
        behind: folder of a run whose curves are shown behind.
    """

    CSS_PATH = "top.tcss"
    TITLE = "shardwise top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(number), f"view({number - 1})", show=False) for number in range(1, len(VIEWS) + 1)),
        Binding("tab", "next(1)", show=False, priority=True),
        Binding("shift+tab", "next(-1)", show=False, priority=True),
        Binding("up", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
        Binding("pageup", "move(-10)", show=False),
        Binding("pagedown", "move(10)", show=False),
        Binding("left", "metric(-1)", show=False),
        Binding("right", "metric(1)", show=False),
        Binding("r", "runs", show=False),
        Binding("enter", "choose(False)", show=False),
        Binding("b", "choose(True)", show=False),
        Binding("z", "span", show=False),
        Binding("p", "pause", show=False),
        Binding("question_mark,h", "help", show=False),
        Binding("escape", "leave_help", show=False),
        Binding("q,ctrl+c", "quit", show=False, priority=True),
    ]

    def __init__(self, read: Callable[..., Frame], interval: float, behind: Path | None = None) -> None:
        super().__init__()
        self.frame: Frame | None = None
        self._read = read
        self._interval = interval
        # Textual gives the screen these classes by its size, and top.tcss arranges the panels by them.
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (120, "-wide")]
        self.VERTICAL_BREAKPOINTS = [(0, "-low"), (36, "-high")]
        self._is_reading = self._is_paused = False
        # These three are indices in VIEWS, METRICS and SPANS.
        self._view = 0
        self._metric = 0
        self._span = 0
        self._moved = [0] * (len(VIEWS) + 1)  # the last one is the place in the list of runs
        self._choice = ShownRuns(behind=behind)

    def compose(self) -> ComposeResult:
        def span() -> Span:
            return SPANS[self._span]

        yield Panel(lambda f, w, h: panels.header(f, w, self._is_paused), id="header")
        with ContentSwitcher(initial=VIEWS[0], id="views"):
            with Vertical(id="overview"):
                with Horizontal(id="curves"):
                    yield Panel(lambda f, w, h: panels.curve(f, w, h, "loss", span()), id="loss")
                    with Vertical(id="more-curves"):
                        yield Panel(lambda f, w, h: panels.curve(f, w, h, "tokens_per_second", span()))
                        yield Panel(lambda f, w, h: panels.curve(f, w, h, "grad_norm", span()))
                    yield Panel(panels.speed, id="speed")
                yield Panel(panels.failure_panel, id="failure")
                yield Panel(panels.step_parts_panel, id="split")
                yield Panel(views.rank_strips, id="strips")
                with Horizontal(id="ending"):
                    yield Panel(panels.lost, id="lost")
                    yield Panel(panels.newest_events_panel, id="newest")
            with Vertical(id="ranks"):
                yield Panel(self._grid, id="grid")
                yield Panel(self._listing, id="listing")
            with Vertical(id="pipeline"):
                yield Panel(views.schedule_view, id="schedule")
                yield Panel(views.bubbles, id="bubbles")
            with Container(id="nodes"):
                yield Panel(lambda f, w, h: views.nodes_view(f, w, h, self._moved[3]))
            with Vertical(id="events"):
                yield Panel(panels.lost, id="all-lost")
                yield Panel(lambda f, w, h: panels.all_events_panel(f, w, h, self._moved[4]))
            with Container(id="log"):
                yield Panel(lambda f, w, h: panels.log_panel(f, w, h, self._moved[5]))
            with Container(id="runs"):
                yield Panel(lambda f, w, h: panels.runs(f, w, h, self._moved[-1]))
            with Container(id="keys"):
                yield Panel(lambda f, w, h: views.keys_view(w, h))
        yield Panel(lambda f, w, h: [self._footer(w)], id="footer")
        yield Panel(lambda f, w, h: self._too_small(w), id="small")

    def on_mount(self) -> None:
        self._refresh_frame()
        if self._interval:
            self.set_interval(self._interval, self._tick)

    def on_resize(self, event: Resize) -> None:
        is_small = event.size.width < LEAST[0] or event.size.height < LEAST[1]
        self.screen.set_class(is_small, "-small")
        self._refresh_frame()

    def _tick(self) -> None:
        if not self._is_paused or self.frame is None:
            self._refresh_frame()

    def _refresh_frame(self) -> None:
        """Start to read the run, unless that is under way; while it is paused, to cut its curves anew."""
        if not self._is_reading:
            self._is_reading = True
            # Textual's own threads would have to end before the program does, and a long history is minutes of reading.
            Thread(target=self._read_frame, daemon=True).start()

    def _read_frame(self) -> None:
        asked = self._asked
        frame = self._read(*asked[:2], self._is_paused and self.frame is not None, asked[2])
        if self.is_running:
            self.call_from_thread(self._show, frame, asked)

    @property
    def _asked(self) -> tuple[int, Span, ShownRuns]:
        return max(1, self.size.width) * 2, SPANS[self._span], self._choice

    def _show(self, frame: Frame, asked: tuple[int, Span, ShownRuns]) -> None:
        is_first = self.frame is None or self.frame.path != frame.path
        if self.frame is not None and (former := [path for path, *_ in self.frame.runs]) and frame.runs:
            # While runs are listed their order stays, and the marked one is marked, whichever wrote last.
            listed = sorted(frame.runs, key=lambda row: former.index(row[0]) if row[0] in former else len(former))
            marked = former[min(self._moved[-1], len(former) - 1)]
            self._moved[-1] = next((at for at, row in enumerate(listed) if row[0] == marked), self._moved[-1])
            frame = replace(frame, runs=listed)
        self.frame = frame
        self._is_reading = False
        self._redraw()
        # The first frame of a run came from the ends of its files: now all steps. A later one may have the curves of a
        # size, a zoom or a choice that was changed while it was read.
        if is_first or asked != self._asked:
            self._refresh_frame()

    def _redraw(self) -> None:
        if self.frame is not None:
            is_high = self.size.height >= 36
            self.screen.set_class(bool(self.frame.failure_lines), "-failed")
            self.query_one("#split").styles.height = 3 + len(drawing.further_rows(self.frame.last))
            self.query_one("#strips").styles.height = min(11 if is_high else 4, 4 + len(self.frame.ranks) // 64)
            self.query_one("#grid").styles.height = views.rank_grid_height(self.frame, 18 if is_high else 11)
            # Room for the header and the footer, and for eight pipeline ranks with their headings.
            room = self.size.height - 3 - 10
            self.query_one("#schedule").styles.height = max(6, min(room, views.schedule_height(self.frame)))
        for panel in self.query(Panel):
            panel.refresh()

    def _grid(self, frame: Frame, width: int, height: int) -> list[Text]:
        metric = views.METRICS[self._metric]
        ordered = views.ordered_ranks(frame, metric)
        chosen = ordered[min(self._moved[1], len(ordered) - 1)] if ordered else None
        return views.rank_grid(frame, width, height, metric, chosen)

    def _listing(self, frame: Frame, width: int, height: int) -> list[Text]:
        metric = views.METRICS[self._metric]
        return views.listing(frame, width, height, views.ordered_ranks(frame, metric), self._moved[1], metric)

    def _footer(self, width: int) -> Text:
        line = Text(" ")
        shown = self.query_one("#views", ContentSwitcher).current
        for number, name in enumerate(VIEWS, 1):
            chosen_style = f"bold {drawing.GROUND} on {drawing.ACCENT}"
            is_chosen = name == shown
            line.append(f" {number} ", chosen_style if is_chosen else f"bold {drawing.ACCENT}")
            line.append(f"{name} ", chosen_style if is_chosen else drawing.FAINT)
        keys = Text()
        for key, name in (("r", "runs"), ("z", "zoom"), ("p", "pause"), ("?", "help"), ("q", "quit")):
            if width >= 102 or key in "r?q":
                keys.append(f" {key} ", f"bold {drawing.ACCENT}")
                keys.append(f"{name} " if width >= 102 or key != "?" else "", drawing.FAINT)
        line.append(" " * max(0, width - line.cell_len - keys.cell_len))
        return line.append_text(keys)

    def _too_small(self, width: int) -> list[Text]:
        size = f"{self.size.width} × {self.size.height}"
        least = f"{LEAST[0]} × {LEAST[1]}"
        text = f"the terminal ({size}) must have at least {least} characters: make it larger, "
        text += "or use `shardwise top --once`"
        return drawing.sentences(width, text, drawing.TEXT)

    def action_view(self, number: int) -> None:
        self._view = number
        self._list(False)

    def action_next(self, by: int) -> None:
        self.action_view((self._view + by) % len(VIEWS))

    def action_move(self, by: int) -> None:
        frame = self.frame
        if frame is not None:
            ends = (0, len(frame.ranks), 0, len(frame.nodes), len(frame.events), len(frame.log), len(frame.runs))
            view = -1 if self._choice.is_listing else self._view
            # Events and the log are read from their end: up goes to older ones.
            step = -by if view in (4, 5) else by
            self._moved[view] = max(0, min(ends[view] - 1, self._moved[view] + step))
            self._redraw()

    def action_runs(self) -> None:
        self._list(not self._choice.is_listing)

    def _list(self, is_listing: bool, **chosen: Path | None) -> None:
        self._choice = self._choice._replace(is_listing=is_listing, **chosen)
        self.query_one("#views", ContentSwitcher).current = "runs" if is_listing else VIEWS[self._view]
        if is_listing or chosen:
            self._refresh_frame()
        self._redraw()

    def action_choose(self, is_behind: bool) -> None:
        """Show the run at the cursor of the list; or put it behind, or take it away from there."""
        if self._choice.is_listing and self.frame is not None and self.frame.runs:
            path, *_ = self.frame.runs[min(self._moved[-1], len(self.frame.runs) - 1)]
            if is_behind:
                self._list(True, behind=None if path == self._choice.behind else path)
            else:
                self._moved[:-1] = [0] * len(VIEWS)
                self._list(False, run=path)

    def action_metric(self, by: int) -> None:
        self._metric = (self._metric + by) % len(views.METRICS)
        self._redraw()

    def action_span(self) -> None:
        self._span = (self._span + 1) % len(SPANS)
        self._refresh_frame()

    def action_pause(self) -> None:
        self._is_paused = not self._is_paused
        self._tick()
        self._redraw()

    def action_help(self) -> None:
        switcher = self.query_one("#views", ContentSwitcher)
        self._choice = self._choice._replace(is_listing=False)
        switcher.current = VIEWS[self._view] if switcher.current == "keys" else "keys"
        self._redraw()

    def action_leave_help(self) -> None:
        self.action_view(self._view)
