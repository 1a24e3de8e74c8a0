"""A child that does not outlive its parent, even one that is killed with SIGKILL."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

from shardwise.launch.environment import PARENT_PID

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.5


def die_with_parent() -> None:
    """Have this process killed as soon as its parent ends.

    On Linux the kernel does it; elsewhere a thread watches. The parent is the process that `SHARDWISE_PARENT_PID`
    names, so that the end of a parent before this call is noticed too; without the variable it is the present parent.
    For the kernel, the parent ends with the thread that started this process: start children from the main thread.
    """
    parent = int(os.environ.get(PARENT_PID) or os.getppid())
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    else:
        threading.Thread(target=_watch, args=(parent,), name="parent-watch", daemon=True).start()
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
