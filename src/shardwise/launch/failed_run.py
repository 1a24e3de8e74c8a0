"""The failure of a run: recorded in its folder, where `top`, `report` and `jobs` read it, and put into words."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shardwise.base import errors
from shardwise.base.errors import ConfigError, LostPeerError, RunError, ShardwiseError, StoppedError, counted_text, see
from shardwise.base.redaction import redacted, redacted_arguments
from shardwise.launch import notices
from shardwise.launch.environment import REPLAY, Rank, may_restart
from shardwise.launch.first_failure import TRACEBACK, Failure, show_failure
from shardwise.launch.stop_requests import is_installed, signal_name
from shardwise.runs.events import first_step, last_event, newest_checkpoint, newest_recorded_checkpoint, seconds_of
from shardwise.runs.failure_record import FailureRecord, failure_of
from shardwise.runs.folder import RunDirectory, now, open_log, read_config


def show_error(
    error: BaseException, place: Rank | None, run_path: Path | None, log: Path | None, began: float
) -> Failure:
    """Show, once for all ranks, the error by which a launched rank fails, and record it in the run's folder."""
    failure = failure_of_error(error, 0 if place is None else place.rank, run_path, log)
    # A request of the user to end at once is no failure of the run.
    is_request = isinstance(error, KeyboardInterrupt)
    show_failure(failure, place, None if is_request else lambda failed: _words(failed, place, run_path, began))
    return failure


def failure_of_error(error: BaseException, rank: int, run_path: Path | None, log: Path | None) -> Failure:
    """Describe for the user the error by which a launched rank fails; logs the traceback of an unexplained one."""
    if isinstance(error, ShardwiseError):
        waited = isinstance(error, LostPeerError)
        if waited:
            _write_traceback(error, log)
        return Failure(rank, counted_text(error), error.exit_code, waited)
    if isinstance(error, KeyboardInterrupt):
        stopped = f"stopped by {str(error) or signal_name(signal.SIGINT)}"
        if run_path is not None:
            text = f"the run was {stopped}; {newest_recorded_checkpoint(run_path)}"
            # Nothing is lost at the start: the same command continues, as after a stop with a checkpoint.
            code = RunError.exit_code if is_installed() else StoppedError.exit_code
            return Failure(rank, text, code)
        text = stopped
    elif isinstance(error, BrokenPipeError) and run_path is None:
        text = "the reader of the output has closed it"
    else:
        is_logged = _write_traceback(error, log)
        details = f"{TRACEBACK}{log}" if is_logged else "".join(traceback.format_exception(error))
        text = f"rank {rank} failed: {errors.error_text(error)}\n{details}"
    return Failure(rank, text, RunError.exit_code)


def _words(failure: Failure, place: Rank | None, run_path: Path | None, began: float) -> str:
    """Record the failure of a rank that no launcher of this package started; returns the text for the user."""
    if run_path is None:
        return failure.told
    resume = resume_command(run_path)
    if place is not None and resume is not None:
        # The words of torchrun, srun or mpirun before those of the rank are unknown.
        resume = f"the same command with --run-dir {shlex.quote(str(run_path))}"
    return failure_text(failure, run_path, began, resume)


def _write_traceback(error: BaseException, log: Path | None) -> bool:
    """Add a traceback to the rank's log; returns False if it has none, or one that cannot be opened."""
    if log is None:
        return False
    with contextlib.suppress(ConfigError), open_log(log) as file:
        file.write(redacted("".join(traceback.format_exception(error))))
        return True
    return False


def send_failure_notice(failure: Failure, run: Path, began: float) -> None:
    """Send the notice of a failed run once for all its ranks: rank 0 is first, the others wait."""
    time.sleep((2.0 + 0.01 * (failure.rank % 100)) * (failure.rank > 0))
    mark = run / ".failure-told"
    with contextlib.suppress(OSError):  # the folder may be gone; file systems round times
        if mark.exists() and mark.stat().st_mtime > began - 0.05:
            return
        mark.touch()
    if not may_restart():
        notices.send("failure", run, failure.text.partition("\n")[0], failure.exit_code)


