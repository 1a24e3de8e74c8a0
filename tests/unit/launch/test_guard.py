"""A child that does not outlive its parent."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shardwise.launch import rank_process
from shardwise.launch.environment import PARENT_PID
from tests.e2e.processes import wait_for

SECONDS = 120.0

CHILD = (
    "from shardwise.launch import rank_process as guard; guard.die_with_parent(); print('ready', flush=True); input()"
)
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE, text=True)
assert child.stdout.readline() == "ready\\n"
print(child.pid, flush=True)
input()
"""


def test_a_child_dies_with_its_killed_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    os.kill(child, 0)
    parent.kill()
    parent.communicate(timeout=SECONDS)
    assert wait_for(lambda: _is_gone(child), SECONDS)


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


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
