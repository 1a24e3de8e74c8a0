"""Files on a local disk: names that are never links, locks, writes that survive a crash, free space.

Crash safety rests on three steps, in this order: a file's bytes are on the disk (`to_disk`), the file gets its name by
one rename, and the name is on the disk (`sync_folder`). `write_atomic` does all three for a small file.

Our own files beside a user's (locks, parts of a file being fetched, temporary files) have names that can be predicted.
In a folder that anyone may write, such as /tmp, another user may have made a link or a folder of that name. So our
files are opened without following links, and what lies in such a folder must be this user's (`require_trusted`).
Elsewhere those who may write a folder are trusted: its owner, and its group.

A name that comes from outside (a key of an object store, a file that an index or a manifest lists) may lead out of the
folder that it belongs to. `name_problem` checks each before it is joined to a folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from shardwise.base.errors import ConfigError

# The answers of systems to O_NOFOLLOW.
_LINKS = (errno.ELOOP, errno.EMLINK)
MOST_BYTES = 1 << 26
"""The largest file that is read whole, such as a configuration: far more than any needs."""
PATH_ERRORS = (
    *(errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EROFS),
    *(errno.ENOTCONN, errno.ESTALE),  # of a mount whose server has gone
)
"""The answers of systems that a path itself causes."""
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
ANYONE_WRITES = stat.S_IWOTH
OTHERS = stat.S_IRWXG | stat.S_IRWXO
"""Bits of a mode, for `require_trusted`."""


class NoLocksError(OSError):
    """The file system has no locks, as some network disks."""


class UntrustedError(OSError):
    """Another user may have put a file or folder there, or may write it."""


def reason_of(error: OSError) -> str:
    """The reason that the file system gave in an OSError, such as `No space left on device`."""
    return error.strerror or str(error)


def path_refusal(error: OSError) -> ConfigError | None:
    """The refusal of a path that the system does not let this user ask about, use or enter; None for other errors.

    No code asks each path beforehand: a command ends by this error where it meets one.
    """
    if error.filename is None or error.errno not in PATH_ERRORS:
        return None
    # Of a rename the second name is the user's.
    path = os.fsdecode(error.filename2 or error.filename)
    return ConfigError(f"the path {path} cannot be used: {reason_of(error)}")


def user_path(path: str | Path) -> Path:
    """A path that a user gave, with the home for `~` where that user exists; ConfigError for a zero character."""
    if "\0" in str(path):
        raise ConfigError(f"the path {path} must have no zero character")
    return Path(os.path.expanduser(path))  # noqa: PTH111  the other one raises a RuntimeError there


# ---- opening


def require_trusted(path: Path, denied: int = 0) -> None:
    """Refuse a folder that another user may have put there. One that is not there passes: who uses it says so.

    Args:
        denied: bits that its mode must not have: `ANYONE_WRITES` for programs, `OTHERS` for a folder of this user
            alone, which must be no link.

    Raises:
        UntrustedError: an entry of the path may be another user's trap, or the mode has a denied bit.
    """
    # Links of one's own, such as a scratch folder in the home, are followed: both ends must be trusted.
    for way in (path.absolute(), Path(os.path.realpath(path))):
        for part in (*reversed(way.parents), way):
            if not os.path.lexists(part):
                return
            _require_own(part, part.lstat())
    is_private = denied == OTHERS
    entry = path.lstat() if is_private else path.stat()
    if is_private and (stat.S_ISLNK(entry.st_mode) or entry.st_uid != os.geteuid()):
        raise UntrustedError(errno.EPERM, f"{path} must be a folder of yours, and no link: remove it")
    _require_mode(path, entry, denied)


def _require_mode(path: Path, entry: os.stat_result, denied: int) -> None:
    mode = stat.S_IMODE(entry.st_mode)
    if mode & denied:
        who = "others may use it" if denied == OTHERS else "anyone may write it"
        raise UntrustedError(
            errno.EPERM,
            f"the mode of {path} ({mode:04o}) must be {mode & ~denied:04o} or stricter, as {who}: check what is in it "
            f"and run `chmod {mode & ~denied:04o} {path}`, or choose a folder below it",
        )


def _require_own(path: Path, entry: os.stat_result) -> None:
    """Refuse what another user put into a folder that anyone may write, unless that folder is his."""
    around = path.parent.stat()
    if around.st_mode & ANYONE_WRITES and entry.st_uid not in (os.geteuid(), 0, around.st_uid):
        raise UntrustedError(
            errno.EPERM,
            f"{path} must belong to you, and user {entry.st_uid} may have put it there because anyone may write "
            f"{path.parent}: choose another folder, or remove it",
        )


def make_folder(path: Path) -> None:
    """Make a folder and those above, for this user alone where anyone may write; OSError also of `require_trusted`."""
    require_trusted(path)
    if not path.exists():
        make_folder(path.parent)
        is_shared = path.parent.stat().st_mode & ANYONE_WRITES
        path.mkdir(0o700 if is_shared else 0o775, exist_ok=True)


def open_own(path: Path, flags: int, denied: int = 0) -> int:
    """A descriptor of the regular file at `path`; OSError as `os.open` and `require_trusted`, ELOOP of any link."""
    require_trusted(path.parent, denied)
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno not in _LINKS:
            raise
    else:
        status = os.fstat(descriptor)
        try:
            if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
                _require_own(path, status)
                _require_mode(path, status, denied)
                return descriptor
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise OSError(errno.ELOOP, f"{path.name} is a link or no plain file, and links are not followed: remove it")


def open_to_append(path: Path) -> int:
    """A descriptor of the file at `path`, made where there is none, for writes to its end; OSError as `open_own`."""
    return open_own(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def open_plain(path: Path) -> BinaryIO:
    """A regular file to read; links are followed. OSError also for a folder, a pipe or a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is no plain file", str(path))


