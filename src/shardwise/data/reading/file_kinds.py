"""Kinds of files of text, told by their content and then by their names; other files are refused with a way on.

The beginning of a file decides: the magic of a format, a first line that is a JSON object, the header of a table.

A JSON object may hold a text among fields of any kind.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from shardwise.base.errors import DataError, listing
from shardwise.base.units import counted
from shardwise.data.reading.content import (
    TEXT_CONTROLS,
    UTF_8,
    Content,
    HubFile,
    control_share,
    opened,
    packing_of,
    unpacked_name,
)

Kind = Literal["text", "jsonl", "parquet"]

LINES = (".jsonl", ".json", ".ndjson", ".jsonlines", ".ldjson")
_TABLES = {".csv": ",", ".tsv": "\t", ".tab": "\t"}
_SEPARATORS = (",", "\t", ";", "|")
_COLUMN = re.compile(r'"?[\w.-]{1,64}"?')
_PARQUET = b"PAR1"
# The first key of an object is asked for, as a text may begin with a brace or a bracket too.
_OBJECT = re.compile(r'\s*\{\s*"(?:[^"\\]|\\.)*"\s*:')
_ARRAY_OF_OBJECTS = re.compile(rf"\s*\[{_OBJECT.pattern}")
_ARRAY_OF_TEXTS = re.compile(r'\s*\[\s*"(?:[^"\\]|\\.)*"\s*[,\]]')
_STRING = r'"((?:[^"\\]|\\.)*)"'
_LIST_WITHIN = re.compile(rf"\s*\{{((?:\s*{_STRING}\s*:\s*(?:{_STRING}|[\w.+-]+)\s*,)*)\s*{_STRING}\s*:\s*\[\s*\{{")
"""An object of many lines whose rows are in a list, after fields that hold one value."""
_COLUMNS_WITHIN = re.compile(rf'\s*\{{\s*{_STRING}\s*:\s*\{{\s*"\d+"\s*:')
_AS_TEXT = "set data.format=text to read it as plain text"
_MARK = rb"(?i:(?:\xef\xbb\xbf)?\s*<"
"""The beginning of a text that is marked up, after which the name of its first mark and a parenthesis must follow."""
FOREIGN: Sequence[tuple[bytes, str, str]] = (
    (rb"%PDF-", "a PDF document", "extract its text, for example with pdftotext"),
    (
        # The name of an archive's first file stands at byte 30.
        rb"PK\x03\x04.{26}[^\0]{0,80}?(?:/data\.pkl|\.npy)",
        "a file of torch.save or of numpy's savez",
        "write the text that it holds as JSON lines",
    ),
    (rb"PK\x03\x04", "a zip archive (or a .docx, .xlsx or .epub, which are such archives)", "unpack it with unzip"),
    (rb"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it with 7z x"),
    (rb"Rar!\x1a\x07", "a rar archive", "unpack it with unrar x"),
    (rb"\x1f\x9d", "packed by compress", "unpack it with uncompress"),
    (rb"\x89LZO\0", "packed by lzop", "unpack it with lzop -d"),
    (rb"\xff\x06\0\0sNaPpY", "packed by snappy", "unpack it with snzip -d"),
    (rb"\x89HDF\r\n\x1a\n", "an HDF5 file", "shards of BERT are read with data.format=hdf5"),
    (rb"ARROW1", "a table of arrow", "write it as parquet, or save it by save_to_disk of datasets"),
    (rb"\xff\xff\xff\xff", "a table of arrow", "name the folder that save_to_disk wrote, with data.format=datasets"),
    (rb"ORC", "an ORC table", "write it as parquet"),
    (rb"Obj\x01", "an Avro table", "write it as parquet"),
    (rb"SQLite format 3\0", "an SQLite database", "write its text as JSON lines"),
    (rb"\{\\rtf", "a rich text document", "extract its text, for example with pandoc -t plain"),
    (rb"WARC/", "a web archive", f"extract its text, for example with trafilatura, or {_AS_TEXT}"),
    (_MARK + rb"\?xml\s)", "XML", f"extract its text (of Wikipedia with wikiextractor --json), or {_AS_TEXT}"),
    (_MARK + rb"mediawiki\b)", "XML", f"extract its text, for example with wikiextractor --json, or {_AS_TEXT}"),
    (_MARK + rb"(?:!doctype\s+)?html\b)", "HTML", f"extract its text, for example with trafilatura, or {_AS_TEXT}"),
)
"""Patterns of the beginnings of files that hold no plain text, with the name of the files and advice."""

_UNPACKED_BY = {
    ".br": "brotli -d",
    ".snappy": "snzip -d",
    ".sz": "snzip -d",
    ".z": "pigz -dc",
    ".zz": "pigz -dc",
    ".zlib": "pigz -dc",
    ".deflate": "pigz -dc",
    ".lzo": "lzop -d",
    ".lz": "lzip -d",
}
"""Programs that unpack files which no library here unpacks, by the suffix of the file."""


@dataclass(frozen=True)
class FileReading:
    """The way in which a file is read.

    Attributes:
        packing: program that packed the file; None if none did.
        encoding: encoding of the text.
    """

    kind: Kind
    packing: str | None = None
    encoding: str = UTF_8

    def __str__(self) -> str:
        kind = {"text": "plain text", "jsonl": "JSON lines", "parquet": "parquet"}[self.kind]
        encoding = "" if self.encoding == UTF_8 else f" in {self.encoding}"
        packing = "" if self.packing is None else f" unpacked by {self.packing}"
        return f"{kind}{encoding}{packing}"


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
        kind = kind or _recognized(path, content, key)
        if kind == "parquet":
            return FileReading(kind)
        return FileReading(kind, content.packing, content.encoding)


def chosen_kind(format: str) -> Kind | None:
    """The kind that `data.format` chooses for all files; None if their content decides."""
    if format in ("text", "jsonl", "parquet"):
        return cast(Kind, format)
    return None


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
    """The kind of a file; DataError if it has none.

    The order matters: foreign formats are known by their first bytes, tables and other JSON are text too, and what has
    passed all of them and is binary is refused last.
    """
    head = content.head
    name = unpacked_name(str(path))
    if name.endswith(".parquet") or head.startswith(_PARQUET):
        if content.packing is not None:
            raise DataError(
                f"{path} is a parquet file packed by {content.packing}, which cannot be read in parts: unpack it"
            )
        return "parquet"
    for magic, format, advice in FOREIGN:
        if re.match(magic, head, re.DOTALL):
            raise DataError(f"{path} is {format}, not plain text: {advice}, or leave it out")
    if head[257:262] == b"ustar":
        raise DataError(f"{path} is a tar archive, not plain text: unpack it with tar -xf, and name the folder")
    if (inner_packing := packing_of(head)) is not None:
        raise DataError(f"{path} is packed twice, by {inner_packing} and then by {content.packing}: unpack it once")
    text = head.decode("utf-8-sig", errors="replace")
    _refuse_table(path, name, text, key)
    _refuse_other_json(path, content.packing, text, key)
    _refuse_binary(path, name, head)
    if name.endswith(LINES) or _OBJECT.match(text):
        return "jsonl"
    return "text"


def _refuse_table(path: Path | HubFile, name: str, text: str, key: str) -> None:
    """Raises DataError for a .csv, and for a header of columns that has the text's or is above lines of as many."""
    header, *lines = text.split("\n")[:5]
    header = header.rstrip("\r")
    separator = next((separator for suffix, separator in _TABLES.items() if name.endswith(suffix)), None)
    for candidate in _SEPARATORS:
        columns = header.split(candidate)
        has_key = key in columns or f'"{key}"' in columns
        # Texts may hold a comma more; prose has no line of names without spaces above lines with commas. The last line
        # may be cut off.
        above_rows = len(lines) > 2 and all(line.count(candidate) >= len(columns) - 1 for line in lines[:-1])
        if len(columns) > 1 and (has_key or above_rows) and all(map(_COLUMN.fullmatch, columns)):
            separator = candidate
    if separator is not None:
        raise DataError(
            f'{path} is a table of separated values, not plain text: convert it, for example with `python -c "import '
            f"pandas; pandas.read_csv({str(path)!r}, sep={separator!r}).to_json('lines.jsonl', orient='records', "
            f'lines=True)"`, or {_AS_TEXT}'
        )


