"""Starting a command on local ranks, and waiting for them as one."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from shardwise.errors import RunError
from shardwise.hardware import cpu_count
from shardwise.launch.environment import ERROR_FILE, PARENT_PID
from shardwise.launch.failure import read_failure, signal_name

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Once a rank has failed or a stop was asked for, ranks that do not end at SIGTERM get this long; torch would wait 30 s.
_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.5


class LaunchError(RunError):
    """The launched ranks failed; `exit_code` is the one that the rank at fault asked for."""

    def __init__(self, text: str, exit_code: int = 1) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def launch(command: Sequence[str], nproc: int, run_path: Path, *, variables: Mapping[str, str] | None = None) -> None:
    """Run `command` on `nproc` local ranks through torchrun's agent, and return when all are done.

    The ranks share this process's terminal output until they redirect it. Ctrl-C, SIGTERM and SIGHUP stop all of them.
    Where this process dies, SIGKILL included, so do they, once they have called `guard.die_with_parent`.
    Call it in the main thread: only there can signals be forwarded.

    Args:
        run_path: the run directory; `logs/` in it is made, and `logs/error.json` and `logs/launcher.log` used.
        variables: set in the ranks' environment, besides the inherited.

    Raises:
        LaunchError: with the cause, where a rank failed or the run was stopped.
    """
    logs = run_path / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    error_file = (logs / "error.json").resolve()
    error_file.unlink(missing_ok=True)
    environment = {"OMP_NUM_THREADS": str(max(1, cpu_count() // nproc)), **os.environ, **(variables or {})}
    environment |= {ERROR_FILE: str(error_file), PARENT_PID: str(os.getpid())}
    agent_command = [sys.executable, "-P", "-m", "shardwise.launch.agent", "--nproc", str(nproc), "--logs", str(logs)]
    stop = _Stop()
    with _forwarding(stop):
        agent = subprocess.Popen(
            [*agent_command, "--", *command], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )
        stop.watch(agent)
        code = _wait(agent, lambda: stop.signal is not None or error_file.exists())
    if code == 0:
        return
    if stop.signal is not None:
        raise LaunchError(f"the run was stopped by {_called(stop.signal)}; no checkpoint was saved")
    failure = read_failure(error_file)
    if failure is not None:
        raise LaunchError(failure.text, failure.exit_code)
    ending = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    raise LaunchError(f"the process that starts the ranks {ending}; its log: {logs / 'launcher.log'}")


def _wait(agent: subprocess.Popen[bytes], is_ending: Callable[[], bool]) -> int:
    """The agent's exit code. Killing it kills its ranks: each has asked the kernel to die with it."""
    deadline = math.inf
    while True:
        try:
            return agent.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            if is_ending():
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            if time.monotonic() >= deadline:
                agent.kill()


class _Stop:
    """Forwards the first stop signal to the agent as SIGTERM, and kills it at the second."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._agent: subprocess.Popen[bytes] | None = None

    def watch(self, agent: subprocess.Popen[bytes]) -> None:
        self._agent = agent
        if self.signal is not None:
            agent.terminate()

    def handle(self, number: int, _frame: FrameType | None) -> None:
        again = self.signal is not None
        self.signal = self.signal or number
        if self._agent is not None:
            self._agent.send_signal(signal.SIGKILL if again else signal.SIGTERM)


@contextmanager
def _forwarding(stop: _Stop) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Whoever had a signal ignored, as nohup does, meant it.
    heard = [number for number in _STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, stop.handle) for number in heard}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _called(number: int) -> str:
    return "Ctrl-C (SIGINT)" if number == signal.SIGINT else signal_name(number)
