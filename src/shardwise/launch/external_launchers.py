"""One task for each rank, as `srun` or `mpirun` starts them: their variables become those of torchrun.

Rank 0's host and a port must be known to all tasks before they can talk. The host is the first of the step's nodes, by
SLURM's own list; the port follows from the job's, the step's and the requeue's numbers, or from what names a job of
mpirun, so that two jobs that share a host do not meet, and a requeued job does not meet what is left of itself.
MASTER_ADDR and MASTER_PORT take precedence.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import subprocess
import zlib
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from shardwise.base.errors import ConfigError, StoppedError, listing, see
from shardwise.launch.environment import RANKS_ALONE, TASK_COUNTS, TASK_RANKS, keep_own, may_be_a_task
from shardwise.launch.first_failure import Failure

_OR_SET = (
    "or set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun does; WORLD_SIZE=1 alone says that "
    "this process is the only rank"
)
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ("OMPI_COMM_WORLD_LOCAL_RANK",), ("OMPI_COMM_WORLD_LOCAL_SIZE",),
     ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", ("MV2_COMM_WORLD_LOCAL_RANK",), ("MV2_COMM_WORLD_LOCAL_SIZE",),
     ("MPIRUN_ID",)),
    ("PMI_RANK", "PMI_SIZE", ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"), ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
     ("PMI_JOBID", "PALS_APID", "I_MPI_HYDRA_UUID")),
)  # fmt: skip
"""Variables of Open MPI, of MVAPICH2, and of MPICH and Intel MPI: rank, number of ranks, names of the rank on one
machine, names of their number there, and names of the job's id, which MPICH does not give."""
_FIRST_PORT = 15000
_PORTS = 17000  # below the ports that Linux gives to outgoing connections (32768 and above)
_SIGNALS = {ConfigError.exit_code: "TERM", StoppedError.exit_code: "TERM"}
_TIME_TO_TELL = 1.0
"""Seconds in which the launcher prints the text of this task, and the other tasks find the same wrong input."""
_TURNS = 6  # factor by which the last task waits longer for its turn in `show_failure`


@dataclass(frozen=True)
class _LauncherTask:
    """A task among those of its step."""

    rank: int
    local_rank: int
    world: int
    local_world: int
    launcher: str
    job: str


def adopt_task(variables: MutableMapping[str, str] = os.environ) -> None:
    """Give a task of `srun` or `mpirun` the variables that torchrun would; ConfigError if its place is not known."""
    try:
        task = task_of(variables)
    except ConfigError:
        # What is wrong for one task is wrong for all: the first one tells it, and the others wait for their turn.
        rank = next((variables[name] for name in TASK_RANKS if variables.get(name, "").isdecimal()), "0")
        variables.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(int(rank) + 2))
        raise
    if task is None:
        return
    variables.update(
        RANK=str(task.rank),
        LOCAL_RANK=str(task.local_rank),
        WORLD_SIZE=str(task.world),
        LOCAL_WORLD_SIZE=str(task.local_world),
    )
    if task.world == task.local_world:
        variables.setdefault("MASTER_ADDR", "127.0.0.1")
    elif task.launcher == "srun":
        if "MASTER_ADDR" not in variables:
            variables["MASTER_ADDR"] = _first_host(variables)
    else:
        _require_rendezvous(task, variables)
    variables.setdefault("MASTER_PORT", str(_FIRST_PORT + zlib.crc32(task.job.encode()) % _PORTS))
    keep_own(variables)


def task_of(variables: Mapping[str, str]) -> _LauncherTask | None:
    """Return the place of this process among the tasks of a launcher; None if it is alone, or placed by torchrun.

    Open MPI and MPICH start their own processes by srun where they are inside of a job of SLURM, so their variables go
    before those of srun.

    Raises:
        ConfigError: the variables say that there are several tasks, and not which of them this is.
    """
    if not may_be_a_task(variables):
        return None
    task = _of_mpirun(variables) or _of_srun(variables)
    if task is not None:
        _require_order(task)
        return task
    rank = next((name for name in RANKS_ALONE if name in variables), None)
    counts = (*TASK_COUNTS, "SLURM_NTASKS", "FLUX_JOB_SIZE", "JSM_NAMESPACE_SIZE")
    if rank is not None and not any(variables.get(name) == "1" for name in counts):
        raise ConfigError(
            f"the number of ranks must be set beside {rank} ({variables[rank]}): start them by mpirun or srun, "
            f"{_OR_SET}"
        )
    return None


