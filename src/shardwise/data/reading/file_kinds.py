"""Kinds of files of text, told by their content and then by their names; other files are refused by one sentence.

The beginning of a file decides: the magic of a format, a first line that is a JSON object, the header of a table.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from shardwise.base.errors import DataError, listing, see
from shardwise.base.units import counted
from shardwise.data.reading.content import Content, HubFile, opened, packing_of, unpacked_name

Kind = Literal["text", "jsonl", "parquet"]
_SHOWN = {"text": "plain text", "jsonl": "JSON lines", "parquet": "parquet"}

LINES = (".jsonl", ".json", ".ndjson", ".jsonlines", ".ldjson")
_PARQUET = b"PAR1"
FOREIGN: Sequence[tuple[bytes, str]] = (
    (rb"%PDF-", "a PDF document"),
    (rb"PK\x03\x04", "a zip archive (or a .docx, .xlsx, .npz or .pt, which are such archives)"),
    (rb"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (rb"Rar!\x1a\x07", "a rar archive"),
    (rb".{257}ustar", "a tar archive"),
    (rb"\x89HDF\r\n\x1a\n", "an HDF5 file (data.format=hdf5 reads shards of BERT)"),
    (rb"ARROW1|\xff\xff\xff\xff", "a table of arrow (data.format=datasets reads folders of save_to_disk)"),
    (rb"ORC", "an ORC table"),
    (rb"Obj\x01", "an Avro table"),
    (rb"SQLite format 3\0", "an SQLite database"),
    (rb"(?i:(?:\xef\xbb\xbf)?\s*<(?:\?xml\s|mediawiki\b))", "XML"),
    (rb"(?i:(?:\xef\xbb\xbf)?\s*<(?:!doctype\s+)?html\b)", "HTML"),
)
"""Patterns of the beginnings of files that hold no plain text, and the names of what they hold."""
# The mark of UTF-32 begins with that of UTF-16, or with zeros.
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
_TABLES = (".csv", ".tsv", ".tab")
_SEPARATORS = (",", "\t", ";", "|")
_COLUMN = re.compile(r'"?[\w.-]{1,64}"?')
# The first key of an object is asked for, as a text may begin with a brace or a bracket too.
_KEY = r'\{\s*"(?:[^"\\]|\\.)*"\s*:'
_OBJECT = re.compile(rf"\s*{_KEY}")
_ARRAY = re.compile(rf'\s*\[\s*(?:{_KEY}|"(?:[^"\\]|\\.)*"\s*[,\]])')
# Control characters but for those of old texts: from bell to carriage return, the end of a file in DOS, escape.
_NOT_IN_TEXT = bytes(set(range(0x20)) - set(range(7, 14)) - {0x1A, 0x1B}) + b"\x7f"
# The largest share of such characters in a text; of random bytes it is about 0.09.
_MOST_CONTROLS = 0.01


@dataclass(frozen=True)
class FileReading:
    """The way in which a file is read.

    Attributes:
        packing: program that packed the file; None if none did.
    """

    kind: Kind
    packing: str | None = None

    def __str__(self) -> str:
        return _SHOWN[self.kind] + ("" if self.packing is None else f" unpacked by {self.packing}")


def reading_of(path: Path | HubFile, kind: Kind | None, key: str) -> FileReading:
    """The reading of a file: of the kind that the user chose, or else as its content says.

    Args:
        kind: kind that `data.format` chooses; None: the content decides.
        key: `data.text_key`.

    Raises:
        DataError: the file cannot be read, or does not hold text.
    """
    if kind == "parquet":
        return FileReading(kind)
    with opened(path) as content:
        if kind is None and (unpacked_name(str(path)).endswith(".parquet") or content.head.startswith(_PARQUET)):
            if content.packing is not None:  # which cannot be read in parts
                raise _no_text(path, f"a parquet file packed by {content.packing}")
            return FileReading("parquet")
        return FileReading(kind or _recognized(path, content, key), content.packing)


def chosen_kind(format: str) -> Kind | None:
    """The kind that `data.format` chooses for all files; None if their content decides."""
    return cast(Kind, format) if format in _SHOWN else None


def described(readings: Sequence[tuple[Path, FileReading]]) -> str:
    """The readings of files, for the user; if there are several, each with its file or the number of its files."""
    groups: dict[FileReading, list[Path]] = {}
    for path, reading in readings:
        groups.setdefault(reading, []).append(path)
    if len(groups) == 1:
        return f"read as {next(iter(groups))}"
    shown = []
    for reading, paths in groups.items():
        files = paths[0].name if len(paths) == 1 else counted(len(paths), "file")
        shown.append(f"{reading} ({files})")
    return f"read as {listing(shown)}"


def _recognized(path: Path | HubFile, content: Content, key: str) -> Kind:
    """The kind of a file that is no parquet; DataError if it holds no text."""
    head = content.head
    if head.startswith(_UTF_16):
        raise DataError(f"{path} must be in UTF-8, and is in UTF-16 or UTF-32: convert it with `iconv -t UTF-8`")
    text = head.decode("utf-8-sig", errors="replace")
    name = unpacked_name(str(path))
    first_line, newline, _ = text.lstrip().partition("\n")
    # The order matters: tables and other JSON are text too, and binary data of an unknown kind are refused last.
    foreign = next((kind for magic, kind in FOREIGN if re.match(magic, head, re.DOTALL)), None)
    if foreign is None and (packing := packing_of(head)) is not None:
        foreign = f"packed twice, by {packing} and then by {content.packing}"
    elif foreign is None and _is_table(name, text, key):
        foreign = "a table of separated values"
    elif foreign is None and (
        _ARRAY.match(text) or (newline and _OBJECT.match(text) and re.search(r"[{[,]\s*$", first_line))
    ):
        foreign = "JSON without one object on each line"
    elif foreign is None and is_binary(head):
        foreign = "binary data"
    if foreign is not None:
        raise _no_text(path, foreign)
    return "jsonl" if name.endswith(LINES) or _OBJECT.match(text) else "text"


def _no_text(path: Path | HubFile, kind: str) -> DataError:
    return DataError(
        f"{path} is {kind}, and must be plain text, JSON lines or parquet: convert or unpack it first, leave it out, "
        f"or set data.format=text to read it as plain text{see('data#not-text')}"
    )


def _is_table(name: str, text: str, key: str) -> bool:
    """True for a .csv, and for a header of columns that has the text's or is above lines of as many."""
    header, *lines = text.split("\n")[:5]
    for separator in _SEPARATORS:
        columns = header.rstrip("\r").split(separator)
        has_key = key in columns or f'"{key}"' in columns
        # Texts may hold a comma more; prose has no line of names without spaces above lines with commas. The last line
        # may be cut off.
        above_rows = len(lines) > 2 and all(line.count(separator) >= len(columns) - 1 for line in lines[:-1])
        if len(columns) > 1 and (has_key or above_rows) and all(map(_COLUMN.fullmatch, columns)):
            return True
    return name.endswith(_TABLES)


def is_binary(data: bytes) -> bool:
    """True if bytes have nulls, or are not UTF-8 and have more control characters than texts of any encoding."""
    if 0 in data:
        return True
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data)  # a character that the end cuts is no fault
    except UnicodeDecodeError:
        return len(data.translate(None, _NOT_IN_TEXT)) < (1 - _MOST_CONTROLS) * len(data)
    return False
