"""One rank's whole life: it guards itself, finds its log, trains, and says why when it fails."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType

from shardwise.cli import output
from shardwise.cli.inputs import prepare_inputs
from shardwise.config import Config
from shardwise.errors import ConfigError, RunError, ShardwiseError
from shardwise.launch import guard, stdio
from shardwise.launch.environment import Rank, is_launched
from shardwise.launch.failure import signal_name
from shardwise.runlog import RunDirectory


class _Stopped(KeyboardInterrupt):
    """A signal asked this process to end."""


def run_alone(config: Config, recipe: str, run_path: Path) -> int:
    """Train in this process, which is the only rank."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise _Stopped(signal_name(number))

    for number in (signal.SIGTERM, signal.SIGHUP):
        # Whoever had a signal ignored, as nohup does, meant it.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, stop)
    failure = _train(config, recipe, run_path, 0)
    if failure is None:
        return 0
    output.complain(failure[0])
    return failure[1]


def run_rank(config: Config, recipe: str, run_path: Path | None, place: Rank) -> int:
    """Train as one rank of a launched job. A rank that fails leaves at once: its peers may never answer again."""
    guard.die_with_parent()
    if not is_launched():
        prepare_inputs(config, output.progress if place.local_rank == 0 else None)
    elif run_path is not None:
        stdio.redirect(place.rank, RunDirectory(run_path).log(place.rank))
    failure = _train(config, recipe, run_path, place.rank)
    if failure is None:
        return 0
    text, code = failure
    output.complain_as_rank(place, text, code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _train(config: Config, recipe: str, run_path: Path | None, rank: int) -> tuple[str, int] | None:
    """None when the run is done, else the text for the user and the exit code."""
    try:
        from shardwise.train import run

        code = run(config, run_path, recipe)
    except ConfigError as error:
        return output.error_text(error), error.exit_code
    except ShardwiseError as error:
        return str(error), error.exit_code
    except KeyboardInterrupt as stop:
        cause = str(stop) or "Ctrl-C (SIGINT)"
        return f"the run was stopped by {cause}; no checkpoint was saved", RunError.exit_code
    except Exception as error:  # noqa: BLE001  the user reads one sentence, and the log has the traceback
        return _unexpected(error, run_path, rank), RunError.exit_code
    return None if code == 0 else (f"rank {rank} ended with exit code {code}", code)


def _unexpected(error: Exception, run_path: Path | None, rank: int) -> str:
    """One sentence on an error that no code of ours explains; the traceback goes to the rank's log."""
    text = "".join(traceback.format_exception(error))
    sentence = f"rank {rank} failed: {type(error).__name__}: {error}"
    if run_path is None:
        return f"{sentence}\n{text}"
    log = RunDirectory(run_path).log(rank)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        file.write(text)
    return f"{sentence}\ntraceback: {log}"