def failure_text(
    failure: Failure, run: Path | None, began: float, resume: str | None, steps: int = 0, *, tells: bool = True
) -> str:
    """Return the text of a rank's failure for the user. That of a run which has begun is a block, and is recorded.

    Args:
        run: the run's folder; None if it is unknown.
        began: beginning of this start of the run, in seconds since the epoch.
        resume: command that continues the run; None if it is unknown.
        steps: steps that were done, as the ranks' heartbeats show them.
        tells: whether the targets of `log.notify` are told, once for all ranks.
    """
    is_recorded = run is not None and _is_recorded(RunDirectory(run), began)
    # Once for all ranks; where torchrun starts them again, that is told.
    if run is not None and tells and not is_recorded and not may_restart():
        facts = {"step": steps} if steps else {}
        notices.send("failure", run, failure.text.partition("\n")[0], failure.exit_code, **facts)
    if failure.exit_code == ConfigError.exit_code or run is None or not _has_begun(run):
        return failure.told
    directory = RunDirectory(run)
    # A rank that lost another one names no cause: what that one has recorded stays.
    if failure.waited and is_recorded:
        return failure.told
    # The block has a line for the log.
    lines = [line for line in failure.text.splitlines() if line.strip() and not line.startswith(TRACEBACK)]
    sections = _recorded_sections(directory)
    checkpoint = newest_checkpoint(run)
    record = FailureRecord(
        time=now(),
        cause=lines[0] if lines else "no reason is known",
        details="\n".join(lines[1:]),
        exit_code=failure.exit_code,
        rank=failure.rank,
        log=_log(run, failure),
        step=_steps_done(run, began, steps),
        checkpoint=checkpoint,
        **_checkpoint_intervals(sections),
        resume=None if _will_recur(failure.text, sections, checkpoint) else resume,
    )
    # A full disk must not hide the failure.
    with contextlib.suppress(OSError):
        record.write(directory)
    return "\n".join(record.lines(run))


def _recorded_sections(directory: RunDirectory) -> Mapping[str, Mapping[str, Any]]:
    try:
        stored = read_config(directory)
    except ConfigError:
        return {}
    return {name: section for name, section in stored.items() if isinstance(section, Mapping)}


def resume_command(run: Path) -> str | None:
    """Return the command that resumes a failed run: that of this process with the run's folder.

    None of a program, and of a replay, whose folder is removed.
    """
    words = redacted_arguments(sys.argv[1:])
    if words[:1] != ["train"] or REPLAY in os.environ:
        return None
    kept = [
        word
        for number, word in enumerate(words)
        if word != "--run-dir" and words[number - 1] != "--run-dir" and not word.startswith("--run-dir=")
    ]
    folder = [f"--run-dir={run}"] if str(run).startswith("-") else ["--run-dir", str(run)]
    return shlex.join(["shardwise", *kept, *folder])


def _checkpoint_intervals(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return `every` and `every_minutes` of a run's checkpoints; None for one that is unknown."""
    checkpoint = sections.get("checkpoint", {})
    every = checkpoint.get("every")
    minutes = checkpoint.get("every_minutes")
    return {
        "every": every if isinstance(every, int) else None,
        "every_minutes": minutes if isinstance(minutes, int | float) else None,
    }


def _will_recur(text: str, sections: Mapping[str, Mapping[str, Any]], checkpoint: int) -> bool:
    """Return True if such a failure comes again: a drift by the run's own model; a loss, without a `checkpoint`."""
    is_same_loss = not checkpoint and see("training#loss-not-finite") in text
    is_own = ":" in str(sections.get("model", {}).get("family", ""))
    return is_same_loss or (is_own and see("training#drifted-parameters") in text)


def _has_begun(run: Path) -> bool:
    """Return True if a run is in the folder, of this start or of an earlier one."""
    try:
        return RunDirectory(run).holds_run
    except ConfigError:
        return False


def _is_recorded(directory: RunDirectory, began: float) -> bool:
    start = {"time": datetime.fromtimestamp(began, UTC).isoformat()}
    return failure_of(directory.recorded_failure(), start) is not None


def _log(run: Path, failure: Failure) -> str | None:
    """Return the path of the log to read, relative to the run's folder; None without one."""
    if failure.log is not None:
        return str(Path(failure.log).relative_to(run)) if Path(failure.log).is_relative_to(run) else failure.log
    log = RunDirectory(run).log(failure.rank)
    return str(log.relative_to(run)) if log.exists() else None


def _steps_done(run: Path, began: float, steps: int) -> int | None:
    """Return the number of steps that are done; None if this start of the run has done none.

    The last record may be older than the last step, if not every step is recorded.
    """
    done = steps
    # Events have their times in whole milliseconds.
    began = int(1000 * began) / 1000
    for kind in ("step", "stop"):
        event = last_event(run, kind) or {}
        if seconds_of(event) >= began:
            done = max(done, int(event.get("step") or 0))
    return done if done > first_step(run) else None
