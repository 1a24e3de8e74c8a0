"""One rank's work: how it joins a job, and how whatever ends it becomes a text for the user and an exit code."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from shardwise.base import user_code
from shardwise.base.errors import ConfigError, LostPeerError, RunError, ShardwiseError, StoppedError, see
from shardwise.base.redaction import redacted
from shardwise.launch import local, output, stop_requests
from shardwise.launch.environment import ERROR_FILE, Rank, is_launched, joined, may_restart, unjoined
from shardwise.launch.first_failure import (
    Failure,
    complain,
    error_text,
    report_done,
    report_stop,
    show_failure,
    signal_name,
)
from shardwise.launch.restarts import what_is_saved
from shardwise.launch.tasks import end_step
from shardwise.runs.folder import RunDirectory


@dataclass
class Ending:
    """How a rank's work ended.

    Attributes:
        code: the exit code of its process.
    """

    code: int = 0


def enter_job(nproc: int | None) -> Rank | None:
    """The place of this process in a launched job, and from here on it ends with its parent; None where it is alone.

    Args:
        nproc: the number of ranks that the user gave by `--nproc`, if any.

    Raises:
        ConfigError: a launcher started several processes that cannot join, or `nproc` is not their number.
    """
    place, problem = joined(), unjoined()
    if problem is not None:
        raise ConfigError(problem)
    if place is None:
        return None
    if nproc is not None and nproc != place.world:
        raise ConfigError(
            f"--nproc ({nproc}) must be left out inside a job: its world size is {place.world}"
            f"{see('runs#nproc-in-a-job')}"
        )
    local.die_with_parent()
    return place


def check_accelerators(nproc: int, accelerators: int) -> None:
    """Refuse more local ranks than there are accelerators, where there are any.

    Raises:
        ConfigError: with both numbers.
    """
    if 0 < accelerators < nproc:
        raise ConfigError(
            f"--nproc ({nproc}) must be at most the number of accelerators ({accelerators})"
            f"{see('runs#too-few-accelerators')}"
        )


@contextmanager
def as_rank(place: Rank | None, run_path: Path | None = None) -> Iterator[Ending]:
    """Run the body of the `with` statement as the work of one rank, and catch whatever it raises.

    The user reads why the work failed, once for all ranks. In a job the process of the rank ends here, at once, whether
    the work failed or not: its peers may never answer again, and connections to them need not be closed.

    Args:
        place: of this process in a launched job; None where it is the only rank.
        run_path: the folder of the run that is trained. Its logs get the traceback of an unexpected error.
    """
    ending, rank = Ending(), 0 if place is None else place.rank
    log = None
    if run_path is not None:
        log = RunDirectory(run_path).log(rank)
    elif is_launched():
        log = Path(os.environ[ERROR_FILE]).parent / f"rank-{rank:04d}.log"
    if place is None and run_path is not None:
        stop_requests.end_at_once()
    if place is not None and log is not None and is_launched():
        output.redirect(rank, log)
    try:
        yield ending
    except StoppedError as error:
        stop_requests.ignore()
        ending.code = _report_stop(place, str(error))
        if place is not None:
            _leave(place, ending.code)
    except BaseException as error:  # SystemExit too: code of the user's own may end nothing
        if isinstance(error, BrokenPipeError) and place is None and run_path is None:
            raise  # the reader of the output, such as `head`, has what it wanted
        failure = _failure(error, rank, run_path, log)
        show_failure(failure, place)
        ending.code = failure.exit_code
        end_step(failure)
        if place is not None or isinstance(error, KeyboardInterrupt):
            _leave(place, ending.code)  # without waiting for threads that still write
    else:
        if place is not None:
            _leave(place, ending.code)


def _failure(error: BaseException, rank: int, run_path: Path | None, log: Path | None) -> Failure:
    """What the user reads of an error. The traceback of an error that is not explained goes to the log."""
    if isinstance(error, ShardwiseError):
        waited = isinstance(error, LostPeerError)
        if waited:
            _write_traceback(error, log)
        return Failure(rank, error_text(error), error.exit_code, waited)
    if isinstance(error, KeyboardInterrupt):
        stopped = f"stopped by {str(error) or signal_name(signal.SIGINT)}"
        text = stopped if run_path is None else f"the run was {stopped}; {what_is_saved(run_path)}"
    elif isinstance(error, BrokenPipeError) and run_path is None:
        text = "the reader of the output has closed it"
    else:
        where = f"traceback: {log}" if _write_traceback(error, log) else "".join(traceback.format_exception(error))
        text = f"rank {rank} failed: {user_code.error_text(error)}\n{where}"
    return Failure(rank, text, RunError.exit_code)


def _write_traceback(error: BaseException, log: Path | None) -> bool:
    """Add a traceback to the rank's log; False where it has none."""
    if log is None:
        return False
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8", errors="replace") as file:
        file.write(redacted("".join(traceback.format_exception(error))))
    return True


def _report_stop(place: Rank | None, text: str) -> int:
    """Report, once for all ranks, that the run stopped with all saved; returns the exit code of this rank."""
    rank = 0 if place is None else place.rank
    if report_stop(rank, text):
        return 0  # torchrun's agent takes anything else for a failure; the exit code of the launcher is 75
    if rank == 0:
        complain(text)
    # torchrun would start a rank that failed once more, and the run that was asked to stop would continue.
    return 0 if place is not None and may_restart() else StoppedError.exit_code


def _leave(place: Rank | None, code: int) -> NoReturn:
    if place is not None and code == 0:
        report_done(place)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
