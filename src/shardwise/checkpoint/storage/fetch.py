"""Copies of files from anywhere that fsspec reads: checked, and fetched once however many processes ask.

Beside a file NAME there are, hidden by a dot:

    .NAME.fetch         the file while it is fetched
    .NAME.fetched.json  of a complete file: its source, its version and its SHA-256
    .NAME.lock          one process fetches, the others wait

Where one of these is a link, it is not followed. The record identifies the file of a URL without what signs the URL: a
presigned URL is a new one each time, and whoever has it can read the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shardwise.base.errors import ConfigError, listing
from shardwise.base.files import (
    NoLocksError,
    lock,
    name_problem,
    new_file,
    open_lock,
    open_own,
    require_replaceable,
    to_disk,
)
from shardwise.base.parsing import json_value
from shardwise.base.redaction import unsigned
from shardwise.base.units import size as size_text
from shardwise.checkpoint.storage.root import ANONYMOUS, WEB_SCHEMES, Root, StoreError, in_time

_ABSENT_STATUSES = (HTTPStatus.NOT_FOUND, HTTPStatus.GONE)
_VERSION_KEYS = ("ETag", "etag", "Content-MD5", "Last-Modified", "LastModified", "last_modified", "mtime")
"""Facts that filesystems report of a file, and that change with its content."""
_PATTERN_CHARACTERS = frozenset("*?[")
_SHOWN = 3
_OWN_FILE = re.compile(r"(.*/)?\.[^/]+\.(fetch|fetched\.json)")
"""Names of the files that a fetch makes beside its target."""


@dataclass(frozen=True)
class Remote:
    """A file that can be fetched.

    Attributes:
        root: place of the file.
        name: path relative to the folder or pattern that was named.
        size: bytes; None where the server does not report them.
        version: text that changes when the file does, as far as the server reports it.
    """

    root: Root
    name: str
    size: int | None
    version: str


@dataclass(frozen=True)
class Fetched:
    """A file on this machine.

    Attributes:
        path: path of the file.
        size: bytes.
        sha256: SHA-256 of the content.
        is_new: this call fetched it.
    """

    path: Path
    size: int
    sha256: str
    is_new: bool


def find(url: str, *, anonymous: bool = False) -> list[Remote]:
    """The files that a URL or a path names: one file, those of a folder, or what a pattern matches.

    Args:
        url: the URL or path.
        anonymous: read a public bucket without credentials.

    Raises:
        ConfigError: there are none, this user may not read them, or the URL cannot be read by what is installed.
        StoreError: the place does not answer.
    """
    root = Root.of(url, anonymous=anonymous)
    try:
        remotes = in_time(root, lambda: _listed(root))
    except StoreError as error:
        if error.missing:
            raise ConfigError(str(error)) from None
        if error.refused:
            may_be_public = root.scheme in ANONYMOUS and not anonymous
            advice = "; if it is public, read it by --anonymous" if may_be_public else ""
            raise ConfigError(f"{error}{advice}") from None
        raise
    _require_inside(root, remotes)
    return remotes


def fetch(
    remote: Remote,
    target: Path,
    sha256: str | None = None,
    *,
    force: bool = False,
    progress: Callable[[int], None] | None = None,
    announce: Callable[[str], None] | None = None,
) -> Fetched:
    """Copy one file to `target`, unless it is there as it was fetched, or has that SHA-256.

    Any number of processes may call it at once: one fetches. The file gets its name when it is whole and on the disk.

    Args:
        remote: the file.
        target: path on this machine.
        sha256: required SHA-256 of the file; None for any.
        force: replace a file that was not fetched from there.
        progress: called with the number of bytes that came since the last call.
        announce: called with one line for the user.

    Raises:
        ConfigError: another file is at `target`, the disk has no room, the source may not be read, or the SHA-256 is
            not that which was asked for.
        StoreError: the source cannot be read, or `target` cannot be written.
    """
    announce = announce or _ignore
    target_root = Root.of(target)
    part = _hidden_file(target, "fetch")
    with target_root.store_errors("written"):
        target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target, announce), contextlib.ExitStack() as stack:
        present = _present(remote, target, sha256, force, announce)
        if present is not None:
            return present
        _require_room(remote, target)
        with target_root.store_errors("written"):
            # A link that another user may have put there would be followed by the filesystem's client.
            new_file(part).close()
            stack.callback(part.unlink, missing_ok=True)
            _copy(remote, part, progress or _ignore)
            with part.open("rb") as file:
                to_disk(file)
            fetched = Fetched(target, part.stat().st_size, _digest(part), is_new=True)
            _require_intact(remote, fetched, sha256)
            # The record comes first: a file without one would be refused as another's.
            record = _origin(remote) | {"sha256": fetched.sha256}
            Root.of(_hidden_file(target, "fetched.json")).write(json.dumps(record, indent=2).encode() + b"\n")
            part.replace(target)
        Root.of(target.parent).sync()
        return fetched


# ---- at the source


def _listed(root: Root) -> list[Remote]:
    """The files that a place names."""
    is_pattern = root.scheme not in WEB_SCHEMES and not _PATTERN_CHARACTERS.isdisjoint(root.path)
    if not is_pattern and (root.scheme in WEB_SCHEMES or not root.is_folder()):
        return [_remote(root, _info(root))]
    with root.store_errors("read"):
        infos = root.fs.glob(root.path, detail=True) if is_pattern else root.fs.find(root.path, detail=True)
    remotes: list[Remote] = []
    for path, info in sorted(infos.items()):
        name = path.rpartition("/")[2] if is_pattern else path.removeprefix(root.path.rstrip("/") + "/")
        # An object store lists markers of folders. What a fetch left there would be taken for a record of this machine.
        is_marker = path.endswith("/") and not info.get("size")
        if info["type"] != "file" or is_marker or _OWN_FILE.fullmatch(name):
            continue
        shown = path if root.is_local else f"{root.scheme}://{path}"
        remotes.append(_remote(replace(root, path=path, shown=shown), info, name))
    if not remotes:
        lacks = "match a file or more, and it matches none" if is_pattern else "hold files, and the folder has none"
        raise ConfigError(f"{root} must {lacks}")
    return remotes


def _require_inside(root: Root, remotes: list[Remote]) -> None:
    """Raise ConfigError where the name of a file leads out of the folder that it is fetched to."""
    if wrong := [problem for remote in remotes if (problem := name_problem(remote.name, nested=True))]:
        raise ConfigError(
            f"{root}: the name of each file ({listing(wrong, most=_SHOWN)}) must lie in the folder that it is "
            "fetched to: nothing was fetched; name the others by a pattern, or rename it there"
        )


def _info(root: Root) -> dict[str, Any]:
    """The facts that the filesystem reports of a file."""
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


def _remote(root: Root, info: dict[str, Any], name: str | None = None) -> Remote:
    """The file at a place, of which the filesystem reports `info`."""
    # The query of a URL is no part of the file's name.
    if name is None and root.scheme in WEB_SCHEMES:
        parts = urlsplit(root.path)
        name = parts.path.rstrip("/").rpartition("/")[2] or parts.hostname
    return Remote(root, name or root.name, info.get("size"), _version(info))


def _version(info: dict[str, Any]) -> str:
    """A text of the reported facts that change with a file's content."""
    return json.dumps([info.get("size"), {key: str(info[key]) for key in _VERSION_KEYS if info.get(key)}])


