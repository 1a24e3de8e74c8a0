"""The folder that keeps compiled graphs: for each one a file, with what decides its code and all that was compiled.

A file `KEY.zip` is written beside its place and renamed, so that it is whole or not there, whoever else reads, writes
or dies; any number of jobs can share the folder, on a network disk too. KEY is a hash of the graph's facts. Whatever
is damaged is removed, and compiled again. The files hold programs, so a folder or a file that anyone may write, or that
another user may have put in the way, is refused. A folder is as trusted as its owner and, where a team shares it, its
group; an export is as trusted as its writer.
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
from typing import Any, BinaryIO

from shardwise.base import files
from shardwise.base.errors import ConfigError
from shardwise.base.parsing import json_value

FACTS = "facts.json"
LOGS = "failed"
_NAME = re.compile(r"[0-9a-f]{32}\.zip")
_DAMAGED = (zipfile.BadZipFile, zlib.error, ValueError, KeyError, EOFError, NotImplementedError)
_UNREADABLE = (OSError, *_DAMAGED)
_OF_THE_MACHINE = ("code", "compiler", "processor", "python", "torch")
"""Facts that change when what made a compilation fail is mended."""

Facts = Mapping[str, Any]
"""What decides the code of a graph, in JSON's types."""


def name_of(unit: str, training: bool) -> str:
    """A graph as the user reads it."""
    return f"{unit} ({'training' if training else 'evaluation'})"


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

    def is_whole(self, entry: Entry) -> bool:
        """Whether a graph's file can be read, and has all its bytes; a damaged one is removed."""
        archive = self._opened(entry)
        if archive is not None:
            archive.close()
        return archive is not None

    def unpack(self, entry: Entry, folder: Path) -> bool:
        """Put what was compiled into a folder; false where the file cannot be read; a damaged one is removed.

        Raises:
            OSError: the folder cannot be written.
        """
        archive = self._opened(entry)
        if archive is None:
            return False
        with archive:
            archive.extractall(folder, [name for name in archive.namelist() if name != FACTS])
        with contextlib.suppress(OSError):
            os.utime(entry.path)  # a folder that others wrote may be read only
        return True

    def _opened(self, entry: Entry) -> zipfile.ZipFile | None:
        archive = None
        try:
            with _open(entry.path) as file:
                archive = zipfile.ZipFile(io.BytesIO(file.read()))
            if archive.testzip() is None:
                return archive
        except OSError:
            return None  # of the disk, which may be a network's, or removed meanwhile: nothing is said of its content
        except _DAMAGED:
            pass
        if archive is not None:
            archive.close()
        self.remove(entry.facts)
        return None

    def remove(self, facts: Facts) -> None:
        """Remove the graph with exactly these facts, if it is there and the folder can be written."""
        with contextlib.suppress(OSError):
            (self.root / f"{key_of(facts)}.zip").unlink()

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
        return self._write(facts, packed.getvalue())

    def _write(self, facts: Facts, content: bytes) -> Entry:
        self._make()
        path = self.root / f"{key_of(facts)}.zip"
        files.write_atomic(path, content, mode=0o664)
        self.log_of(facts).unlink(missing_ok=True)
        entry = self._entry(path)
        if entry is None:
            raise OSError(f"{path} was written and cannot be read")
        return entry

    def prune(self, most_bytes: float, kept: Iterable[Facts] = ()) -> list[Entry]:
        """Remove those that were used longest ago until the rest has at most so many bytes; returns the removed.

        Args:
            kept: facts of graphs that stay, whatever they need.
        """
        stay = {key_of(facts) for facts in kept}
        size, removed = 0, []
        for entry in sorted(self.entries(), key=lambda entry: entry.key not in stay):
            size += entry.bytes
            if size > most_bytes and entry.key not in stay:
                with contextlib.suppress(OSError):
                    entry.path.unlink()
                    removed.append(entry)
        return removed

    def require_writable(self) -> None:
        """Write a small file, and remove it.

        Raises:
            OSError: that is not possible.
        """
        self._make()
        probe = self.root / f".{os.getpid()}.zip.probe.tmp"
        files.write_atomic(probe, bytes(4096))
        probe.unlink()

    def require_trusted(self) -> None:
        """Raise ConfigError where any user may have put programs there; a folder that is not there yet passes."""
        try:
            files.require_trusted(self.root, files.ANYONE_WRITES)
        except files.UntrustedError as error:
            reason = files.reason_of(error)
            raise ConfigError(
                f"compile.cache_dir ({self.root}) cannot be trusted, and what is in it are programs: {reason}"
            ) from None

    def _make(self) -> None:
        files.make_folder(self.root)
        files.require_trusted(self.root, files.ANYONE_WRITES)

    def clean(self) -> tuple[int, int]:
        """Remove all graphs, logs and parts of files; returns the number of graphs and their bytes."""
        names = [path for path in self.root.glob("*.zip") if _NAME.fullmatch(path.name)]
        size = sum(path.stat().st_size for path in names)
        for path in (*names, *self.root.glob(".*.zip.*.tmp"), *(self.root / LOGS).glob("*.log")):
            path.unlink(missing_ok=True)
        return len(names), size

    # ---- failures, which are told and never kept as results

    def log_of(self, facts: Facts) -> Path:
        """Where `shardwise compile` leaves the output of a compilation that failed.

        The name stays when the model's code, the compiler or torch changes, so that a graph that failed is known then.
        """
        return self.root / LOGS / f"{key_of({k: v for k, v in facts.items() if k not in _OF_THE_MACHINE})}.log"

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
                    with _open(entry.path) as file:
                        archive.writestr(entry.path.name, file.read())
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
        if not content:
            raise ConfigError(f"{wrong}, and holds no graph")
        found = []
        for name, packed in content.items():
            try:
                facts = _facts(io.BytesIO(packed))
            except _UNREADABLE as error:
                raise ConfigError(f"{wrong}: {name} in it is no graph: {error}") from None
            if name != (own := f"{key_of(facts)}.zip"):
                raise ConfigError(f"{wrong}: {name} in it is no graph: its facts are of {own}")
            found.append((facts, packed))
        return [self._write(facts, packed) for facts, packed in found]

    def _entry(self, path: Path) -> Entry | None:
        try:
            with _open(path) as file:
                facts, status = _facts(file), os.fstat(file.fileno())
        except _UNREADABLE:
            return None
        return Entry(path, facts, status.st_size, status.st_mtime)


def _open(path: Path) -> BinaryIO:
    """Open the file of a graph, which no other user may have put there."""
    return os.fdopen(files.open_own(path, os.O_RDONLY, files.ANYONE_WRITES), "rb")


def _facts(archive_file: BinaryIO) -> Facts:
    with zipfile.ZipFile(archive_file) as archive:
        facts: object = json_value(archive.read(FACTS))
    if not isinstance(facts, dict) or not {"unit", "training"} <= facts.keys():
        raise ValueError("it has no facts of a graph")
    return facts


@contextlib.contextmanager
def writing(root: Path) -> Iterator[None]:
    """Turns a failure to write the folder into a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(not_written(root, error)) from error


def not_written(root: Path, error: OSError) -> str:
    """The sentence on a folder of graphs that cannot be written."""
    return f"compile.cache_dir ({root}) cannot be written: {files.reason_of(error)}; set it to another folder"
