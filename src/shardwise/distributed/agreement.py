"""Agreement of ranks: what any of them found is known to all, so that all of them raise or none does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from shardwise.base.errors import ConfigError
from shardwise.distributed import collectives
from shardwise.distributed.mesh import Group

_Item = TypeVar("_Item")


def union(items: Iterable[_Item], group: Group) -> list[_Item]:
    """The items of all ranks of a group, each once, in the same order on every rank.

    Where no rank has one, as in a healthy job, the ranks exchange a flag and no more.
    """
    mine = list(items)
    if not collectives.any_rank(bool(mine), group):
        return []
    return list(dict.fromkeys(item for of_rank in collectives.all_gather_objects(mine, group) for item in of_rank))


def agree(problems: list[str], group: Group) -> None:
    """Every rank raises, as one ConfigError, the problems of all ranks of the group, or none does."""
    if everyones := union(problems, group):
        raise ConfigError(everyones)
