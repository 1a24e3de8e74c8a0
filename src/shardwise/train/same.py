"""Whether all ranks of a job have the same software, configuration and folder, which several machines may not have."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise import comm
from shardwise.checkpoint_format.diff import by_dotted_key
from shardwise.config import Config
from shardwise.errors import ConfigError, listing
from shardwise.mesh import Group, Mesh, join
from shardwise.train.opening import versions

_FOLDER = "the run's folder"
_SHOWN = 5
"""Differences, and ranks of each, that are told."""


def require_same(config: Config, mesh: Mesh, run_path: Path | None = None) -> None:
    """Compare versions, the configuration and the run's folder of all ranks with rank 0's. Collective.

    Args:
        run_path: None: that of rank 0, whatever it is.

    Raises:
        ConfigError: on every rank, with what differs and on which ranks.
    """
    software = {"Python": platform.python_version()} | {name: versions()[name] for name in ("torch", "shardwise")}
    own = software | by_dotted_key(config.model_dump(mode="json"))
    first = comm.broadcast_object(own | {_FOLDER: None if run_path is None else str(run_path)}, mesh.world)
    folder = first[_FOLDER]
    alike = run_path is None or (folder is not None and Path(folder).resolve() == run_path.resolve())
    own[_FOLDER] = folder if alike else str(run_path)
    _require_equal(own, first, mesh.world)


def require_same_run_dir(run_dir: Path | None, timeout: float) -> None:
    """Join the job, and compare the folder that each rank was given with rank 0's; None: it was given none.

    Collective; `timeout`: as of `join`.

    Raises:
        ConfigError: on every rank, with the folders and the ranks.
    """
    join(timeout=timeout)
    world = Group.world()
    require_equal({"run_dir": None if run_dir is None else str(run_dir.absolute())}, world, places=("run_dir",))


def require_equal(own: Mapping[str, Any], world: Group, places: Sequence[str] = ()) -> None:
    """Raise ConfigError on every rank, with what differs, where any rank's values are not the first rank's. Collective.

    Args:
        own: the values of this rank, by name.
        world: the ranks.
        places: names of absolute paths, which are compared without symbolic links.
    """
    first = comm.broadcast_object(own, world)
    given = dict(own)
    for name in places:
        if first[name] and given[name] and Path(first[name]).resolve() == Path(given[name]).resolve():
            given[name] = first[name]
    _require_equal(given, first, world)


def _require_equal(own: Mapping[str, Any], first: Mapping[str, Any], world: Group) -> None:
    """Raise ConfigError on every rank, with what differs, where any rank's values are not those of the first."""
    other = [(name, first.get(name), own.get(name)) for name in {**first, **own} if first.get(name) != own.get(name)]
    if not comm.any_rank(bool(other), world):
        return
    everywhere = comm.all_gather_objects(other, world)
    ranks: dict[str, list[int]] = {}
    for rank, differences in enumerate(everywhere):
        for name, there, here in differences:
            ranks.setdefault(f"{name} must be the same on all ranks: {there} on rank 0, and {here}", []).append(rank)
    told = [f"{text} on {_named(of)}" for text, of in ranks.items()]
    more = [f"{len(told) - _SHOWN} more differ"] if len(told) > _SHOWN else []
    raise ConfigError([*told[:_SHOWN], *more])


def _named(ranks: list[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listing(ranks, most=_SHOWN)}"
