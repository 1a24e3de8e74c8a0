"""The first failure of a job, kept in one file: the user sees its cause, not the errors that followed from it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from shardwise.base import files, redaction, terminal, yaml_and_json
from shardwise.base.errors import ConfigError, RunError, see
from shardwise.launch import rank_output, stop_requests
from shardwise.launch.environment import ERROR_FILE, HEARTBEATS, Rank
from shardwise.runs.failure_record import HEADING

TRACEBACK = "traceback: "
"""Beginning of the line of a failure's text that names the log with the traceback."""
_WAITED = " waited for "  # words of a `LostPeerError` that names whom its rank waited for
_TURN_SECONDS = 2.0
_INPUT_TURNS = 5
"""Turns that a rank waits with wrong input, which all ranks usually have: on a busy machine rank 0 may come late."""

# An error of another rank never ends a process by one of these: such a death is the cause, whoever reported first.
_OWN_DEATHS: dict[int, str] = {
    signal.SIGKILL: "usually out of memory",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGBUS: "usually shared memory or a disk is full",
    signal.SIGILL: "usually a library built for another processor",
    signal.SIGFPE: "a crash in native code",
}


@dataclass(frozen=True)
class Failure:
    """The failure of a launched rank."""

    rank: int
    text: str
    exit_code: int
    # True if the rank lost another one: the text says only what it was doing then, and is no cause.
    waited: bool = False
    log: str | None = None  # path of the log in which the user reads more; None without one

    @property
    def told(self) -> str:
        """The text, with the log below it."""
        return self.text if self.log is None else f"{self.text}\nlog: {self.log}"


def print_error(text: str) -> None:
    """Print the error that ends a launched job."""
    sys.stdout.flush()
    sys.stderr.write(_complaint(text))
    sys.stderr.flush()


def _complaint(text: str) -> str:
    """Return the lines of an error. The block of a failed run stands by itself, and so does a warning."""
    program = "" if text.startswith((HEADING, "warning: ")) else "shardwise: "
    return f"{terminal.fit_to_terminal(f'{program}{redaction.redacted(text)}', sys.stderr)}\n"


def show_failure(failure: Failure, place: Rank | None, words: Callable[[Failure], str] | None = None) -> None:
    """Show a failure once for the whole job: through the launcher, else from the first rank that meets it.

    Args:
        words: function that records the failure and returns the text for the user; None for the text of the failure.
    """
    is_late = False
    if place is not None:
        if report_first_failure(replace(failure, text=redaction.redacted(failure.text))):
            return
        if place.rank != 0 and not failure.waited:
            # The launcher ends every rank when the first one exits. So rank 0 goes first, for an error that all ranks
            # have; then the first rank of a node, for an error of that node; then the others.
            signal.signal(signal.SIGTERM, lambda *_: os._exit(failure.exit_code))
            turns = _INPUT_TURNS if failure.exit_code == ConfigError.exit_code else 1
            time.sleep(_TURN_SECONDS * turns * (2 if place.local_rank else 1))
            if words is None:
                text = f"rank {place.rank}: {failure.text.removeprefix(f'rank {place.rank} ')}"
                failure = replace(failure, text=text)
            is_late = True
    text = failure.told if words is None else words(failure)
    if is_late:
        rank_output.tell_past_log(_complaint(text))
    print_error(text)


def report_first_failure(failure: Failure) -> bool:
    """Write a rank's failure to the launcher's file, unless another was first; True if a launcher reads it."""
    path = os.environ.get(ERROR_FILE)
    if path is None:
        return False
    # The folder may have been removed with that of the run.
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    # "x": of ranks that fail at once, the file system lets one alone make the file. One write without a buffer: the
    # launcher may kill this process at any moment after the file is there.
    with contextlib.suppress(FileExistsError), Path(path).open("xb", buffering=0) as file:
        file.write(json.dumps(asdict(failure)).encode())
    return True


