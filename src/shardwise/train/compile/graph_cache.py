"""The folder that keeps compiled graphs: for each graph a file with the facts that decide its code and its binaries.

A file `KEY.zip` is written beside its place and renamed, so that it is whole or not there, whoever else reads, writes
or dies; any number of jobs can share the folder, on a network disk too. KEY is a hash of the graph's facts. A damaged
file is removed, and its graph compiled again. The files hold programs, so a folder or a file that anyone may write, or
that another user may have put there, is refused. A folder is as trusted as its owner and, where a team shares it, its
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

from shardwise.base import files, parsing
from shardwise.base.errors import ConfigError

FACTS = "facts.json"
LOGS = "failed"
_NAME = re.compile(r"[0-9a-f]{32}\.zip")
_DAMAGED = (zipfile.BadZipFile, zlib.error, ValueError, KeyError, EOFError, NotImplementedError)
_UNREADABLE = (OSError, *_DAMAGED)
_MACHINE_FACTS = ("code", "compiler", "processor", "python", "torch")
"""Facts that change when the cause of a failed compilation is mended."""

Facts = Mapping[str, Any]
"""Facts that decide the code of a graph, in JSON's types."""


def name_of(unit: str, training: bool) -> str:
    """The name of a graph in messages."""
    return f"{unit} ({'training' if training else 'evaluation'})"


