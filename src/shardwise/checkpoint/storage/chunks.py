"""Files with a checksum per chunk: hashed while they are written, verified when a chunk is read.

xxh3_64 of each chunk: it runs at memory speed, where a cryptographic hash would take longer than the disk.
"""

from __future__ import annotations

import builtins
import struct
from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from shardwise.base.errors import DamageError, StoreError
from shardwise.checkpoint.storage.root import Buffer, Root

MIN_CHUNK_BYTES = 2**14
MAX_CHUNK_BYTES = 2**24
_CHUNKS_OF_A_FILE = 8192  # aim for the number of chunks of a file: 64 KiB of checksums
_CHECKSUM = struct.Struct("<Q")
READ_BYTES = 16 * 2**20


@dataclass(frozen=True)
class FileEntry:
    """A stored file, and the checksum of each of its chunks."""

    path: str  # path relative to the folder
    bytes: int  # length of the file
    chunk_bytes: int  # length of each chunk; the last one may be shorter
    checksums: builtins.bytes  # xxh3_64 of each chunk, packed little-endian

    @property
    def chunks(self) -> int:
        return -(-self.bytes // self.chunk_bytes)

    def checksum(self, chunk: int) -> int:
        return int(_CHECKSUM.unpack_from(self.checksums, _CHECKSUM.size * chunk)[0])


def chunk_bytes(size: int) -> int:
    """Length of the chunks of a stored file of `size` bytes: a power of two from 16 KiB to 16 MiB, near `size` / 8192.

    Short chunks take space: each has a checksum of 8 bytes in the manifest. Long ones take time: whoever reads a part
    of a chunk reads all of it.
    """
    chunk = MIN_CHUNK_BYTES
    while chunk < MAX_CHUNK_BYTES and chunk * _CHUNKS_OF_A_FILE < size:
        chunk *= 2
    return chunk


class ChunkedWriter:
    """Writes one stored file with checksums, from its first byte to its last.

    Args:
        size: length of the file, which must be known beforehand.
        path: path relative to the folder, for the entry; default: the file's name.
    """

    def __init__(self, file: Root, size: int, path: str | None = None) -> None:
        self._path = file.name if path is None else path
        self._size = size
        self._chunk_bytes = chunk_bytes(size)
        self._written = 0
        self._checksums: list[int] = []
        self._hash = xxhash.xxh3_64()
        self._file = file.open(size)

    def write(self, data: Buffer) -> None:
        """Append any number of bytes."""
        # A view of bytes, whatever the elements of the buffer are.
        view = memoryview(data).cast("B")
        assert self._written + len(view) <= self._size, f"{self._path} gets more than {self._size} bytes"
        self._file.write(view)
        while len(view):
            # A part ends where its chunk ends: the checksum is then complete.
            part = view[: self._chunk_bytes - self._written % self._chunk_bytes]
            self._hash.update(part)
            self._written += len(part)
            if self._written % self._chunk_bytes == 0:
                self._next_chunk()
            view = view[len(part) :]

    def close(self) -> FileEntry:
        """End the file, all of whose bytes were written; a local file is then on the disk."""
        assert self._written == self._size, f"{self._path} got {self._written} of {self._size} bytes"
        if self._written % self._chunk_bytes:
            self._next_chunk()
        self._file.close()
        checksums = struct.pack(f"<{len(self._checksums)}Q", *self._checksums)
        return FileEntry(self._path, self._size, self._chunk_bytes, checksums)

    def __enter__(self) -> ChunkedWriter:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Leave nothing behind where the writing failed; a file that is whole was closed before."""
        if kind is not None:
            self._file.abandon()

    def _next_chunk(self) -> None:
        self._checksums.append(self._hash.intdigest())
        self._hash.reset()


class ChunkedReader:
    """Reads parts of one stored file; bytes are only returned once their checksum was verified.

    Attributes:
        bytes_read: bytes that were read from the place so far, in whole chunks.
        verified: a byte for each chunk, 1 where it was read and is intact.
    """

    def __init__(self, folder: Root, entry: FileEntry) -> None:
        self.bytes_read = 0
        self.verified = bytearray(entry.chunks)
        self._file = folder / entry.path
        self._entry = entry
        self._last_chunk: tuple[int, memoryview] | None = None
        """Number and bytes of the chunk that was read last: the next read often begins in it."""
        self._has_required_size = False

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes `start` to `stop`.

        Adjacent chunks come in one request of at most 16 MiB; the last chunk is kept for the next call.

        Raises:
            DamageError: a chunk does not match its checksum, or the file is missing or of another length.
        """
        entry = self._entry
        assert 0 <= start <= stop <= entry.bytes, f"bytes {start} to {stop} of {entry.path} ({entry.bytes} bytes)"
        if start == stop:
            return memoryview(b"")
        first = start // entry.chunk_bytes
        last = (stop - 1) // entry.chunk_bytes
        at_once = max(1, READ_BYTES // entry.chunk_bytes)
        # Few chunks need no copy; more of them are put together as they come.
        if last - first < at_once:
            begin = first * entry.chunk_bytes
            return self._chunks(first, last + 1)[start - begin : stop - begin]
        result = memoryview(bytearray(stop - start))
        for chunk in range(first, last + 1, at_once):
            data = self._chunks(chunk, min(chunk + at_once, last + 1))
            begin = chunk * entry.chunk_bytes
            part = data[max(start - begin, 0) : stop - begin]
            offset = max(begin - start, 0)
            result[offset : offset + len(part)] = part
        return result.toreadonly()

    def _chunks(self, first: int, end: int) -> memoryview:
        """Chunks `first` to `end`, verified."""
        entry = self._entry
        last_number, last_data = self._last_chunk or (-1, memoryview(b""))
        if first == end - 1 == last_number:
            return last_data
        begin = first * entry.chunk_bytes
        stop = min(end * entry.chunk_bytes, entry.bytes)
        # A read that goes on where the last one ended fetches only what follows.
        if first == last_number:
            fetched = self._fetch(begin + len(last_data), stop)
            data = memoryview(b"".join((last_data, fetched)))
            fresh = range(first + 1, end)
        else:
            data = memoryview(self._fetch(begin, stop))
            fresh = range(first, end)
        for chunk in fresh:
            offset = (chunk - first) * entry.chunk_bytes
            verify_chunk(self._file, entry, chunk, data[offset : offset + entry.chunk_bytes])
            self.verified[chunk] = 1
        final = data[(end - 1 - first) * entry.chunk_bytes :]
        # A copy, so that the other chunks are freed.
        if len(final) < len(data):
            final = memoryview(bytes(final))
        self._last_chunk = (end - 1, final)
        return data

    def _fetch(self, start: int, stop: int) -> bytes:
        # A file with more bytes than were written has the right checksums: only its length shows it.
        if not self._has_required_size:
            require_size(self._file, self._entry)
            self._has_required_size = True
        data = read_range(self._file, start, stop)
        self.bytes_read += len(data)
        return data


def read_range(file: Root, start: int, stop: int) -> bytes:
    """Bytes `start` to `stop` of a stored file; DamageError where it ends before."""
    data = file.read(start, stop)
    if len(data) != stop - start:
        raise DamageError(f"{file} is damaged: it ends at byte {start + len(data):,}, before byte {stop:,}")
    return data


def read_whole(folder: Root, entry: FileEntry) -> bytes:
    """All bytes of a small stored file, verified; DamageError as of `ChunkedReader.read`."""
    return bytes(ChunkedReader(folder, entry).read(0, entry.bytes))


def require_size(file: Root, entry: FileEntry) -> None:
    """Raise DamageError where a file is missing or has another length than its entry."""
    length: int | None = None
    try:
        length = file.size()
    except StoreError as error:
        if not error.missing:
            raise
    require_length(file, entry, length)


def require_length(file: Root, entry: FileEntry, length: int | None) -> None:
    """Raise DamageError where the length of a file, None for a file that is missing, is not that of its entry."""
    if length is None:
        raise DamageError(f"{file} is missing, and the manifest lists it ({entry.bytes:,} bytes)")
    if length != entry.bytes:
        raise DamageError(f"{file} is damaged: its length ({length:,} bytes) must be {entry.bytes:,} bytes")


def verify_chunk(file: Root, entry: FileEntry, chunk: int, data: memoryview) -> None:
    """Raise DamageError where the bytes of chunk number `chunk` do not match its checksum."""
    if xxhash.xxh3_64_intdigest(data) != entry.checksum(chunk):
        begin = chunk * entry.chunk_bytes
        raise DamageError(
            f"{file} is damaged: bytes {begin:,} to {begin + len(data):,} do not match their checksum (chunk {chunk})"
        )


def consecutive_numbers(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """First and last number of each range of consecutive chunks, of ascending ones."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def chunk_numbers_text(numbers: Iterable[int]) -> str:
    """The numbers of chunks as text: `0…3, 5`."""
    return ", ".join(f"{a}…{b}" if a < b else f"{a}" for a, b in consecutive_numbers(sorted(numbers)))
