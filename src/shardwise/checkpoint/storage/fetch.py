"""Copies of files from anywhere that fsspec reads: resumable, checked, fetched once however many processes ask.

Beside a file NAME there are, hidden by a dot:

    .NAME.fetch         the part that has come so far
    .NAME.fetch.json    the source of that part, and its version
    .NAME.fetched.json  of a complete file: its source, its version, its size and its SHA-256
    .NAME.lock          one process fetches, the others wait

Where one of these is a link, it is not followed. The records identify the file of a URL without what signs the URL: a
presigned URL is a new one each time, and whoever has it can read the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Any, BinaryIO
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
from shardwise.checkpoint.storage.root import ANONYMOUS, PATIENCE_SECONDS, Root, StoreError, in_time

_RANGE_BYTES = 1 << 23
_RANGES_AT_ONCE = 4
_ATTEMPTS = 5
"""Requests for a range: with the pauses between them, a server may be away for about 4 s."""
_WEB_SCHEMES = ("http", "https")
_ABSENT_STATUSES = (HTTPStatus.NOT_FOUND, HTTPStatus.GONE)
_VERSION_KEYS = ("ETag", "etag", "Content-MD5", "Last-Modified", "LastModified", "last_modified", "mtime")
"""Facts that filesystems report of a file, and that change with its content."""
_PATTERN_CHARACTERS = frozenset("*?[")
_SHOWN = 3
_RECORD = re.compile(r"(.*/)?\.[^/]+\.(fetch|fetch\.json|fetched\.json)")
"""Names of the files that a fetch makes beside its target."""


@dataclass(frozen=True)
class Remote:
    """A file that can be fetched.

    Attributes:
        root: place of the file.
        name: path relative to the folder or pattern that was named.
        size: bytes; None where the server does not report them.
        version: text that changes when the file does, as far as the server reports it.
        ranges: the server sends parts of the file.
    """

    root: Root
    name: str
    size: int | None
    version: str
    ranges: bool


@dataclass(frozen=True)
class Fetched:
    """A file on this machine.

    Attributes:
        path: path of the file.
        size: bytes.
        sha256: SHA-256 of the content.
        fetched_bytes: bytes that this call fetched.
    """

    path: Path
    size: int
    sha256: str
    fetched_bytes: int


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

    The next call continues a fetch that was interrupted, unless the source has changed. Any number of processes may
    call it at once: one fetches. The file gets its name when it is complete and on the disk.

    Args:
        remote: the file.
        target: path on this machine.
        sha256: required SHA-256 of the file; None for any.
        force: replace a file that was not fetched from there.
        progress: called with the number of bytes that came since the last call.
        announce: called with one line for the user.

    Raises:
        ConfigError: another file is at `target`, the disk has no room, or the SHA-256 is not that which was asked for.
        StoreError: the source cannot be read, or `target` cannot be written.
    """
    announce = announce or _ignore
    target_root = Root.of(target)
    with target_root.store_errors("written"):
        target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target, announce):
        present = _present(remote, target, sha256, force, announce)
        if present is not None:
            return present
        with target_root.store_errors("written"):
            fetched = _complete_part(remote, target, progress or _ignore, announce)
            _require_intact(remote, fetched, sha256)
            facts = {"size": fetched.size, "sha256": fetched.sha256}
            # The record of the complete file comes first: a file without one would be refused as another's.
            _write_record(target, "fetched.json", _origin(remote) | facts)
            _hidden_file(target, "fetch").replace(target)
            # After a crash here, the record has no part beside it: the next fetch takes it for none.
            _hidden_file(target, "fetch.json").unlink()
        Root.of(target.parent).sync()
        return fetched


# ---- at the source


