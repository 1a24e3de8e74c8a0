"""Notices of a run: the targets of `log.notify` are told of its end, its failure, a restart and a spike of the loss.

Each is told in a thread of its own, for which only the end of a process waits. What fails is a warning, never an error.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import Any, Literal

from shardwise.base.errors import RunError, ShardwiseError, StoppedError
from shardwise.base.files import user_path
from shardwise.base.notice_targets import ADDRESS, VARIABLE, notice_target_problem
from shardwise.base.redaction import REDACTED, hosts_alone, redacted
from shardwise.base.terminal import fit_to_terminal
from shardwise.launch.environment import NODE
from shardwise.launch.stop_requests import signal_name
from shardwise.runs.folder import json_text, now

Event = Literal["end", "failure", "restart", "spike"]
SECONDS = 10.0
"""Time in which a target must take a notice."""
_RESTARTS = {"TORCHELASTIC_RESTART_COUNT": "torchrun", "SLURM_RESTART_COUNT": "SLURM"}
targets: list[str] = []
_threads: list[threading.Thread] = []
_problems: queue.SimpleQueue[str] = queue.SimpleQueue()
_known_problems: set[str] = set()


def set_up(new_targets: Sequence[str]) -> None:
    """Let the notices of this process go to `new_targets`, those of `log.notify`."""
    targets[:] = new_targets


def send(event: Event, run: Path, reason: str, exit_code: int | None = None, **facts: Any) -> None:
    """Send a notice of an event to the targets, without waiting; `facts`: `step` and `loss`, else those recorded."""
    if not targets:
        return
    from shardwise.runs.events import last_event, number  # for targets alone: a start without them is faster

    facts = {name: (last_event(run, "step") or {}).get(name) for name in ("step", "loss")} | facts
    notice = {"event": event, "run": run.resolve().name, **facts, "reason": redacted(reason), "exit_code": exit_code}
    at = "" if facts["step"] is None else f" at step {facts['step']:,}, loss {number(facts['loss']):.4f}"
    text = f"{notice['run']}: {event}{at}: {notice['reason']}"
    body = json_text({**notice, "time": now(), "text": text}).encode()
    _threads[:] = [thread for thread in _threads if thread.is_alive()]
    for target in targets:
        thread = threading.Thread(target=_tell, args=(target, body), name=target, daemon=True)
        with contextlib.suppress(RuntimeError):  # the limit on threads is reached
            thread.start()
            _threads.append(thread)


def begin(run: Path) -> None:
    """Send a notice of a restart by a launcher outside of this package."""
    for name, launcher in _RESTARTS.items():
        if NODE not in os.environ and (count := os.environ.get(name, "0")) != "0":
            send("restart", run, f"{launcher} has started the ranks again ({name}={count})")


def end(run: Path, reason: str) -> None:
    """Send a notice of the end of a run, by the reason of its "stop" event; of a job, the supervisor does."""
    is_stopped = reason.startswith("stopped by ")
    if NODE not in os.environ and (is_stopped or reason in ("finished", "stop_after")):
        send("end", run, reason, StoppedError.exit_code if is_stopped else 0)


def problems(candidates: Sequence[str] = ()) -> list[str]:
    """Return the reasons, not returned before, for which a target got no notice, or a candidate cannot get any."""
    for target in candidates:
        _tell(target, None)
    return [_problems.get() for _ in range(_problems.qsize())]


@atexit.register
def wait() -> None:
    """Wait for notices that are still being sent, and print the problems."""
    until = time.monotonic() + SECONDS
    while _threads:
        (thread := _threads.pop()).join(max(0.0, until - time.monotonic()))
        if thread.is_alive():
            _note(thread.name, TimeoutError())
    sys.stdout.flush()  # a warning is the last line of a log
    for problem in problems():
        sys.stderr.write(f"{fit_to_terminal(f'warning: {redacted(problem)}', sys.stderr)}\n")


def _note(target: str, error: Exception) -> None:
    """Keep the reason for which a target was not told. The text of an unknown error may have the address."""
    text = f"it cannot be told ({type(error).__name__})"
    if isinstance(getattr(error, "reason", error), TimeoutError | TimeoutExpired):
        text = f"no answer within {SECONDS:g} s"
    elif isinstance(error, ShardwiseError | OSError):
        text = re.sub(r"^<urlopen error |\[\w*:? ?-?\w+\] | \(_ssl.*|>$", "", hosts_alone(str(error)))
        text = re.sub("^[A-Z](?=[a-z])", lambda match: match[0].lower(), text)
    problem = f"log.notify: {hosts_alone(target)}: {text}"
    if problem not in _known_problems:
        _known_problems.add(problem)
        _problems.put(problem)


def _tell(target: str, body: bytes | None) -> None:
    """Tell a target, or without a body only look for what would prevent it."""
    try:
        resolved = _resolved(target)
        if body is not None:
            (_post if re.match(ADDRESS, resolved) else _call)(resolved, body)
    except Exception as error:  # noqa: BLE001  no notice ends a run
        _note(target, error)


def _resolved(target: str) -> str:
    """Return the command or the address of a target. Raises RunError: it cannot be used."""
    text = os.environ.get(target.removeprefix(VARIABLE), "") if target.startswith(VARIABLE) else target
    problem = notice_target_problem(text)
    if target.startswith(VARIABLE) and (problem is not None or not re.match(ADDRESS, text)):
        problem = "the variable must be set to an https address without a log-in"
    elif problem is None and not re.match(ADDRESS, text) and shutil.which(program := _words(text)[0]) is None:
        problem = f"no program {program}" + " on the PATH" * ("/" not in program)
    if REDACTED in text:
        problem = "config.yaml keeps no path of an address: give log.notify again, or an address by env:NAME"
    if problem is not None:
        raise RunError(problem)
    return text


def _words(command: str) -> list[str]:
    program, *words = shlex.split(command)
    return [str(user_path(program)) if program.startswith("~") else program, *words]


def _call(command: str, body: bytes) -> None:
    """Run a command with a notice on its standard input; what it has started ends with it where it takes too long."""
    # A session of its own: Ctrl-C ends the training, and not what tells of it.
    with Popen(_words(command), stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True) as process:
        try:
            process.communicate(body, 0.95 * SECONDS)
        except TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if code := process.returncode:
        raise RunError(f"it ended with exit code {code}" if code > 0 else f"it was killed by {signal_name(-code)}")


def _post(address: str, body: bytes) -> None:
    from urllib.request import Request, urlopen  # costly to import, for this alone

    request = Request(address, body, {"Content-Type": "application/json", "User-Agent": "shardwise"})
    with urlopen(request, timeout=0.95 * SECONDS) as answer:
        if answer.url != address:
            raise RunError("it sends to another address, where a notice does not arrive")
