"""Which run saves at a place: `run.json` beside its checkpoints, so that no other run overwrites them."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.runlog import RunLock
from shardwise.storage.root import Root

OWNER = "run.json"


@dataclass(frozen=True)
class Owner:
    """A run, by its id; and where it was last started, for whoever meets its file."""

    id: str
    folder: str
    host: str

    @staticmethod
    def here(run: str, folder: Path) -> Owner:
        return Owner(run, str(folder.resolve()), platform.node())

    @property
    def is_gone(self) -> bool:
        """Whether the run surely runs no more: it was one of this machine, and nobody holds its folder."""
        return self.host == platform.node() and not RunLock.is_held(Path(self.folder))


def owner(root: Root) -> Owner | None:
    """The run that saves there; None where no file, or none that can be understood, names one.

    Raises:
        StoreError: the place cannot be read.
    """
    if OWNER not in root.names():
        return None
    try:
        plain = json.loads((root / OWNER).read())
        return Owner(str(plain["id"]), str(plain["folder"]), str(plain["host"]))
    except (ValueError, KeyError, TypeError):
        return None


def require_own(root: Root, run: str | None, *, is_empty: bool) -> None:
    """ConfigError where the place is another run's, unless that has saved nothing and is gone.

    Args:
        run: the id of the one that is to save there, if it has one yet. is_empty: there are no checkpoints.
    """
    other = owner(root)
    if other is None or other.id == run or (is_empty and other.is_gone):
        return
    raise ConfigError(
        f"checkpoint.path ({root}) must be a run's own, and it is that of {other.folder} on {other.host}: choose "
        f"another checkpoint.path, give --run-dir that folder to go on with it, or remove {root / OWNER} if that "
        "run is gone"
    )


def take(root: Root, run: Owner) -> None:
    """Write down whose the place is.

    Raises:
        StoreError: it cannot be written.
    """
    if owner(root) != run:
        root.make()
        (root / OWNER).write(json.dumps(asdict(run)).encode())
