"""Sources of text: built-in texts, the user's files and data sets, as pieces of documents; and the files of streams.

A document is a file, a JSON line, or a topic of Python's documentation. It arrives in pieces of bounded size, so that
memory stays bounded whatever the size of a file, and so that one long file is encoded on all cores. A file of a stream
can be read from any of its documents on.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import re
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from shardwise.base.errors import DataError, RunError, ShardwiseError, first_line, listing
from shardwise.base.files import user_path
from shardwise.base.units import counted
from shardwise.config import BUILT_IN_TEXTS, DataConfig
from shardwise.data.reading import content, jsonl_parquet
from shardwise.data.reading.dataset_tables import DataSet, names_data_set, open_arrow_table

PIECE_CHARACTERS = content.BLOCK
# Characters before the end of a piece among which white space is looked for; words are much shorter.
_BACKTRACK = 1 << 12
# A bound, as installations differ in size: with it they give about the same amount of text.
_PYTHON_BYTES = 12_000_000
# Tests and installed packages differ between installations; `encodings` is tables of code pages, hardly text.
_PYTHON_SKIPPED = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings"}
)
_TOPICS = "pydoc_data/topics.py"
_CORPUS = Path(__file__).parent.parent / "corpus"
# Files that programs leave in a folder of data: marks of complete jobs, checksums, descriptions of columns, locks.
_BOOKKEEPING = re.compile(
    r"_[\w-]*|.*\.(crc|md5|sha\d+|lock)|(md5|sha\d+)sums?(\.txt)?|(dataset_infos?|dataset_dict|state)\.json",
    re.IGNORECASE,
)
_BOOKKEEPING_FOLDERS = frozenset({"_delta_log", "_spark_metadata", "_temporary", "__MACOSX"})
# Texts of people about data, and programs, settings and pages. Next to lines or rows these are no data; in a folder of
# texts they may be. A .txt and a file without a suffix are data in any case.
_NO_ROWS = re.compile(
    r"(readme|licen[cs]e|copying|notice|citation|changelog|contributing|authors)([_-]\w+)?(\.txt)?"
    r"|.*\.(bib|cff|markdown|md|rst|tex|css|htm|html|svg|xhtml|xml|cfg|conf|ini|toml|yaml|yml|err|log|out|bat|c|cc|cpp|cu"
    r"|go|h|ipynb|java|js|pl|ps1|py|r|rb|rs|sh|slurm|ts)",
    re.IGNORECASE,
)
# A file changed this recently may change again within the resolution of its time stamp.
_SETTLED_SECONDS = 2.0


@dataclass(frozen=True)
class TextPiece:
    """A part of a document's text; the next piece continues it unless `ends_document`."""

    text: str
    ends_document: bool

    @property
    def characters(self) -> int:
        """The size of its text."""
        return len(self.text)


