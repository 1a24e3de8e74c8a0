"""A child that does not outlive its parent."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from shardwise.launch import rank_process
from shardwise.launch.environment import PARENT_PID

SECONDS = 120.0
CHILD = (
    "from shardwise.launch import rank_process as guard; guard.die_with_parent(); print('ready', flush=True); input()"
)


def test_a_parent_that_died_before_is_noticed() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    environment = {**os.environ, PARENT_PID: str(gone.pid)}
    child = subprocess.run([sys.executable, "-c", CHILD], env=environment, timeout=SECONDS)
    assert child.returncode == -signal.SIGKILL


def test_elsewhere_a_thread_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[int, int]] = []
    parents = iter([7, 7, 1])
    monkeypatch.setattr(rank_process, "_PARENT_POLL_SECONDS", 0.0)
    monkeypatch.setattr(rank_process.os, "getppid", lambda: next(parents))
    monkeypatch.setattr(rank_process.os, "kill", lambda *call: killed.append(call))
    watcher = threading.Thread(target=rank_process._end_after, args=(7,))
    watcher.start()
    watcher.join(SECONDS)
    assert killed == [(os.getpid(), signal.SIGKILL)]
