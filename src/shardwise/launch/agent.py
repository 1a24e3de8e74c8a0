"""The process between the launcher and its ranks: it imports once what they need, and becomes each of them by a fork.

`python -m shardwise.launch.agent N` imports torch. Standard input has lines of JSON: further `imports`, and at last the
job, with the `command` of the N ranks of this machine, the folder of `logs`, and variables of the ranks, to which those
of torchrun are added. Ranks inherit its output: rank 0 still writes to the terminal.

A module of Python runs in forks of this process, which share the memory of what it has imported. Where a fork may
differ from a new process, ranks are new processes: on systems other than Linux, with devices that a package adds to
torch, where something imported has started a thread, and for other programs.

This process ignores signals, which the launcher handles: SLURM sends a signal to every process of a job, and a
checkpoint may take long. Only SIGKILL ends this process before its ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shardwise.base.errors import RunError
from shardwise.base.files import write_atomic
from shardwise.base.hardware import has_plugin
from shardwise.base.registered import imported
from shardwise.launch import rank_process, stop_requests
from shardwise.launch.environment import PARENT_PID, launches_node
from shardwise.launch.first_failure import Failure, exit_codes_file, report_first_failure
from shardwise.launch.node import this_node
from shardwise.runs.folder import open_log

_NCCL = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
# Once a rank has failed, the others may tell what they lost; then SIGTERM asks them to end, and SIGKILL ends them.
_ANSWER_SECONDS = 0.1
_GRACE_SECONDS = 30


def main() -> int:
    # First of all: the launcher may be killed while this process imports torch, which takes seconds.
    rank_process.die_with_parent()
    # A handler, because the ranks would inherit that a signal is ignored, and hear none themselves.
    handlers = stop_requests.handle_signals(lambda *_: None)
    can_fork = _import_torch()
    job: dict[str, Any] = {}
    for line in sys.stdin:
        job = json.loads(line)
        can_fork = can_fork and _start_nothing(job.pop("imports", ()))
    if "command" not in job:
        return 1  # the launcher has refused its input
    command, logs = job.pop("command"), Path(job.pop("logs"))
    os.environ.update(job)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    try:
        listener = _set_meeting(int(sys.argv[1]))
        ranks = _start(command, can_fork and command[:3] == [sys.executable, "-P", "-m"])
        failed = _supervise(ranks, listener) if ranks is not None else {}
    except Exception as error:  # noqa: BLE001  the launcher names the log; ranks end with this process
        with open_log(logs / "launcher.log") as log:
            traceback.print_exception(error, file=log)
        return 1
    if ranks is None:
        _become(command, handlers)
    if failed:
        write_atomic(exit_codes_file(logs), json.dumps(failed))
    return 1 if failed else 0


def _import_torch() -> bool:
    """Import torch, and what meeting needs; returns whether forks of this process can be ranks."""
    may_fork = sys.platform == "linux" and not has_plugin() and _held()[0] == 1
    return _start_nothing(["shardwise.distributed.rendezvous"]) and may_fork


def _start_nothing(modules: Iterable[str]) -> bool:
    """Import modules; returns whether none starts a thread or opens a device, which a fork cannot use."""
    # An error is told by whoever imports the same again.
    with contextlib.suppress(Exception):
        # The threads of numpy's BLAS end at a fork by themselves, and begin anew where they are needed.
        imported("numpy")
        before = _held()
        for name in modules:
            imported(name)
        return _held() == before
    return False


def _held() -> tuple[int, int]:
    """The number of threads, and of open files below /dev: a driver such as CUDA's opens its devices."""
    opened = Path("/proc/self/fd").glob("*")
    devices = sum(os.path.realpath(file).startswith("/dev/") for file in opened)
    return len([*Path("/proc/self/task").glob("*")]), devices


def _set_meeting(nproc: int) -> socket.socket | None:
    """Set the variables that all ranks of this node share; returns the socket of their store if it is on this node.

    The ranks of one machine meet on its loopback interface. Others follow the order of SLURM's nodes, whose neighbours
    are near in the network.
    """
    from shardwise.distributed.rendezvous import listen

    address, port, nodes, number, job = "127.0.0.1", 0, 1, 0, uuid.uuid4().hex
    if launches_node() and (node := this_node()).attempt.nodes > 1:
        attempt, number = node.attempt, node.number
        address, port, nodes, job = attempt.address, attempt.port, attempt.nodes, attempt.id
    listener = listen(address, port) if number == 0 else None
    if listener is not None:
        os.register_at_fork(after_in_child=listener.close)
    facts = {
        "MASTER_ADDR": address, "MASTER_PORT": listener.getsockname()[1] if listener else port,
        "GROUP_RANK": number, "GROUP_WORLD_SIZE": nodes, "LOCAL_WORLD_SIZE": nproc, "WORLD_SIZE": nodes * nproc,
        "ROLE_NAME": "default_role", "ROLE_WORLD_SIZE": nodes * nproc, "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_MAX_RESTARTS": 0, "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_USE_AGENT_STORE": True,
        PARENT_PID: os.getpid(), _NCCL: os.environ.get(_NCCL, 1),
    }  # fmt: skip
    os.environ.update({name: str(fact) for name, fact in facts.items()})
    return listener


def _start(command: list[str], forks: bool) -> dict[int, int] | None:
    """Start the ranks of this node; returns the rank of each process, and None in a fork."""
    ranks = {}
    nproc, node = (int(os.environ[name]) for name in ("LOCAL_WORLD_SIZE", "GROUP_RANK"))
    for number in range(nproc):
        rank = nproc * node + number
        os.environ.update(RANK=str(rank), ROLE_RANK=str(rank), LOCAL_RANK=str(number))
        try:
            process = os.fork() if forks else os.posix_spawnp(command[0], command, os.environ)
        except BlockingIOError:
            text = f"rank {rank} cannot be started: the limit on processes (`ulimit -u`) is reached"
            report_first_failure(Failure(rank, text, RunError.exit_code))
            raise
        if process == 0:
            return None
        ranks[process] = rank
    return ranks


def _become(command: list[str], handlers: Mapping[int, Any]) -> None:
    """Run the module of a command in this fork, as a new process would."""
    rank_process.die_with_parent()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    # Python's own random numbers begin anew at a fork by themselves.
    sys.modules["torch"].default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(f"rank {os.environ['RANK']}")
    sys.orig_argv[:] = command
    sys.argv[:] = command[3:]
    runpy.run_module(command[3], run_name="__main__", alter_sys=True)


def _supervise(ranks: dict[int, int], listener: socket.socket | None) -> dict[int, int]:
    """Open the ranks' store, and wait for their end; returns the codes of those that failed, or minus the signal."""
    # The terminal is that of the ranks.
    for output in (1, 2):
        os.dup2(0, output)
    if listener is not None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # stubs leave it out

        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        _store = TCPStore(*place, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    failed: dict[int, int] = {}

    def kill(*_: object) -> None:
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    signal.signal(signal.SIGALRM, kill)
    while ranks:
        process, status = os.waitpid(-1, 0)
        if process not in ranks:
            continue  # something imported, such as a sitecustomize, has started it
        rank, code = ranks.pop(process), os.waitstatus_to_exitcode(status)
        if code and not failed:
            time.sleep(_ANSWER_SECONDS)
            # To this process too, which ignores it.
            os.killpg(0, signal.SIGTERM)
            signal.alarm(_GRACE_SECONDS)
        if code:
            failed[rank] = code
    return failed


if __name__ == "__main__":
    sys.exit(main())