@dataclass(frozen=True)
class FileSource:
    """The text of data files, a document a file, line or row; `kind`: of all; None: the content of each decides."""

    name: str
    files: tuple[Path, ...]
    kind: content.Kind | None
    text_key: str
    left_out: tuple[Path, ...] = ()

    @cached_property
    def readings(self) -> tuple[content.FileReading, ...]:
        """The reading of each file; DataError if one holds no text."""
        return tuple(content.reading_of(path, self.kind, self.text_key) for path in self.files)

    def require_text(self) -> None:
        """Raises DataError if the first line or row of a file has no text, or all are empty; one plain text is read."""
        looked_at: set[content.FileReading] = set()
        for path, reading in zip(self.files, self.readings, strict=True):
            if reading.kind == "text" and reading in looked_at:
                continue
            for _, blocks in islice(jsonl_parquet.documents_of_file(path, reading.kind, self.text_key), 1):
                if next(iter(blocks), None) is not None or reading.kind != "text":
                    looked_at.add(reading)
        if not looked_at:
            raise self._without_text()

    def _without_text(self) -> DataError:
        return DataError(f"{self.name} holds no text: it is empty, or all of its documents are")

    def described(self) -> str:
        """The readings of the files, and the files that are left out; DataError if a file holds no text."""
        return content.described_readings(list(zip(self.files, self.readings, strict=True))) + self.left_out_note()

    def left_out_note(self) -> str:
        """The files that are left out, as the end of a sentence."""
        if not self.left_out:
            return ""
        return f", left out {listing((path.name for path in self.left_out), most=3)}"

    def bytes_within(self, limit: int) -> int | None:
        """The size of the files; None if it is above `limit`, or if files are packed, whose text may be larger."""
        total = sum(file.stat().st_size for file in self.files)
        # Files are opened only if it matters how they are packed.
        if total > limit or any(reading.kind == "parquet" or reading.packing is not None for reading in self.readings):
            return None
        return total

    def stamp(self) -> str | None:
        """A digest that changes when the text may have changed, without reading it; None: read it to know."""
        return _stamp(self.files, ["files", self.kind or "by content", self.text_key])

    @cached_property
    def empty(self) -> dict[str, int]:
        """The documents without text in each file that was read."""
        return {}

    def pieces(self) -> Iterator[TextPiece]:
        """All documents in a fixed order, from the first one in each call; a DataError names file, line or offset.

        Documents without text are left out, and counted.
        """
        documents = 0
        for path in self.files:
            empty = 0
            for _, blocks in jsonl_parquet.documents_of_file(path, self.kind, self.text_key):
                piece = None
                for piece in cut_document(blocks):
                    yield piece
                documents += 1
                empty += piece is None
            self.empty[str(path)] = empty
        if documents == sum(self.empty.values()):
            raise self._without_text()


class ColumnSource(DataSet):
    """The texts of a data set's column, one split after another."""

    @cached_property
    def empty(self) -> dict[str, int]:
        """The rows without text in each split that was read."""
        return {}

    def pieces(self) -> Iterator[TextPiece]:
        for split in self.splits:
            yield from self.pieces_of(split)

    def pieces_of(self, split: str) -> Iterator[TextPiece]:
        """All documents of one split; rows without text are left out."""
        if self.holds_tokens:
            raise DataError(
                f"the column {self.column!r} of {self.shown} must hold text, and it holds tokens, which a run reads as "
                "they are: train on the data set itself, or name another column by data.text_key"
            )
        row = empty = 0
        for array in self.arrays(split):
            for value in array:
                text = jsonl_parquet.arrow_text(value, f"{self.where(split)}: row {row}", self.column)
                yield from cut_document([text])
                row += 1
                empty += not text
        self.empty[split] = empty


@dataclass(frozen=True)
class _CodeSource:
    """Built-in text that code makes of `files`, if any; `stamped`: the files that decide it."""

    name: str
    files: tuple[Path, ...]
    stamped: tuple[Path, ...]
    texts: Callable[[], Iterator[str]]

    def stamp(self) -> str | None:
        return _stamp(self.stamped, [self.name, sys.version])

    def pieces(self) -> Iterator[TextPiece]:
        for text in self.texts():
            yield from cut_document([text])


Source = FileSource | ColumnSource | _CodeSource


def announce_empty(source: Source, announce: Callable[[str], None] | None, kind: str = "empty document") -> None:
    """Tells the user how many documents of a text that was read are left out, as they are empty."""
    if announce is not None and isinstance(source, FileSource | ColumnSource) and (empty := sum(source.empty.values())):
        announce(f"{source.name}: {counted(empty, kind)} left out")


def open_text_source(data: DataConfig) -> Source:
    """The text that the `data` section names; DataError if it is missing or holds no files."""
    if names_data_set(data):
        return ColumnSource.open(data)
    if data.path is not None:
        path = user_path(data.path)
        with content.read_errors(path):
            return text_files_at(path, data)
    if data.dataset is None:
        raise DataError("data.path, data.blend or data.dataset must name the data; for a trial: data.dataset=python")
    text = BUILT_IN_TEXTS[data.dataset]
    if text.file is not None:
        key = data.text_key if text.holds_chat else "text"
        return FileSource(data.dataset, (_CORPUS / text.file,), "jsonl", key)
    if data.dataset == "stories":
        from shardwise.data.reading import stories

        return _CodeSource("stories", (), (stories.GRAMMAR, Path(stories.__file__)), stories.stories)
    root = Path(sysconfig.get_path("stdlib"))
    with content.read_errors(root):
        return _python_source(root)


