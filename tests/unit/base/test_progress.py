"""Progress of long work: nothing at first, then a bar on a terminal and lines in a log."""

import io
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from shardwise.base import progress as module
from shardwise.base.progress import progress
from tests.rows import rows_of
from tests.screens import Screen

ROWS = rows_of(__file__)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that a test moves."""
    moved = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: moved.now))
    return moved


@pytest.mark.parametrize(
    ("total", "noun", "amounts", "line"),
    ROWS["texts"],
)
def test_texts(clock: SimpleNamespace, total: int | None, noun: str, amounts: list[int], line: str) -> None:
    """Amounts in the product's units, the share, the speed of bytes, and the time left by the speed so far."""
    work = progress("working", total, noun)
    for amount in amounts:
        clock.now += {2: 10.0, 1: 10.0, 4: 5.0}[len(amounts)]
        work.advance(amount)
    assert work._text() == f"working: {line}"


def test_work_that_is_asked_and_a_log_with_a_line_every_half_minute(clock: SimpleNamespace) -> None:
    """What is there at the beginning, such as files of an earlier process, does not count."""
    work = progress("verifying", 8, "layout", done=iter([1, 3, 5]).__next__)
    clock.now += 6
    assert work._text() == "verifying: 2 of 8 layouts, 25%, 18.0 s left"
    clock.now += 6
    assert work._text() == "verifying: 4 of 8 layouts, 50%, 12.0 s left"
    work = progress("tokenizing x", 100 << 20, "")
    log = io.StringIO()

    def half_a_minute() -> None:
        clock.now += 30
        work.advance(30 << 20)

    turns = Turns(3, half_a_minute)
    work.show(log, turns)
    assert turns.waits == [30.0] * 4
    assert log.getvalue().splitlines() == [
        "tokenizing x: 30.0 MiB of 100 MiB, 30%, 1.0 MiB/s, 1 min 10 s left",
        "tokenizing x: 60.0 MiB of 100 MiB, 60%, 1.0 MiB/s, 40.0 s left",
        "tokenizing x: 90.0 MiB of 100 MiB, 90%, 1.0 MiB/s, 10.0 s left",
    ]


class Turns:
    """An end that comes after some waits, whose times are kept."""

    def __init__(self, turns: int, then: Callable[[], None] = lambda: None) -> None:
        self.waits: list[float] = []
        self._turns = turns
        self._then = then

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        self._then()
        return len(self.waits) > self._turns


def test_a_bar_vanishes_and_short_or_hidden_work_has_none(screen: Screen, clock: SimpleNamespace) -> None:
    """On a terminal, work that ends within the first wait draws nothing; in a log, within half a minute."""
    log = io.StringIO()
    for stream, waits in ((screen.stream, [module.AFTER_SECONDS, module.EVERY_SECONDS]), (log, [module.EVERY_SECONDS])):
        turns = Turns(0)
        progress("working", 10, "").show(stream, turns)
        assert turns.waits == waits
    assert screen.text() + log.getvalue() == ""
    # The progress of other ranks, secrets and control characters.
    with progress("working", 2, "graph", shown=False) as advance:
        advance(2)
    assert screen.text() == ""
    with progress("fetching https://host/x?token=abc \x1b[31m", 1):
        pass
    assert "abc" not in screen.text()
    assert "\x1b[31m" not in screen.text()
    work = progress("exporting to x", 4 << 20, "")
    work.advance(1 << 20)
    clock.now += 2
    work.show(screen.stream, Turns(3))
    shown = screen.text()
    assert "exporting to x: 1.0 MiB of 4.0 MiB, 25%, 512 KiB/s, 6.0 s left" in shown
    assert "━" in shown
    assert shown.rstrip("\r").endswith("\x1b[2K"), "the line is erased"
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l"), "the cursor is shown"
    assert shown.index("\x1b[?25h") < shown.rindex("exporting"), "it is while the bar is drawn, as a signal may come"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_the_middle_is_kept(screen: Screen, error: type[BaseException]) -> None:
    """The bar is gone, the thread has ended, and the error is the body's."""

    def work() -> None:
        with progress("working", 2, "graph") as advance:
            advance(1)
            raise error("the body's")

    with pytest.raises(error, match="the body's"):
        work()
    assert "1 of 2 graphs" in screen.text()
    assert screen.text().rstrip("\r").endswith("\x1b[2K")
    assert "progress" not in {thread.name for thread in threading.enumerate()}
