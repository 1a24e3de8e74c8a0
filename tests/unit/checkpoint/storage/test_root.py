"""Places: the same operations on a disk and on another filesystem, and failures as sentences."""

import errno
import os
import sys
import threading
import uuid
from pathlib import Path

import pytest

from shardwise.base.errors import ConfigError
from shardwise.checkpoint.storage import root as behind
from shardwise.checkpoint.storage.root import Root, StoreError


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


def test_renames_removals_and_what_is_missing(root: Root) -> None:
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


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a\0"])
def test_no_name_leads_out_of_a_place(root: Root, name: str) -> None:
    with pytest.raises(StoreError, match="runs cannot be left: "):
        root / name


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
