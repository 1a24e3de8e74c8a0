"""Content of files: unpacked and in UTF-8, however it is stored, with its beginning for a first look.

The first bytes of a file, and not its name, tell the program that packed it and its encoding.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import importlib
import io
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from shardwise.base.errors import DataError, see
from shardwise.base.files import reason_of

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

BLOCK = 1 << 18
"""Bytes that are read at once."""
# Bytes for a first look: enough for a header of columns and some lines.
HEAD = 1 << 13
UTF_8 = "UTF-8"
# The marks of UTF-32 come first, as one of them begins with a mark of UTF-16.
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


# Control characters but for those of old texts: from bell to carriage return, the end of a file in DOS, escape.
_NOT_IN_TEXT = bytes(set(range(0x20)) - set(range(7, 14)) - {0x1A, 0x1B}) + b"\x7f"
TEXT_CONTROLS = 0.01
"""The largest `control_share` of a text; of random bytes it is about 0.09."""


@dataclass(frozen=True)
class HubFile:
    """A file on the hub (hf://…): each read goes over the network, and nothing is kept."""

    address: str

    def open(self, mode: Literal["rb"], /) -> IO[bytes]:
        from huggingface_hub import HfFileSystem

        opened: IO[bytes] = HfFileSystem().open(self.address, mode)
        return opened

    def __str__(self) -> str:
        return self.address


@dataclass(frozen=True)
class Content:
    """Content of an open file.

    Attributes:
        stream: bytes of the content, from the byte that was asked for on, in UTF-8 whatever the encoding is.
        head: first `HEAD` bytes, or all if there are fewer.
        packing: program that packed the file; None if none did.
        encoding: encoding of the text in the file.
    """

    stream: IO[bytes]
    head: bytes
    packing: str | None
    encoding: str


@contextmanager
def opened(path: Path | HubFile, start: int = 0) -> Iterator[Content]:
    """The content of a file from byte `start` of the unpacked content on.

    Raises:
        DataError: the file cannot be read, or is cut off or damaged, while it is opened or read.
    """
    with readable(path), path.open("rb") as file:
        head = file.read(HEAD)
        packing = packing_of(head)
        encoding = _encoding_of(head)
        named = packing_named(str(path))
        if head and named is not None and packing is None:
            raise DataError(f"{path} is not packed by {named}, as its name says: pack it, or rename it")
        if packing is None and encoding == UTF_8:
            file.seek(start)
            yield Content(file, head, None, UTF_8)
            return
        file.seek(0)
        if packing is None:
            blocks = _blocks(file)
        else:
            head, blocks = _with_head(_unpacked(path, file, packing))
            encoding = _encoding_of(head)
        if encoding != UTF_8:
            head, blocks = _with_head(_in_utf8(path, blocks, encoding))
        with io.BufferedReader(_Blocks(blocks), BLOCK) as stream:
            while start > 0 and (block := stream.read(min(start, BLOCK))):
                start -= len(block)
            yield Content(stream, head, packing, encoding)


@contextmanager
def readable(path: object) -> Iterator[None]:
    """Turns a refusal of the system into a DataError about the file that it names, or about `path`."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{error.filename or path} cannot be read: {reason_of(error)}") from None


def first_line(error: BaseException) -> str:
    """The first line of a library's message, without a period."""
    return str(error).partition("\n")[0].rstrip(".")


def optional_library(module: str, who_needs: str, extra: str) -> Any:
    """The imported module of a library that only some formats need.

    Args:
        who_needs: beginning of the message, such as "parquet files need".
        extra: extra of this package that installs the library.

    Raises:
        DataError: the module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise DataError(f"{who_needs} {library} ({error}): pip install 'shardwise[{extra}]'") from None


def _blocks(file: IO[bytes] | gzip.GzipFile | bz2.BZ2File) -> Iterator[bytes]:
    while block := file.read(BLOCK):
        yield block


def _xz(file: IO[bytes]) -> Iterator[bytes]:
    import lzma  # some builds of Python lack it

    with lzma.LZMAFile(file) as unpacked:
        try:
            yield from _blocks(unpacked)
        except lzma.LZMAError as error:
            raise OSError(str(error)) from None


def _by_arrow(codec: str, file: IO[bytes]) -> Iterator[bytes]:
    arrow = optional_library("pyarrow", f"files packed by {codec} need", "parquet")
    unpacked = arrow.CompressedInputStream(arrow.PythonFile(file, mode="r"), codec)  # not closed: that closes the file
    try:
        yield from _blocks(unpacked)
    except OSError as error:
        if "Truncated" in str(error):
            raise EOFError from None
        raise


@dataclass(frozen=True)
class _Packing:
    """A program that packs files.

    Attributes:
        magic: bytes that its files begin with, one of several.
        suffixes: suffixes of the names that it gives them.
        blocks: function that reads the unpacked content of an open file; it raises EOFError if the file is cut off,
            OSError or zlib.error if it is damaged.
    """

    magic: tuple[bytes, ...]
    suffixes: tuple[str, ...]
    blocks: Callable[[IO[bytes]], Iterator[bytes]]


_PACKINGS: Mapping[str, _Packing] = {
    "gzip": _Packing((b"\x1f\x8b",), (".gz", ".gzip", ".bgz"), lambda file: _blocks(gzip.GzipFile(fileobj=file))),
    "bzip2": _Packing((b"BZh",), (".bz2", ".bzip2"), lambda file: _blocks(bz2.BZ2File(file))),
    "xz": _Packing((b"\xfd7zXZ\0", b"\x5d\0\0"), (".xz", ".lzma"), _xz),
    # A file of zstd may begin with frames that hold no content, of which pzstd writes one.
    "zstd": _Packing(
        (b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18"), (".zst", ".zstd"), lambda file: _by_arrow("zstd", file)
    ),
    "lz4": _Packing((b"\x04\x22\x4d\x18",), (".lz4",), lambda file: _by_arrow("lz4", file)),
}


def control_share(data: bytes) -> float:
    """The share of null bytes and of other characters that no text has, in any encoding but UTF-16 and UTF-32."""
    if not data:
        return 0.0
    return 1 - len(data.translate(None, _NOT_IN_TEXT)) / len(data)


def packing_of(head: bytes) -> str | None:
    """The program that packed a file which begins with `head`."""
    for name, packing in _PACKINGS.items():
        # Text may begin with BZh; in a file of bzip2 a digit and the magic of its first block or of its end follow.
        if name == "bzip2" and head[4:10] not in (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90"):
            continue
        if head.startswith(packing.magic):
            return name
    return None


def packing_named(name: str) -> str | None:
    """The program that packed a file, as its name says."""
    for program, packing in _PACKINGS.items():
        if name.lower().endswith(packing.suffixes):
            return program
    return None


def unpacked_name(name: str) -> str:
    """The name of a file in lower case, without the suffix that packing gave it."""
    name = name.lower()
    packing = packing_named(name)
    if packing is not None:
        suffix = next(suffix for suffix in _PACKINGS[packing].suffixes if name.endswith(suffix))
        name = name.removesuffix(suffix)
    return name


def _unpacked(path: Path | HubFile, file: IO[bytes], packing: str) -> Iterator[bytes]:
    try:
        yield from _PACKINGS[packing].blocks(file)
    except EOFError:
        raise DataError(
            f"{path} is cut off: its {file.tell():,} bytes end before what {packing} packed does; fetch or copy it "
            f"again{see('data#file-cut-off')}"
        ) from None
    except (OSError, zlib.error) as error:
        # An error of the system has a number; errors about damaged content have none.
        if isinstance(error, OSError) and error.errno:
            raise
        raise DataError(
            f"{path} is damaged before byte {file.tell():,}, {packing} cannot unpack it ({error}): fetch or copy it "
            "again"
        ) from None
    except ImportError as error:
        raise DataError(
            f"{path} is packed by {packing}, which this Python cannot unpack ({error}): unpack the file first"
        ) from None


def _encoding_of(head: bytes) -> str:
    return next((encoding for mark, encoding in _MARKS.items() if head.startswith(mark)), UTF_8)


def _in_utf8(path: Path | HubFile, blocks: Iterator[bytes], encoding: str) -> Iterator[bytes]:
    try:
        for text in codecs.iterdecode(blocks, encoding):
            yield text.encode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} begins with the mark of {encoding} and is not {encoding} ({error.reason}): it is damaged or holds "
            "no text, so fetch or copy it again, or leave it out"
        ) from None


def _with_head(blocks: Iterator[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """The first bytes of a content, and all its blocks."""
    first = b""
    for block in blocks:
        first += block
        if len(first) >= HEAD:
            break
    # An empty block would mean the end to readers.
    return first[:HEAD], chain(filter(None, [first]), blocks)


class _Blocks(io.RawIOBase):
    """A file of the blocks that an iterator gives."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._unread = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        target = memoryview(buffer).cast("B")
        while not self._unread:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._unread = memoryview(block)
        count = min(len(target), len(self._unread))
        target[:count] = self._unread[:count]
        self._unread = self._unread[count:]
        return count
