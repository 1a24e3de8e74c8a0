"""The environment variables between a launcher and its ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

ERROR_FILE = "SHARDWISE_ERROR_FILE"
PARENT_PID = "SHARDWISE_PARENT_PID"


@dataclass(frozen=True)
class Rank:
    """One process's place in a job."""

    rank: int
    local_rank: int
    world: int


def joined(variables: Mapping[str, str] = os.environ) -> Rank | None:
    """The place that a launcher gave to this process, or None where it was started by itself."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    if not all(variables.get(name, "").isdecimal() for name in names):
        return None
    rank, local_rank, world = (int(variables[name]) for name in names)
    return Rank(rank, local_rank, world)


_OTHER_LAUNCHERS = {"srun": "SLURM_STEP_NUM_TASKS", "mpirun": "OMPI_COMM_WORLD_SIZE"}


def unjoined(variables: Mapping[str, str] = os.environ) -> str | None:
    """Why this process, one of several that a launcher started, cannot join them; None where it is alone."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in variables]
    if "RANK" in variables or variables.get("WORLD_SIZE", "1") != "1":
        return f"{' and '.join(missing)} must be set beside RANK or WORLD_SIZE, as torchrun does" if missing else None
    for launcher, variable in _OTHER_LAUNCHERS.items():
        processes = variables.get(variable, "1")
        if processes != "1":
            return (
                f"{launcher} started {processes} processes ({variable}), and each would train by itself: "
                f"let {launcher} start torchrun once on each node, or set {', '.join(names)} in each process"
            )
    return None


def is_launched(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether `local.launch` started this process, and will tell the user why it failed."""
    return ERROR_FILE in variables


def may_restart(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun starts the ranks again when one of them fails."""
    restarts, done = (variables.get(f"TORCHELASTIC_{name}", "") for name in ("MAX_RESTARTS", "RESTART_COUNT"))
    return restarts.isdecimal() and int(restarts) > (int(done) if done.isdecimal() else 0)
