"""This process as one of the ranks that a launcher started."""

from __future__ import annotations

from shardwise.errors import ConfigError
from shardwise.launch import guard
from shardwise.launch.environment import Rank, joined, unjoined


def enter_job(nproc: int | None) -> Rank | None:
    """The place of this process in a launched job, and from here on it ends with its parent; None where it is alone.

    Args:
        nproc: the number of ranks that the user gave by `--nproc`, if any.

    Raises:
        ConfigError: a launcher started several processes that cannot join, or `nproc` is not their number.
    """
    place, problem = joined(), unjoined()
    if problem is not None:
        raise ConfigError(problem)
    if place is None:
        return None
    if nproc is not None and nproc != place.world:
        raise ConfigError(f"--nproc ({nproc}) must be left out inside torchrun: the world size is {place.world}")
    guard.die_with_parent()
    return place


def check_accelerators(nproc: int, accelerators: int) -> None:
    """Refuse more local ranks than there are accelerators, where there are any.

    Raises:
        ConfigError: with both numbers.
    """
    if 0 < accelerators < nproc:
        raise ConfigError(f"--nproc ({nproc}) must be at most the number of accelerators ({accelerators})")
