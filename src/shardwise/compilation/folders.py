"""The folders that compilers work in: among temporary files, each held by a process that keeps a lock on it."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from shardwise.files import open_own

_PREFIX = f"shardwise-graphs-{os.getuid()}-"
_LOCK = "owner.lock"
_HOUR = 3600.0


class WorkFolder:
    """A folder of this process, until `remove`.

    Its lock tells other processes, in other containers and on other machines that share the disk too, that it is in
    use. The lock ends with the process, even one that is killed.

    Raises:
        OSError: there is no room for it.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove it with all that it holds."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def compiled_files(folder: Path) -> set[Path]:
    """What a compiler has written into a folder and another process can use."""
    return {path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".lock", ".tmp")}


def remove_left_over() -> None:
    """Remove the folders of this user's processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            if folder.lstat().st_uid == os.getuid() and not _is_held(folder):
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # another user's, or removed meanwhile by its process or by another that looks for what is left


def _is_held(folder: Path) -> bool:
    try:
        lock = open_own(folder / _LOCK, os.O_RDWR)
    except FileNotFoundError:
        return time.time() - folder.stat().st_mtime < _HOUR  # it may be a new one, whose lock is made next
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
