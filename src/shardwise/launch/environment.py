"""The environment variables between a launcher and its ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

from shardwise.base.errors import listing

ERROR_FILE = "SHARDWISE_ERROR_FILE"
PARENT_PID = "SHARDWISE_PARENT_PID"
HEARTBEATS = "SHARDWISE_HEARTBEATS"
"""The folder of the heartbeats of a node's ranks (`heartbeat.py`), where each also notes that its work is done."""
REPLAY = "SHARDWISE_REPLAY"
"""Set for a run that `shardwise audit` starts to replay another one: `runs/latest` does not point to it."""
NODE = "SHARDWISE_NODE"
"""The facts of an attempt, from the supervisor of a job to the launcher of a node (`node.py`)."""
RANK_PROCESS = "SHARDWISE_RANK_PROCESS"
"""The process whose variables these are, and its rendezvous (`keep_own`)."""
_PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")
# Variables that torchrun sets besides.
_OF_TORCHRUN = (
    "LOCAL_WORLD_SIZE",
    *(f"{unit}_{fact}" for unit in ("GROUP", "ROLE") for fact in ("RANK", "WORLD_SIZE")),
)
_BOUNDS = (
    ("RANK", "WORLD_SIZE", 1),
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE", 1),
    ("LOCAL_RANK", "WORLD_SIZE", 1),
    ("LOCAL_WORLD_SIZE", "WORLD_SIZE", 0),
)
"""Pairs of variables, and the least difference by which the second must be larger."""
RANKS_ALONE = (
    "PMIX_RANK", "PALS_RANKID", "FLUX_TASK_RANK", "JSM_NAMESPACE_RANK", "ALPS_APP_PE", "MPT_MPI_RANK",
    "MPI_LOCALRANKID",
)  # fmt: skip
"""Ranks of PMIx, HPE PALS, Flux, jsrun, aprun, HPE MPT and Hydra, which say that there are several processes, and not
how many: none of them may train alone."""
TASK_RANKS = ("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", *RANKS_ALONE)
TASK_COUNTS = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""Rank and number of tasks, as srun and the mpirun of Open MPI, MVAPICH2, MPICH and Intel MPI set them for each task
(`external_launchers.py`)."""


class Rank(NamedTuple):
    """The place of one process in a launched job, by its environment variables."""

    rank: int
    local_rank: int
    world: int


def keep_own(variables: MutableMapping[str, str] = os.environ) -> None:
    """Remove the variables that were set for the rank which started this process; call it before they are read.

    A process inherits the variables of the rank that starts it. But a `shardwise evaluate` that a training starts must
    not report to the launcher of the training, nor join its ranks. So each rank writes its process id beside its
    variables, and a process with another id removes them. If a launcher between the two has set a rendezvous of its
    own, the place in that job is kept.
    """
    job = ":".join(variables.get(name, "") for name in _RENDEZVOUS)
    process, _, inherited = variables.get(RANK_PROCESS, "").partition(" ")
    if process not in ("", str(os.getpid())):
        foreign = [RANK_PROCESS, ERROR_FILE, PARENT_PID, HEARTBEATS, NODE]
        if inherited == job:
            foreign += [*_PLACE, *_RENDEZVOUS, *_OF_TORCHRUN, *TASK_RANKS, *TASK_COUNTS]
            foreign += [name for name in variables if name.startswith("TORCHELASTIC_")]
        for name in foreign:
            variables.pop(name, None)
    if joined(variables) is not None:
        variables[RANK_PROCESS] = f"{os.getpid()} {job}"


def joined(variables: Mapping[str, str] = os.environ) -> Rank | None:
    """Return the place that a launcher gave to this process; None if it was started by itself."""
    if not all(variables.get(name, "").isdecimal() for name in _PLACE):
        return None
    rank, local_rank, world = (int(variables[name]) for name in _PLACE)
    return Rank(rank, local_rank, world)


def unjoined(variables: Mapping[str, str] = os.environ) -> str | None:
    """Return the reason why this process, one of several that a launcher started, cannot join them; None if it can."""
    counts = (*_PLACE, "LOCAL_WORLD_SIZE")
    alone = {"LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    if "RANK" not in variables and all(variables.get(name, number) == number for name, number in alone.items()):
        return None
    missing = [name for name in (*_PLACE, *_RENDEZVOUS) if not variables.get(name)]
    if missing:
        stated = listing(name for name in counts if variables.get(name))
        return f"{listing(missing)} must be set beside {stated}, as torchrun does"
    for name in (*counts, "MASTER_PORT"):
        if name in variables and not variables[name].isdecimal():
            return f"{name} ({variables[name]!r}) must be a whole number, as torchrun sets it"
    for name, bound, gap in _BOUNDS:
        if name in variables and bound in variables and int(variables[name]) + gap > int(variables[bound]):
            less = "less than" if gap else "at most"
            return f"{name} ({variables[name]}) must be {less} {bound} ({variables[bound]})"
    if not 0 < int(variables["MASTER_PORT"]) < 2**16:
        return f"MASTER_PORT ({variables['MASTER_PORT']}) must be a port, from 1 to 65535"
    return None


def may_be_a_task(variables: Mapping[str, str] = os.environ) -> bool:
    """Return True if srun or mpirun may have started this process as one of several; `tasks.task_of` knows."""
    # Placed already: by torchrun, the user or the supervisor of a job.
    is_placed = any(name in variables for name in ("RANK", "WORLD_SIZE", NODE))
    return not is_placed and any(name in variables for name in (*TASK_RANKS, *TASK_COUNTS))


def launches_node() -> bool:
    """Return True if this process is the launcher of a node, which a job's supervisor has started."""
    return NODE in os.environ and "RANK" not in os.environ


def is_launched(variables: Mapping[str, str] = os.environ) -> bool:
    """Return True if `local.launch` started this process, and will show the user why it failed."""
    return ERROR_FILE in variables


def may_restart() -> bool:
    """Return True if torchrun starts the ranks again when one of them fails."""
    allowed = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "")
    done = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return allowed.isdecimal() and int(allowed) > (int(done) if done.isdecimal() else 0)