def text_files_at(path: Path, data: DataConfig) -> FileSource:
    """The files of text, or of rows, at a path, without those that are no data; DataError if there are none."""
    from shardwise.data.reading import raw_tokens

    kind = content.chosen_file_kind(data.format)
    left_out: set[Path] = set()
    if path.is_dir():
        # A link to nowhere stays, and fails by its name; reading a pipe would wait for ever.
        candidates = [file for file in _walk(path, _BOOKKEEPING_FOLDERS) if file.is_file() or not file.exists()]
        left_out = _left_out(candidates, kind, data.text_key)
        files = tuple(file for file in candidates if file not in left_out)
        if not files:
            besides = f" but {listing((file.name for file in candidates), most=3)}" if candidates else ""
            raise DataError(
                f"data.path ({data.path}) must hold text, .jsonl or .parquet files, and the folder has none{besides}"
            )
    elif path.is_file():
        files = (path,)
    elif path.exists():
        raise DataError(f"data.path ({data.path}) must be a file or a folder; it is neither")
    else:
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise DataError(
            f"data.path ({data.path}) does not exist{where}: name a text file, a .jsonl, a .parquet or a folder of them"
        )
    for file in files:
        # Tokens would be refused at some byte as text, or even be read.
        if kind is None and file.suffix in raw_tokens.SUFFIXES:
            if file.with_suffix(".idx").exists():
                raise DataError(f"{file} holds tokens, not text: name the data by their prefix, {file.with_suffix('')}")
            raise DataError(f"{file} holds raw tokens, not text: {raw_tokens.raw_tokens_hint(file)}")
    return FileSource(str(data.path), files, kind, data.text_key, tuple(sorted(left_out)))


def _left_out(files: Sequence[Path], kind: content.Kind | None, key: str) -> set[Path]:
    left_out = {file for file in files if _BOOKKEEPING.fullmatch(file.name)}
    about = {file for file in files if _NO_ROWS.fullmatch(file.name)} - left_out
    has_rows = kind != "text"
    if about and kind is None:
        # A file of each suffix tells enough of the others.
        samples = {
            Path(content.unpacked_name(file.name)).suffix: file for file in files if file not in about | left_out
        }
        has_rows = any(content.reading_of(file, None, key).kind != "text" for file in samples.values())
    return left_out | about if has_rows else left_out


def _python_source(root: Path) -> _CodeSource:
    files: list[Path] = []
    total = 0
    for path in _walk(root, _PYTHON_SKIPPED):
        generated = path.name.startswith("_sysconfigdata") or path == root / _TOPICS
        if path.suffix != ".py" or generated or not path.is_file():
            continue
        size = path.stat().st_size
        if total + size <= _PYTHON_BYTES:
            files.append(path)
            total += size
    if not files:
        raise DataError(
            f"data.dataset (python) needs the standard library's sources, and {root} has none: "
            "set data.dataset=tiny, or data.path to your own text"
        )

    def texts() -> Iterator[str]:
        for path in files:
            with content.read_errors(path), contextlib.suppress(UnicodeDecodeError):
                yield path.read_text(encoding="utf-8")
        yield from _python_topics()

    topics = [root / _TOPICS] if (root / _TOPICS).is_file() else []
    return _CodeSource("python", tuple(files), (*files, *topics), texts)


def _python_topics() -> list[str]:
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        return []
    return [topics[name] for name in sorted(topics) if topics[name]]


def _walk(root: Path, skipped: frozenset[str] = frozenset()) -> list[Path]:
    """Files under `root`, hidden ones and `skipped` folders left out, sorted by their path from there."""
    paths: list[Path] = []
    seen: set[str] = set()

    def fail(error: OSError) -> None:
        raise error

    for folder, folders, files in os.walk(root, onerror=fail, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if name not in skipped and not name.startswith("."))
        paths += [Path(folder, name) for name in files if not name.startswith(".")]
    return sorted(paths, key=lambda path: path.relative_to(root).as_posix())


