"""A command whose answer comes from several ranks: it starts them, or is one of them."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from shardwise.cli import output
from shardwise.errors import ConfigError, RunError, ShardwiseError
from shardwise.launch import guard, stdio
from shardwise.launch.environment import ERROR_FILE, Rank, is_launched, joined, unjoined
from shardwise.launch.failure import signal_name
from shardwise.launch.local import LaunchError, launch


def place_in_job(nproc: int | None) -> Rank | None:
    """This process's place in a launched job; None where it is started by itself.

    Raises:
        ConfigError: a launcher started several processes that cannot join, or `--nproc` is not their number.
    """
    place, problem = joined(), unjoined()
    if problem is not None:
        raise ConfigError(problem)
    if place is not None and nproc is not None and nproc != place.world:
        raise ConfigError(f"--nproc ({nproc}) must be left out inside torchrun: the world size is {place.world}")
    return place


def check_accelerators(world: int, count: int) -> None:
    """Refuse more local ranks than there are accelerators, where there are any.

    Raises:
        ConfigError: with both numbers.
    """
    if 0 < count < world:
        raise ConfigError(f"--nproc ({world}) must be at most the number of accelerators ({count})")


def start(command: Sequence[str], world: int) -> None:
    """`shardwise COMMAND …` on `world` local ranks; their logs are kept where a failure names them.

    Raises:
        LaunchError: with the cause.
    """
    folder = Path(tempfile.mkdtemp(prefix="shardwise-"))
    named = False
    try:
        launch([sys.executable, "-P", "-m", "shardwise", *command], world, folder)
    except LaunchError as error:
        named = str(folder) in str(error)
        raise
    finally:
        if not named:
            shutil.rmtree(folder, ignore_errors=True)


def take_part(place: Rank, work: Callable[[], None]) -> int:
    """Do one rank's work. A rank that fails leaves at once: its peers may never answer again."""
    guard.die_with_parent()
    if is_launched():
        logs = Path(os.environ[ERROR_FILE]).parent
        stdio.redirect(place.rank, logs / f"rank-{place.rank:04d}.log")
    failure = _attempt(work, place.rank)
    if failure is None:
        return 0
    text, code = failure
    output.complain_as_rank(place, text, code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _attempt(work: Callable[[], None], rank: int) -> tuple[str, int] | None:
    """None when the work is done, else the text for the user and the exit code."""
    try:
        work()
    except ShardwiseError as error:
        return output.error_text(error), error.exit_code
    except KeyboardInterrupt:
        return f"stopped by Ctrl-C ({signal_name(2)})", RunError.exit_code
    except BrokenPipeError:
        return "nobody reads the output any more", RunError.exit_code
    except Exception as error:  # noqa: BLE001  the user reads one sentence before the traceback
        text = "".join(traceback.format_exception(error))
        return f"rank {rank} failed: {type(error).__name__}: {error}\n{text}", RunError.exit_code
    return None
