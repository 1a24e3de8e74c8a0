"""The launcher of local ranks: it starts a command on each, and waits for them as one."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from shardwise.base.errors import EndedError, LaunchError, RunError, StoppedError
from shardwise.base.files import reason_of
from shardwise.base.hardware import cpu_count
from shardwise.base.yaml_and_json import json_value
from shardwise.launch import heartbeat, stop_requests
from shardwise.launch.environment import ERROR_FILE, HEARTBEATS, PARENT_PID, RANK_PROCESS
from shardwise.launch.failed_run import failure_text, resume_command
from shardwise.launch.first_failure import (
    Failure,
    ended_early,
    exit_codes_file,
    read_exit_codes,
    read_first_failure,
    root_cause,
    stop_record,
)
from shardwise.launch.stop_requests import signal_name

# The time that the other ranks have to end at SIGTERM once a rank has failed; the agent alone would wait 30 s.
_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.5
_SHOW_CURSOR = "\x1b[?25h"


def launch(command: Sequence[str], nproc: int, run_path: Path) -> None:
    """Run `command` on `nproc` local ranks and return when all are done.

    The ranks share this process's terminal output until they redirect it. Until a step was taken, a signal ends all of
    them at once. Later the first signal asks them to stop with a checkpoint, however long that takes, and a second
    SIGINT or SIGTERM ends them. If this process dies, even by SIGKILL, so do the ranks that have called
    `die_with_parent`. Call it in the main thread: only there can signals be handled.

    Args:
        run_path: the run's folder; `logs/` in it is made, and the launcher's own files in that are replaced.

    Raises:
        StoppedError: the ranks stopped as they were asked to, with a checkpoint.
        EndedError: a signal ended the ranks at once; the text names it. Its exit code is 75 where no step was taken.
        LaunchError: a rank failed; the text says why.
    """
    logs = run_path / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    stop = _Stop(run_path, logs)
    began = time.time()
    # Before the start: a signal in between would kill this process and leave the ranks to the kernel.
    handlers = stop_requests.handle_signals(stop.handle)
    try:
        ended = run_ranks(command, nproc, logs, stop.watch)
    except OSError as error:
        # No bad input: the folder could be used at the start.
        place = error.filename or "a new process"
        raise LaunchError(f"the ranks cannot be started or watched: {place}: {reason_of(error)}") from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    _raise_failure(ended, stop, run_path, began)


def _raise_failure(ended: _LocalRanksEnd, stop: _Stop, run_path: Path, began: float) -> None:
    """Raise the error that describes the end of the ranks, unless they have done their work."""
    if ended.stopped is not None:
        raise StoppedError(ended.stopped)
    if ended.code == 0:
        return
    ended_by = stop.ended_by or _signal_at_the_start(ended)
    if ended_by is not None:
        if sys.stdout.isatty():
            # A rank that is killed leaves the cursor hidden by its progress line.
            sys.stdout.write(_SHOW_CURSOR)
        # Nothing is lost at the start: the same command continues, as after a stop with a checkpoint.
        code = RunError.exit_code if ended.took_steps else StoppedError.exit_code
        raise EndedError(f"the run was stopped by {ended_by}", code)
    logs = run_path / "logs"
    failure = root_cause(ended.reported, ended.exit_codes, logs, lambda: heartbeat.missing(ended.beats))
    if failure is None:
        code = ended.code
        ending = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        text = f"the process that starts the ranks {ending}"
        log = logs / "launcher.log"
        failure = Failure(0, text, RunError.exit_code, log=str(log) if log.exists() else None)
    steps = max((beat.step for beat in ended.beats), default=0)
    text = failure_text(failure, run_path, began, resume_command(run_path), steps)
    raise LaunchError(text, failure.exit_code)


def _signal_at_the_start(ended: _LocalRanksEnd) -> str | None:
    """Name the signal to a rank that ended the ranks before a step was taken, and asks ranks that train to stop."""
    signals = {-code for code in ended.exit_codes.values()}
    if ended.took_steps or ended.reported is not None or not signals or not signals <= {*stop_requests.SIGNALS}:
        return None
    # The agent ends the other ranks by SIGTERM.
    return signal_name(min(signals - {signal.SIGTERM}, default=signal.SIGTERM))


@dataclass(frozen=True)
class _LocalRanksEnd:
    """The end of the ranks of this machine."""

    code: int  # the agent's exit code, or minus the signal that killed it
    stopped: str | None  # text of ranks that stopped as they were asked to; None if they did not
    reported: Failure | None
    exit_codes: Mapping[int, int]  # ends of the failed ranks (exit code, or minus the signal)
    beats: Sequence[heartbeat.Beat]
    took_steps: bool = False  # True if the ranks had begun to take steps


def run_ranks(
    command: Sequence[str],
    nproc: int,
    logs: Path,
    watch: Callable[[subprocess.Popen[bytes]], None],
    beats: Path | None = None,
    first: int = 0,
) -> _LocalRanksEnd:
    """Run `command` on `nproc` local ranks, which the agent starts.

    Args:
        logs: folder for the files between ranks, agent and this process; former files of that kind are removed.
        beats: empty folder for the heartbeats of the ranks; None for a temporary one.
    """
    error_file = (logs / "error.json").resolve()
    # Files of a former start would be taken for those of this one.
    for left_over in (error_file, exit_codes_file(logs), stop_record(logs), stop_requests.training_mark(logs)):
        left_over.unlink(missing_ok=True)
    # An agent that is there was told by whoever started it what its ranks need.
    imports = () if nproc in _agents else TRAINING
    with tempfile.TemporaryDirectory(prefix="shardwise-") as temporary, agent_ahead(nproc, imports) as agent:
        beats = beats or Path(temporary)
        watch(agent)
        # Another launch in the same `with` statement has an agent of its own.
        _agents.pop(nproc, None)
        job = {"command": [*command], "logs": str(logs), ERROR_FILE: str(error_file), HEARTBEATS: str(beats)}
        # An agent that is gone already tells by its exit code.
        with contextlib.suppress(BrokenPipeError), agent.stdin as pipe:  # type: ignore[union-attr]  # there is one
            pipe.write(json.dumps(job).encode())
        # Heartbeats are read when the first rank has failed: the others end soon after, and then have none either.
        last_beats: list[heartbeat.Beat] = []
        code = _wait(agent, error_file.exists, lambda: last_beats.extend(heartbeat.read(beats)))
        early = ended_early(beats, range(first, first + nproc), logs) if code == 0 else None
    took_steps = stop_requests.training_mark(logs).exists()
    stop_requests.training_mark(logs).unlink(missing_ok=True)
    record = stop_record(logs)
    text = None
    if record.exists():
        text = json_value(record.read_text(encoding="utf-8"))["text"]
        # It is of no use once the user has read the text.
        record.unlink()
    if early is not None and text is None:
        return _LocalRanksEnd(early.exit_code, None, early, {}, last_beats)
    return _LocalRanksEnd(code, text, read_first_failure(error_file), read_exit_codes(logs), last_beats, took_steps)


_agents: dict[int, subprocess.Popen[bytes]] = {}
TRAINING = ("shardwise.cli.train", "shardwise.train.run")
"""Modules that each rank of a training imports. None of them starts a thread, or opens a device."""


@contextmanager
def agent_ahead(nproc: int, imports: Sequence[str] = TRAINING) -> Iterator[subprocess.Popen[bytes]]:
    """Have the agent of a `launch` in the `with` statement import torch and more, beside the work of this process."""
    if nproc in _agents:
        _tell(_agents[nproc], imports)
        yield _agents[nproc]
        return
    # The last words are for `ps`, which shows them of the ranks too.
    command = [sys.executable, "-P", "-m", "shardwise.launch.agent", str(nproc), *sys.argv[1:]]
    variables = {"OMP_NUM_THREADS": str(max(1, cpu_count() // nproc)), **os.environ, PARENT_PID: str(os.getpid())}
    # These variables are for the ranks, whatever process this one is.
    variables.pop(RANK_PROCESS, None)
    try:
        # A session of its own: Ctrl-C in the terminal reaches this process alone, which passes it on once.
        process = subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, start_new_session=True)
    except BlockingIOError as error:
        raise LaunchError(f"the ranks cannot be started or watched: a new process: {reason_of(error)}") from None
    with process as agent:
        _agents[nproc] = agent
        try:
            _tell(agent, imports)
            yield agent
        finally:
            _agents.pop(nproc, None)
            kill_ranks(agent)


def _tell(agent: subprocess.Popen[bytes], imports: Sequence[str]) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(agent.stdin.fileno(), json.dumps({"imports": imports}).encode() + b"\n")  # type: ignore[union-attr]


def launch_without_run(arguments: Sequence[str], nproc: int) -> None:
    """Run `shardwise ARGUMENTS` on `nproc` local ranks. Their logs are kept if the text of a failure names them.

    Raises:
        LaunchError: the ranks failed; the text has the cause.
    """
    folder = Path(tempfile.mkdtemp(prefix="shardwise-"))
    is_named = False
    try:
        launch([sys.executable, "-P", "-m", "shardwise", *arguments], nproc, folder)
    except EndedError as error:
        # No run is here that the same command would continue.
        raise EndedError(str(error)) from None
    except LaunchError as error:
        is_named = str(folder) in str(error)
        raise
    finally:
        if not is_named:
            shutil.rmtree(folder, ignore_errors=True)


def _wait(agent: subprocess.Popen[bytes], has_failed: Callable[[], bool], failed: Callable[[], object]) -> int:
    """Wait for the agent, and return its exit code. Ranks that outlive a failure by `_GRACE_SECONDS` are killed.

    Args:
        failed: function that is called once, when `has_failed` is true or the agent has ended.
    """
    deadline = math.inf
    while True:
        try:
            code = agent.wait(_POLL_SECONDS)
            if deadline == math.inf:
                failed()
            return code
        except subprocess.TimeoutExpired:
            if deadline == math.inf and has_failed():
                deadline = time.monotonic() + _GRACE_SECONDS
                failed()
            if time.monotonic() >= deadline:
                kill_ranks(agent)


class _Stop:
    """The signals to a launcher: the first is a request to stop; the second, or one before training, ends the ranks."""

    def __init__(self, run_path: Path, logs: Path) -> None:
        self.ended_by: str | None = None
        self._run_path = run_path
        self._logs = logs
        self._requests = stop_requests.Requests()
        self._agent: subprocess.Popen[bytes] | None = None

    def watch(self, agent: subprocess.Popen[bytes]) -> None:
        self._agent = agent
        # The signal came while the agent was started, and found no process to kill.
        if self.ended_by is not None:
            kill_ranks(agent)

    def handle(self, number: int, _frame: FrameType | None) -> None:
        first = self._requests.by is None
        # Without the mark no rank has taken a step: there is nothing to save, and none would look for a request.
        if self._requests.hear(number) or not stop_requests.training_mark(self._logs).exists():
            self.ended_by = self.ended_by or signal_name(number)
            if self._agent is not None:
                kill_ranks(self._agent)
        elif first:
            try:
                stop_requests.request(self._run_path, signal_name(number))
                stop_requests.say(stop_requests.NOTICE)
            except OSError as error:
                stop_requests.say(f"the run cannot be asked to stop: {self._run_path}: {reason_of(error)}")


def kill_ranks(agent: subprocess.Popen[bytes]) -> None:
    """Kill an agent and its ranks, one group of processes, at once: none is to report that it lost another."""
    with contextlib.suppress(ProcessLookupError):
        if agent.poll() is None:
            os.killpg(agent.pid, signal.SIGKILL)
