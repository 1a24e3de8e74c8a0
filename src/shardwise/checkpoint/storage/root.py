"""One place of a filesystem, local or remote: a file or a folder, and the operations on it.

`runs/x/checkpoints` and `s3://bucket/x` have the same operations, most of them by `fsspec`. On a local disk, a file is
on the disk once it is closed, and renames are atomic. An object store has neither folders nor renames: there, the file
that makes a group of files valid must be written last.

Every failure becomes a `StoreError`: one sentence with the place, the reason and what to do. `answering_root` and
`require_writable_folder` check a place before the work whose result is to be written there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import re
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from shardwise.base import files
from shardwise.base.errors import ConfigError, RunError, StoreError, listing, see
from shardwise.base.files import PATH_ERRORS, free_bytes, name_problem, sync_folder, user_path, write_atomic
from shardwise.base.redaction import redacted
from shardwise.base.units import size as size_text

Buffer: TypeAlias = bytes | bytearray | memoryview
_LOCAL_SCHEMES = ("file", "local")
WEB_SCHEMES = ("http", "https")
_EXTRAS = {"s3": "s3", "s3a": "s3", "http": "http", "https": "http"}
"""URL scheme → the extra of this package that brings its client."""
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "r2"}
"""Schemes where a folder is only a prefix of names."""
ANONYMOUS: dict[str, dict[str, Any]] = {
    **{scheme: {"anon": True} for scheme in ("s3", "s3a", "abfs", "abfss", "az")},
    **{scheme: {"token": "anon"} for scheme in ("gs", "gcs")},
}
"""URL scheme → the options of its client that read a public place without credentials."""
_REFUSED = r"(?i)denied|forbidden|unauthorized|credentials|anonymous"
"""Words of clients' errors where a user may not read or write: they have no common class."""
_S3_ADVICE = {
    r"(?i)bucket (does|is) not|NoSuchBucket|invalid bucket": (
        "make the bucket, name one that is there, or set AWS_ENDPOINT_URL to the address of the server that has it"
        f"{see('data#object-store-bucket')}"
    ),
    r"(?i)endpoint|connect|answer": (
        f"set AWS_ENDPOINT_URL to the address of a server that answers here{see('data#object-store-address')}"
    ),
    "": (
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, to an account that may do this, and "
        f"AWS_ENDPOINT_URL to the address of a server that is not Amazon's{see('data#object-store-credentials')}"
    ),
}
"""Pattern → advice: that of the first pattern that occurs in the reason of a failure."""
PATIENCE_SECONDS = 20.0
"""Longest wait for the first answer of a remote place. Clients retry for minutes, which helps only after an answer."""
_SILENCE_SECONDS = 60.0  # longest pause of a web server in the middle of a file
_WINDOW_BYTES = 32 * 2**20  # bytes of a file that are brought to the disk at a time
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Root:
    """A folder on a disk or in an object store: `Root.of("runs/x") / "checkpoints"`. Making the object touches nothing.

    Attributes:
        path: path as the filesystem expects it.
        shown: text of the user, without secrets, for messages.
        scheme: scheme of the URL; `file` on this machine.
        anonymous: it is read without credentials, as a public bucket can be.
    """

    path: str
    shown: str
    scheme: str
    _remote: Any = None
    anonymous: bool = False

    @staticmethod
    def of(location: str | Path, *, anonymous: bool = False) -> Root:
        """The place that a path or a URL names.

        Raises:
            ConfigError: the URL's scheme is unknown, its client is not installed, or it cannot be read anonymously.
        """
        text = str(location)
        scheme, separator, address = text.partition("://")
        if anonymous and scheme not in ANONYMOUS:
            raise ConfigError(
                f"--anonymous must be left out with {redacted(text)}: it is for {listing(ANONYMOUS, 'and')}, and "
                "other places are read without credentials unless their address has some"
            )
        if not separator or scheme in _LOCAL_SCHEMES:
            path = user_path(address if separator else text).absolute()
            return Root(str(path), text.rstrip("/") or "/", "file")
        shown = redacted(text)
        # The import takes 0.1 s, which local places need not wait for.
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        try:
            # fsspec would chain two filesystems.
            if "::" in text:
                raise ValueError("it has two schemes")
            # Without a cache of listings, files of other processes are seen.
            options = ANONYMOUS[scheme] if anonymous else {}
            if scheme in WEB_SCHEMES:
                from aiohttp import ClientTimeout

                # The default allows 5 minutes for a whole file.
                options = {"client_kwargs": {"timeout": ClientTimeout(sock_read=_SILENCE_SECONDS)}}
            remote, path = url_to_fs(text, use_listings_cache=False, **options)
        except ImportError as error:
            package = getattr(error, "name", None) or f"its client ({error})"
            if scheme in _EXTRAS:
                package = f"shardwise[{_EXTRAS[scheme]}]"
            raise ConfigError(f"{shown} needs a package that is not installed: pip install '{package}'") from None
        except ValueError as error:
            raise ConfigError(f"{shown} must be a path, or a URL such as s3://bucket/folder: {error}") from None
        return Root(path, shown.rstrip("/"), scheme, remote, anonymous)

    @property
    def fs(self) -> Any:
        """The filesystem, as fsspec has it."""
        if self._remote is not None:
            return self._remote
        # The import takes long. fsspec itself keeps the object, one for each thread.
        from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

        return LocalFileSystem()

    def __truediv__(self, name: str) -> Root:
        """The place called `name` below this one; StoreError where the name leads elsewhere."""
        # Names come from manifests and indexes of unknown sources too.
        if problem := name_problem(name, nested=True):
            raise StoreError(f"{self} cannot be left: {problem}")
        return replace(self, path=f"{self.path.rstrip('/')}/{name}", shown=f"{self.shown.rstrip('/')}/{name}")

    def __str__(self) -> str:
        return self.shown

    @property
    def name(self) -> str:
        return self.path.rstrip("/").rpartition("/")[2]

    @property
    def is_local(self) -> bool:
        return self._remote is None

    def local(self) -> Path:
        assert self.is_local, f"{self} is not on this machine"
        return Path(self.path)

    # ---- looking

    def exists(self) -> bool:
        return self._info() is not None

    def is_folder(self) -> bool:
        info = self._info()
        return info is not None and info["type"] == "directory"

    def size(self) -> int:
        """Bytes of a file; StoreError if there is none (`missing`), or it is no regular file."""
        info = self._info()
        if info is None:
            raise StoreError(f"{self} cannot be read: there is no such file", missing=True)
        if info["type"] != "file":
            raise StoreError(f"{self} cannot be read: it is no file")
        # Some servers report None for an empty file.
        return int(info["size"] or 0)

    def names(self) -> list[str]:
        """Names of the files and folders in a folder, sorted; empty where there is no folder."""
        with self.store_errors("read"):
            try:
                if self.is_local:
                    return sorted(path.name for path in self.local().iterdir())
                paths = {path.rstrip("/") for path in self.fs.ls(self.path, detail=False)}
            except (FileNotFoundError, NotADirectoryError):
                return []
        # An object store also lists the marker of the folder itself, and names that are no names on a disk.
        names = {path.rpartition("/")[2] for path in paths - {self.path.rstrip("/")}}
        return sorted(names - {"", ".", ".."})

    def files(self) -> dict[str, int]:
        """Every file below this folder: relative path → bytes. Links to folders are not followed."""
        with self.store_errors("read"):
            if self.is_local:
                folder = self.local()
                paths = (path for path in folder.rglob("*") if path.is_file())
                return dict(sorted((path.relative_to(folder).as_posix(), path.stat().st_size) for path in paths))
            infos: dict[str, Any] = self.fs.find(self.path, detail=True)
        prefix = self.path.rstrip("/") + "/"
        inside = {path.removeprefix(prefix): info for path, info in infos.items() if path.startswith(prefix)}
        return {path: int(info["size"] or 0) for path, info in sorted(inside.items()) if path}

    # ---- reading and writing

    def read(self, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes `start` to `stop` of a file; fewer where it ends before."""
        if stop is not None and stop <= start:
            return b""
        with self.store_errors("read"):
            return bytes(self.fs.cat_file(self.path, start=start, end=stop))

    def open(self, size: int | None = None) -> _Writing:
        """A file to write from its beginning; `size`: the bytes to come, for the message of a full disk."""
        return _Writing(self, size)

    def write(self, data: bytes) -> None:
        """Replace the file: a reader or a crash sees the old one or the new one, never a part."""
        with self.store_errors("written", len(data)):
            if self.is_local:
                write_atomic(self.local(), data)
            else:
                self.fs.pipe_file(self.path, data)

    def make(self) -> None:
        """Make the folder and those above it, where the filesystem has folders."""
        if self.scheme not in _OBJECT_STORES:
            with self.store_errors("made"):
                if self.is_local:
                    self.local().mkdir(parents=True, exist_ok=True)
                else:
                    self.fs.makedirs(self.path, exist_ok=True)

    def rename(self, target: Root, *, last: str | None = None) -> None:
        """Give a file or a folder another name: atomic on a local disk, copies on an object store.

        `last`: the file that makes a folder valid. Where the files are copied, it is copied last and removed first.
        """
        with self.store_errors(f"renamed to {target}"):
            if self.is_local and target.is_local:
                self.local().rename(target.path)
            elif self.scheme in _OBJECT_STORES:
                # One by one: `mv` and `rm` would take * and [ in a name for patterns.
                for name in sorted(self.files() or [""], key=lambda name: name == last):
                    self.fs.cp_file(f"{self.path}/{name}".rstrip("/"), f"{target.path}/{name}".rstrip("/"))
                if last is not None:
                    (self / last).remove()
                self.remove()
            else:
                self.fs.mv(self.path, target.path, recursive=self.is_folder())

    def remove(self) -> None:
        """Remove a file, or a folder and all that it holds, if it exists. A link is removed, not what it leads to."""
        with self.store_errors("removed"), contextlib.suppress(FileNotFoundError):
            if self.is_local:
                path = self.local()
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                # A read-only disk refuses to remove even a file that does not exist.
                elif os.path.lexists(path):
                    path.unlink()
            elif self.scheme in _OBJECT_STORES:
                # One by one, for the same reason as in `rename`.
                for path_of_file in self.fs.find(self.path):
                    self.fs.rm_file(path_of_file)
            else:
                self.fs.rm(self.path, recursive=True)

    def sync(self) -> None:
        """Wait until the names in a local folder are on the disk."""
        if self.is_local:
            with self.store_errors("written"):
                sync_folder(self.local())

    def free_bytes(self) -> int | None:
        """Free space of the disk under this place, which need not exist yet; None on another machine."""
        if not self.is_local:
            return None
        with self.store_errors("read"):
            return free_bytes(self.local())

    # ---- inside

    def _info(self) -> dict[str, Any] | None:
        with self.store_errors("read"):
            try:
                if self.is_local:
                    status = self.local().stat()
                    types = {stat.S_IFDIR: "directory", stat.S_IFREG: "file"}
                    return {"type": types.get(stat.S_IFMT(status.st_mode), "other"), "size": status.st_size}
                info: dict[str, Any] = self.fs.info(self.path)
                return info
            except (FileNotFoundError, NotADirectoryError):
                return None

    @contextlib.contextmanager
    def store_errors(self, verb: str, needed: int | None = None) -> Iterator[None]:
        """Turn whatever the filesystem raises inside into a StoreError.

        Args:
            verb: participle of the action on this place, such as `read`.
            needed: bytes that are to be written.
        """
        try:
            yield
        except Exception as error:
            # A client of a remote place has exceptions of its own (botocore, aiohttp, google).
            if isinstance(error, RunError) or (self.is_local and not isinstance(error, OSError)):
                raise
            raise self.failure(error, verb, needed) from None

    def failure(self, error: BaseException, verb: str, needed: int | None = None) -> StoreError:
        """The StoreError for an error of a filesystem, with advice; `verb` and `needed`: as in `store_errors`."""
        number = error.errno if isinstance(error, OSError) else None
        if number in (errno.ENOSPC, errno.EDQUOT):
            reason = "its quota is used up" if number == errno.EDQUOT else "the disk is full"
            needed_text = f"{size_text(needed)} ({needed:,} bytes)" if needed is not None else "more"
            free = self.free_bytes() or 0
            text = (
                f"{self} cannot be {verb}: {reason}; it needs {needed_text}, free is {size_text(free)} "
                f"({free:,} bytes): make room on that disk{see('checkpoints#disk-full')}"
            )
            return StoreError(text)
        # Clients of remote places say more than that a file is missing, such as that a bucket is.
        if isinstance(error, FileNotFoundError) and (self.is_local or not str(error)):
            return StoreError(f"{self} cannot be {verb}: there is no such file or folder", missing=True)
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        reason = redacted(" ".join(reason.split())).rstrip(".")
        text = f"{self} cannot be {verb}: {reason}"
        refused = number in PATH_ERRORS
        if self.scheme in _OBJECT_STORES:
            refused = isinstance(error, PermissionError) or re.search(_REFUSED, reason) is not None
        if refused and self.anonymous:
            text += "; it is not public: leave out --anonymous"
        if _EXTRAS.get(self.scheme) == "s3":
            text += "; " + next(advice for pattern, advice in _S3_ADVICE.items() if re.search(pattern, reason))
        return StoreError(text, missing=isinstance(error, FileNotFoundError), refused=refused)


class _Writing:
    """A file that is being written, to be closed or, after a failure, abandoned. A closed local file is on the disk."""

    def __init__(self, root: Root, size: int | None = None) -> None:
        self._root = root
        self._size = size
        with root.store_errors("written", size):
            self._file: Any = root.fs.open(root.path, "wb")
        self._write_behind = _WriteBehind(self._file.fileno()) if root.is_local else None

    def write(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        with self._root.store_errors("written", self._size):
            # An unbuffered file may take a part of what it is given.
            while len(view):
                count = self._file.write(view)
                view = view[count:]
                if self._write_behind is not None:
                    self._write_behind.wrote(count)

    def close(self) -> None:
        with self._root.store_errors("written", self._size):
            if self._write_behind is not None:
                self._write_behind.finish()
                self._file.flush()
                os.fsync(self._file.fileno())
            self._file.close()

    def abandon(self) -> None:
        """Remove what was written. Failures on the way are ignored: the user is to read the error that led here."""
        with contextlib.suppress(Exception):
            if self._write_behind is not None:
                with contextlib.suppress(OSError):
                    self._write_behind.finish()
            # `close` would complete the file of an object store; `discard` removes the parts that it has received.
            if hasattr(self._file, "discard") and not self._root.is_local:
                self._file.discard()
                self._file.closed = True
            else:
                self._file.close()
        with contextlib.suppress(StoreError):
            self._root.remove()


def answering_root(location: str | Path) -> Root:
    """The storage at a path or URL, once it has answered.

    Raises:
        ConfigError: the package for this kind of URL is not installed. StoreError: there was no answer in time.
    """
    root = Root.of(location)
    answer_in_time(root, root.exists)
    return root


def answer_in_time(root: Root, action: Callable[[], _Result]) -> _Result:
    """Return what `action`, which asks the storage `root` for something, returns.

    Raises:
        StoreError: a remote place gave no answer in PATIENCE_SECONDS. Whatever `action` raises.
    """
    if root.is_local:
        return action()
    answer: Future[_Result] = Future()

    def ask() -> None:
        try:
            answer.set_result(action())
        except Exception as error:  # noqa: BLE001  raised where it is waited for
            answer.set_exception(error)

    # A client's call cannot be cancelled: the thread continues, and ends with the process.
    threading.Thread(target=ask, name="first answer", daemon=True).start()
    # Not the timeout of `result`: the action may raise a TimeoutError of its own.
    if not wait([answer], PATIENCE_SECONDS).done:
        raise root.failure(TimeoutError(f"no answer within {PATIENCE_SECONDS:.0f} s"), "reached")
    return answer.result()


def require_writable_folder(root: Root) -> None:
    """Write a small file into a folder of storage, which is made, and remove it; StoreError if that is not possible."""
    root.make()
    if root.is_local:
        with root.store_errors("written"):
            files.require_writable(root.local())
        return
    # One name for each machine: a process that is killed leaves it to the next one.
    probe = root / f".probe-{platform.node()}"
    probe.write(b"shardwise")
    probe.remove()


class _WriteBehind:
    """Syncs a growing file window by window, so that at most two windows of 32 MiB are in the page cache.

    A file that is synced only at its end fills the page cache, and displaces pages that other programs will read again.
    On a virtual machine whose host provides memory at first use, a new page also takes more time than the disk: a
    checkpoint then takes three times as long (`benchmarks/checkpoint.py`).

    Args:
        descriptor: descriptor of the file, open for as long as this is used.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._start = self._end = 0
        self._thread = ThreadPoolExecutor(1, "write-behind")
        self._pending: Future[None] | None = None

    def wrote(self, count: int) -> None:
        """Count the bytes of a write that was done. Waits while the previous window is being synced.

        Raises:
            OSError: an earlier window could not be brought to the disk.
        """
        self._end += count
        length = self._end - self._start
        # One window is synced while the next one is filled: so at most two are in the cache.
        if length < _WINDOW_BYTES:
            return
        self._wait()
        self._pending = self._thread.submit(_sync_and_drop, self._descriptor, self._start, length)
        self._start = self._end

    def finish(self) -> None:
        """Wait until the last window is synced; raises as `wrote`."""
        with self._thread:
            self._wait()

    def _wait(self) -> None:
        # An error of a window is raised once: whoever meets it abandons the file, which waits again.
        pending = self._pending
        self._pending = None
        if pending is not None:
            pending.result()


def _sync_and_drop(descriptor: int, start: int, length: int) -> None:
    # Pages that are not on the disk yet cannot go.
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_DONTNEED)


def is_url(load: str) -> bool:
    """True if `checkpoint.load` names a checkpoint by a URL, such as s3://bucket/run/step-00000100."""
    return "://" in load