def _listed(root: Root) -> list[Remote]:
    """The files that a place names."""
    is_pattern = root.scheme not in _WEB_SCHEMES and not _PATTERN_CHARACTERS.isdisjoint(root.path)
    if not is_pattern and (root.scheme in _WEB_SCHEMES or not root.is_folder()):
        return [_remote(root, _info(root))]
    with root.store_errors("read"):
        infos = root.fs.glob(root.path, detail=True) if is_pattern else root.fs.find(root.path, detail=True)
    remotes: list[Remote] = []
    for path, info in sorted(infos.items()):
        if is_pattern:
            name = path.rstrip("/").rpartition("/")[2]
        else:
            name = path.removeprefix(root.path.rstrip("/") + "/")
        if is_pattern and info["type"] != "file":
            continue
        # The marker of a folder in an object store.
        if path.endswith("/") and not info.get("size"):
            continue
        # A file of a fetch to that place: here it would be taken for a record of this machine.
        if _RECORD.fullmatch(name):
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
    is_web = root.scheme in _WEB_SCHEMES
    # The query of a URL is no part of the file's name.
    if name is None and is_web:
        parts = urlsplit(root.path)
        name = parts.path.rstrip("/").rpartition("/")[2] or parts.hostname
    has_ranges = info.get("size") is not None and (not is_web or _gives_ranges(root.path))
    return Remote(root, name or root.name, info.get("size"), _version(info), has_ranges)


def _version(info: dict[str, Any]) -> str:
    """A text of the reported facts that change with a file's content."""
    return json.dumps([info.get("size"), {key: str(info[key]) for key in _VERSION_KEYS if info.get(key)}])