def _refuse_other_json(path: Path | HubFile, packing: str | None, text: str, key: str) -> None:
    """Raises DataError for JSON that has no object on each line."""
    first, newline, _ = text.lstrip().partition("\n")
    is_cut = newline and re.search(r"[{[,]\s*$", first)
    within = _LIST_WITHIN.match(text)
    if _ARRAY_OF_OBJECTS.match(text):
        contents = "a JSON array"
        program = ".[]"
    elif _ARRAY_OF_TEXTS.match(text):
        contents = "a JSON array"
        program = "{text: .[]}"
    elif is_cut and _COLUMNS_WITHIN.match(text):
        raise DataError(f"{path} is a table by columns, as pandas writes JSON: {PANDAS_ADVICE}, or {_AS_TEXT}")
    elif is_cut and within is not None and f'"{key}"' not in within[1]:
        contents = "a JSON object with its rows in a list"
        program = entries(within[4])
    elif is_cut and _OBJECT.match(text) and not re.search(r"\}\s*,\s*$", first):
        contents = "JSON with objects of several lines"
        program = "."
    else:
        return
    file = shlex.quote(str(path))
    if packing is None:
        command = f"jq -c '{program}' {file}"
    else:
        command = f"{packing} -dc {file} | jq -c '{program}'"
    raise DataError(
        f"{path} is {contents}, and JSON must have one object on each line: convert it, for example with `{command} > "
        f"lines.jsonl`, or {_AS_TEXT}"
    )