def read_plain(path: Path) -> bytes:
    """The bytes of a small regular file; OSError as `open_plain` and `read_small`."""
    with open_plain(path) as file:
        return read_small(file, path)


def read_small(file: BinaryIO, path: Path) -> bytes:
    """The bytes of an open file named `path`; OSError, which is EFBIG where it has more than `MOST_BYTES`."""
    content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MOST_BYTES >> 20} MiB", str(path))
    return content


def new_file(path: Path, mode: int = 0o666) -> BinaryIO:
    """An empty file to write and read, in place of what had the name; of a link, of the link alone."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "w+b")


# ---- locks


def open_lock(path: Path) -> BinaryIO:
    """The file to lock, made where there is none. It stays: two processes must not lock two. OSError as `open_own`."""
    return os.fdopen(open_own(path, os.O_RDWR | os.O_CREAT), "r+b")


def lock(file: BinaryIO | int, *, wait: bool, shared: bool = False) -> bool:
    """Take the lock on an open file, until it is closed or the process ends; False where another process has it.

    `wait` waits until that gives it back. A `shared` lock any number may have, while none has an exclusive one.
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
    """Wait until what was written to a file would survive a loss of power."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder would survive a loss of power: those of new, renamed and removed files."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_atomic(path: Path, content: bytes | str, *, mode: int = 0o666) -> None:
    """Replace a file: a reader or a crash sees its old content or the new, never a part. `mode` as in `new_file`."""
    # Processes of several machines or containers, which may have the same number, can write to one folder.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    try:
        with new_file(temporary, mode) as file:
            # Python stands halves of characters for bytes of a path that its encoding lacks; UTF-8 has none of them.
            file.write(content.encode(errors="replace") if isinstance(content, str) else content)
            to_disk(file)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def require_replaceable(path: Path, option: str) -> None:
    """Refuse a path for `write_atomic`, which `option` gave, where a folder, link, pipe or device is."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a link" if stat.S_ISLNK(mode) else "a device or a pipe"
        raise ConfigError(f"{option} ({path}) must be a file or a free name, and it is {kind}: name another file")


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a folder of this process; `files`: name, which may have folders of its own → content."""
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def require_writable(folder: Path) -> None:
    """Write a small file without a name, which goes with the process, into a folder; OSError if that fails."""
    # Costly to import, for a training alone.
    import tempfile

    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(4096))
        to_disk(file)


def free_bytes(path: Path) -> int:
    """Free space of the disk under a path, which need not exist yet."""
    existing = path.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    return shutil.disk_usage(existing).free


# ---- what can be made again


def cache_root(chosen: Path | None = None) -> Path:
    """The path of the user's cache folder: `chosen`, else $SHARDWISE_CACHE, else shardwise under ~/.cache."""
    if chosen is not None:
        return chosen
    if cache := os.environ.get("SHARDWISE_CACHE"):
        return user_path(cache)
    user_cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(user_cache) if user_cache else user_path("~/.cache")) / "shardwise"


SAFETENSORS_METADATA = "__metadata__"
"""The member of a safetensors header that describes no tensor."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def name_problem(name: object, *, nested: bool = False) -> str | None:
    """The reason why a file's name must not be joined to a folder; None where the result is sure to lie in that folder.

    Args:
        nested: True also allows a result in a folder of that folder, as `a/b` has.
    """
    if not isinstance(name, str):
        return f"{name!r} is no text"
    segments = name.split("/")
    if name.startswith("/"):
        return f"{name!r} is absolute"
    if ".." in segments:
        return f"{name!r} leads out of its folder"
    if "" in segments or "." in segments:
        return f"{name!r} has a part without a name"
    if _CONTROL.search(name) or "\\" in name:
        return f"{name!r} has a backslash or a control character"
    return f"{name!r} lies in another folder" if len(segments) > 1 and not nested else None


def is_printable_name(name: str) -> bool:
    """True if files can hold this name of a tensor, and a terminal shows it: it obeys some characters."""
    return name.isprintable() and name != SAFETENSORS_METADATA


def write_new(path: Path, text: str, option: str) -> None:
    """Write a file that must not be there yet, at the path that `option` gave; ConfigError if it cannot be written."""
    try:
        # "x" instead of a test: between a test and the writing another process could make the file.
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{option} {path}: the file exists already; choose another name or remove it") from None
    except OSError as error:
        raise ConfigError(f"{option} {path}: {reason_of(error)}") from None
