"""The folder in which data are prepared, until they are complete and move to where readers look.

    .NAME.preparing/state.json    what is durably written; replaced as a whole
    .NAME.preparing/…             files that grow; what lies beyond the state is cut off
    .NAME.preparing/output/       a folder that becomes OUTPUT, or files that are moved beside it

One process at a time works in it: the one that holds the lock or, where the file system has no locks, that created
owner.json. A process that is killed leaves the folder behind, and the next one continues from the state.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from shardwise.errors import ConfigError, DataError
from shardwise.files import NoLocksError, lock, open_lock, reason_of, sync_folder, write_atomic
from shardwise.parsing import json_value

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_STATE, _LOCK, _OWNER = "state.json", "lock", "owner.json"


class WorkFolder:
    """The work folder of one output."""

    def __init__(self, output: Path) -> None:
        self.target = output
        self.folder = output.parent / f".{output.name}.preparing"
        self.output = self.folder / "output"

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Makes the folder and keeps other processes out of it; a folder without a state is removed at the end.

        Raises:
            DataError: it cannot be written.
            ConfigError: another process prepares the same.
        """
        with self.writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            lock_file = open_lock(self.folder / _LOCK)
        with lock_file:
            refusal = f"{self.target} is being prepared by another process"
            try:
                taken = lock(lock_file, wait=False)
            except NoLocksError:
                self._claim(refusal)
                taken = True
            if not taken or not _is_there(lock_file):
                raise ConfigError(f"{refusal}: wait for its end")
            try:
                yield
            finally:
                # Once this process is done, the next one may have made a folder of the same name.
                if _is_there(lock_file):
                    (self.folder / _OWNER).unlink(missing_ok=True)
                    if not (self.folder / _STATE).exists():
                        self.remove()

    def _claim(self, refusal: str) -> None:
        """Makes the folder this process's where the file system has no locks: only one process can create owner.json.

        The file of a process of this machine that has ended is replaced.

        Raises:
            ConfigError: another process has the folder, or may have it on another machine.
        """
        path, aside = self.folder / _OWNER, self.folder / f".{_OWNER}.{platform.node()}.{os.getpid()}"
        own = {"host": platform.node(), "pid": os.getpid()}
        for may_replace in (True, False):
            with self.writing(), contextlib.suppress(FileExistsError), path.open("xb") as file:
                file.write(json.dumps(own).encode())
                return
            owner = _read(path)
            if not (may_replace and owner is not None and _has_ended(owner)):
                break
            with self.writing(), contextlib.suppress(FileNotFoundError):
                path.rename(aside)
                if _read(aside) != owner:  # another process replaced it since it was read, and has the folder now
                    aside.rename(path)
                    break
                aside.unlink()
        who = "" if owner is None else f" ({owner.get('pid')} on {owner.get('host')})"
        raise ConfigError(f"{refusal}{who}: wait for its end, or remove {path} if it has ended")

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turns a failure to write into a sentence for the user."""
        try:
            yield
        except OSError as error:
            reason = f"{self.target} cannot be written: {reason_of(error)}"
            if (self.folder / _STATE).exists():
                reason += f"; what is finished stays in {self.folder}, and the same command continues from there"
            then = "make room" if error.errno in _NO_ROOM else "name a place that can be"
            raise DataError(f"{reason}: {then}") from error

    def state(self) -> dict[str, Any] | None:
        """The saved state; None where there is none."""
        return _read(self.folder / _STATE)

    def save(self, state: dict[str, Any]) -> None:
        """Replaces the state; the files that it describes must be on the disk already."""
        write_atomic(self.folder / _STATE, json.dumps(state, indent=1))

    def clear(self) -> None:
        """Removes everything except the lock and the owner, the state first."""
        (self.folder / _STATE).unlink(missing_ok=True)
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in (_LOCK, _OWNER):
                path.unlink()

    def remove_output(self) -> None:
        if self.output.exists():
            shutil.rmtree(self.output)

    def remove(self) -> None:
        """Removes the folder, the state first: the rest without it is never continued."""
        (self.folder / _STATE).unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def publish(self, moves: Sequence[tuple[Path, Path]]) -> None:
        """Moves what is complete to where readers look, the last of `moves` last; it may be killed and called again.

        What is at the targets is removed, that of the last move first: readers accept nothing without it.
        """
        last, target = moves[-1]
        if last.exists():
            if target.is_dir():
                aside = self.folder / "replaced"
                if aside.exists():
                    shutil.rmtree(aside)
                target.rename(aside)
            target.unlink(missing_ok=True)
            sync_folder(target.parent)
        for source, place in moves:
            if source.exists():
                source.replace(place)
                sync_folder(place.parent)
        self.remove()


def _is_there(lock_file: BinaryIO) -> bool:
    """Whether the file still has its name: it was not removed, nor was the folder, since it was opened."""
    return os.fstat(lock_file.fileno()).st_nlink > 0


def _read(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is none."""
    try:
        content = json_value(path.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _has_ended(owner: Mapping[str, Any]) -> bool:
    """Whether a process has surely ended: it was one of this machine, and no process has its number now."""
    pid = owner.get("pid")
    if owner.get("host") != platform.node() or not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)  # signal 0 only asks whether the process exists
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass
    return False