def _gives_ranges(url: str) -> bool:
    """True if a web server sends a part of a file when asked for one; many that do so do not announce it."""
    request = urllib.request.Request(url, headers={"Range": "bytes=0-0"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
            return bool(answer.status == HTTPStatus.PARTIAL_CONTENT)
    except (OSError, ValueError, HTTPException):
        return False


# ---- on this machine


def _present(
    remote: Remote, target: Path, sha256: str | None, force: bool, announce: Callable[[str], None]
) -> Fetched | None:
    """The file at `target` where it needs no fetch; None where it is to be fetched."""
    require_replaceable(target, "DEST")
    if not target.exists():
        return None
    with Root.of(target).store_errors("read"), target.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    record = _read_record(target, "fetched.json")
    origin = _origin(remote)
    is_from_source = record.get("source") == origin["source"]
    is_current = record.get("version") == origin["version"]
    is_intact = actual == record.get("sha256")
    if actual == sha256 or (sha256 is None and is_from_source and is_current and is_intact):
        return Fetched(target, target.stat().st_size, actual, 0)
    if not (is_from_source or force):
        raise ConfigError(
            f"{target} is there already and was not fetched from {remote.root}: name another place, or replace it by "
            "--force"
        )
    state = "is not as it was fetched" if is_current and not is_intact else "is there in another version"
    announce(f"{target} {state}: fetching it again")
    return None


def _complete_part(
    remote: Remote, target: Path, progress: Callable[[int], None], announce: Callable[[str], None]
) -> Fetched:
    """Fetch the file into the hidden part beside `target`, from where an earlier fetch of the same version stopped."""
    part = _hidden_file(target, "fetch")
    digest = hashlib.sha256()
    present_bytes = 0
    with contextlib.ExitStack() as stack:
        earlier_part = None
        if remote.ranges and _read_record(target, "fetch.json") == _origin(remote):
            # It may be missing, or be a link, which another user may have put there.
            with contextlib.suppress(OSError):
                earlier_part = stack.enter_context(os.fdopen(open_own(part, os.O_RDWR), "r+b"))
        # The digest is of the whole file, so the bytes that are there are hashed again.
        if earlier_part is not None and os.fstat(earlier_part.fileno()).st_size <= (remote.size or 0):
            digest = hashlib.file_digest(earlier_part, "sha256")
            present_bytes = earlier_part.seek(0, os.SEEK_END)
        _require_room(remote, target, present_bytes)
        file: BinaryIO
        if earlier_part is not None and present_bytes:
            file = earlier_part
        else:
            file = stack.enter_context(new_file(part))
        # Only now, when no bytes of another version are left: after a crash they would pass for those of this one.
        _write_record(target, "fetch.json", _origin(remote))
        if present_bytes:
            announce(f"continuing {target.name} after {size_text(present_bytes)}")
            progress(present_bytes)
        for block in _blocks(remote, present_bytes):
            file.write(block)
            digest.update(block)
            progress(len(block))
        to_disk(file)
        size = file.tell()
    return Fetched(target, size, digest.hexdigest(), size - present_bytes)


def _require_room(remote: Remote, target: Path, present_bytes: int) -> None:
    """Raise ConfigError where the disk has no room for the bytes to come."""
    free = Root.of(target.parent).free_bytes()
    if remote.size is not None and free is not None and remote.size - present_bytes > free:
        raise ConfigError(
            f"{target.parent} ({size_text(free)} free) must have room for {remote.root} "
            f"({size_text(remote.size - present_bytes)} to come): make room, or name a place on another disk"
        )


def _require_intact(remote: Remote, fetched: Fetched, sha256: str | None) -> None:
    """Refuse, and remove, a file that came while its source changed, or is not the one that was asked for."""
    part = _hidden_file(fetched.path, "fetch")
    problem: str | None = None
    # Asked again: the parts may be of two versions.
    if _version(_info(remote.root)) != remote.version:
        part.unlink()
        raise StoreError(f"{remote.root} changed while it was fetched: start again once it is complete")
    if remote.size is not None and fetched.size != remote.size:
        problem = f"its size ({fetched.size:,} bytes) must be that which its server reports ({remote.size:,})"
    elif sha256 is not None and fetched.sha256 != sha256:
        problem = f"its SHA-256 ({fetched.sha256}) must be that which was asked for ({sha256})"
    if problem is not None:
        part.unlink()
        _hidden_file(fetched.path, "fetch.json").unlink()
        raise ConfigError(f"{remote.root}: {problem}: the file there is another one, or it was changed on its way")


def _blocks(remote: Remote, start: int) -> Iterator[bytes]:
    """The bytes from `start` on, in order; where the server sends ranges, several are requested ahead."""
    if not remote.ranges:
        with remote.root.store_errors("read"), remote.root.fs.open(remote.root.path, "rb") as file:
            while block := file.read(_RANGE_BYTES):
                yield block
        return
    assert remote.size is not None
    # A queue and not `map`, which would request all ranges at once and keep those that nobody has written yet.
    requested: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(_RANGES_AT_ONCE, thread_name_prefix="fetch") as threads:
        for first in range(start, remote.size, _RANGE_BYTES):
            requested.append(threads.submit(_range, remote, first, min(first + _RANGE_BYTES, remote.size)))
            if len(requested) == _RANGES_AT_ONCE:
                yield requested.popleft().result()
        while requested:
            yield requested.popleft().result()


def _range(remote: Remote, start: int, stop: int) -> bytes:
    """Bytes `start` to `stop`, requested again after a failure, with longer and longer pauses."""
    attempt = 1
    while True:
        try:
            block = remote.root.read(start, stop)
            if len(block) == stop - start:
                return block
            error = remote.root.failure(EOFError(f"{len(block):,} of {stop - start:,} bytes came"), "read")
        except StoreError as failure:
            error = failure
        # The name of a file may be listed where its content may not be read.
        if error.refused:
            raise ConfigError(str(error))
        if error.missing or attempt == _ATTEMPTS:
            raise StoreError(f"{error}; from byte {start:,} on: start again, and it continues from there")
        time.sleep(2 ** (attempt - 1) / 4)
        attempt += 1


# ---- files beside


def _hidden_file(target: Path, kind: str) -> Path:
    """A hidden file beside the target; `kind`: its suffix, as the module's docstring lists them."""
    return target.with_name(f".{target.name}.{kind}")


def _origin(remote: Remote) -> dict[str, str]:
    """The fields of a record that identify a file and its version."""
    root = remote.root
    source = unsigned(root.path) if root.scheme in _WEB_SCHEMES else root.shown
    return {"source": source, "version": remote.version}


def _write_record(target: Path, kind: str, facts: dict[str, Any]) -> None:
    Root.of(_hidden_file(target, kind)).write(json.dumps(facts, indent=2).encode() + b"\n")


def _read_record(target: Path, kind: str) -> dict[str, Any]:
    """A record; empty where there is none, or none that can be used."""
    try:
        with os.fdopen(open_own(_hidden_file(target, kind), os.O_RDONLY), "rb") as file:
            record = json_value(file.read())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


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