def end_step(failure: Failure, variables: Mapping[str, str] = os.environ) -> None:
    """End the other tasks that `srun` launched in the step of this one: it has failed, and they may wait for it.

    torchrun and Open MPI do so themselves, srun only with --kill-on-bad-exit, and the mpiexec of MPICH and Intel MPI
    where a task asks for it by PMI. Tasks with the same wrong input wait for their turn to say so
    (`first_failure.show_failure`), and srun ends them by SIGTERM with its exit code; others are killed.

    Args:
        failure: failure of this task. One that lost another task waits until that one has told why.
    """
    if "TORCHELASTIC_RUN_ID" in variables:
        # srun has started the agent of this rank, which ends the others, and tells why or starts them again.
        return
    scancel = shutil.which("scancel")
    step = ".".join(variables.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    quiet = to = subprocess.DEVNULL
    if _is_of_srun(variables) and re.fullmatch(r"\d+\.\d+", step) and scancel is not None:
        request = [scancel, f"--signal={_SIGNALS.get(failure.exit_code, 'KILL')}", step]
    elif "PMI_RANK" in variables and _is_socket(variables.get("PMI_FD", "")):
        request, to = ["echo", f"cmd=abort exitcode={failure.exit_code}"], int(variables["PMI_FD"])
    else:
        return
    seconds = _TIME_TO_TELL * (_TURNS if failure.waited else 1)
    # In a process of its own: this one ends at once, so that whoever waits for it notices.
    command = ["sh", "-c", 'sleep "$0"; exec "$@"', f"{seconds:g}", *request]
    subprocess.Popen(command, stdin=quiet, stdout=to, stderr=quiet, start_new_session=True)


def _is_socket(descriptor: str) -> bool:
    """Return True for the number of an open socket, which it need not be in a process that a script started."""
    try:
        return stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode)
    except (ValueError, OSError):
        return False


def _is_of_srun(variables: Mapping[str, str]) -> bool:
    return variables.get("SLURM_STEP_NUM_TASKS", "1") != "1" and "SLURM_PROCID" in variables


