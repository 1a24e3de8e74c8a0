"""The process between the launcher and its ranks: it imports once what they need, and becomes each of them by a fork.

`python -m shardwise.launch.agent N` imports what a training does, and then reads its job from standard input, an object
of JSON: the `command` to run on N local ranks, beside those of the other nodes of the job if the `variables` describe
one (`node.py`), and the folder of `logs`. The ranks get the job's variables, and those that torchrun sets.

A module of this package runs in forks of this process, which share the memory of what it has imported. Ranks are new
processes where a fork may not be as good as one: for another command, on systems other than Linux, with devices that a
package adds to torch, and where something imported has started a thread.

Text of this process goes to launcher.log in the folder, and the ends of failed ranks go to exit-codes.json, which the
launcher reads. Ranks inherit this process's own standard output and error, so that rank 0 still writes to the terminal.

This process ignores signals, which the launcher handles: SLURM sends a signal to every process of a job, and a
checkpoint may take long. Only SIGKILL ends this process before its ranks.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.base.errors import ConfigError, RunError
from shardwise.base.files import reason_of, write_atomic
from shardwise.base.hardware import has_plugin
from shardwise.launch import rank_process, stop_requests
from shardwise.launch.environment import PARENT_PID, launches_node
from shardwise.launch.first_failure import Failure, exit_codes_file, report_failure
from shardwise.launch.node import Node, this_node
from shardwise.runs.folder import open_log

if TYPE_CHECKING:
    import socket

_IMPORTS = ("shardwise.cli.train", "shardwise.train.run", "shardwise.distributed.rendezvous")
"""Modules that each rank of a training imports, with torch; none of them starts a thread or opens a device."""
_ANSWER_SECONDS = 0.1
"""The time in which the other ranks may tell what they lost, once one has failed, before SIGTERM asks them to end."""
_GRACE_SECONDS = 30
"""The time that they have to end; the launcher may give them less."""
_EXIT_SECONDS = 300.0
"""The time that the agent of the first node waits for the others, whose ranks may still use its store."""


def main() -> int:
    # First of all: the launcher may be killed while this process imports torch, which takes seconds.
    rank_process.die_with_parent()
    # A handler, because the ranks would inherit that a signal is ignored, and hear none themselves.
    handlers = stop_requests.handle_signals(lambda *_: None)
    can_fork, problem = _import_once()
    text = sys.stdin.read()
    if not text:
        # The launcher has refused its input, or is gone.
        return 1
    job = json.loads(text)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(job["variables"])
    command, logs = job["command"], Path(job["logs"])
    try:
        # Never closed: what Python prints as it exits belongs there too.
        log = open_log(logs / "launcher.log")
    except ConfigError as error:
        report_failure(Failure(0, str(error), error.exit_code))
        return error.exit_code
    ranks: dict[int, int] = {}
    node = this_node() if launches_node() else None
    try:
        if problem is not None:
            raise problem
        listener = _set_meeting(int(sys.argv[1]), node)
        is_rank = _start(ranks, command, can_fork and _module_of(command) is not None)
    except Exception as error:  # noqa: BLE001  told by the launcher
        _signal(ranks, signal.SIGKILL)
        if isinstance(error, RunError):
            report_failure(Failure(0, str(error), error.exit_code))
        else:
            traceback.print_exception(error, file=log)
        return 1
    if is_rank:
        for file in (log, listener):
            if file is not None:
                file.close()
        _become_rank(command, handlers)
        return 0
    for descriptor in (1, 2):
        os.dup2(log.fileno(), descriptor)
    failed = _supervise(ranks, node, listener)
    if failed:
        write_atomic(exit_codes_file(logs), json.dumps(failed))
    if os.fstat(log.fileno()).st_size == 0:
        # Nothing was said. The file may be missing, as the run's folder may have been renamed.
        (logs / "launcher.log").unlink(missing_ok=True)
    return 1 if failed else 0


def _import_once() -> tuple[bool, Exception | None]:
    """Import what the ranks need; returns whether they can be forks of this process, and what went wrong."""
    can_fork = sys.platform == "linux" and not has_plugin() and _threads() == 1
    threads = 0
    gc.disable()
    try:
        # The threads of its BLAS end at a fork by themselves, and begin anew where they are needed.
        importlib.import_module("numpy")
        threads = _threads() if can_fork else 0
        for name in _IMPORTS if can_fork else _IMPORTS[-1:]:
            importlib.import_module(name)
    except Exception as error:  # noqa: BLE001  told once the folder of the logs is known
        return False, error
    # What is imported stays. A search for garbage would write to the pages that the ranks share.
    gc.freeze()
    gc.enable()
    return can_fork and _threads() == threads, None


def _threads() -> int:
    return len([*Path("/proc/self/task").iterdir()])


def _module_of(command: list[str]) -> str | None:
    """Return the module of this package that a command runs; None for another command."""
    python, *options = command[:4]
    is_own = python == sys.executable and options[:2] == ["-P", "-m"] and options[-1].split(".")[0] == "shardwise"
    return options[-1] if is_own else None


def _set_meeting(nproc: int, node: Node | None) -> socket.socket | None:
    """Set the variables that all ranks of this node share; returns the socket of the store if it is on this node.

    The ranks follow the order of SLURM's nodes, whose neighbours are near in the network. The ranks of one machine meet
    on its loopback interface.
    """
    from shardwise.distributed.rendezvous import listen

    attempt = None if node is None or node.attempt.nodes == 1 else node.attempt
    address = "127.0.0.1" if attempt is None else attempt.address
    port = 0 if attempt is None else attempt.port
    number = 0 if node is None else node.number
    listener = listen(address, port) if number == 0 else None
    nodes = 1 if attempt is None else attempt.nodes
    facts = {
        "MASTER_ADDR": address,
        "MASTER_PORT": listener.getsockname()[1] if listener is not None else port,
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex if attempt is None else attempt.id,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "GROUP_RANK": number,
        "GROUP_WORLD_SIZE": nodes,
        "LOCAL_WORLD_SIZE": nproc,
        "WORLD_SIZE": nodes * nproc,
        "ROLE_WORLD_SIZE": nodes * nproc,
        "ROLE_NAME": "default_role",
        # This process is the parent of the ranks: they end with it (`rank_process.die_with_parent`).
        PARENT_PID: os.getpid(),
    }
    os.environ.update({name: str(fact) for name, fact in facts.items()})
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    return listener


def _start(ranks: dict[int, int], command: list[str], forks: bool) -> bool:
    """Start the ranks of this node, and add them to `ranks` (process → rank); returns True in a rank that is a fork."""
    nproc = int(os.environ["LOCAL_WORLD_SIZE"])
    for number in range(nproc):
        rank = str(nproc * int(os.environ["GROUP_RANK"]) + number)
        os.environ.update(RANK=rank, ROLE_RANK=rank, LOCAL_RANK=str(number))
        try:
            process = os.fork() if forks else os.posix_spawnp(command[0], command, os.environ, setsid=True)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ENOMEM):
                raise
            raise RunError(
                f"rank {rank} of {os.environ['WORLD_SIZE']} cannot be started: {reason_of(error)}; the limit on "
                "processes (`ulimit -u`) and the memory of this machine must be enough for all ranks"
            ) from None
        if process == 0:
            return True
        ranks[process] = int(rank)
    return False


def _become_rank(command: list[str], handlers: Mapping[int, Any]) -> None:
    """Run the module of a command in this fork as a new process would."""
    os.setsid()
    rank_process.die_with_parent()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    # Python's own random numbers and torch's are those of a new process.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(f"rank {os.environ['RANK']}")
    sys.orig_argv[:] = command
    sys.argv[:] = command[3:]
    runpy.run_module(command[3], run_name="__main__", alter_sys=True)


def _supervise(ranks: dict[int, int], node: Node | None, listener: socket.socket | None) -> dict[int, int]:
    """Wait for the end of all ranks; returns the exit codes of those that failed, or minus the signal, first to last.

    Once one has failed, the others are asked to end.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # stubs leave it out

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = None
    if listener is not None:
        # Only now: it starts threads.
        store = TCPStore(
            address, port, None, True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
        )
    failed: dict[int, int] = {}
    while ranks:
        process, status = os.waitpid(-1, 0)
        rank, code = ranks.pop(process), os.waitstatus_to_exitcode(status)
        if code == 0:
            continue
        if not failed:
            time.sleep(_ANSWER_SECONDS)
            _signal(ranks, signal.SIGTERM)
            signal.signal(signal.SIGALRM, lambda *_: _signal(ranks, signal.SIGKILL))
            signal.alarm(_GRACE_SECONDS)
        failed[rank] = code
    if node is not None and node.attempt.nodes > 1 and not failed:
        with contextlib.suppress(Exception):
            # The ranks of other nodes may still use the store.
            if store is None:
                TCPStore(address, port, None, False).set(f"agent {node.number}", "")
            else:
                store.wait(
                    [f"agent {number}" for number in range(1, node.attempt.nodes)], timedelta(seconds=_EXIT_SECONDS)
                )
    return failed


def _signal(ranks: Iterable[int], number: int) -> None:
    """Send a signal to ranks and to what they have started."""
    for process in ranks:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process, number)


if __name__ == "__main__":
    sys.exit(main())
