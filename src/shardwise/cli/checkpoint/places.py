"""What the user's PATH is: a checkpoint, a run's folder, or a folder of checkpoints; on any storage."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.errors import ConfigError

if TYPE_CHECKING:
    from shardwise.store.folders import Found
    from shardwise.store.root import Root

LATEST = "runs/latest"
_CONFIG = "config.yaml"


@dataclass(frozen=True)
class Place:
    """`root`: one checkpoint (`single`), or the folder of a run's checkpoints."""

    root: Root
    single: bool


def add_path(parser: argparse.ArgumentParser, name: str = "PATH") -> None:
    kinds = "a run's folder, or a folder of checkpoints"
    parser.add_argument(
        "path",
        metavar=name,
        nargs="?",
        default=LATEST,
        help=f"{'a checkpoint, ' if name == 'PATH' else ''}{kinds}; a path, or a URL such as s3://bucket/run "
        f"(default: {LATEST})",
    )


def locate(location: str) -> Place:
    """What lies at a path or URL.

    Raises:
        ConfigError: nothing that has to do with checkpoints. StoreError: it cannot be read.
    """
    from shardwise.store.folders import step_of
    from shardwise.store.manifest import MANIFEST
    from shardwise.store.root import Root

    root = Root.of(location)
    if not root.exists():
        hint = ": no run was started in this folder, name a run's" if location == LATEST else ""
        raise ConfigError(f"{root} must be a checkpoint or a run's folder: there is nothing of that name{hint}")
    if not root.is_folder():
        raise ConfigError(f"{root} must be a checkpoint's or a run's folder: it is a file")
    names = root.names()
    if MANIFEST in names:
        return Place(root, single=True)
    if step_of(root.name) is not None:
        raise ConfigError(f"{root} is no checkpoint: it has no {MANIFEST}, so it was not completed")
    if "checkpoints" in names:
        return Place(root / "checkpoints", single=False)
    if any(step_of(name) is not None for name in names):
        return Place(root, single=False)
    if _CONFIG in names and (configured := _configured(root)):
        return Place(configured, single=False)
    kind = "a run without checkpoints so far" if _CONFIG in names else "neither"
    raise ConfigError(f"{root} must be a checkpoint (with {MANIFEST}) or a run's folder: it is {kind}")


def all_of(place: Place) -> list[Found]:
    """The checkpoints at a place, newest first."""
    from shardwise.store.folders import checkpoints, glance

    return [glance(place.root)] if place.single else checkpoints(place.root)


def newest_intact(location: str) -> Root:
    """The checkpoint at a path, or a run's newest one; a folder of another kind as it is."""
    from shardwise.store.folders import checkpoints, step_of
    from shardwise.store.root import Root

    root = Root.of(location)
    names = root.names()
    if "checkpoints" not in names and _CONFIG not in names and not any(step_of(name) is not None for name in names):
        if not root.exists():
            raise ConfigError(f"{root} must be a folder with weights: there is nothing of that name")
        return root
    place = locate(location)
    if place.single:
        return place.root
    for found in checkpoints(place.root):
        if found.problem is None:
            return found.folder
    raise ConfigError(f"{place.root} must hold an intact checkpoint: there is none")


def _configured(run: Root) -> Root | None:
    """Where a run keeps its checkpoints, if its `checkpoint.path` says so."""
    import yaml

    from shardwise.store.root import Root

    try:
        section = yaml.safe_load((run / _CONFIG).read())["checkpoint"]
        path = section["path"]
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError):
        return None
    return Root.of(path) if isinstance(path, str) else None
