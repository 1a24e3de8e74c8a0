"""The run that saves at a place: `run.json` beside the checkpoints names it, so that no other run overwrites them."""

from __future__ import annotations

import contextlib
import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

from shardwise.errors import ConfigError, see
from shardwise.files import MOST_BYTES
from shardwise.records import instance, record_of
from shardwise.runlog import RunDirectory, RunLock
from shardwise.storage.root import Root

OWNER = "run.json"


@dataclass(frozen=True)
class Owner:
    """A run: its id, and the folder and machine where it was last started.

    Attributes:
        key: tells the folder from a copy of it; empty in files of older versions.
    """

    id: str
    folder: str
    host: str
    key: str = ""

    @staticmethod
    def here(run: str, folder: Path) -> Owner:
        return Owner(run, str(folder.resolve()), platform.node(), RunDirectory(folder).key())

    @property
    def is_gone(self) -> bool:
        """Whether the run has surely ended: it ran on this machine, and no process holds its folder."""
        return self.host == platform.node() and not RunLock.is_held(Path(self.folder))


def owner(root: Root) -> Owner | None:
    """The run that saves there; None where `run.json` is missing or damaged.

    Raises:
        StoreError: the place cannot be read.
    """
    if OWNER not in root.names():
        return None
    try:
        return instance(Owner, record_of((root / OWNER).read(0, MOST_BYTES)))
    except ValueError:
        return None


def original_of(root: Root, run: str | None, folder: Path) -> Path | None:
    """The folder that `folder` is a copy of, as the place of its checkpoints tells; None where it is no copy.

    A copy has the same id, and the folder that last saved there still has it too: at its path, or beside it if it was
    renamed, which its key tells. It is gone if it was moved elsewhere.

    Args:
        root: the place of the checkpoints, or a copy of it.
        run: id of the run in `folder`.
        folder: of the run that is to save there.

    Raises:
        StoreError: the place cannot be read.
    """
    saving = owner(root)
    if saving is None or saving.id != run:
        return None
    former = Path(saving.folder)
    if _has_key(folder, saving.key):
        return None
    with contextlib.suppress(OSError):
        if RunDirectory(former).stored_id() == run:
            return None if former.samefile(folder) else former
    with contextlib.suppress(OSError):
        return next((path for path in former.parent.iterdir() if _has_key(path, saving.key)), None)
    return None


def _has_key(folder: Path, key: str) -> bool:
    try:
        return RunDirectory(folder).key() == key
    except OSError:
        return False


def is_inside(root: Root, folder: Path) -> bool:
    """Whether a place lies in a run's folder: what is there was saved by this run, or copied with it."""
    return root.is_local and root.local().resolve().is_relative_to(folder.resolve())


def require_own(root: Root, run: str | None, *, is_empty: bool) -> None:
    """Raise ConfigError where the place belongs to another run, unless that run has ended and saved nothing.

    Args:
        run: id of the run that is to save there; None where it has none yet.
        is_empty: the place holds no checkpoints.
    """
    other = owner(root)
    if other is None or other.id == run or (is_empty and other.is_gone):
        return
    raise ConfigError(
        f"checkpoint.path ({root}) must be a run's own, and it is that of {other.folder} on {other.host}: choose "
        f"another checkpoint.path, give --run-dir that folder to continue it, or remove {root / OWNER} if that "
        "run is gone or this place is a copy of its own"
        f"{see('checkpoints#place-of-another-run')}"
    )


def take(root: Root, run: Owner) -> None:
    """Record that the place belongs to this run.

    Raises:
        StoreError: it cannot be written.
    """
    if owner(root) != run:
        root.make()
        (root / OWNER).write(json.dumps(asdict(run)).encode())
