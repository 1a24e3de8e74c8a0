"""Children that do not outlive their parent, even one that is killed with SIGKILL, and the killing of both."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
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


def kill_with_children(parent: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to the children of a process that this one started, then to the process itself.

    Children that ask the kernel for their end are told of it only after the parent's connections are closed. In between
    they would report connections that were lost, though nothing but their end is meant.
    """
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(parent.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    parent.kill()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
