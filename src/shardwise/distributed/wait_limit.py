"""Limits how long a rank waits for other ranks.

The limit of a wait is `launch.timeout` seconds, of those in which the rank's process ran. gloo and torch's store
measure by a clock that goes on while a process is stopped, as by SIGSTOP or `scontrol suspend`. If all ranks of a job
are stopped for longer than their limit, each of them finds the others late as soon as it goes on. So they get a limit
that is never reached, and a thread here closes the connections of a rank that has waited for too long: what waits there
then raises an error. gloo's wait for a connection that it makes hears nothing of it: there the thread ends the process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch

NEVER = timedelta(days=365)
"""The limit of gloo and the store where this module measures."""
_TICK_SECONDS = 1.0
_DEAF_SECONDS = 5.0  # seconds after which a wait has not noticed that the connections were closed
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


class WaitLimit:
    """The limit of seconds that a thread of this process may wait for other ranks, and how long each has waited."""

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
            # The thread has begun to wait, or has worked in between.
            if earlier is None or earlier[0] != used:
                earlier = (used, self._ran)
            since[thread] = earlier
        self._since = since
        return any(self._ran - began >= self._seconds for _, began in since.values())


def start_wait_limit(seconds: float) -> bool:
    """Limit how long this process waits for other ranks, by a thread; False where the system hides what threads do.

    A thread that has waited for the limit finds its connections closed. If it waits on, the process ends.
    """
    if not Path("/proc/self/schedstat").exists():
        return False
    threading.Thread(target=_run, args=(seconds,), name=_THREAD_NAME, daemon=True).start()
    return True


def _run(seconds: float) -> None:
    watch = WaitLimit(seconds)
    tick = min(_TICK_SECONDS, seconds / 10)
    while True:
        began = time.monotonic()
        time.sleep(tick)
        # A longer pause means that the process was stopped.
        waiting = _waiting()
        if watch.is_over(min(time.monotonic() - began, 2 * tick), waiting):
            break
    close_connections()
    time.sleep(_DEAF_SECONDS)
    if waiting.items() & _waiting().items():
        rank = os.environ.get("RANK", "0")
        os.write(2, f"rank {rank} waited for another rank for {seconds:g} s (launch.timeout), and ends\n".encode())
        os._exit(1)


def _waiting() -> dict[int, int]:
    """The threads that call something which may wait for other ranks, each with its processor time in milliseconds."""
    # Not the frames: one of them is of this function, so that with them all threads' tensors would be cyclic garbage.
    files = {ident: frame.f_code.co_filename for ident, frame in sys._current_frames().items()}
    waiting = {}
    for thread in threading.enumerate():
        if files.get(thread.ident or 0, "").startswith(_WAITING_CODE):
            # Python keeps the number that the main thread had before a fork.
            number = os.getpid() if thread is threading.main_thread() else thread.native_id or 0
            # The thread may have just ended.
            with contextlib.suppress(OSError):
                nanoseconds = Path(f"/proc/self/task/{number}/schedstat").read_text().split()[0]
                waiting[number] = int(nanoseconds) // 1_000_000
    return waiting


def close_connections() -> None:
    """Shut down the TCP connections of this process, whoever has opened them."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(descriptor.name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                # This fails for a socket that only listens, which is left open.
                connection.getpeername()
                connection.shutdown(socket.SHUT_RDWR)
