"""One task for each rank, as `srun` or `mpirun` starts them: their variables become those of torchrun.

Rank 0's host and a port must be known to all tasks before they can talk. The host is the first of the step's nodes, by
SLURM's own list; the port follows from the job's, the step's and the requeue's numbers, so that two jobs that share a
host do not meet, and a requeued job does not meet what is left of itself. MASTER_ADDR and MASTER_PORT take precedence.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import zlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from shardwise.errors import ConfigError, see
from shardwise.launch.environment import keep_own
from shardwise.launch.failure import Failure

_FIRST_PORT, _PORTS = 15000, 17000
"""Below the ports that Linux gives to outgoing connections (32768 and above)."""
_SIGNALS = {ConfigError.exit_code: "TERM"}
_TIME_TO_TELL = 1.0
"""Seconds in which srun prints what this task has said, and the other tasks find the same wrong input."""
_TURNS = 6
"""So much longer the last task takes to have its turn in `show_failure`."""


@dataclass(frozen=True)
class _Task:
    """A task among those of its step."""

    rank: int
    local_rank: int
    world: int
    local_world: int
    launcher: str
    job: str


def adopt_task(variables: MutableMapping[str, str] = os.environ) -> None:
    """Give a task of several that `srun` or `mpirun` started the variables that torchrun would.

    Raises:
        ConfigError: the host of rank 0 cannot be known.
    """
    if "RANK" in variables or variables.get("WORLD_SIZE", "1") != "1":
        return  # torchrun's, or the user's own
    task = _of_srun(variables) or _of_mpirun(variables)
    if task is None:
        return
    variables.update(
        RANK=str(task.rank),
        LOCAL_RANK=str(task.local_rank),
        WORLD_SIZE=str(task.world),
        LOCAL_WORLD_SIZE=str(task.local_world),
    )
    if "MASTER_ADDR" not in variables:
        variables["MASTER_ADDR"] = _first_host(task, variables)
    variables.setdefault("MASTER_PORT", str(_FIRST_PORT + zlib.crc32(task.job.encode()) % _PORTS))
    keep_own(variables)


def end_step(failure: Failure, variables: Mapping[str, str] = os.environ) -> None:
    """End the other tasks of the step that this task of `srun` belongs to: it has failed, and they may wait for it.

    torchrun and mpirun do so themselves, and srun only with --kill-on-bad-exit. Tasks with the same wrong input wait
    for their turn to say so (`failure.show_failure`), and end by SIGTERM with its exit code; others are killed.

    Args:
        failure: of this task. One that lost another task waits until that one has told why.
    """
    scancel = shutil.which("scancel")
    if not _is_of_srun(variables) or scancel is None:
        return
    seconds = _TIME_TO_TELL * (_TURNS if failure.waited else 1)
    step, name = f"{variables['SLURM_JOB_ID']}.{variables['SLURM_STEP_ID']}", _SIGNALS.get(failure.exit_code, "KILL")
    # In a process of its own: this one ends at once, so that whoever waits for it notices.
    command = ["sh", "-c", 'sleep "$0"; exec "$@"', f"{seconds:g}", scancel, f"--signal={name}", step]
    quiet = subprocess.DEVNULL
    subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)


def _is_of_srun(variables: Mapping[str, str]) -> bool:
    return variables.get("SLURM_STEP_NUM_TASKS", "1") != "1" and "SLURM_PROCID" in variables


def _of_srun(variables: Mapping[str, str]) -> _Task | None:
    if not _is_of_srun(variables):
        return None
    node = int(variables.get("SLURM_NODEID", "0"))
    return _Task(
        rank=int(variables["SLURM_PROCID"]),
        local_rank=int(variables["SLURM_LOCALID"]),
        world=int(variables["SLURM_STEP_NUM_TASKS"]),
        local_world=tasks_of_nodes(variables["SLURM_STEP_TASKS_PER_NODE"])[node],
        launcher="srun",
        job=".".join(variables.get(f"SLURM_{name}", "0") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT")),
    )


def _of_mpirun(variables: Mapping[str, str]) -> _Task | None:
    """Open MPI's variables."""
    names = ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE")
    found = [variables.get(f"OMPI_COMM_WORLD_{name}", "") for name in names]
    if not all(value.isdecimal() for value in found) or found[2] == "1":
        return None
    rank, local_rank, world, local_world = map(int, found)
    namespace = variables.get("PMIX_NAMESPACE") or variables.get("OMPI_MCA_ess_base_jobid", "")
    return _Task(rank, local_rank, world, local_world, "mpirun", namespace)


def tasks_of_nodes(counts: str) -> list[int]:
    """The tasks of each node of SLURM's `2(x3),1`: 2, 2, 2 and 1."""
    found = []
    for part in counts.split(","):
        number, _, times = part.partition("(x")
        found += [int(number)] * (int(times.rstrip(")")) if times else 1)
    return found


def _first_host(task: _Task, variables: Mapping[str, str]) -> str:
    if task.world == task.local_world:
        return "127.0.0.1"
    if task.launcher != "srun":
        raise ConfigError(
            f"MASTER_ADDR must be set where mpirun starts ranks on several machines: the address of rank 0's machine, "
            f"as in mpirun -x MASTER_ADDR={socket.gethostname()}"
            f"{see('runs#first-node-not-found')}"
        )
    return address_of(first_name(variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", "")))


def address_of(name: str) -> str:
    """The address of a node of SLURM, by which the ranks of the other nodes reach it.

    Raises:
        ConfigError: it is not known. It is never guessed: a job that meets on a wrong machine hangs.
    """
    for address in (_node_address(name), name):
        if address and _resolves(address):
            return address
    raise ConfigError(
        f"MASTER_ADDR must be set to the address of the job's first node: its name ({name}) does not resolve on "
        f"{socket.gethostname()}, and `scontrol show node {name}` names no address"
        f"{see('runs#first-node-not-found')}"
    )


def first_name(nodes: str) -> str:
    """The first of SLURM's `rack[1-2]node[01-04],gpu7`: rack1node01."""
    first = re.split(r",(?![^\[]*\])", nodes, maxsplit=1)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def _node_address(name: str) -> str | None:
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        return None
    command = [scontrol, "show", "node", name, "--oneliner"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout
    except subprocess.TimeoutExpired:
        return None
    found = re.search(r"\bNodeAddr=(\S+)", said)
    return found[1] if found else None


def _resolves(address: str) -> bool:
    try:
        socket.getaddrinfo(address, None)
    except OSError:
        return False
    return True