def _refuse_binary(path: Path | HubFile, name: str, head: bytes) -> None:
    share = control_share(head)
    if not share:
        return
    if (tool := next((tool for suffix, tool in _UNPACKED_BY.items() if name.endswith(suffix)), None)) is not None:
        raise DataError(
            f"{path} holds binary data, and its name says that it is packed: unpack it, for example with {tool}, or "
            "leave it out"
        )
    # Latin letters in UTF-16 have zeros as their high bytes. Small ids of tokens look alike, except that some of their
    # low bytes are control characters.
    for encoding, high, low in (("UTF-16LE", head[1::2], head[::2]), ("UTF-16BE", head[::2], head[1::2])):
        if high.count(0) > len(high) // 2 and min(set(low) - set(b"\t\n\r"), default=0) >= ord(" "):
            raise DataError(
                f"{path} looks like {encoding} without the mark that begins such files: convert it with `iconv -f "
                f"{encoding} -t UTF-8`, or leave it out"
            )
    if (at := head.find(0)) >= 0:
        raise DataError(f"{path}: byte {at} is null, so the file holds binary data and no text: leave it out")
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # a character that the end cuts is no fault
    except UnicodeDecodeError:
        if share > TEXT_CONTROLS:
            raise DataError(f"{path} is not UTF-8, and its control characters show binary data: leave it out") from None


# Numbers are no text, and Python refuses to read those of more than 4,300 digits.
_DECODER = json.JSONDecoder(parse_int=lambda _digits: 0)
# Far beyond what records have, and far below the about 1,000 calls of Python's recursion limit.
_DEPTH = 100
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)


def read_json(text: str) -> Any:
    """The value of a JSON text, with 0 for every whole number; very deep lists and objects are read as empty ones.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return _DECODER.decode(text)
    except RecursionError:
        return _DECODER.decode(_without_depths(text))


def _without_depths(text: str) -> str:
    """A JSON text with empty lists and objects in place of those that lie within more than `_DEPTH` others."""
    kept: list[str] = []
    depth = start = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        if match[0] in ("[", "{"):
            if depth == _DEPTH:
                kept.append(text[start : match.end()])
            depth += 1
        elif match[0] in ("]", "}"):
            depth -= 1
            if depth == _DEPTH:
                start = match.start()
    # A bracket that is not closed stays unclosed, and is refused as such.
    if depth <= _DEPTH:
        kept.append(text[start:])
    return "".join(kept)


def field_of(record: Mapping[str, Any], key: str) -> Any:
    """The value of a field, or of one within another: `meta.body`. A field whose name has a dot goes first.

    Raises:
        KeyError: there is none.
    """
    if key in record:
        return record[key]
    for dot, letter in enumerate(key):
        inner = record.get(key[:dot]) if letter == "." else None
        if isinstance(inner, dict):
            with contextlib.suppress(KeyError):
                return field_of(inner, key[dot + 1 :])
    raise KeyError(key)


def field_names(record: Mapping[str, Any]) -> Iterator[str]:
    """The names of all fields, and of those within them, as `field_of` takes them."""
    for name, value in record.items():
        if isinstance(value, dict) and value:
            yield from (f"{name}.{inner}" for inner in value)
        else:
            yield name


PANDAS_ADVICE = "write it with to_json(…, orient='records', lines=True)"
"""The advice about a table that pandas wrote by columns, by rows or split."""


def other_layout(record: Mapping[str, Any], key: str) -> str | None:
    """The end of a message about an object that holds many records; None if it seems to be one record."""
    inner = [value for value in record.values() if isinstance(value, dict)]
    by_number = any(fields and all(map(str.isdecimal, fields)) for fields in [record, *inner])
    if (by_number and len(inner) == len(record)) or record.keys() >= {"columns", "index", "data"}:
        return f"is a whole table, as pandas writes it: {PANDAS_ADVICE}"
    has_text = any(isinstance(value, str) for value in record.values())
    conversation = next((name for name, value in record.items() if _are_messages(value)), None)
    if conversation is not None and (conversation == key or not has_text):
        return f"holds a conversation in {conversation!r}, which data.format=chat reads"
    for name, value in record.items():
        if isinstance(value, list) and value and isinstance(value[0], dict) and (key in value[0] or not has_text):
            command = f"jq -c '{entries(name)}'"
            return f"holds objects in the list {name!r}: put each on its own line, for example with `{command}`"
    return None


def _are_messages(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, dict) and message.keys() >= {"role", "content"} for message in value)
    )


def entries(name: str) -> str:
    """The program of jq that gives each entry of a list."""
    return f".{name}[]" if name.isidentifier() else f".[{json.dumps(name)}][]"