def read_first_failure(path: Path) -> Failure | None:
    """Read the first failure of a job from the file of its launcher; None without one, or one that is cut short."""
    try:
        return Failure(**yaml_and_json.json_value(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError):
        return None


def report_stop(rank: int, text: str) -> bool:
    """Tell the launcher that the run stopped as it was asked to, and all is saved; returns True if it shows that."""
    path = os.environ.get(ERROR_FILE)
    if path is None:
        return False
    if rank == 0:
        files.write_atomic(stop_record(Path(path).parent), json.dumps({"text": text}))
    return True


def report_done(place: Rank) -> None:
    """Record that the work of a rank is done: its exit code 0 alone does not tell, as `os._exit(0)` gives it too."""
    folder = os.environ.get(HEARTBEATS)
    if folder is not None:
        _done_mark(Path(folder), place.rank).touch()


def ended_early(folder: Path, ranks: Iterable[int], logs: Path) -> Failure | None:
    """Find the first of these ranks, which ended with exit code 0, that had not done its work; None without one."""
    rank = next((rank for rank in ranks if not _done_mark(folder, rank).exists()), None)
    if rank is None:
        return None
    text = f"rank {rank} ended with exit code 0 before its work was done: code of your own must not end the process"
    return Failure(rank, text, RunError.exit_code, log=_log_of(rank, logs))


def _done_mark(folder: Path, rank: int) -> Path:
    return folder / f"done-{rank:04d}"


def stop_record(logs: Path) -> Path:
    """Path of the file of `report_stop`. It is not the file of failures: a rank may still fail while it ends."""
    return logs / "stopped.json"


def exit_codes_file(logs: Path) -> Path:
    """Path of the file of a node's failed ranks: rank → exit code, or minus the signal.

    It lies beside that of the first failure.
    """
    return logs / "exit-codes.json"


def read_exit_codes(logs: Path) -> dict[int, int]:
    """Read the exit codes of this node's failed ranks; {} if their agent could not write them."""
    try:
        codes = yaml_and_json.json_value(exit_codes_file(logs).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return {int(rank): code for rank, code in codes.items()}


def root_cause(
    reported: Failure | None, exit_codes: Mapping[int, int], logs: Path, awaited: Callable[[], str | None] | None = None
) -> Failure | None:
    """Choose the failure that a launcher shows; None if nothing is known of it.

    The connections of a rank that was killed close, so another rank may have reported the consequence before the cause
    was seen. The launcher ends ranks by SIGTERM only, so a death by SIGKILL or a crash is a cause.

    Args:
        exit_codes: ends of the failed ranks (exit code, or minus the signal).
        awaited: function that names the ranks for which the others waited. It is asked if no rank has died, and none
            says why it failed.
    """
    own_deaths = [rank for rank, code in exit_codes.items() if -code in _OWN_DEATHS]
    suspects = own_deaths
    if reported is None:
        suspects = own_deaths or list(exit_codes)
    elif reported.waited:
        # Ranks that lost another one end with 1 too, and those that the launcher ends by SIGTERM.
        suspects = own_deaths or [rank for rank, code in exit_codes.items() if code not in (1, -signal.SIGTERM)]
    if reported is not None and reported.waited and not suspects:
        missing = None if awaited is None else awaited()
        return reported if missing is None else replace(reported, text=missing, waited=False)
    if not suspects or (reported is not None and reported.rank in suspects):
        return reported
    rank = suspects[0]
    text = _death_text(rank, exit_codes[rank])
    # Whom a rank waited for tells more of the death; that a connection was lost does not.
    if reported is not None and reported.waited and _WAITED in reported.text:
        text += f"\n{reported.text}"
    return Failure(rank, text, RunError.exit_code, log=_log_of(rank, logs))


def _death_text(rank: int, code: int) -> str:
    if code >= 0:
        return f"rank {rank} ended with exit code {code} and named no reason"
    hint = _OWN_DEATHS.get(-code)
    name = stop_requests.signal_name(-code)
    return f"rank {rank} was killed ({name}{f'; {hint}' if hint else ''}){see('training#killed-rank')}"


def _log_of(rank: int, logs: Path) -> str | None:
    log = logs / f"rank-{rank:04d}.log"
    return str(log) if log.exists() else None