def _stamp(files: Iterable[Path], identity: list[str | None]) -> str | None:
    """A digest of `identity` and of the paths, sizes and times of files; None if one has just changed."""
    facts: list[Any] = [identity]
    newest = 0.0
    for path in files:
        with content.read_errors(path):
            status = path.stat()
        newest = max(newest, status.st_mtime, status.st_ctime)
        facts.append([str(path.absolute()), status.st_size, status.st_mtime_ns, status.st_ctime_ns])
    if newest >= time.time() - _SETTLED_SECONDS:
        return None
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def cut_document(blocks: Iterable[str]) -> Iterator[TextPiece]:
    """The pieces of one document, made of blocks of its text; none if it has no text."""
    pending = ""
    for block in blocks:
        pending += block
        begin = 0
        while len(pending) - begin > PIECE_CHARACTERS:
            end = _cut_point(pending, begin + PIECE_CHARACTERS)
            yield TextPiece(pending[begin:end], ends_document=False)
            begin = end
        pending = pending[begin:]
    if pending:
        yield TextPiece(pending, ends_document=True)


def _cut_point(text: str, limit: int) -> int:
    """The last place at or before `limit` between a word and white space, else `limit`.

    Most tokenizers never join a word to the white space after it; after punctuation some join a line end, so a word is
    preferred.
    """
    after_punctuation = 0
    for at in range(limit, limit - min(_BACKTRACK, PIECE_CHARACTERS), -1):
        if text[at].isspace() and not text[at - 1].isspace():
            if text[at - 1].isalnum():
                return at
            after_punctuation = after_punctuation or at
    return after_punctuation or limit


# At four characters a token the tokens of a block take 64 MiB of memory, and those of a few blocks are kept.
BLOCK_CHARACTERS = 1 << 26
"""Characters at which a block of a stream ends, whatever the buffer is, and the longest document of a plain text."""


@dataclass(frozen=True)
class FileShard:
    """A file of text that a stream reads, on this machine or on the hub."""

    path: Path | content.HubFile
    kind: content.Kind | None
    text_key: str

    def documents(self, start: int) -> Iterator[tuple[int, Iterable[str]]]:
        """The documents from the one at `start` on, as blocks of text, with the place of the next one."""
        try:
            yield from jsonl_parquet.documents_of_file(
                self.path, self.kind, self.text_key, start, longest=BLOCK_CHARACTERS
            )
        except ShardwiseError:
            raise
        except Exception as error:
            if not isinstance(self.path, content.HubFile):
                raise
            raise RunError(f"{self.path} cannot be read: {type(error).__name__}: {first_line(error)}") from None


@dataclass(frozen=True)
class TableShard:
    """A file of a data set's table that a stream reads, mapped into memory."""

    path: Path
    column: str

    def documents(self, start: int) -> Iterator[tuple[int, Iterable[str]]]:
        row = start
        for array in self._values.slice(start).chunks:
            jsonl_parquet.require_sound_array(array, f"{self.path}: rows {row} to {row + len(array) - 1}", self.column)
            for value in array:
                text = jsonl_parquet.arrow_text(value, f"{self.path}: row {row}", self.column)
                row += 1
                yield row, [text]

    @cached_property
    def _values(self) -> Any:
        table = open_arrow_table([self.path])
        jsonl_parquet.require_text_column(self.path, table.schema, self.column)
        return jsonl_parquet.with_nested_column(table, self.column).column(self.column)


TextShard = FileShard | TableShard


def open_text_shard(file: str, data: DataConfig) -> TextShard:
    """The shard of a file, or of an address on the hub; DataError if it cannot be streamed."""
    if data.is_hub_dataset:
        if content.unpacked_name(file).endswith(content.LINES) or file.endswith(".parquet"):
            return FileShard(content.HubFile(file), "parquet" if file.endswith(".parquet") else "jsonl", data.text_key)
        raise DataError(
            f"{file} must be a .parquet, .jsonl or .json file for data.streaming: set it to false, or data.path to a "
            "copy of the files"
        )
    path = Path(file)
    if path.suffix == ".arrow":
        return TableShard(path, data.text_key)
    return FileShard(path, content.chosen_file_kind(data.format), data.text_key)
