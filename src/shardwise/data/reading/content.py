"""Content of files: unpacked, however it is stored, with its beginning for a first look.

The first bytes of a file, and not its name, tell the program that packed it.
"""

from __future__ import annotations

import bz2
import gzip
import io
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from shardwise.base.errors import DataError, see
from shardwise.base.files import reason_of
from shardwise.base.libraries import optional_library

BLOCK = 1 << 18
"""Bytes that are read at once."""
HEAD = 1 << 13
"""Bytes for a first look: enough for a header of columns and some lines."""


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
        stream: bytes of the content, from the byte that was asked for on.
        head: first `HEAD` bytes, or all if there are fewer.
        packing: program that packed the file; None if none did.
    """

    stream: IO[bytes]
    head: bytes
    packing: str | None


def _lzma(file: IO[bytes]) -> Any:
    import lzma  # some builds of Python lack it

    return lzma.LZMAFile(file)


def _by_arrow(codec: str, file: IO[bytes]) -> Any:
    arrow = optional_library("pyarrow", f"files packed by {codec} need", "parquet")
    return arrow.CompressedInputStream(arrow.PythonFile(file, mode="r"), codec)


@dataclass(frozen=True)
class _Packing:
    """A program that packs files.

    Attributes:
        magic: bytes that its files begin with, one of several.
        suffixes: suffixes of the names that it gives them.
        unpacked: function that opens the unpacked content of an open file.
    """

    magic: tuple[bytes, ...]
    suffixes: tuple[str, ...]
    unpacked: Callable[[IO[bytes]], Any]


_PACKINGS: Mapping[str, _Packing] = {
    "gzip": _Packing((b"\x1f\x8b",), (".gz", ".gzip", ".bgz"), lambda file: gzip.GzipFile(fileobj=file)),
    # Text may begin with BZh; in a file of bzip2 a digit and the magic of its first block or of its end follow.
    "bzip2": _Packing(
        tuple(
            b"BZh%d%b" % (level, magic) for level in range(1, 10) for magic in (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90")
        ),
        (".bz2", ".bzip2"),
        bz2.BZ2File,
    ),
    "xz": _Packing((b"\xfd7zXZ\0", b"\x5d\0\0"), (".xz", ".lzma"), _lzma),
    # A file of zstd may begin with frames that hold no content, of which pzstd writes one.
    "zstd": _Packing(
        (b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18"), (".zst", ".zstd"), lambda file: _by_arrow("zstd", file)
    ),
    "lz4": _Packing((b"\x04\x22\x4d\x18",), (".lz4",), lambda file: _by_arrow("lz4", file)),
}


@contextmanager
def opened(path: Path | HubFile, start: int = 0) -> Iterator[Content]:
    """The content of a file from byte `start` of the unpacked content on.

    Raises:
        DataError: the file cannot be read, or is cut off or damaged, while it is opened or read.
    """
    with readable(path), ExitStack() as files:
        file = files.enter_context(path.open("rb"))
        head = file.read(HEAD)
        packing = packing_of(head)
        if packing is None:
            file.seek(start)
            yield Content(file, head, None)
            return
        with _unpacking(path, packing, file):
            head = _unpacked(path, packing, files).read(HEAD)
            stream = _unpacked(path, packing, files)
            while start > 0 and (block := stream.read(min(start, BLOCK))):
                start -= len(block)
            yield Content(stream, head, packing)


def _unpacked(path: Path | HubFile, packing: str, files: ExitStack) -> IO[bytes]:
    """The unpacked content from its beginning, of a file of its own, as closing it may close that."""
    file = files.enter_context(path.open("rb"))
    return files.enter_context(io.BufferedReader(_PACKINGS[packing].unpacked(file), BLOCK))


@contextmanager
def _unpacking(path: Path | HubFile, packing: str, file: IO[bytes]) -> Iterator[None]:
    """Turns what libraries raise about a packed file, while it is read, into a DataError."""
    try:
        yield
    except ImportError as error:
        raise DataError(
            f"{path} is packed by {packing}, which this Python cannot unpack ({error}): unpack the file first"
        ) from None
    except Exception as error:
        # An error of the system has a number; errors about damaged content have none.
        is_cut = isinstance(error, EOFError) or "Truncated" in str(error)
        is_damaged = isinstance(error, OSError | zlib.error) or type(error).__name__ == "LZMAError"
        if getattr(error, "errno", None) or not (is_cut or is_damaged):
            raise
        if is_cut:
            size = file.seek(0, io.SEEK_END)
            raise DataError(
                f"{path} is cut off: its {size:,} bytes end before what {packing} packed does; fetch or copy it again"
                f"{see('data#file-cut-off')}"
            ) from None
        raise DataError(f"{path} is damaged, {packing} cannot unpack it ({error}): fetch or copy it again") from None


@contextmanager
def readable(path: object) -> Iterator[None]:
    """Turns a refusal of the system into a DataError about the file that it names, or about `path`."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{error.filename or path} cannot be read: {reason_of(error)}") from None


def packing_of(head: bytes) -> str | None:
    """The program that packed a file which begins with `head`."""
    return next((name for name, packing in _PACKINGS.items() if head.startswith(packing.magic)), None)


def unpacked_name(name: str) -> str:
    """The name of a file in lower case, without the suffix that packing gave it."""
    name = name.lower()
    suffixes = (suffix for packing in _PACKINGS.values() for suffix in packing.suffixes if name.endswith(suffix))
    return name.removesuffix(next(suffixes, ""))
