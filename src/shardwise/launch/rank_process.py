"""The process of one rank, from joining its job to its exit code.

Whatever ends the rank's work, an error, a signal or the end of the training, becomes a text for the user and an exit
code.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from shardwise.base.errors import ConfigError, StoppedError, see
from shardwise.launch import notices, rank_output, stop_requests
from shardwise.launch.environment import ERROR_FILE, PARENT_PID, Rank, is_launched, joined, may_restart, unjoined
from shardwise.runs import folder

# The option of `prctl` in <linux/prctl.h>.
_PR_SET_PDEATHSIG = 1
_PARENT_POLL_SECONDS = 0.5


@dataclass
class _RankExit:
    """The end of a rank's work, filled in when the `with` statement of `as_rank` is left."""

    code: int = 0


def enter_job(nproc: int | None) -> Rank | None:
    """Find the place of this process in a launched job, and have it end with its parent; None if it is alone.

    Raises:
        ConfigError: a launcher started several processes that cannot join, or `nproc` is not their number.
    """
    problem = unjoined()
    if problem is not None:
        raise ConfigError(problem)
    place = joined()
    if place is None:
        return None
    if nproc is not None and nproc != place.world:
        raise ConfigError(
            f"--nproc ({nproc}) must be left out inside a job: its world size is {place.world}"
            f"{see('runs#nproc-in-a-job')}"
        )
    die_with_parent()
    return place


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
        threading.Thread(target=_end_after, args=(parent,), name="parent-watch", daemon=True).start()
    # After the request to the kernel: a parent that ended before it sends no signal any more.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def check_accelerators(nproc: int, accelerators: int) -> None:
    """Refuse to launch more local ranks than there are accelerators, if there are any, by a ConfigError."""
    if 0 < accelerators < nproc:
        raise ConfigError(
            f"--nproc ({nproc}) must be at most the number of accelerators ({accelerators})"
            f"{see('runs#too-few-accelerators')}"
        )


@contextmanager
def as_rank(
    place: Rank | None, run_path: Path | None = None, on_refusal: Callable[[], None] | None = None
) -> Iterator[_RankExit]:
    """Run the body of the `with` statement as the process of a launched rank, and catch whatever it raises.

    The user reads why the work failed, once for all ranks. In a job the process of the rank ends here, at once, whether
    the work failed or not: its peers may never answer again, and connections to them need not be closed.

    Args:
        place: place of this process in a launched job; None if it is the only rank.
        run_path: folder of the run that is trained. Its logs get the traceback of an unexpected error.
        on_refusal: called before this process ends because the start was refused.
    """
    rank_exit = _RankExit()
    began = time.time()
    rank = 0 if place is None else place.rank
    log = None
    if run_path is not None:
        log = folder.RunDirectory(run_path).log(rank)
    elif is_launched():
        log = Path(os.environ[ERROR_FILE]).parent / f"rank-{rank:04d}.log"
    if place is None and run_path is not None:
        stop_requests.end_at_once()
    if place is not None and log is not None and is_launched():
        rank_output.redirect(rank, log)
    try:
        yield rank_exit
    except StoppedError as error:
        # First of all: another signal would turn a stop with all saved into a failure.
        stop_requests.ignore()
        rank_exit.code = _report_stop(place, str(error))
        if place is not None:
            _leave(place, rank_exit.code)
    except BaseException as error:
        # SystemExit too: the user's own code must not end a rank as if its work were done.
        if isinstance(error, BrokenPipeError) and place is None and run_path is None:
            # The reader of the output, such as `head`, has read enough; `main` ends the command quietly.
            raise
        # Costly to import, for the ranks that fail alone.
        from shardwise.launch import external_launchers, failed_run

        # The text before the end of the other tasks: they may be killed as soon as srun is asked to.
        failure = failed_run.show_error(error, place, run_path, log, began)
        rank_exit.code = failure.exit_code
        if on_refusal is not None and failure.exit_code == ConfigError.exit_code:
            on_refusal()
        external_launchers.end_step(failure)
        if place is not None or isinstance(error, KeyboardInterrupt):
            # Without waiting for threads that still write.
            _leave(place, rank_exit.code)
    else:
        if place is not None:
            _leave(place, rank_exit.code)


@contextmanager
def failure_recorded(place: Rank | None, run_path: Path | None) -> Iterator[None]:
    """Run a training that a program called as a rank; record its error in the run's folder, if known, and raise it."""
    began = time.time()
    try:
        yield
    except StoppedError:
        raise
    except Exception as error:
        if run_path is not None:
            rank = 0 if place is None else place.rank
            from shardwise.launch import failed_run

            failure = failed_run.failure_of_error(error, rank, run_path, folder.RunDirectory(run_path).log(rank))
            failed_run.failure_text(failure, run_path, began, None, tells=False)
            if notices.targets:
                failed_run.send_failure_notice(failure, run_path, began)
        raise


def _report_stop(place: Rank | None, text: str) -> int:
    """Report, once for all ranks, that the run stopped with all saved; returns the exit code of this rank."""
    from shardwise.launch import first_failure

    rank = 0 if place is None else place.rank
    if first_failure.report_stop(rank, text):
        # torchrun's agent takes anything else for a failure; the exit code of the launcher is 75.
        return 0
    if rank == 0:
        first_failure.print_error(text)
    # torchrun would start a rank that failed once more, and the run that was asked to stop would continue.
    return 0 if place is not None and may_restart() else StoppedError.exit_code


def _leave(place: Rank | None, code: int) -> NoReturn:
    """End this process without the cleanup of Python: threads of gloo and NCCL could wait there for other ranks."""
    if place is not None and code == 0:
        from shardwise.launch.first_failure import report_done

        # Before the exit: the launcher takes exit code 0 without this mark for user code that called `os._exit(0)`.
        report_done(place)
    notices.wait()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
