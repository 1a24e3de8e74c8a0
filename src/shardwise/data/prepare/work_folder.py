"""The folder in which data are prepared, until they are complete and take their place.

    .NAME.preparing/state.json    what is durably written; replaced as a whole
    .NAME.preparing/tokens.*      files that grow; what lies beyond the state is cut off
    .NAME.preparing/lock          its holder alone works in the folder
    .NAME.preparing/owner.json    in place of the lock where the file system has none

A process that is killed leaves the folder behind, and the next one continues from the state.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from shardwise.base.errors import ConfigError, DataError
from shardwise.base.files import NoLocksError, lock, open_lock, reason_of, sync_folder, write_atomic
from shardwise.base.parsing import json_value

PREFIX = "tokens"
"""The prefix of the data set in the folder."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_STATE = "state.json"
_LOCK = "lock"
_OWNER = "owner.json"


class WorkFolder:
    """The work folder of one output."""

    def __init__(self, output: Path) -> None:
        self.target = output
        self.folder = output.parent / f".{output.name}.preparing"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Makes the folder and keeps other processes out of it; a folder without a state is removed at the end.

        Raises:
            DataError: it cannot be written.
            ConfigError: another process prepares the same output.
        """
        with self.writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            lock_file = open_lock(self.folder / _LOCK)
        with lock_file:
            advice = "wait for its end"
            try:
                taken = lock(lock_file, wait=False)
            except NoLocksError:
                taken = self._create_owner()
                advice += f", or remove {self.folder / _OWNER} if it has ended"
            # The lock of a folder that was removed while this process waited to open it keeps nobody out.
            if not taken or not _is_there(lock_file):
                raise ConfigError(f"{self.target} is being prepared by another process: {advice}")
            try:
                yield
            finally:
                # Once this process is done, the next one may have made a folder of the same name.
                if _is_there(lock_file):
                    (self.folder / _OWNER).unlink(missing_ok=True)
                    if not (self.folder / _STATE).exists():
                        self.remove()

    def _create_owner(self) -> bool:
        """True if this process could create owner.json, which only one can."""
        with self.writing(), contextlib.suppress(FileExistsError), (self.folder / _OWNER).open("x") as file:
            json.dump({"host": platform.node(), "pid": os.getpid()}, file)
            return True
        return False

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turns a failure to write into a sentence for the user."""
        try:
            yield
        except OSError as error:
            reason = f"{self.target} cannot be written: {reason_of(error)}"
            if (self.folder / _STATE).exists():
                reason += f"; what is finished stays in {self.folder}, and the same command continues from there"
            advice = "make room" if error.errno in _NO_ROOM else "name a place that can be"
            raise DataError(f"{reason}: {advice}") from error

    def state(self) -> dict[str, Any] | None:
        """The saved state; None if there is none."""
        try:
            content = json_value((self.folder / _STATE).read_bytes())
        except (OSError, ValueError):
            return None
        return content if isinstance(content, dict) else None

    def save(self, state: dict[str, Any]) -> None:
        """Replaces the state; the files that it describes must be on the disk already."""
        write_atomic(self.folder / _STATE, json.dumps(state, indent=1))

    def clear(self) -> None:
        """Removes everything except the lock and the owner, the state first: files without it are never continued."""
        (self.folder / _STATE).unlink(missing_ok=True)
        for path in self.folder.iterdir():
            if path.is_dir():  # of an earlier version
                shutil.rmtree(path)
            elif path.name not in (_LOCK, _OWNER):
                path.unlink()

    def remove(self) -> None:
        """Removes the folder, the state first."""
        (self.folder / _STATE).unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def publish(self, moves: Sequence[tuple[str, Path]]) -> None:
        """Moves complete files of the folder to their places, in the order of `moves`; it may be called again.

        The last of them is removed first where one is there: readers accept nothing without it.
        """
        name, target = moves[-1]
        if (self.folder / name).exists() and target.exists():
            target.unlink()
            sync_folder(target.parent)
        for name, place in moves:
            if (self.folder / name).exists():
                (self.folder / name).replace(place)
                sync_folder(place.parent)
        self.remove()

    def size(self) -> int:
        """The bytes of all files."""
        return sum(path.stat().st_size for path in self.folder.iterdir())


def _is_there(lock_file: BinaryIO) -> bool:
    """True if the file still has its name: it was not removed, nor was the folder, since it was opened."""
    return os.fstat(lock_file.fileno()).st_nlink > 0