def _of_srun(variables: Mapping[str, str]) -> _LauncherTask | None:
    """Read srun's variables; in a container that hides those of the step, those of the job."""
    has_step = "SLURM_STEP_NUM_TASKS" in variables
    if not has_step and "SLURM_PROCID" not in variables:
        return None
    in_script = not has_step and variables.get("ENVIRONMENT") == "BATCH"
    is_first = variables.get("SLURM_PROCID", "0") == "0"
    if in_script and is_first:
        # This is a job's own script, which has the variables of a task but for those of the step.
        return None
    if has_step or in_script:
        size = "SLURM_STEP_NUM_TASKS"
        per_node = "SLURM_STEP_TASKS_PER_NODE"
    else:
        size = "SLURM_NTASKS"
        per_node = "SLURM_TASKS_PER_NODE"
    if is_first and variables.get(size, "1") == "1":
        return None
    names = ("SLURM_PROCID", "SLURM_LOCALID", size, "SLURM_NODEID")
    rank, local_rank, world, node = _numbers(variables, names, "srun")
    counts = _tasks_of_nodes(variables.get(per_node, ""))
    if node >= len(counts) or sum(counts) != world:
        raise ConfigError(
            f"{per_node} ({variables.get(per_node, 'not set')}) must be {world} tasks in all ({size}), and some on "
            f"node {node} (SLURM_NODEID), as srun sets it, {_OR_SET}"
        )
    job = ".".join(variables.get(f"SLURM_{name}", "0") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT"))
    return _LauncherTask(rank, local_rank, world, counts[node], "srun", job)


def _of_mpirun(variables: Mapping[str, str]) -> _LauncherTask | None:
    for rank, size, local_ranks, local_sizes, job in _MPI:
        if rank not in variables and size not in variables:
            continue
        if variables.get(size) == "1":
            continue
        local_rank, local_size = (
            next((name for name in names if name in variables), names[0]) for names in (local_ranks, local_sizes)
        )
        names = (rank, local_rank, size, local_size)
        if _is_of_srun(variables) and not all(name in variables for name in names):
            # srun --mpi=pmi2 sets a part of them for its own tasks.
            continue
        number, local_number, world, local_world = _numbers(variables, names, "mpirun")
        names_of_job = [variables[name] for name in job if variables.get(name)]
        if not names_of_job and world == local_world:
            names_of_job = [_process_of_mpirun(rank)]
        return _LauncherTask(number, local_number, world, local_world, "mpirun", "".join(names_of_job[:1]))
    return None


def _process_of_mpirun(rank: str) -> str:
    """Return the id of the process that started the ranks of this machine, which no other job has.

    It is the nearest ancestor without the variable `rank`: scripts may stand between the two.
    """
    import psutil

    for process in psutil.Process().parents():
        # What may not be read is a container's runtime, which runs as another user.
        with suppress(psutil.Error):
            if rank not in process.environ():
                return str(process.pid)
    return str(os.getppid())


def _numbers(variables: Mapping[str, str], names: Sequence[str], launcher: str) -> list[int]:
    missing = [name for name in names if name not in variables]
    if missing:
        stated = listing(f"{name} ({variables[name]})" for name in names if name in variables)
        raise ConfigError(f"{listing(missing)} must be set beside {stated}, as {launcher} does, {_OR_SET}")
    for name in names:
        if not variables[name].isdecimal():
            raise ConfigError(f"{name} ({variables[name]!r}) must be a whole number, as {launcher} does, {_OR_SET}")
    return [int(variables[name]) for name in names]


def _require_order(task: _LauncherTask) -> None:
    if task.rank < task.world and task.local_rank < task.local_world <= task.world:
        return
    raise ConfigError(
        f"the variables of {task.launcher} must agree, and say that this is rank {task.rank} of {task.world}, and on "
        f"its machine {task.local_rank} of {task.local_world}, counted from 0: correct them, {_OR_SET}"
    )


def _tasks_of_nodes(counts: str) -> list[int]:
    """Read the tasks of each node from SLURM's `2(x3),1`: 2, 2, 2 and 1; [] for another text."""
    parts = [re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,6})\))?", part) for part in counts.split(",")]
    if not all(parts):
        return []
    return [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]


def _require_rendezvous(task: _LauncherTask, variables: Mapping[str, str]) -> None:
    """Refuse ranks of mpirun on several machines that do not know where they meet."""
    needed = ("MASTER_ADDR",) if task.job else ("MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in variables]
    if missing:
        port = " and a free port of it" if "MASTER_PORT" in missing else ""
        raise ConfigError(
            f"{listing(missing)} must be set where mpirun starts ranks on several machines: the address of rank 0's "
            f"machine{port}, as in mpirun -x MASTER_ADDR={socket.gethostname()} (Open MPI) or mpiexec -genv "
            f"{missing[-1]} … (MPICH){see('runs#first-node-not-found')}"
        )


def _first_host(variables: Mapping[str, str]) -> str:
    """Return the address of the node of rank 0: the first of SLURM's list, which is sorted."""
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", "")
    if variables.get("SLURM_DISTRIBUTION", "").startswith("arbitrary") or "SLURM_HET_SIZE" in variables:
        raise ConfigError(
            f"MASTER_ADDR must be set where a file of hosts (SLURM_DISTRIBUTION=arbitrary) or a heterogeneous job "
            f"(SLURM_HET_SIZE) orders the ranks: the address of rank 0's node, which may be any of {nodes}"
            f"{see('runs#first-node-not-found')}"
        )
    return first_node_address(first_name(nodes))


def first_node_address(name: str) -> str:
    """Return the address of the first node, by which others reach it: MASTER_ADDR for ranks that `srun` launches.

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
    """Return the first name of SLURM's `rack[1-2]node[01-04],gpu7`: rack1node01."""
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
    address = re.search(r"\bNodeAddr=(\S+)", said)
    return address[1] if address else None


def _resolves(address: str) -> bool:
    try:
        socket.getaddrinfo(address, None)
    except OSError:
        return False
    return True
