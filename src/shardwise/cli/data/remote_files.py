"""Copies of files from anywhere that fsspec reads: whole, and fetched once however many processes ask.

Beside a file NAME there are `.NAME.fetch`, the file while it is fetched, and `.NAME.lock`: one process fetches, the
others wait.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shardwise.base.errors import ConfigError, StoreError, listing
from shardwise.base.files import NoLocksError, lock, name_problem, new_file, open_lock, require_replaceable, to_disk
from shardwise.base.units import size as size_text
from shardwise.checkpoint.storage.root import ANONYMOUS, WEB_SCHEMES, Root, answer_in_time

_ABSENT_STATUSES = (HTTPStatus.NOT_FOUND, HTTPStatus.GONE)
_PATTERN_CHARACTERS = frozenset("*?[")
_SHOWN = 3


@dataclass(frozen=True)
class RemoteFile:
    """A file at a URL that `data fetch` can copy."""

    root: Root
    name: str  # path relative to the folder or pattern that was named
    size: int | None  # bytes; None where the server does not report them


@dataclass(frozen=True)
class FetchedFile:
    """A file that `data fetch` has on this machine."""

    path: Path
    size: int
    sha256: str
    is_new: bool  # this call fetched it

    @staticmethod
    def of(path: Path, *, is_new: bool) -> FetchedFile:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return FetchedFile(path, path.stat().st_size, sha256, is_new)


def find_remote_files(url: str, *, anonymous: bool = False) -> list[RemoteFile]:
    """The files that a URL or a path names: one file, those of a folder, or what a pattern matches.

    Args:
        anonymous: read a public bucket without credentials.

    Raises:
        ConfigError: there are none, or the URL cannot be read by what is installed.
        StoreError: the place does not answer, or this user may not read it (`refused`).
    """
    root = Root.of(url, anonymous=anonymous)
    try:
        remotes = answer_in_time(root, lambda: _listed(root))
    except StoreError as error:
        if error.missing:
            raise ConfigError(str(error)) from None
        if error.refused and root.scheme in ANONYMOUS and not anonymous:
            raise StoreError(f"{error}; if it is public, read it by --anonymous", refused=True) from None
        raise
    if wrong := [problem for remote in remotes if (problem := name_problem(remote.name, nested=True))]:
        raise ConfigError(
            f"{root}: the name of each file ({listing(wrong, most=_SHOWN)}) must lie in the folder that it is "
            "fetched to: nothing was fetched; name the others by a pattern, or rename it there"
        )
    return remotes


def fetch_remote_file(
    remote: RemoteFile,
    target: Path,
    sha256: str | None = None,
    *,
    force: bool = False,
    progress: Callable[[int], None] = lambda _: None,
    announce: Callable[[str], None] | None = None,
) -> FetchedFile:
    """Copy one file from a URL to `target`, unless a file of its length, or of that SHA-256, is there.

    Any number of processes may call it at once: one fetches. The file gets its name when it is whole and on the disk.

    Args:
        sha256: required SHA-256 of the file; None for any.
        force: replace another file.
        progress: called with the number of bytes that came since the last call.

    Raises:
        ConfigError: another file is at `target`, the disk has no room, or the file is not the one that was asked for.
        StoreError: the source cannot be read, or `target` cannot be written.
    """
    part = target.with_name(f".{target.name}.fetch")
    target_root = Root.of(target)
    with target_root.store_errors("written"):
        target.parent.mkdir(parents=True, exist_ok=True)
        lock_file = open_lock(target.with_name(f".{target.name}.lock"))
    with lock_file, contextlib.ExitStack() as stack:
        with contextlib.suppress(NoLocksError):
            if not lock(lock_file, wait=False):
                if announce is not None:
                    announce(f"waiting for another process that fetches {target.name}")
                lock(lock_file, wait=True)
        require_replaceable(target, "DEST")
        if target.exists():
            with target_root.store_errors("read"):
                present = FetchedFile.of(target, is_new=False)
            problem = _problem(present, remote, sha256)
            if problem is None:
                return present
            if not force:
                raise ConfigError(f"{target} is there, and {problem}: name another place, or replace it by --force")
        _require_room(remote, target)
        with target_root.store_errors("written"):
            # A link that another user may have put there would be followed by the filesystem's client.
            new_file(part).close()
            stack.callback(part.unlink, missing_ok=True)
            _copy(remote, part, progress)
            with part.open("rb") as file:
                to_disk(file)
            fetched = FetchedFile.of(part, is_new=True)
            if problem := _problem(fetched, remote, sha256):
                raise ConfigError(f"{remote.root}: {problem}: it is another file, or changed on its way")
            part.replace(target)
        Root.of(target.parent).sync()
        return replace(fetched, path=target)


def _problem(file: FetchedFile, remote: RemoteFile, sha256: str | None) -> str | None:
    """The reason why a file is not the one that is to be fetched; None where it is, as far as that can be told."""
    if sha256 is not None and file.sha256 != sha256:
        return f"its SHA-256 ({file.sha256}) must be that which was asked for ({sha256})"
    if sha256 is None and remote.size not in (None, file.size):
        return f"its size ({file.size:,} bytes) must be that which {remote.root} has ({remote.size:,})"
    return None


def _listed(root: Root) -> list[RemoteFile]:
    is_pattern = root.scheme not in WEB_SCHEMES and not _PATTERN_CHARACTERS.isdisjoint(root.path)
    if not is_pattern and (root.scheme in WEB_SCHEMES or not root.is_folder()):
        info = _info(root)
        name = root.name
        if root.scheme in WEB_SCHEMES:
            # The query of a URL is no part of the file's name.
            parts = urlsplit(root.path)
            name = parts.path.rstrip("/").rpartition("/")[2] or parts.hostname or name
        return [RemoteFile(root, name, info.get("size"))]
    with root.store_errors("read"):
        infos = root.fs.glob(root.path, detail=True) if is_pattern else root.fs.find(root.path, detail=True)
    remotes: list[RemoteFile] = []
    for path, info in sorted(infos.items()):
        name = path.rpartition("/")[2] if is_pattern else path.removeprefix(root.path.rstrip("/") + "/")
        # An object store lists markers of folders.
        is_marker = path.endswith("/") and not info.get("size")
        if info["type"] == "file" and not is_marker:
            shown = path if root.is_local else f"{root.scheme}://{path}"
            remotes.append(RemoteFile(replace(root, path=path, shown=shown), name, info.get("size")))
    if not remotes:
        lacks = "match a file or more, and it matches none" if is_pattern else "hold files, and the folder has none"
        raise ConfigError(f"{root} must {lacks}")
    return remotes


def _info(root: Root) -> dict[str, Any]:
    with root.store_errors("read"):
        try:
            info: dict[str, Any] = root.fs.info(root.path)
            return info
        except FileNotFoundError as error:
            # For http, fsspec raises this whatever the server answered, and also where no server answered.
            cause = error.__cause__
            status = getattr(cause, "status", None)
            if cause is None or status in _ABSENT_STATUSES:
                raise FileNotFoundError from None
            if status is not None:
                cause = RuntimeError(f"its server answers {status} ({getattr(cause, 'message', '')})")
            raise root.failure(cause, "read") from None


def _copy(remote: RemoteFile, part: Path, progress: Callable[[int], None]) -> None:
    from fsspec.callbacks import Callback  # type: ignore[import-untyped]

    class Told(Callback):  # type: ignore[misc]
        def relative_update(self, inc: int = 1) -> None:
            progress(inc)

    with remote.root.store_errors("read"):
        remote.root.fs.get_file(remote.root.path, str(part), callback=Told())


def _require_room(remote: RemoteFile, target: Path) -> None:
    free = Root.of(target.parent).free_bytes()
    if remote.size is not None and free is not None and remote.size > free:
        raise ConfigError(
            f"{target.parent} ({size_text(free)} free) must have room for {remote.root} ({size_text(remote.size)}): "
            "make room, or name a place on another disk"
        )
