"""Places: the same operations on a disk and on another filesystem, failures as sentences, and checksums of chunks."""

import errno
import os
import random
import sys
import threading
import uuid
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.base.errors import ConfigError, DamageError, StoreError
from shardwise.checkpoint.storage import root as behind
from shardwise.checkpoint.storage.chunks import MIN_CHUNK_BYTES, ChunkedReader, ChunkedWriter, FileEntry, chunk_bytes
from shardwise.checkpoint.storage.root import Root


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Root:
    """A folder that does not exist yet, on the disk or in fsspec's memory."""
    place = tmp_path / "runs" if request.param == "local" else f"memory://{uuid.uuid4().hex}/runs"
    return Root.of(place)


def test_a_folder_and_its_files(root: Root) -> None:
    assert not root.exists()
    assert root.names() == []
    root.make()
    root.make()
    assert root.is_folder()
    (root / "b").write(b"hello")
    (root / "a").make()
    file = (root / "a/c").open(3)
    file.write(b"wor")
    file.write(memoryview(bytearray(b"ld")))
    file.close()
    assert root.names() == ["a", "b"]
    assert root.files() == {"a/c": 5, "b": 5}
    assert (root / "b").read() == b"hello"
    assert (root / "a/c").read(1, 3) == b"or"
    assert (root / "a/c").read(3, 3) == b""
    assert (root / "b").size() == 5
    assert not (root / "b").is_folder()
    assert (root / "a" / "c").name == "c"
    (root / "b").write(b"another")
    assert (root / "b").read() == b"another", "a file is replaced whole"
    assert root.names() == ["a", "b"]


def test_renames_removals_and_what_is_missing_or_leads_out(root: Root) -> None:
    (root / ".new/inner").make()
    (root / ".new/inner/a").write(b"x")
    (root / ".new").rename(root / "final")
    assert root.files() == {"final/inner/a": 1}
    (root / "final").remove()
    assert not (root / "final").exists()
    (root / "final").remove()
    assert root.names() == []
    for action in ((root / "a").size, (root / "a").read):
        with pytest.raises(StoreError, match=r"runs/a cannot be read: ") as caught:
            action()
        assert caught.value.missing
    for name in ["../x", "/etc/x", "a\0"]:
        with pytest.raises(StoreError, match="runs cannot be left: "):
            root / name


def test_a_removal_does_not_follow_links_and_a_pipe_is_no_file(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("stays")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(kept)
    (tmp_path / "latest").symlink_to(folder)
    Root.of(tmp_path / "latest").remove()
    assert folder.is_dir()
    Root.of(folder).remove()
    assert (kept / "file").read_text() == "stays"
    # It would be waited for without end.
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StoreError, match="pipe cannot be read: it is no file"):
        Root.of(tmp_path / "pipe").size()


def full(_: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_full_disks_and_what_is_complete_on_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", full)
    file = (Root.of(tmp_path) / "a").open(3 * 2**20)
    file.write(b"x")
    needed = r"/a cannot be written: the disk is full; it needs 3\.0 MiB \(3,145,728 bytes\), free is .*: make room on "
    with pytest.raises(StoreError, match=f"^{tmp_path}{needed}that disk"):
        file.close()
    file.abandon()
    assert list(tmp_path.iterdir()) == []
    # A file with all of its bytes once it is closed, a folder's names once it is synced.
    flushed: dict[int, int] = {}
    monkeypatch.setattr(os, "fsync", lambda file: flushed.update({os.fstat(file).st_ino: os.fstat(file).st_size}))
    file = (Root.of(tmp_path) / "a").open()
    file.write(b"abc")
    file.close()
    assert flushed == {(tmp_path / "a").stat().st_ino: 3}
    Root.of(tmp_path).sync()
    assert tmp_path.stat().st_ino in flushed


def test_which_urls_are_taken_and_what_is_shown_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(Root.of("memory://host/x?sig=5ecret&y=1")) == "memory://host/x?(redacted)"
    assert str(Root.of("memory://me:word@host/x") / "y") == "memory://(redacted)@host/x/y"
    with pytest.raises(ConfigError, match=r"nfs3://x must be a path, or a URL such as s3://bucket/folder"):
        Root.of("nfs3://x")
    for chained in ("simplecache::memory://x", "zip://x::memory://y.zip"):
        with pytest.raises(ConfigError, match=r"must be a path, or a URL such as .*: it has two schemes"):
            Root.of(chained)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"].__dict__["_registry"], "s3", raising=False)
    with pytest.raises(ConfigError, match=r"s3://bucket/x needs a package .* pip install 'shardwise\[s3\]'"):
        Root.of("s3://bucket/x")


def test_a_place_that_can_be_written_is_left_as_it_was(root: Root) -> None:
    behind.require_writable_folder(root)
    assert root.names() == []
    assert behind.answer_in_time(root, lambda: 3) == 3


def test_a_place_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="file/run cannot be made: "):
        behind.require_writable_folder(Root.of(tmp_path / "file/run"))
    monkeypatch.setattr(behind, "PATIENCE_SECONDS", 0.01)
    with pytest.raises(StoreError, match="memory://far cannot be reached: no answer within 0 s"):
        behind.answer_in_time(Root.of("memory://far"), threading.Event().wait)


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
    for length in [0, 5 * CHUNK + 101]:
        _, data, entry = stored
        (tmp_path / "file").write_bytes((data + b"x")[:length])
        with pytest.raises(DamageError, match=rf"its length \({length:,} bytes\) must be {len(data):,} bytes"):
            ChunkedReader(Root.of(tmp_path), entry).read(0, 1)