def key_of(facts: Facts) -> str:
    """The name of a graph: 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class CachedGraph:
    """A graph in the folder.

    Attributes:
        bytes: size of the file.
        used: time at which it was written or last unpacked, in seconds since 1970.
    """

    path: Path
    facts: Facts
    bytes: int
    used: float

    @property
    def key(self) -> str:
        """The hash of the facts."""
        return self.path.stem


class GraphCache:
    """The graphs in a folder, which need not exist yet."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, facts: Facts) -> CachedGraph | None:
        """The graph with exactly these facts."""
        return self._entry(self.root / f"{key_of(facts)}.zip")

    def entries(self) -> list[CachedGraph]:
        """All graphs, in the order of their last use, the latest first. Files that cannot be read are left out."""
        paths = sorted(path for path in self.root.glob("*.zip") if _NAME.fullmatch(path.name))
        entries = [entry for path in paths if (entry := self._entry(path)) is not None]
        return sorted(entries, key=lambda entry: -entry.used)

    def nearest(self, facts: Facts) -> tuple[CachedGraph, list[str]] | None:
        """The graph of the same unit and mode whose facts differ in the fewest keys from these, and those keys."""
        compared = []
        for entry in self.entries():
            if all(entry.facts.get(key) == facts[key] for key in ("unit", "training")):
                keys = {*facts, *entry.facts}
                compared.append((entry, sorted(key for key in keys if facts.get(key) != entry.facts.get(key))))
        return min(compared, key=lambda pair: len(pair[1]), default=None)

    def is_whole(self, entry: CachedGraph) -> bool:
        """Return whether a graph's file can be read and has all its bytes; a damaged file is removed."""
        archive = self._opened(entry)
        if archive is not None:
            archive.close()
        return archive is not None

    def unpack(self, entry: CachedGraph, folder: Path) -> bool:
        """Unpack the binaries into a folder; False where the file cannot be read. A damaged file is removed.

        Raises:
            OSError: the folder cannot be written.
        """
        archive = self._opened(entry)
        if archive is None:
            return False
        with archive:
            archive.extractall(folder, [name for name in archive.namelist() if name != FACTS])
        with contextlib.suppress(OSError):
            os.utime(entry.path)  # may be refused in a folder that another user wrote
        return True

    def _opened(self, entry: CachedGraph) -> zipfile.ZipFile | None:
        archive = None
        try:
            with _open(entry.path) as file:
                archive = zipfile.ZipFile(io.BytesIO(file.read()))
            if archive.testzip() is None:
                return archive
        except OSError:
            # An error of the disk, which may be a network's, or the file was removed meanwhile: its content may be
            # intact.
            return None
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

    def store(self, facts: Facts, folder: Path, compiled: Iterable[Path]) -> CachedGraph:
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

    def _write(self, facts: Facts, content: bytes) -> CachedGraph:
        self._make()
        path = self.root / f"{key_of(facts)}.zip"
        files.write_atomic(path, content, mode=0o664)
        self.log_of(facts).unlink(missing_ok=True)
        entry = self._entry(path)
        if entry is None:
            raise OSError(f"{path} was written and cannot be read")
        return entry

    def prune(self, most_bytes: float, kept: Iterable[Facts] = ()) -> list[CachedGraph]:
        """Remove the graphs that were used longest ago until at most so many bytes are left; returns the removed.

        Args:
            kept: facts of graphs that stay, whatever their size.
        """
        kept_keys = {key_of(facts) for facts in kept}
        size = 0
        removed = []
        # The kept ones are counted first; the sort leaves all others in the order of their last use.
        for entry in sorted(self.entries(), key=lambda entry: entry.key not in kept_keys):
            size += entry.bytes
            if size > most_bytes and entry.key not in kept_keys:
                with contextlib.suppress(OSError):
                    entry.path.unlink()
                    removed.append(entry)
        return removed

    def require_writable(self) -> None:
        """Write a small file, and remove it.

        Raises:
            OSError: the folder cannot be written.
        """
        self._make()
        files.require_writable(self.root)

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

    # ---- failures, which are shown and never kept as results

    def log_of(self, facts: Facts) -> Path:
        """The path at which `shardwise compile` leaves the output of a compilation that failed.

        The name stays when the model's code, the compiler or torch changes, so that a graph that failed is known then.
        """
        lasting_facts = {key: value for key, value in facts.items() if key not in _MACHINE_FACTS}
        return self.root / LOGS / f"{key_of(lasting_facts)}.log"

    # ---- one file to ship

    def export(self, target: Path) -> list[CachedGraph]:
        """Write all graphs into one file.

        Raises:
            OSError: it cannot be written.
        """
        entries = self.entries()
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
                for entry in entries:
                    with _open(entry.path) as file:
                        archive.writestr(entry.path.name, file.read())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
        return entries

    def take_in(self, source: Path) -> list[CachedGraph]:
        """Add the graphs of an exported file.

        Raises:
            ConfigError: the file is no export, or is damaged; nothing is added then.
            OSError: the graphs cannot be written.
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
        graphs = []
        for name, packed in content.items():
            try:
                facts = _facts(io.BytesIO(packed))
            except _UNREADABLE as error:
                raise ConfigError(f"{wrong}: {name} in it is no graph: {error}") from None
            name_by_facts = f"{key_of(facts)}.zip"
            if name != name_by_facts:
                raise ConfigError(f"{wrong}: {name} in it is no graph: its facts are of {name_by_facts}")
            graphs.append((facts, packed))
        return [self._write(facts, packed) for facts, packed in graphs]

    def _entry(self, path: Path) -> CachedGraph | None:
        try:
            with _open(path) as file:
                facts = _facts(file)
                status = os.fstat(file.fileno())
        except _UNREADABLE:
            return None
        return CachedGraph(path, facts, status.st_size, status.st_mtime)


def _open(path: Path) -> BinaryIO:
    """Open the file of a graph, which no other user may have put there."""
    return os.fdopen(files.open_own(path, os.O_RDONLY, files.ANYONE_WRITES), "rb")


def _facts(archive_file: BinaryIO) -> Facts:
    with zipfile.ZipFile(archive_file) as archive:
        facts: object = parsing.json_value(archive.read(FACTS))
    if not isinstance(facts, dict) or not {"unit", "training"} <= facts.keys():
        raise ValueError("it has no facts of a graph")
    return facts


@contextlib.contextmanager
def write_errors_explained(root: Path) -> Iterator[None]:
    """Turn a failure to write the folder into a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(not_written(root, error)) from error


def not_written(root: Path, error: OSError) -> str:
    """The sentence on a folder of graphs that cannot be written."""
    return f"compile.cache_dir ({root}) cannot be written: {files.reason_of(error)}; set it to another folder"
