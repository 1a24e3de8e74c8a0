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


def is_launched(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether `local.launch` started this process, and will tell the user why it failed."""
    return ERROR_FILE in variables
