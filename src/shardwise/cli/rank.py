"""One rank's whole life: it guards itself, finds its log, trains, and says why when it fails."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from shardwise.cli import output
from shardwise.cli.claim import claim, finished
from shardwise.cli.ending import what_is_saved
from shardwise.cli.inputs import prepare_inputs
from shardwise.config import Config
from shardwise.errors import ConfigError, LostPeerError, RunError, ShardwiseError, StoppedError
from shardwise.launch import guard, stdio, stopping
from shardwise.launch.environment import Rank, is_launched, may_restart
from shardwise.launch.failure import report_stop
from shardwise.redaction import redacted
from shardwise.runlog import RunDirectory, new_run_path


def run_alone(config: Config, recipe: str, run_path: Path) -> int:
    """Train in this process, which is the only rank."""
    stopping.end_at_once()
    failure = _train(config, recipe, run_path, 0)
    if failure is None:
        return 0
    output.complain(failure.text)
    if failure.at_once:
        _leave(failure.code)  # without waiting for threads that still write
    return failure.code


def run_rank(config: Config, recipe: str, run_path: Path | None, place: Rank) -> int:
    """Train as one rank of a launched job. A rank that fails leaves at once: its peers may never answer again."""
    guard.die_with_parent()
    if place.rank == 0:
        stdio.survive_hangup()
    if is_launched():
        if run_path is not None:
            stdio.redirect(place.rank, RunDirectory(run_path).log(place.rank))
        return _train_as_rank(config, recipe, run_path, place)
    said = finished(config, run_path) if run_path is not None else None
    if said is not None:
        if place.rank == 0:
            output.line(said)
        return 0
    prepare_inputs(config, output.progress if place.local_rank == 0 else None)
    with ExitStack() as held:
        if place.rank == 0:
            run_path = run_path or new_run_path(recipe)
            RunDirectory(run_path).create()
            claim(held, run_path)
        return _train_as_rank(config, recipe, run_path, place)


def _train_as_rank(config: Config, recipe: str, run_path: Path | None, place: Rank) -> int:
    failure = _train(config, recipe, run_path, place.rank)
    if failure is None:
        return 0
    if failure.code == StoppedError.exit_code:
        _leave(_tell_of_stop(place, failure.text))
    output.complain_as_rank(place, failure.text, failure.code, waited=failure.waited)
    return _leave(failure.code)


def _tell_of_stop(place: Rank, text: str) -> int:
    """Tell the user once, with all saved, and return the exit code of this rank."""
    if report_stop(place.rank, text):
        return 0  # torchrun's agent takes anything else for a failure; the launcher says 75
    if place.rank == 0:
        output.complain(text)
    # torchrun would start a rank that failed once more, and the run that was asked to stop would go on.
    return 0 if may_restart() else StoppedError.exit_code


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@dataclass(frozen=True)
class _Failure:
    """Text for the user and exit code.

    at_once: a signal ended the rank without a checkpoint. waited: the text says what it was doing when it lost another
    rank.
    """

    text: str
    code: int
    at_once: bool = False
    waited: bool = False


def _train(config: Config, recipe: str, run_path: Path | None, rank: int) -> _Failure | None:
    """None when the run is done."""
    try:
        from shardwise.train import run

        code = run(config, run_path, recipe)
    except StoppedError as error:
        stopping.ignore()
        return _Failure(str(error), error.exit_code)
    except ConfigError as error:
        return _Failure(output.error_text(error), error.exit_code)
    except LostPeerError as error:
        _log_traceback(error, run_path, rank)
        return _Failure(str(error), error.exit_code, waited=True)
    except ShardwiseError as error:
        return _Failure(str(error), error.exit_code)
    except KeyboardInterrupt as stop:
        cause = str(stop) or "Ctrl-C (SIGINT)"
        text = f"the run was stopped by {cause}" + ("" if run_path is None else f"; {what_is_saved(run_path)}")
        return _Failure(text, RunError.exit_code, at_once=True)
    except Exception as error:  # noqa: BLE001  the user reads one sentence, and the log has the traceback
        return _Failure(_unexpected(error, run_path, rank), RunError.exit_code)
    return None if code == 0 else _Failure(f"rank {rank} ended with exit code {code}", code)


def _unexpected(error: Exception, run_path: Path | None, rank: int) -> str:
    """One sentence on an error that no code of ours explains; the traceback goes to the rank's log."""
    sentence = f"rank {rank} failed: {type(error).__name__}: {error}"
    log = _log_traceback(error, run_path, rank)
    return (
        f"{sentence}\n{''.join(traceback.format_exception(error))}" if log is None else f"{sentence}\ntraceback: {log}"
    )


def _log_traceback(error: Exception, run_path: Path | None, rank: int) -> Path | None:
    """Add it to the rank's log; None where no run's folder is known."""
    if run_path is None:
        return None
    log = RunDirectory(run_path).log(rank)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        file.write(redacted("".join(traceback.format_exception(error))))
    return log
