"""Asking a run to stop: by a signal to a process of it, or by a file in its folder.

A run that trains stops after the step under way and a checkpoint. Its ranks call `requested` after each step: signals
set a flag here, the launcher and `shardwise stop` write RUN/stop.json. Before `install`, and at the second SIGINT or
SIGTERM, a signal ends a process at once.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from shardwise.base.errors import ConfigError
from shardwise.base.files import reason_of, write_atomic
from shardwise.launch.environment import ERROR_FILE, NODE, is_launched, joined
from shardwise.runs.folder import json_text
from shardwise.runs.json_records import read_record

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
NOTICE = "stopping after the current step, with a checkpoint (Ctrl-C again ends at once)"
STOP_FILE = "stop.json"
_END_AT_SECOND = (signal.SIGINT, signal.SIGTERM)
"""Signals that people and schedulers send again to a process that does not end."""
# `timeout`, SLURM and wrappers around a command may send one signal twice: to a process and to its process group.
_ONE_REQUEST_SECONDS = 1.0


class Interrupted(KeyboardInterrupt):
    """Raised by the handler of stop requests to end this process at once; the text names the signal."""


class Requests:
    """The signals that one process has got."""

    def __init__(self) -> None:
        self.by: str | None = None
        # The time of the first SIGINT or SIGTERM, by the monotonic clock.
        self._first_ending: float | None = None

    def hear(self, number: int) -> bool:
        """Note a signal; returns True if it asks to end at once, as the second SIGINT or SIGTERM does."""
        now = time.monotonic()
        self.by = self.by or signal_name(number)
        if number not in _END_AT_SECOND:
            return False
        if self._first_ending is None:
            self._first_ending = now
        return now - self._first_ending >= _ONE_REQUEST_SECONDS


# One for this process, as its signal handlers are.
_requests = Requests()


def install() -> None:
    """Let the first signal ask for a stop after a checkpoint. Call it in the main thread, before training."""
    global _requests
    _requests = Requests()
    handle_signals(_note)
    place = joined()
    # The mark after the handlers: at a signal the launcher asks marked ranks to save, and kills those without the mark.
    if is_launched() and place is not None and place.rank == 0:
        training_mark(Path(os.environ[ERROR_FILE]).parent).touch()


def is_installed() -> bool:
    """True once a signal asks for a stop after a checkpoint: before, no step was taken that could be lost."""
    return signal.getsignal(signal.SIGTERM) is _note


def end_at_once() -> None:
    """Have signals raise `Interrupted`: there is nothing to save yet."""
    handle_signals(_interrupt)


def ignore() -> None:
    """Ignore all signals from here on: the process ends because of one, with all saved."""
    handle_signals(signal.SIG_IGN)


def requested(run_path: Path | str | None) -> str | None:
    """Return who asked this run to stop, in words that follow "stopped by"; None if nobody did.

    It is called after each step, so it costs one `stat` of a file; without a `run_path` only signals count.
    """
    if _requests.by is not None or run_path is None:
        return _requests.by
    path = Path(run_path) / STOP_FILE
    if not path.exists():
        return None
    with contextlib.suppress(OSError, ValueError):
        return read_record(path).get("by") or STOP_FILE
    return STOP_FILE


def make_stop_check(run: Path) -> Callable[[], str | None]:
    """Return a function that looks for requests to stop on a rank, and returns the reason, or None.

    On each machine one rank looks for a request in the run's folder; the other ranks notice only signals. A look at a
    network disk by every rank in every step would load its server.
    """
    place = joined()
    folder = run if place is None or place.local_rank == 0 else None
    return partial(requested, folder)


def request(run_path: Path, by: str) -> None:
    """Ask the run in a folder to stop. `by`: name of the asking signal or person."""
    facts = {"by": by, "host": platform.node(), "pid": os.getpid(), "time": datetime.now(UTC).isoformat()}
    write_atomic(run_path / STOP_FILE, json_text(facts, indent=2) + "\n")


def clear(run_path: Path) -> None:
    """Remove a request to stop an earlier run in this folder. Only the holder of the folder's lock may call this."""
    try:
        (run_path / STOP_FILE).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{run_path / STOP_FILE}, by which an earlier run was asked to stop, must be removed, and it cannot be: "
            f"{reason_of(error)}"
        ) from None


def training_mark(logs: Path) -> Path:
    """Path of the file by which rank 0 shows its launcher that steps have begun: a stop then waits for a checkpoint."""
    return logs / "training"


def say(text: str) -> None:
    """Print on standard error from inside a handler of signals to stop; a terminal that is gone is no error."""
    # `sys.stderr` would raise RuntimeError if the handler interrupted a write to it.
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


def handle_signals(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> dict[int, Any]:
    """Set the handler of all signals, and return the former ones; only in the main thread, else do nothing."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    # A signal that was ignored on purpose, as nohup does, stays ignored.
    heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}


def _note(number: int, _frame: FrameType | None) -> None:
    """Note the first signal as a request to stop; raise `Interrupted` at the second."""
    if number == signal.SIGTERM and is_launched() and Path(os.environ[ERROR_FILE]).exists():
        # torchrun's agent ends the other ranks by SIGTERM once one has failed, and that one has said why.
        os._exit(1)
    first = _requests.by is None
    if _requests.hear(number):
        raise Interrupted(signal_name(number))
    place = joined()
    # torchrun, too, ends ranks by SIGTERM when one has failed: only Ctrl-C is surely a person's, who wants an answer.
    if first and (place is None or (number == signal.SIGINT and place.rank == 0 and not is_launched())):
        say(NOTICE)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    raise Interrupted(signal_name(number))


def signal_name(number: int) -> str:
    """Name a signal as a user knows it: 15 is `SIGTERM`; real-time signals have numbers alone."""
    if number == signal.SIGINT:
        return "Ctrl-C (SIGINT)"
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def continuing_command(run: Path) -> str:
    """Return the command that continues a run which was stopped, in words if it needs those of another launcher."""
    is_local = is_launched() or joined() is None
    if sys.argv[1:2] == ["train"] and is_local and NODE not in os.environ:
        return f"`{shlex.join(['shardwise', 'train', '--run-dir', str(run)])}`"
    return f"the same command with --run-dir {run}"
