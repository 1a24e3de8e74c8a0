"""Where text comes from: built-in texts and the user's files, as one stream of pieces.

A document is a file, a line of a `.jsonl`, or a topic of Python's documentation. It arrives in pieces of bounded
size, so that memory stays bounded whatever the size of a file, and so that one long file is encoded on all cores.
"""

from __future__ import annotations

import codecs
import hashlib
import importlib
import json
import os
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shardwise.config import DataConfig
from shardwise.errors import DataError

PIECE_CHARACTERS = 1 << 18
_BACKTRACK = 1 << 12
_PYTHON_BYTES = 12_000_000
# Tests and installed packages differ between installations; `encodings` is tables of code pages, hardly text.
_PYTHON_SKIPPED = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings"}
)
_TOPICS = "pydoc_data/topics.py"
_TINY = Path(__file__).parent / "corpus" / "tiny.jsonl"
# A file changed this recently may change again within the resolution of its time stamp.
_SETTLED_SECONDS = 2.0


@dataclass(frozen=True)
class Piece:
    """A part of a document; the next piece continues it unless `ends_document`."""

    text: str
    ends_document: bool

    @property
    def characters(self) -> int:
        """Its size."""
        return len(self.text)


class Source(Protocol):
    """A text of many documents, read again from the start by every `pieces()`."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    def stamp(self) -> str | None:
        """A digest that changes when the text may have changed, without reading it; None: read it to know."""
        ...

    def pieces(self) -> Iterator[Piece]:
        """All documents in a fixed order.

        Raises:
            DataError: naming file, line or offset.
        """
        ...


@dataclass(frozen=True)
class FileSource:
    """Text files (one document each) and `.jsonl` files (one document a line), in the order given."""

    name: str
    files: tuple[Path, ...]
    format: str
    text_key: str

    def stamp(self) -> str | None:
        return _stamp(self.files, ["files", self.format, self.text_key])

    def pieces(self) -> Iterator[Piece]:
        for path in self.files:
            if self.format == "jsonl" or (self.format == "auto" and path.suffix == ".jsonl"):
                yield from _jsonl_pieces(path, self.text_key)
            else:
                yield from _text_pieces(path)


@dataclass(frozen=True)
class PythonSource:
    """Text of every Python installation: the standard library's sources, then the topics of `help()`."""

    root: Path
    files: tuple[Path, ...]
    name: str = "python"

    def stamp(self) -> str | None:
        topics = self.root / _TOPICS
        return _stamp([*self.files, *([topics] if topics.is_file() else [])], ["python", sys.version])

    def pieces(self) -> Iterator[Piece]:
        for path in self.files:
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            except OSError as error:
                raise _unreadable(path, error) from None
            if text:
                yield from _cut_document(_slices(text))
        for text in _python_topics():
            yield from _cut_document(_slices(text))


def open_source(data: DataConfig) -> Source:
    """The text that the `data` section names.

    Raises:
        DataError: when it is missing or holds no files.
    """
    if data.path is not None:
        path = Path(data.path).expanduser()
        try:
            return _user_source(path, data)
        except OSError as error:
            raise _unreadable(path, error) from None
    if data.dataset == "tiny":
        return FileSource("tiny", (_TINY,), "jsonl", "text")
    return _python_source(Path(sysconfig.get_path("stdlib")))


def _user_source(path: Path, data: DataConfig) -> Source:
    if path.is_file():
        return FileSource(str(data.path), (path,), data.format, data.text_key)
    if path.is_dir():
        # A link to nowhere stays, and fails by its name; reading a pipe would wait for ever.
        files = tuple(file for file in _walk(path) if file.is_file() or not file.exists())
        if not files:
            raise DataError(f"data.path ({data.path}) must hold text or .jsonl files, and the folder has none")
        return FileSource(str(data.path), files, data.format, data.text_key)
    if path.exists():
        raise DataError(f"data.path ({data.path}) must be a file or a folder; it is neither")
    where = "" if path.is_absolute() else f" in {Path.cwd()}"
    raise DataError(f"data.path ({data.path}) does not exist{where}: name a text file, a folder of them or a .jsonl")


def _python_source(root: Path) -> PythonSource:
    chosen: list[Path] = []
    total = 0
    for path in _walk(root, _PYTHON_SKIPPED):
        generated = path.name.startswith("_sysconfigdata") or path == root / _TOPICS
        if path.suffix != ".py" or generated or not path.is_file():
            continue
        size = path.stat().st_size
        if total + size <= _PYTHON_BYTES:
            chosen.append(path)
            total += size
    if not chosen:
        raise DataError(
            f"data.dataset (python) needs the standard library's sources, and {root} has none: "
            "set data.dataset=tiny, or data.path to your own text"
        )
    return PythonSource(root, tuple(chosen))


def _python_topics() -> list[str]:
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        return []
    return [topics[name] for name in sorted(topics) if topics[name]]


