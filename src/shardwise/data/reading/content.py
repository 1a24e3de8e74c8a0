"""Content of files: unpacked, however it is stored, and told by its first bytes: text, JSON lines or parquet."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, cast

from shardwise.base import registered, units
from shardwise.base.errors import DataError, listing, see
from shardwise.base.files import reason_of

BLOCK = 1 << 18
"""Bytes that are read at once."""
HEAD = 1 << 13
"""Bytes for a first look: enough for a header of columns and some lines."""
Kind = Literal["text", "jsonl", "parquet"]
_SHOWN = {"text": "plain text", "jsonl": "JSON lines", "parquet": "parquet"}
LINES = (".jsonl", ".json", ".ndjson", ".jsonlines", ".ldjson")
_TABLES = (".csv", ".tsv", ".tab")
FOREIGN: Sequence[tuple[bytes, str]] = (
    (rb"%PDF-", "a PDF document"),
    (rb"PK\x03\x04", "a zip archive (or a .docx, .xlsx, .npz or .pt, which are such archives)"),
    (rb".{257}ustar", "a tar archive"),
    (rb"\x89HDF\r\n\x1a\n", "an HDF5 file (data.format=hdf5 reads shards of BERT)"),
    (rb"ARROW1|\xff\xff\xff\xff", "a table of arrow (data.format=datasets reads folders of save_to_disk)"),
    (rb"(?i:(?:\xef\xbb\xbf)?\s*<(?:\?xml\s|mediawiki\b|docs?\b|(?:!doctype\s+)?html\b))", "XML or HTML"),
    (rb"WARC/\d", "an archive of web pages (WARC, or WET of Common Crawl)"),
)
"""Patterns of the beginnings of files that hold no plain text, and the names of what they hold."""
# The first key of an object is asked for, as a text may begin with a brace or a bracket too.
_KEY = r'\{\s*"(?:[^"\\]|\\.)*"\s*:'
_OBJECT = re.compile(rf"\s*{_KEY}")
_ARRAY = re.compile(rf'\s*\[\s*(?:{_KEY}|"(?:[^"\\]|\\.)*"\s*[,\]])')
# The mark of UTF-32 begins with that of UTF-16, or with zeros.
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)


class HubFile(NamedTuple):
    """The content of a data file on the hub (hf://…): each read goes over the network, and nothing is kept."""

    address: str

    def open(self, mode: Literal["rb"], /) -> IO[bytes]:
        from huggingface_hub import HfFileSystem

        opened: IO[bytes] = HfFileSystem().open(self.address, mode)
        return opened

    def __str__(self) -> str:
        return self.address


class _Packing(NamedTuple):
    magic: tuple[bytes, ...]
    suffixes: tuple[str, ...]
    unpacked: Callable[[IO[bytes]], Any]


class _Streams(io.RawIOBase):
    """The content of packed streams, one after another, between which zeros may stand.

    `bz2.BZ2File` and `lzma.LZMAFile` end without an error at such zeros, and at a stream that is damaged at its begin.
    """

    def __init__(self, file: IO[bytes], decoder: Callable[[], Any]) -> None:
        self._blocks, self._rest = self._unpacked(file, decoder), b""

    @staticmethod
    def _unpacked(file: IO[bytes], decoder: Callable[[], Any]) -> Iterator[bytes]:
        rest = b""
        while packed := rest or file.read(BLOCK):
            if rest := packed.lstrip(b"\0"):
                stream = decoder()
                yield stream.decompress(rest, BLOCK)
                while not stream.eof:
                    if stream.needs_input and not (rest := file.read(BLOCK)):
                        raise EOFError("it ends within a stream")
                    yield stream.decompress(rest if stream.needs_input else b"", BLOCK)
                rest = stream.unused_data

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        unpacked = self._rest or next(filter(None, self._blocks), b"")
        size = min(len(buffer), len(unpacked))
        buffer[:size], self._rest = unpacked[:size], unpacked[size:]
        return size


def _lzma(file: IO[bytes]) -> Any:
    import lzma  # some builds of Python lack it

    return _Streams(file, lzma.LZMADecompressor)


def _by_arrow(codec: str) -> Callable[[IO[bytes]], Any]:
    def unpacked(file: IO[bytes]) -> Any:
        arrow = registered.optional_library("pyarrow", f"files packed by {codec} need", "parquet")
        return arrow.CompressedInputStream(arrow.PythonFile(file, mode="r"), codec)

    return unpacked


# Text may begin with BZh; in a file of bzip2 a digit and the magic of its first block follow.
_BZIP2 = tuple(b"BZh%d1AY&SY" % level for level in range(1, 10))
_PACKINGS: Mapping[str, _Packing] = {
    "gzip": _Packing((b"\x1f\x8b",), (".gz", ".gzip", ".bgz"), lambda file: gzip.GzipFile(fileobj=file)),
    "bzip2": _Packing(_BZIP2, (".bz2", ".bzip2"), lambda file: _Streams(file, bz2.BZ2Decompressor)),
    "xz": _Packing((b"\xfd7zXZ\0", b"\x5d\0\0"), (".xz", ".lzma"), _lzma),
    # A file of zstd may begin with a frame that holds no content, which pzstd writes.
    "zstd": _Packing((b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18"), (".zst", ".zstd"), _by_arrow("zstd")),
    "lz4": _Packing((b"\x04\x22\x4d\x18",), (".lz4",), _by_arrow("lz4")),
}


@contextmanager
def open_unpacked(path: Path | HubFile, start: int = 0) -> Iterator[IO[bytes]]:
    """The unpacked content of a data file from byte `start` on; DataError if it is unreadable, cut off or damaged."""
    with read_errors(path), ExitStack() as files:
        file = files.enter_context(path.open("rb"))
        packing = _packing_of(file.read(HEAD))
        file.seek(start if packing is None else 0)
        if packing is None:
            yield file
            return
        with _unpacking(path, packing):
            stream = files.enter_context(io.BufferedReader(_PACKINGS[packing].unpacked(file), BLOCK))
            while start > 0 and (block := stream.read(min(start, BLOCK))):
                start -= len(block)
            yield stream


def _window(path: Path | HubFile) -> str:
    """Return the window that the first frame of a file of zstd asks for, if it is too large (RFC 8878 §3.1.1.1)."""
    with path.open("rb") as file:
        head = file.read(HEAD)
    flags, exponent, eighths = head[4], head[5] >> 3, head[5] & 7
    at = 5 + (0, 1, 2, 4)[flags & 3]
    content = int.from_bytes(head[at : at + (1 << (flags >> 6))], "little")
    size = content if flags & 32 else (8 + eighths) << (exponent + 7)
    return f", not {size >> 20:,} MiB" if head[:4] == b"\x28\xb5\x2f\xfd" and size > 2**27 else ""


@contextmanager
def _unpacking(path: Path | HubFile, packing: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise DataError(
            f"{path} is packed by {packing}, which this Python cannot unpack ({error}): unpack the file first"
        ) from None
    except Exception as error:
        # An error of the system has a number; errors about damaged content have none.
        is_damaged = isinstance(error, OSError | EOFError | zlib.error) or type(error).__name__ == "LZMAError"
        if getattr(error, "errno", None) or not is_damaged:
            raise
        if "too much memory" in str(error):
            said = f"{path} must have a window of at most 128 MiB{_window(path)}"
            raise DataError(f"{said}: unpack it by `zstd -d --long=31`") from None
        raise DataError(
            f"{path} is cut off or damaged, {packing} cannot unpack it ({error}): fetch or copy it again"
            f"{see('data#file-cut-off')}"
        ) from None


@contextmanager
def read_errors(path: object) -> Iterator[None]:
    """Turns a failure to read a data file into a DataError about the file that the system names, or about `path`."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{error.filename or path} cannot be read: {reason_of(error)}") from None


def _packing_of(head: bytes) -> str | None:
    return next((name for name, packing in _PACKINGS.items() if head.startswith(packing.magic)), None)


def unpacked_name(name: str) -> str:
    """The name of a data file in lower case, without the suffix that packing gave it, such as .gz."""
    name = name.lower()
    suffixes = (suffix for packing in _PACKINGS.values() for suffix in packing.suffixes if name.endswith(suffix))
    return name.removesuffix(next(suffixes, ""))


class FileReading(NamedTuple):
    """The way in which a data file is read; `packing`: the program that packed it, None if none did."""

    kind: Kind
    packing: str | None = None

    def __str__(self) -> str:
        return _SHOWN[self.kind] + ("" if self.packing is None else f" unpacked by {self.packing}")


def reading_of(path: Path | HubFile, kind: Kind | None, key: str) -> FileReading:
    """How a data file is read: as `kind`, or as its content says; DataError: it is unreadable, or holds no text."""
    if kind == "parquet":
        return FileReading(kind)
    with read_errors(path), path.open("rb") as file:
        packing = _packing_of(file.read(HEAD))
    with open_unpacked(path) as content:
        head = content.read(HEAD)
    name = unpacked_name(str(path))
    if kind is not None:
        return FileReading(kind, packing)
    if packing is None and (name.endswith(".parquet") or head.startswith(b"PAR1")):
        return FileReading("parquet")
    if head.startswith(_UTF_16):
        raise DataError(f"{path} must be in UTF-8, and is in UTF-16 or UTF-32: convert it with `iconv -t UTF-8`")
    text = head.decode("utf-8-sig", errors="replace")
    first_line, newline, _ = text.lstrip().partition("\n")
    is_open = first_line.rstrip().endswith(("{", "[", ","))
    # The order matters: tables and other JSON are text too, and binary data of an unknown kind are refused last.
    foreign = next((shown for magic, shown in FOREIGN if re.match(magic, head, re.DOTALL)), None)
    if foreign is None and head.startswith(b"PAR1"):  # which cannot be read in parts
        foreign = f"a parquet file packed by {packing}"
    elif foreign is None and _is_table(name, text, key):
        foreign = "a table of separated values"
    elif foreign is None and (_ARRAY.match(text) or (newline and _OBJECT.match(text) and is_open)):
        foreign = "JSON without one object on each line"
    elif foreign is None and b"\0" in head:
        foreign = "binary data"
    if foreign is not None:
        raise DataError(
            f"{path} is {foreign}, and must be plain text, JSON lines or parquet: convert or unpack it first, leave it "
            f"out, or set data.format=text to read it as plain text{see('data#not-text')}"
        )
    return FileReading("jsonl" if name.endswith(LINES) or _OBJECT.match(text) else "text", packing)


def _is_table(name: str, text: str, key: str) -> bool:
    """True for a .csv, and for a first line of names without spaces that has the text's."""
    header = text.partition("\n")[0].rstrip("\r")
    rows = ([column.strip('"') for column in header.split(separator)] for separator in ",\t;|")
    has_key = any(len(row) > 1 and key in row and all(map(str.isidentifier, row)) for row in rows)
    return has_key or name.endswith(_TABLES)


def chosen_file_kind(format: str) -> Kind | None:
    """The kind of files that `data.format` chooses for all; None if their content decides."""
    return cast(Kind, format) if format in _SHOWN else None


def described_readings(readings: Sequence[tuple[Path, FileReading]]) -> str:
    """The readings of data files, for the user; if there are several, each with its file or the number of its files."""
    groups: dict[FileReading, list[Path]] = {}
    for path, reading in readings:
        groups.setdefault(reading, []).append(path)
    if len(groups) == 1:
        return f"read as {next(iter(groups))}"
    shown = []
    for reading, paths in groups.items():
        files = paths[0].name if len(paths) == 1 else units.counted(len(paths), "file")
        shown.append(f"{reading} ({files})")
    return f"read as {listing(shown)}"
