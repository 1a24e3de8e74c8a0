"""The process between the launcher and its ranks: torchrun's elastic agent, without torchrun's wall of text.

`python -m shardwise.launch.agent N DIR COMMAND …` runs COMMAND on N local ranks. The only module of
this package that imports torch, and only inside `main`. What torch prints about ranks that failed goes to
DIR/launcher.log; the cause goes to the run's error file, which `local.launch` reads. Ranks inherit this process's own
standard output and error, so rank 0 still writes to the terminal. This process ignores signals, which the launcher
handles: SLURM sends a signal to every process of a job, and torch's agent would then kill the ranks after 30 s, though
a checkpoint may take longer. Only SIGKILL ends this process before its ranks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import uuid
from dataclasses import asdict
from pathlib import Path

from shardwise.files import write_atomic
from shardwise.launch import guard, stopping
from shardwise.launch.environment import ERROR_FILE, PARENT_PID
from shardwise.launch.failure import read_failure, root_cause

_NATIVE_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


def main() -> int:
    guard.die_with_parent()
    for number in stopping.SIGNALS:
        # A handler, because the ranks would inherit that a signal is ignored, and hear none themselves.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    nproc, logs, *command = sys.argv[1:]
    log_path = Path(logs) / "launcher.log"
    # Never closed: torch's loggers hold it, and what Python prints as it exits belongs there too.
    sys.stdout = sys.stderr = log_path.open("a", encoding="utf-8", buffering=1)
    code = _run(command, int(nproc), Path(logs))
    if log_path.stat().st_size == 0:
        log_path.unlink()
    return code


def _run(command: list[str], nproc: int, logs: Path) -> int:
    quiet = _NATIVE_LOG_LEVEL not in os.environ
    if quiet:
        os.environ[_NATIVE_LOG_LEVEL] = "ERROR"
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from shardwise._torch_private import leave_events_without_names

    if quiet:
        del os.environ[_NATIVE_LOG_LEVEL]
    leave_events_without_names()
    os.environ[PARENT_PID] = str(os.getpid())
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        signals_to_handle="SIGQUIT",
    )
    error_file = Path(os.environ[ERROR_FILE])
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        exit_codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        failure = root_cause(read_failure(error_file), exit_codes, logs)
        write_atomic(error_file, json.dumps(asdict(failure)))
        return failure.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