def _walk(root: Path, skipped: frozenset[str] = frozenset()) -> list[Path]:
    """Files under `root`, hidden ones and `skipped` folders left out, sorted by their path from there."""
    found: list[tuple[str, Path]] = []
    seen: set[str] = set()

    def fail(error: OSError) -> None:
        raise _unreadable(Path(error.filename), error)

    for folder, folders, files in os.walk(root, onerror=fail, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if name not in skipped and not name.startswith("."))
        paths = [Path(folder, name) for name in files if not name.startswith(".")]
        found += [(path.relative_to(root).as_posix(), path) for path in paths]
    return [path for _, path in sorted(found)]


def _stamp(files: Iterable[Path], identity: list[str]) -> str | None:
    digest = hashlib.sha256(json.dumps(identity).encode())
    newest = 0.0
    for path in files:
        try:
            status = path.stat()
        except OSError as error:
            raise _unreadable(path, error) from None
        newest = max(newest, status.st_mtime, status.st_ctime)
        facts = [str(path.absolute()), status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        digest.update(json.dumps(facts).encode())
    return digest.hexdigest() if newest < time.time() - _SETTLED_SECONDS else None


def _text_pieces(path: Path) -> Iterator[Piece]:
    empty = True
    for piece in _cut_document(_decoded(path)):
        empty = False
        yield piece
    if empty:
        raise DataError(f"{path} is empty: remove it or put text into it")


def _decoded(path: Path) -> Iterator[str]:
    """The file's text in blocks, without a byte-order mark."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0
    try:
        with path.open("rb") as file:
            while True:
                block = file.read(PIECE_CHARACTERS)
                try:
                    text = decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    at = offset + len(block) - len(error.object) + error.start
                    raise _not_utf8(f"{path}: byte {at}", error.object[error.start]) from None
                text = text.removeprefix("\ufeff") if offset == 0 else text
                offset += len(block)
                if text:
                    yield text
                if not block:
                    return
    except OSError as error:
        raise _unreadable(path, error) from None


def _jsonl_pieces(path: Path, key: str) -> Iterator[Piece]:
    empty = True
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    empty = False
                    yield from _cut_document(_slices(_line_text(line, f"{path}: line {number}", key)))
    except OSError as error:
        raise _unreadable(path, error) from None
    if empty:
        raise DataError(f"{path} is empty: remove it or put one JSON object on each line")


def _line_text(line: bytes, where: str, key: str) -> str:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _not_utf8(f"{where}, byte {error.start}", line[error.start]) from None
    except ValueError as error:
        raise DataError(
            f'{where} is not JSON ({error}): a .jsonl holds one object such as {{"{key}": "…"}} on each line; '
            "for plain text set data.format=text"
        ) from None
    if not isinstance(record, dict):
        raise DataError(f'{where} is JSON but not an object: each line must read like {{"{key}": "…"}}')
    if key not in record:
        fields = ", ".join(sorted(record)) or "no fields"
        raise DataError(f"{where} has no field {key!r}: set data.text_key to the field that holds the text ({fields})")
    text = record[key]
    if not isinstance(text, str):
        raise DataError(f"{where}: the field {key!r} must hold text, not {type(text).__name__} (data.text_key)")
    if not text:
        raise DataError(f"{where}: the field {key!r} is empty: remove the line")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"{where}: the field {key!r} has half a surrogate pair (\\ud800 to \\udfff): fix it") from None
    return text


def _slices(text: str) -> Iterator[str]:
    for start in range(0, len(text), PIECE_CHARACTERS):
        yield text[start : start + PIECE_CHARACTERS]


def _cut_document(blocks: Iterable[str]) -> Iterator[Piece]:
    """One document's pieces from blocks of its text."""
    pending = ""
    for block in blocks:
        pending += block
        while len(pending) > PIECE_CHARACTERS:
            cut = _cut_point(pending, PIECE_CHARACTERS)
            yield Piece(pending[:cut], ends_document=False)
            pending = pending[cut:]
    if pending:
        yield Piece(pending, ends_document=True)


def _cut_point(text: str, limit: int) -> int:
    """The last place at or before `limit` where a cut leaves the tokens as they are, else `limit`.

    Byte-level tokenizers never join a word to the white space after it, so the cut goes between the two; after
    punctuation some join a line end, so a word is preferred.
    """
    after_punctuation = 0
    for at in range(limit, max(limit - _BACKTRACK, 0), -1):
        if text[at].isspace() and not text[at - 1].isspace():
            if text[at - 1].isalnum():
                return at
            after_punctuation = after_punctuation or at
    return after_punctuation or limit


def _not_utf8(where: str, byte: int) -> DataError:
    return DataError(
        f"{where} (0x{byte:02x}) is not UTF-8: convert the file, for example with iconv -f LATIN1 -t UTF-8, "
        "or leave it out"
    )


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read: {error.strerror or error}")
