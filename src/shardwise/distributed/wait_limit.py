"""Limits how long a rank waits for other ranks: `launch.timeout` seconds, of those in which its process ran.

gloo and torch's store measure by a clock that goes on while a process is stopped, as by SIGSTOP or `scontrol suspend`.
If all ranks of a job are stopped for longer than their limit, each of them finds the others late as soon as it goes on.
So they get a limit that is never reached, and a thread here closes the connections of a rank that has waited for too
long: what waits there then raises an error.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch

NEVER = timedelta(days=365)
"""The limit of gloo and the store where this module measures."""
_TICK_SECONDS = 1.0
_THREAD_NAME = "wait-limit"
_PACKAGE = Path(__file__).parent.parent
_WAITING_CODE = (
    str(Path(torch.__file__).parent),
    str(_PACKAGE / "distributed/collectives.py"),
    str(_PACKAGE / "distributed/mesh.py"),
    str(_PACKAGE / "pipeline"),
)
"""Files and folders with the code that calls what waits for other ranks; all else, such as reading files, has no limit.
"""


class Watch:
    """Measures how long each thread of this process has waited for other ranks.

    Args:
        seconds: the limit.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ran = 0.0
        # By thread: its processor time when it was first seen waiting, and the value of `_ran` then.
        self._since: dict[int, tuple[int, float]] = {}

    def is_over(self, passed: float, waiting: Mapping[int, int]) -> bool:
        """Return whether a thread has reached the limit.

        Args:
            passed: seconds since the last call, of those in which the process ran.
            waiting: the threads that may wait, each with its processor time in milliseconds: one that grows shows that
                the thread works.
        """
        self._ran += passed
        since = {}
        for thread, used in waiting.items():
            earlier = self._since.get(thread)
            if earlier is None or earlier[0] != used:  # it has begun to wait, or has worked in between
                earlier = (used, self._ran)
            since[thread] = earlier
        self._since = since
        return any(self._ran - began >= self._seconds for _, began in since.values())


def is_watching() -> bool:
    """True if this process is watched, so that gloo must have no limit of its own."""
    return any(thread.name == _THREAD_NAME for thread in threading.enumerate())


def start_watch(seconds: float, give_up: Callable[[], None] | None = None) -> bool:
    """Watch this process from here on, in a thread; False where the system does not tell what threads do.

    Args:
        seconds: the limit.
        give_up: ends a wait; default: `close_connections`.
    """
    if not Path("/proc/self/schedstat").exists():
        return False
    arguments = (seconds, give_up or close_connections)
    threading.Thread(target=_run, args=arguments, name=_THREAD_NAME, daemon=True).start()
    return True


def _run(seconds: float, give_up: Callable[[], None]) -> None:
    watch = Watch(seconds)
    tick = min(_TICK_SECONDS, seconds / 10)
    while True:
        began = time.monotonic()
        time.sleep(tick)
        # A longer pause means that the process was stopped.
        if watch.is_over(min(time.monotonic() - began, 2 * tick), _waiting()):
            give_up()
            return


def _waiting() -> dict[int, int]:
    """The threads that call something which may wait for other ranks, each with its processor time in milliseconds."""
    frames = sys._current_frames()
    waiting = {}
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if frame is not None and frame.f_code.co_filename.startswith(_WAITING_CODE):
            # Python keeps the number that the main thread had before a fork.
            number = os.getpid() if thread is threading.main_thread() else thread.native_id or 0
            with contextlib.suppress(OSError):  # the thread has just ended
                nanoseconds = Path(f"/proc/self/task/{number}/schedstat").read_text().split()[0]
                waiting[number] = int(nanoseconds) // 1_000_000
    return waiting


def close_connections() -> None:
    """Shut down the TCP connections of this process, whoever has opened them."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(descriptor.name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                connection.getpeername()  # fails for one that only listens
                connection.shutdown(socket.SHUT_RDWR)
