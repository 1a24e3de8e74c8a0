"""The folder that keeps compiled graphs: for each one a file, with what decides its code and all that was compiled.

A file `KEY.zip` is written beside its place and renamed, so that it is whole or not there, whoever else reads, writes
or dies; any number of jobs can share the folder, on a network disk too. KEY is a hash of the graph's facts. Whatever
is damaged is removed, and compiled again. The files hold programs: a folder or an export is as trusted as its writer.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise import files
from shardwise.errors import ConfigError

FACTS = "facts.json"
LOGS = "failed"
_NAME = re.compile(r"[0-9a-f]{32}\.zip")
_UNREADABLE = (OSError, zipfile.BadZipFile, zlib.error, ValueError, KeyError, EOFError, NotImplementedError)

Facts = Mapping[str, Any]
"""What decides the code of a graph, in JSON's types."""


def key_of(facts: Facts) -> str:
    """The name of a graph: 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Entry:
    """A graph in the folder.

    Attributes:
        bytes: of its file.
        used: when it was written or last unpacked, in seconds since 1970.
    """

    path: Path
    facts: Facts
    bytes: int
    used: float

    @property
    def key(self) -> str:
        """The hash of its facts."""
        return self.path.stem


class GraphCache:
    """The graphs in a folder, which need not exist yet."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, facts: Facts) -> Entry | None:
        """The graph with exactly these facts."""
        return self._entry(self.root / f"{key_of(facts)}.zip")

    def entries(self) -> list[Entry]:
        """All graphs, those that were used last first. Files that cannot be read are left out."""
        names = sorted(path for path in self.root.glob("*.zip") if _NAME.fullmatch(path.name))
        found = [entry for path in names if (entry := self._entry(path)) is not None]
        return sorted(found, key=lambda entry: -entry.used)

    def nearest(self, facts: Facts) -> tuple[Entry, list[str]] | None:
        """The graph of the same unit and mode whose facts differ in the fewest keys from these, and those keys."""
        same = [entry for entry in self.entries() if all(entry.facts.get(k) == facts[k] for k in ("unit", "training"))]
        compared = [
            (entry, sorted(k for k in {*facts, *entry.facts} if facts.get(k) != entry.facts.get(k))) for entry in same
        ]
        return min(compared, key=lambda pair: len(pair[1]), default=None)

    def unpack(self, entry: Entry, folder: Path) -> bool:
        """Put what was compiled into a folder; false where the file is damaged, which is then removed.

        Raises:
            OSError: the folder cannot be written.
        """
        try:
            archive = zipfile.ZipFile(entry.path)
        except _UNREADABLE:
            return self._removed(entry)
        with archive:
            try:
                damaged = archive.testzip() is not None
            except _UNREADABLE:
                damaged = True
            if damaged:
                return self._removed(entry)
            archive.extractall(folder, [name for name in archive.namelist() if name != FACTS])
        with contextlib.suppress(OSError):
            os.utime(entry.path)  # a folder that others wrote may be read only
        return True

    def _removed(self, entry: Entry) -> bool:
        with contextlib.suppress(OSError):
            entry.path.unlink()
        return False

    def store(self, facts: Facts, folder: Path, compiled: Iterable[Path]) -> Entry:
        """Keep files of a folder as the graph with these facts.

        Raises:
            OSError: they cannot be written.
        """
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            archive.writestr(FACTS, json.dumps(facts, sort_keys=True))
            for path in sorted(compiled):
                archive.write(path, path.relative_to(folder))
        return self._write(key_of(facts), packed.getvalue())

    def _write(self, key: str, content: bytes) -> Entry:
        self.root.mkdir(parents=True, exist_ok=True)
        path = self.root / f"{key}.zip"
        files.write_atomic(path, content)
        (self.root / LOGS / f"{key}.log").unlink(missing_ok=True)
        entry = self._entry(path)
        if entry is None:
            raise OSError(f"{path} was written and cannot be read")
        return entry

    def prune(self, most_bytes: float) -> list[Entry]:
        """Remove those that were used longest ago until the rest has at most so many bytes; returns the removed."""
        kept, removed = 0, []
        for entry in self.entries():
            kept += entry.bytes
            if kept > most_bytes:
                with contextlib.suppress(OSError):
                    entry.path.unlink()
                    removed.append(entry)
        return removed

    def clean(self) -> tuple[int, int]:
        """Remove all graphs, logs and parts of files; returns the number of graphs and their bytes."""
        names = [path for path in self.root.glob("*.zip") if _NAME.fullmatch(path.name)]
        size = sum(path.stat().st_size for path in names)
        for path in (*names, *self.root.glob(".*.zip.*.tmp"), *(self.root / LOGS).glob("*.log")):
            path.unlink(missing_ok=True)
        return len(names), size

    # ---- failures, which are told and never kept as results

    def log_of(self, facts: Facts) -> Path:
        """Where `shardwise compile` leaves the output of a compilation that failed."""
        return self.root / LOGS / f"{key_of(facts)}.log"

    # ---- one file to ship

    def export(self, target: Path) -> list[Entry]:
        """Write all graphs into one file.

        Raises:
            OSError: it cannot be written.
        """
        found = self.entries()
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
                for entry in found:
                    archive.write(entry.path, entry.path.name)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
        return found

    def take_in(self, source: Path) -> list[Entry]:
        """Add the graphs of an exported file.

        Raises:
            ConfigError: it is none, or is damaged; nothing is added then.
            OSError: they cannot be written.
        """
        wrong = f"{source} must be a file that `shardwise compile --export` wrote"
        try:
            with zipfile.ZipFile(source) as archive:
                if archive.testzip() is not None:
                    raise ConfigError(f"{source} is damaged: export it again")
                content = {name: archive.read(name) for name in archive.namelist()}
        except FileNotFoundError:
            raise ConfigError(f"there is no file {source}") from None
        except _UNREADABLE as error:
            raise ConfigError(f"{wrong}, and cannot be read as one ({error})") from None
        for name, packed in content.items():
            try:
                is_sound = _NAME.fullmatch(name) and key_of(_facts(io.BytesIO(packed))) == name.removesuffix(".zip")
            except _UNREADABLE:
                is_sound = False
            if not is_sound:
                raise ConfigError(f"{wrong}: {name} in it is no graph")
        return [self._write(name.removesuffix(".zip"), packed) for name, packed in content.items()]

    def _entry(self, path: Path) -> Entry | None:
        try:
            facts, status = _facts(path), path.stat()
        except _UNREADABLE:
            return None
        return Entry(path, facts, status.st_size, status.st_mtime)


def _facts(archive_file: Path | io.BytesIO) -> Facts:
    with zipfile.ZipFile(archive_file) as archive:
        facts: Facts = json.loads(archive.read(FACTS))
    return facts


@contextlib.contextmanager
def writing(root: Path) -> Iterator[None]:
    """Turns a failure to write the folder into a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"compile.cache_dir ({root}) cannot be written: {files.reason_of(error)}; set it to a folder with room"
        ) from error
