"""Files on a local disk: names that are never links, locks, writes that survive a crash, free space.

Crash safety rests on three steps, in this order: a file's bytes are on the disk (`to_disk`), the file gets its name by
one rename, and the name is on the disk (`sync_folder`). `write_atomic` does all three for a small file.

Our own files beside a user's (locks, parts of a file being fetched, temporary files) have names that can be predicted.
In a folder that others can write to, someone may have made a link of that name to a file that only the user may write,
so links are never followed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from pathlib import Path
from typing import BinaryIO

_LINKS = (errno.ELOOP, errno.EMLINK)  # what systems answer to O_NOFOLLOW
MOST_BYTES = 1 << 26
"""Of a file that is read whole and describes something, such as a configuration: far more than any needs."""
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class NoLocksError(OSError):
    """The file system has no locks, as some network disks."""


def reason_of(error: OSError) -> str:
    """Why the system refused, such as `No space left on device`."""
    return error.strerror or str(error)


# ---- opening


def open_own(path: Path, flags: int) -> int:
    """A descriptor of the regular file at `path`; `flags` are those of `os.open`, which may make it.

    Raises:
        OSError: as `os.open`; ELOOP where the file is a link, symbolic or hard, or no regular file.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno not in _LINKS:
            raise
    else:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
            return descriptor
        os.close(descriptor)
    raise OSError(errno.ELOOP, f"{path.name} is a link or no plain file, and links are not followed: remove it")


def open_plain(path: Path) -> BinaryIO:
    """A regular file to read; links are followed.

    Raises:
        OSError: as `os.open`; EISDIR of a folder, and EINVAL of a pipe or a device, which might never answer.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is no plain file", str(path))


def read_plain(path: Path) -> bytes:
    """The bytes of a small regular file.

    Raises:
        OSError: as `open_plain` and `read_small`.
    """
    with open_plain(path) as file:
        return read_small(file, path)


def read_small(file: BinaryIO, path: Path) -> bytes:
    """The bytes of an open file, which has the name `path`.

    Raises:
        OSError: EFBIG where it has more than `MOST_BYTES`; else it cannot be read.
    """
    content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MOST_BYTES >> 20} MiB", str(path))
    return content


def new_file(path: Path, mode: int = 0o666) -> BinaryIO:
    """An empty file to write and read. What had the name before is removed; of a link, the link alone.

    Args:
        mode: who may read and write it, before the process's umask.

    Raises:
        OSError: it cannot be removed or made.
    """
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "w+b")


# ---- locks


def open_lock(path: Path) -> BinaryIO:
    """The file to lock, which is made where there is none. It stays: two processes must not lock two files.

    Raises:
        OSError: as `open_own`.
    """
    return os.fdopen(open_own(path, os.O_RDWR | os.O_CREAT), "r+b")


def lock(file: BinaryIO | int, *, wait: bool, shared: bool = False) -> bool:
    """Takes the lock on an open file, until it is closed or the process ends; false where another process has it.

    Args:
        file: the file, or its descriptor.
        wait: until the other process gives it back.
        shared: any number of processes may have it at once, but none beside an exclusive one.

    Raises:
        NoLocksError: the file system has none.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(file, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            raise NoLocksError(error.errno, error.strerror) from None
        raise
    return True


# ---- writing


def to_disk(file: BinaryIO) -> None:
    """Waits until what was written to a file would survive a loss of power."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Waits until the names in a folder would survive a loss of power: those of new, renamed and removed files."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_atomic(path: Path, content: bytes | str, *, mode: int = 0o666) -> None:
    """Replaces a file: a reader or a crash sees the old content or the new one, never a part. `mode` as in `new_file`.

    Raises:
        OSError: it cannot be written; the old file is as it was.
    """
    # Processes of several machines or containers, which may have the same number, can write to one folder.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    try:
        with new_file(temporary, mode) as file:
            file.write(content.encode() if isinstance(content, str) else content)
            to_disk(file)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def free_bytes(path: Path) -> int:
    """Free space of the disk under a path, which need not exist yet."""
    there = path.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    return shutil.disk_usage(there).free


# ---- what can be made again


def cache_root(chosen: Path | None = None) -> Path:
    """`chosen`, else $SHARDWISE_CACHE, else shardwise under $XDG_CACHE_HOME or ~/.cache."""
    if chosen is not None:
        return chosen
    if own := os.environ.get("SHARDWISE_CACHE"):
        return Path(own).expanduser()
    general = os.environ.get("XDG_CACHE_HOME")
    return (Path(general) if general else Path("~/.cache").expanduser()) / "shardwise"
