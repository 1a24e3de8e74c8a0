"""Checksums per chunk: written in any pieces, verified by whoever reads."""

import random
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.checkpoint.storage.chunks import MIN_CHUNK_BYTES, ChunkedReader, ChunkedWriter, FileEntry, chunk_bytes
from shardwise.checkpoint.storage.root import DamageError, Root

KIB, MIB, GIB = 2**10, 2**20, 2**30
CHUNK = MIN_CHUNK_BYTES


@pytest.mark.parametrize(
    ("size", "chunk"),
    [(0, CHUNK), (1, CHUNK), (8192 * CHUNK, CHUNK), (8192 * CHUNK + 1, 2 * CHUNK), (5 * GIB, MIB), (2**40, 16 * MIB)],
)
def test_chunk_sizes(size: int, chunk: int) -> None:
    assert chunk_bytes(size) == chunk


def write(folder: Root, data: bytes, cuts: list[int]) -> FileEntry:
    folder.make()
    writer = ChunkedWriter(folder / "file", len(data), "file")
    for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True):
        writer.write(memoryview(data)[a:b])
    return writer.close()


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Root, bytes, FileEntry]:
    """A file of five chunks and a bit."""
    data = random.Random(0).randbytes(5 * CHUNK + 100)
    folder = Root.of(tmp_path_factory.mktemp("chunks"))
    return folder, data, write(folder, data, [3, CHUNK, CHUNK, 3 * CHUNK + 7])


def test_each_chunk_has_its_checksum(stored: tuple[Root, bytes, FileEntry], tmp_path: Path) -> None:
    folder, data, entry = stored
    assert (folder / "file").read() == data
    assert entry.chunks == 6
    chunks = [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)]
    assert [entry.checksum(i) for i in range(6)] == [xxhash.xxh3_64_intdigest(chunk) for chunk in chunks]
    empty = write(Root.of(tmp_path), b"", [])
    assert empty == FileEntry("file", 0, CHUNK, b"")
    assert ChunkedReader(Root.of(tmp_path), empty).read(0, 0) == b""


@given(st.lists(st.tuples(st.integers(0, 5 * CHUNK + 100), st.integers(0, 5 * CHUNK + 100)), max_size=8))
@settings(deadline=None, max_examples=60)
def test_any_reads(stored: tuple[Root, bytes, FileEntry], reads: list[tuple[int, int]]) -> None:
    folder, data, entry = stored
    reader = ChunkedReader(folder, entry)
    for a, b in reads:
        start, stop = min(a, b), max(a, b)
        assert reader.read(start, stop) == data[start:stop]


def test_damage_is_found_by_who_reads_the_chunk(stored: tuple[Root, bytes, FileEntry], tmp_path: Path) -> None:
    _, data, entry = stored
    broken = bytearray(data)
    broken[2 * CHUNK + 5] ^= 1
    (tmp_path / "file").write_bytes(broken)
    reader = ChunkedReader(Root.of(tmp_path), entry)
    assert reader.read(0, 2 * CHUNK) == data[: 2 * CHUNK]
    told = rf"bytes {2 * CHUNK:,} to {3 * CHUNK:,} do not match their checksum \(chunk 2\)"
    with pytest.raises(DamageError, match=told):
        reader.read(2 * CHUNK - 1, 2 * CHUNK + 1)
    assert reader.read(3 * CHUNK, len(data)) == data[3 * CHUNK :]
    with pytest.raises(DamageError, match=r"\(chunk 2\)"):
        ChunkedReader(Root.of(tmp_path), entry).read(0, len(data))  # of several that come in one request


def test_another_length_is_damage(stored: tuple[Root, bytes, FileEntry], tmp_path: Path) -> None:
    for length in [0, 5 * CHUNK + 101]:
        _, data, entry = stored
        (tmp_path / "file").write_bytes((data + b"x")[:length])
        with pytest.raises(DamageError, match=rf"its length \({length:,} bytes\) must be {len(data):,} bytes"):
            ChunkedReader(Root.of(tmp_path), entry).read(0, 1)
