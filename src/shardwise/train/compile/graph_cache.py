"""The folder that keeps compiled graphs: for each graph a file with the facts that decide its code and its binaries.

A file `KEY.zip` is written beside its place and renamed, so that it is whole or not there, whoever else reads, writes
or dies; any number of jobs can share the folder, on a network disk too. KEY is a hash of the graph's facts. A damaged
file is removed, and its graph compiled again. The files hold programs, so a folder or a file that anyone may write, or
that another user may have put there, is refused. A folder is as trusted as its owner and, where a team shares it, its
group; an export is as trusted as its writer.

`torch.compiler.save_cache_artifacts` would not do: of a CPU's kernels it has the source alone, which each start would
compile, and count as taken from the cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import time
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from shardwise.base import files, yaml_and_json
from shardwise.base.errors import ConfigError

FACTS = "facts.json"
_NAME = re.compile(r"[0-9a-f]{32}\.zip")
_DAMAGED = (zipfile.BadZipFile, zlib.error, ValueError, KeyError, EOFError, NotImplementedError)
_UNREADABLE = (OSError, *_DAMAGED)
Facts = Mapping[str, Any]
"""Facts that decide the code of a graph, in JSON's types."""


def graph_label(unit: str, training: bool) -> str:
    """The name of a compiled graph in messages."""
    return f"{unit} ({'training' if training else 'evaluation'})"


def graph_key(facts: Facts) -> str:
    """The key of a compiled graph in the cache: 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class CachedGraph:
    """A compiled graph in the cache; `used`: its last time of use, in seconds since 1970."""

    path: Path
    facts: Facts
    bytes: int
    used: float


class GraphCache:
    """The compiled graphs in a folder, which need not exist yet.

    Raises:
        ConfigError: the folder cannot be written, by the methods that do.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = files.reason_of(error)
            raise ConfigError(
                f"compile.cache_dir ({self.root}) cannot be written: {reason}; set it to another folder"
            ) from error

    def find(self, facts: Facts) -> CachedGraph | None:
        """The graph with exactly these facts."""
        return self._entry(self.root / f"{graph_key(facts)}.zip")

    def entries(self) -> list[CachedGraph]:
        """All graphs, in the order of their last use, the latest first. Files that cannot be read are left out."""
        entries = [entry for path in self._paths() if (entry := self._entry(path)) is not None]
        return sorted(entries, key=lambda entry: -entry.used)

    def _paths(self) -> list[Path]:
        return sorted(path for path in self.root.glob("*.zip") if _NAME.fullmatch(path.name))

    def read(self, entry: CachedGraph) -> zipfile.ZipFile | None:
        """The whole file of a graph, in memory; None if it cannot be read. A damaged one is removed."""
        try:
            with _open(entry.path) as file:
                archive = zipfile.ZipFile(io.BytesIO(file.read()))
            if archive.testzip() is None:
                with contextlib.suppress(OSError):
                    os.utime(entry.path)  # may be refused in a folder that another user wrote
                return archive
        except OSError:
            # An error of the disk, which may be a network's, or the file was removed meanwhile: its content may be
            # intact.
            return None
        except _DAMAGED:
            pass
        self.remove(entry.facts)
        return None

    def remove(self, facts: Facts) -> None:
        """Remove the graph with exactly these facts, if it is there and the folder can be written."""
        with contextlib.suppress(OSError):
            (self.root / f"{graph_key(facts)}.zip").unlink()

    def store(self, facts: Facts, folder: Path, compiled: Iterable[Path]) -> CachedGraph:
        """Keep files of a folder as the graph with these facts."""
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            archive.writestr(FACTS, json.dumps(facts, sort_keys=True))
            for path in sorted(compiled):
                archive.write(path, path.relative_to(folder))
        return self._write(facts, packed.getvalue())

    def _write(self, facts: Facts, content: bytes) -> CachedGraph:
        self.require_writable()
        path = self.root / f"{graph_key(facts)}.zip"
        with self._writing():
            files.write_atomic(path, content, mode=0o664)
        return CachedGraph(path, facts, len(content), time.time())

    def prune(self, most_bytes: float, kept: Iterable[Facts] = ()) -> list[CachedGraph]:
        """Remove and return the graphs that were used longest ago until so many bytes are left; `kept` stay anyway."""
        kept_keys = {graph_key(facts) for facts in kept}
        size = 0
        removed = []
        # The kept ones are counted first; the sort leaves all others in the order of their last use.
        for entry in sorted(self.entries(), key=lambda entry: entry.path.stem not in kept_keys):
            size += entry.bytes
            if size > most_bytes and entry.path.stem not in kept_keys:
                with contextlib.suppress(OSError):
                    entry.path.unlink()
                    removed.append(entry)
        return removed

    def require_writable(self) -> None:
        """Make the folder, and a file in it."""
        with self._writing():
            files.make_folder(self.root)
            files.require_trusted(self.root, files.ANYONE_WRITES)
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

    def clean(self) -> tuple[int, int]:
        """Remove all graphs; returns their number and their bytes."""
        paths = self._paths()
        with self._writing():
            size = sum(path.stat().st_size for path in paths)
            for path in paths:
                path.unlink(missing_ok=True)
        return len(paths), size

    def export(self, target: Path) -> list[CachedGraph]:
        """Write all graphs into one file; OSError if it cannot be written."""
        entries = self.entries()
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
            for entry in entries:
                archive.write(entry.path, entry.path.name)
        files.write_atomic(target, packed.getvalue())
        return entries

    def take_in(self, source: Path) -> list[CachedGraph]:
        """Add the graphs of an exported file; ConfigError, and nothing is added, if it is no export, or damaged."""
        wrong = f"{source} must be a file that `shardwise compile --export` wrote"
        try:
            with zipfile.ZipFile(source) as archive:
                content = [archive.read(name) for name in archive.namelist()]
            graphs = [(_facts(io.BytesIO(packed)), packed) for packed in content]
        except FileNotFoundError:
            raise ConfigError(f"there is no file {source}") from None
        except _UNREADABLE as error:
            raise ConfigError(f"{wrong}, and cannot be read as one ({error})") from None
        if not graphs:
            raise ConfigError(f"{wrong}, and holds no graph")
        return [self._write(facts, packed) for facts, packed in graphs]

    def _entry(self, path: Path) -> CachedGraph | None:
        try:
            with _open(path) as file:
                status = os.fstat(file.fileno())
                return CachedGraph(path, _facts(file), status.st_size, status.st_mtime)
        except _UNREADABLE:
            return None


def _open(path: Path) -> BinaryIO:
    """Open the file of a graph, which no other user may have put there."""
    return os.fdopen(files.open_own(path, os.O_RDONLY, files.ANYONE_WRITES), "rb")


def _facts(archive_file: BinaryIO) -> Facts:
    with zipfile.ZipFile(archive_file) as archive:
        facts: object = yaml_and_json.json_value(archive.read(FACTS))
    if not isinstance(facts, dict) or not {"unit", "training"} <= facts.keys():
        raise ValueError("it has no facts of a graph")
    return facts
