"""The folder in which something is prepared, until it is complete and takes the place where readers look.

    .NAME.preparing/state.json    what has been written for good; replaced as a whole
    .NAME.preparing/…             files that grow; what lies beyond the state is cut off
    .NAME.preparing/output/       a folder that becomes OUTPUT, or files that are moved beside it

One process at a time works in it. One that is killed leaves it behind, and the next goes on from the state.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shardwise.data.indexed import sync_folder, to_disk
from shardwise.errors import ConfigError, DataError
from shardwise.files import new_file, open_lock

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_STATE, _LOCK = "state.json", "lock"


class Work:
    """The folder, while it is this process's own."""

    def __init__(self, output: Path) -> None:
        self.target = output
        self.folder = output.parent / f".{output.name}.preparing"
        self.output = self.folder / "output"

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """The folder is there and no other process's; a folder without a state vanishes at the end.

        Raises:
            DataError: it cannot be written. ConfigError: another process prepares the same.
        """
        with self.writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = open_lock(self.folder / _LOCK)
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                gone = os.fstat(lock.fileno()).st_nlink == 0
            except OSError as error:
                gone = error.errno not in _NO_LOCKS
            if gone:
                raise ConfigError(f"{self.target} is being prepared by another process: wait for its end")
            try:
                yield
            finally:
                if not (self.folder / _STATE).exists():
                    self.remove()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turns a failure to write into a sentence for the user."""
        try:
            yield
        except OSError as error:
            reason = f"{self.target} cannot be written: {error.strerror or error}"
            if (self.folder / _STATE).exists():
                reason += f"; what is finished stays in {self.folder}, and the same command goes on from there"
            then = "make room" if error.errno in _NO_ROOM else "name a place that can be"
            raise DataError(f"{reason}: {then}") from error

    def state(self) -> dict[str, Any] | None:
        """What was written for good; None where nothing was."""
        try:
            found = json.loads((self.folder / _STATE).read_bytes())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def save(self, state: dict[str, Any]) -> None:
        """Replaces the state; the files that it tells of are on the disk already."""
        temporary = self.folder / f".{_STATE}"
        with new_file(temporary) as file:
            file.write(json.dumps(state, indent=1).encode())
            to_disk(file)
        temporary.replace(self.folder / _STATE)
        sync_folder(self.folder)

    def clear(self) -> None:
        """Begins anew: all but the lock goes, the state first."""
        (self.folder / _STATE).unlink(missing_ok=True)
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != _LOCK:
                path.unlink()

    def remove_output(self) -> None:
        if self.output.exists():
            shutil.rmtree(self.output)

    def remove(self) -> None:
        (self.folder / _STATE).unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def publish(self, moves: Sequence[tuple[Path, Path]]) -> None:
        """Moves what is complete to where readers look, the last of `moves` last; it may be cut off and done again.

        What lies there goes, that of the last move first: readers accept nothing without it.
        """
        last, target = moves[-1]
        if last.exists():
            if target.is_dir():
                self._set_aside(target)
            target.unlink(missing_ok=True)
            sync_folder(target.parent)
        for source, place in moves:
            if source.exists():
                source.replace(place)
                sync_folder(place.parent)
        self.remove()

    def _set_aside(self, folder: Path) -> None:
        aside = self.folder / "replaced"
        if aside.exists():
            shutil.rmtree(aside)
        folder.rename(aside)