# ---- on this machine


def _present(
    remote: Remote, target: Path, sha256: str | None, force: bool, announce: Callable[[str], None]
) -> Fetched | None:
    """The file at `target` where it needs no fetch; None where it is to be fetched."""
    require_replaceable(target, "DEST")
    if not target.exists():
        return None
    with Root.of(target).store_errors("read"):
        actual = _digest(target)
    record = _record(target)
    intact = _origin(remote) | {"sha256": actual}
    if actual == sha256 or (sha256 is None and record.items() >= intact.items()):
        return Fetched(target, target.stat().st_size, actual, is_new=False)
    if record.get("source") != intact["source"] and not force:
        raise ConfigError(
            f"{target} is there already and was not fetched from {remote.root}: name another place, or replace it by "
            "--force"
        )
    announce(f"{target} is damaged, or there in another version: fetching it again")
    return None


def _copy(remote: Remote, part: Path, progress: Callable[[int], None]) -> None:
    """Have the client of the place write the file to `part`."""
    from fsspec.callbacks import Callback  # type: ignore[import-untyped]

    told = 0

    def tell(_: int | None, value: int) -> None:
        nonlocal told
        progress(value - told)
        told = value

    try:
        with remote.root.store_errors("read"):
            remote.root.fs.get_file(remote.root.path, str(part), callback=Callback(hooks={"progress": tell}))
    except StoreError as error:
        # The name of a file may be listed where its content may not be read.
        if error.refused:
            raise ConfigError(str(error)) from None
        raise
    # The client of the local disk reports none.
    tell(None, part.stat().st_size)


def _require_room(remote: Remote, target: Path) -> None:
    """Raise ConfigError where the disk has no room for the file."""
    free = Root.of(target.parent).free_bytes()
    if remote.size is not None and free is not None and remote.size > free:
        raise ConfigError(
            f"{target.parent} ({size_text(free)} free) must have room for {remote.root} ({size_text(remote.size)}): "
            "make room, or name a place on another disk"
        )


def _require_intact(remote: Remote, fetched: Fetched, sha256: str | None) -> None:
    """Refuse a file that came while its source changed, or is not the one that was asked for."""
    # Asked again: the parts may be of two versions.
    if _version(_info(remote.root)) != remote.version:
        raise StoreError(f"{remote.root} changed while it was fetched: start again once it is complete")
    if remote.size not in (None, fetched.size):
        problem = f"its size ({fetched.size:,} bytes) must be that which its server reports ({remote.size:,})"
    elif sha256 not in (None, fetched.sha256):
        problem = f"its SHA-256 ({fetched.sha256}) must be that which was asked for ({sha256})"
    else:
        return
    raise ConfigError(f"{remote.root}: {problem}: the file there is another one, or it was changed on its way")


# ---- files beside


def _hidden_file(target: Path, kind: str) -> Path:
    """A hidden file beside the target; `kind`: its suffix, as the module's docstring lists them."""
    return target.with_name(f".{target.name}.{kind}")


def _origin(remote: Remote) -> dict[str, str]:
    """The fields of a record that identify a file and its version."""
    root = remote.root
    source = unsigned(root.path) if root.scheme in WEB_SCHEMES else root.shown
    return {"source": source, "version": remote.version}


def _record(target: Path) -> dict[str, Any]:
    """The record of a complete file; empty where there is none, or none that can be used."""
    try:
        with os.fdopen(open_own(_hidden_file(target, "fetched.json"), os.O_RDONLY), "rb") as file:
            record = json_value(file.read())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _locked(target: Path, announce: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of `target`, where the file system supports locks."""
    with Root.of(target).store_errors("written"):
        file = open_lock(_hidden_file(target, "lock"))
    with file:
        with contextlib.suppress(NoLocksError):
            if not lock(file, wait=False):
                announce(f"waiting for another process that fetches {target.name}")
                lock(file, wait=True)
        yield


def _ignore(_: object) -> None:
    pass
