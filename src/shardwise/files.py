"""Files of our own beside a user's: locks, parts of what is being fetched, temporary files.

Their names are known beforehand, so in a folder that others can write to, one of these may already be a link to a file
that only the user may write. A link is never followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_LINKS = (errno.ELOOP, errno.EMLINK)  # what systems answer to O_NOFOLLOW


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


def open_lock(path: Path) -> BinaryIO:
    """The file to lock, which is made where there is none. It stays: two processes must not lock two files.

    Raises:
        OSError: as `open_own`.
    """
    return os.fdopen(open_own(path, os.O_RDWR | os.O_CREAT), "r+b")


def new_file(path: Path) -> BinaryIO:
    """An empty file to write and read; what had the name before is removed, a link itself and not what it leads to.

    Raises:
        OSError: it cannot be removed or made.
    """
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "w+b")
