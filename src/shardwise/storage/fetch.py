"""Copies files from anywhere that fsspec reads to this machine: resumable, checked, once however many ask.

Beside a file NAME there are, hidden by a dot:

    .NAME.fetch         what has come so far, while it comes
    .NAME.fetch.json    its source, and the version of it
    .NAME.fetched.json  of a complete file: its source, its size and its SHA-256
    .NAME.lock          one process fetches, the others wait

Where one of these is a link, it is not followed. Of a URL the records have what identifies the file, and nothing of
what signs it: a presigned URL is another each time.
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
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from shardwise.errors import ConfigError, listing
from shardwise.files import NoLocksError, lock, new_file, open_lock, open_own, to_disk
from shardwise.names import name_problem
from shardwise.redaction import unsigned
from shardwise.storage.reach import PATIENCE_SECONDS, in_time
from shardwise.storage.root import Root, StoreError
from shardwise.units import size as size_text

_RANGE = 1 << 23
_RANGES_AT_ONCE = 4
_ATTEMPTS = 5
_WEB = ("http", "https")
_ABSENT = (HTTPStatus.NOT_FOUND, HTTPStatus.GONE)
_VERSIONS = ("ETag", "etag", "Content-MD5", "Last-Modified", "LastModified", "last_modified", "mtime")
"""Facts that filesystems report of a file, and that change with its content."""
_PATTERN = frozenset("*?[")
_SHOWN = 3
_RECORD = re.compile(r"(.*/)?\.[^/]+\.(fetch|fetch\.json|fetched\.json)")

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Remote:
    """A file that can be fetched.

    Attributes:
        root: where it is.
        name: relative to the folder or pattern that was named.
        size: None where the server does not report it.
        version: changes when the file does, as far as the server reports it.
        ranges: whether the server sends parts of it.
    """

    root: Root
    name: str
    size: int | None
    version: str
    ranges: bool


@dataclass(frozen=True)
class Fetched:
    """A file that is on this machine; `came`: bytes that this call fetched."""

    path: Path
    size: int
    sha256: str
    came: int


def find(url: str) -> list[Remote]:
    """The files that a URL or a path names: one file, those of a folder, or what a pattern matches.

    Raises:
        ConfigError: there are none, or the URL cannot be read by what is installed.
        StoreError: the place does not answer.
    """
    root = Root.of(url)
    pattern = root.scheme not in _WEB and not _PATTERN.isdisjoint(root.path)
    try:
        return in_time(root, lambda: _matching(root) if pattern else _below(root))
    except StoreError as error:
        if error.missing:
            raise ConfigError(str(error)) from None
        raise


def fetch(
    remote: Remote,
    target: Path,
    sha256: str | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
    announce: Callable[[str], None] | None = None,
) -> Fetched:
    """Brings one file to `target`, unless it is there as it was fetched, or has that SHA-256.

    The next call continues a fetch that was interrupted, unless the source has changed. Any number of processes may
    call it at once: one fetches. The file appears when it is complete and on the disk.

    Args:
        sha256: what the file's SHA-256 must be; None for any.
        force: replace a file that was not fetched from there.
        progress: called with the number of bytes that came since the last call.
        announce: called with one line for the user.

    Raises:
        ConfigError: another file is at `target`, the disk has no room, or the SHA-256 is not that which was asked for.
        StoreError: the source cannot be read, or `target` cannot be written.
    """
    here = Root.of(target)
    with here.store_errors("written"):
        target.parent.mkdir(parents=True, exist_ok=True)
    with _alone(target, announce):
        found = _there(remote, target, sha256, force, announce)
        if found is not None:
            return found
        part = _beside(target, "fetch")
        with here.store_errors("written"):
            begun, digest = _bring(remote, target, part, progress, announce)
        if _info(remote.root)[1] != remote.version:
            part.unlink()
            raise StoreError(f"{remote.root} changed while it was fetched: start again once it is complete")
        return _finish(remote, target, part, digest.hexdigest(), sha256, begun)


# ---- what there is


def _matching(root: Root) -> list[Remote]:
    with root.store_errors("read"):
        infos = root.fs.glob(root.path, detail=True)
    files = sorted((path, info) for path, info in infos.items() if info["type"] == "file")
    found = _sent([_remote(_at(root, path), info) for path, info in files])
    if not found:
        raise ConfigError(f"{root} must match a file or more, and it matches none")
    return _inside(root, found)


def _below(root: Root) -> list[Remote]:
    if root.scheme in _WEB or not root.is_folder():
        return _inside(root, [_remote(root, _info(root)[0])])
    with root.store_errors("read"):
        infos = root.fs.find(root.path, detail=True)
    above = root.path.rstrip("/") + "/"
    found = _sent([_remote(_at(root, path), info, path.removeprefix(above)) for path, info in sorted(infos.items())])
    if not found:
        raise ConfigError(f"{root} must hold files, and the folder has none")
    return _inside(root, found)


def _sent(found: list[Remote]) -> list[Remote]:
    """All but the markers of folders that an object store may hold, and what an earlier fetch left beside a file there:
    here it would be taken for a record of this machine.
    """
    return [
        remote
        for remote in found
        if not (remote.root.path.endswith("/") and not remote.size) and not _RECORD.fullmatch(remote.name)
    ]


def _inside(root: Root, remotes: list[Remote]) -> list[Remote]:
    """The files of a place, each with a name that stays in the folder that they are fetched to.

    Raises:
        ConfigError: the name of one leads elsewhere.
    """
    if wrong := [problem for remote in remotes if (problem := name_problem(remote.name, nested=True))]:
        raise ConfigError(
            f"{root}: the name of each file ({listing(wrong, most=_SHOWN)}) must lie in the folder that it is "
            "fetched to: nothing was fetched; name the others by a pattern, or rename it there"
        )
    return remotes


def _info(root: Root) -> tuple[dict[str, Any], str]:
    """What the filesystem reports of a file, and its version."""
    with root.store_errors("read"):
        try:
            info: dict[str, Any] = root.fs.info(root.path)
            return info, _version(info)
        except FileNotFoundError as error:
            # Of the web fsspec says so whatever the server answered, if it did.
            if error.__cause__ is None or getattr(error.__cause__, "status", None) in _ABSENT:
                raise FileNotFoundError from None
            raise root.failure(_plain(error.__cause__), "read") from None


def _plain(error: BaseException) -> Exception:
    status = getattr(error, "status", None)
    if status is None:
        return error if isinstance(error, Exception) else RuntimeError(str(error))
    return RuntimeError(f"its server answers {status} ({getattr(error, 'message', '')})")


def _at(root: Root, path: str) -> Root:
    shown = path if root.is_local else f"{root.scheme}://{path}"
    return Root(path, shown, root.scheme, root._remote)


def _remote(root: Root, info: dict[str, Any], name: str | None = None) -> Remote:
    if name is None and root.scheme in _WEB:
        parts = urlsplit(root.path)
        name = parts.path.rstrip("/").rpartition("/")[2] or parts.hostname
    ranges = info.get("size") is not None and (root.scheme not in _WEB or _gives_ranges(root.path))
    return Remote(root, name or root.name, info.get("size"), _version(info), ranges)


def _version(info: dict[str, Any]) -> str:
    return json.dumps([info.get("size"), {key: str(info[key]) for key in _VERSIONS if info.get(key)}])


def _gives_ranges(url: str) -> bool:
    """Whether a web server sends a part of a file when asked for one; many do not announce it."""
    request = urllib.request.Request(url, headers={"Range": "bytes=0-0"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
            return bool(answer.status == HTTPStatus.PARTIAL_CONTENT)
    except (OSError, ValueError, HTTPException):
        return False


# ---- what is here


def _there(
    remote: Remote, target: Path, sha256: str | None, force: bool, announce: Callable[[str], None] | None
) -> Fetched | None:
    """The file, where it is here and is what it should be."""
    if target.is_dir():
        raise ConfigError(f"{target} is a folder, where {remote.root} is to be: name another place")
    if not target.exists():
        return None
    record, digest = _read_record(_beside(target, "fetched.json")), _digest(target)
    ours = record.get("source") == _source(remote)
    if digest == (sha256 or (record.get("sha256") if ours and record.get("version") == remote.version else None)):
        return Fetched(target, target.stat().st_size, digest, 0)
    if not (ours or force):
        raise ConfigError(
            f"{target} is there already and was not fetched from {remote.root}: name another place, or replace it by "
            "--force"
        )
    if announce is not None:
        same = record.get("version") == remote.version
        why = "is not as it was fetched" if same and digest != record.get("sha256") else "is there in another version"
        announce(f"{target} {why}: fetching it again")
    return None


def _begun(remote: Remote, part: Path) -> BinaryIO | None:
    """The part of the file that an earlier call fetched, opened at its beginning; None where the source has changed."""
    record = _read_record(part.with_name(f"{part.name}.json"))
    if not remote.ranges or record != {"source": _source(remote), "version": remote.version}:
        return None
    with contextlib.suppress(OSError):  # there is none, or a link
        file = os.fdopen(open_own(part, os.O_RDWR), "r+b")
        if os.fstat(file.fileno()).st_size <= (remote.size or 0):
            return file
        file.close()
    return None


def _source(remote: Remote) -> str:
    """What identifies the source in records."""
    return unsigned(remote.root.path) if remote.root.scheme in _WEB else remote.root.shown


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with Root.of(path).store_errors("read"), path.open("rb") as file:
        _update(digest, file)
    return str(digest.hexdigest())


def _update(digest: Any, file: BinaryIO) -> None:
    while block := file.read(_RANGE):
        digest.update(block)


def _require_room(remote: Remote, target: Path, begun: int) -> None:
    free = Root.of(target.parent).free_bytes()
    if remote.size is not None and free is not None and remote.size - begun > free:
        raise ConfigError(
            f"{target.parent} ({size_text(free)} free) must have room for {remote.root} "
            f"({size_text(remote.size - begun)} to come): make room, or name a place on another disk"
        )


# ---- what comes


def _bring(
    remote: Remote,
    target: Path,
    part: Path,
    progress: Callable[[int], None] | None,
    announce: Callable[[str], None] | None,
) -> tuple[int, Any]:
    """Fills `part`; returns its bytes of before, and the digest of all."""
    digest, begun = hashlib.sha256(), 0
    with contextlib.ExitStack() as held:
        file = _begun(remote, part)
        if file is not None:
            held.enter_context(file)
            _update(digest, file)
            begun = file.tell()
        _require_room(remote, target, begun)
        if file is None:
            file = held.enter_context(new_file(part))
        _record(_beside(target, "fetch.json"), {"source": _source(remote), "version": remote.version})
        if begun and announce is not None:
            announce(f"going on with {target.name} after {size_text(begun)}")
        if begun and progress is not None:
            progress(begun)
        for block in _blocks(remote, begun):
            file.write(block)
            digest.update(block)
            if progress is not None:
                progress(len(block))
        to_disk(file)
    return begun, digest


def _blocks(remote: Remote, begun: int) -> Iterator[bytes]:
    """The bytes after the first `begun` ones, in order."""
    if not remote.ranges:
        yield from _stream(remote.root)
        return
    assert remote.size is not None
    starts = iter(range(begun, remote.size, _RANGE))
    with ThreadPoolExecutor(_RANGES_AT_ONCE, thread_name_prefix="fetch") as threads:
        coming: deque[Future[bytes]] = deque()
        try:
            for start in starts:
                coming.append(threads.submit(_range, remote, start, min(start + _RANGE, remote.size)))
                if len(coming) == _RANGES_AT_ONCE:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()
        finally:
            for each in coming:
                each.cancel()


def _range(remote: Remote, start: int, stop: int) -> bytes:
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            found = remote.root.read(start, stop)
            if len(found) == stop - start:
                return found
            error = remote.root.failure(EOFError(f"{len(found):,} of {stop - start:,} bytes came"), "read")
        except StoreError as failure:
            error = failure
        if error.missing or attempt == _ATTEMPTS:
            raise StoreError(f"{error}; from byte {start:,} on: start again, and it continues from there")
        time.sleep(2 ** (attempt - 1) / 4)
    raise AssertionError("the last attempt returns or raises")


def _stream(root: Root) -> Iterator[bytes]:
    with root.store_errors("read"), root.fs.open(root.path, "rb") as file:
        while block := file.read(_RANGE):
            yield block


def _finish(remote: Remote, target: Path, part: Path, found: str, sha256: str | None, begun: int) -> Fetched:
    size = part.stat().st_size
    wrong = None
    if remote.size is not None and size != remote.size:
        wrong = f"its size ({size:,} bytes) must be that which its server reports ({remote.size:,})"
    elif sha256 is not None and found != sha256:
        wrong = f"its SHA-256 ({found}) must be that which was asked for ({sha256})"
    record = part.with_name(f"{part.name}.json")
    with Root.of(target).store_errors("written"):
        if wrong is not None:
            part.unlink()
            record.unlink()
            raise ConfigError(f"{remote.root}: {wrong}: the file there is another one, or it was changed on its way")
        facts = {"source": _source(remote), "version": remote.version, "size": size, "sha256": found}
        _record(_beside(target, "fetched.json"), facts)
        part.replace(target)
        record.unlink()
    Root.of(target.parent).sync()
    return Fetched(target, size, found, size - begun)


# ---- files beside


def _beside(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{kind}")


def _record(path: Path, facts: dict[str, Any]) -> None:
    Root.of(path).write(json.dumps(facts, indent=2).encode() + b"\n")


def _read_record(path: Path) -> dict[str, Any]:
    try:
        with os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
            found = json.loads(file.read())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@contextlib.contextmanager
def _alone(target: Path, announce: Callable[[str], None] | None) -> Iterator[None]:
    """Holds the only lock on `target`, where the file system supports locks."""
    path = _beside(target, "lock")
    with Root.of(target).store_errors("written"):
        file = open_lock(path)
    with file:
        with contextlib.suppress(NoLocksError):
            if not lock(file, wait=False):
                if announce is not None:
                    announce(f"waiting for another process that fetches {target.name}")
                lock(file, wait=True)
        yield
