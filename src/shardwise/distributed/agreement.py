"""Agreement of ranks: all know the problems of any of them, so that all of them raise or none does."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TypeVar

from shardwise.base.errors import ConfigError
from shardwise.distributed import collectives
from shardwise.distributed.mesh import Group

_Item = TypeVar("_Item")


def union(items: Iterable[_Item], group: Group) -> list[_Item]:
    """The items of all ranks of a group, each once, in the same order on every rank.

    Where no rank has one, as in a healthy job, the ranks exchange a flag and no more.
    """
    local_items = list(items)
    if not collectives.any_rank(bool(local_items), group):
        return []
    by_rank = collectives.all_gather_objects(local_items, group)
    return list(dict.fromkeys(chain.from_iterable(by_rank)))  # not a set: its order may differ from rank to rank


def agree(problems: list[str], group: Group) -> None:
    """Raise on every rank, as one ConfigError, the problems of all ranks of the group, or on none."""
    if all_problems := union(problems, group):
        raise ConfigError(all_problems)
