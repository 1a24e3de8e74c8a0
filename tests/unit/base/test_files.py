"""A link that lies where a file of our own is to be is never followed."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.base import files
from shardwise.base.errors import ConfigError, DataError
from shardwise.base.files import UntrustedError, open_lock, open_own, require_trusted, write_atomic
from shardwise.checkpoint.storage.root import Root
from shardwise.data import cache
from shardwise.data.prepare.output import PreparedOutput
from shardwise.runs.folder import JsonLines, RunLock, json_text, open_log
from tests.os_errors import raises


@pytest.fixture(params=["symbolic", "dangling", "hard"])
def plant(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Path], Path]:
    """Makes a link to a file of the user's; returns that."""

    def link(path: Path) -> Path:
        victim = tmp_path / "victim"
        if request.param != "dangling":
            victim.write_text("mine")
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.hardlink_to if request.param == "hard" else path.symlink_to)(victim)
        return victim

    return link


def untouched(victim: Path) -> bool:
    return not victim.exists() or victim.read_text() == "mine"


def test_a_link_is_not_opened_and_no_temporary_file_is_one(tmp_path: Path, plant: Callable[[Path], Path]) -> None:
    victim = plant(tmp_path / "own")
    for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT):
        with pytest.raises(OSError, match=r"own is a link or no plain file, and links are not followed: remove it"):
            open_own(tmp_path / "own", flags)
    assert untouched(victim)
    with files.new_file(tmp_path / "own") as file:
        file.write(b"ours")
    assert (tmp_path / "own").read_bytes() == b"ours"
    assert untouched(victim)
    os.mkfifo(tmp_path / "pipe")  # nor waited for
    with pytest.raises(OSError, match="no plain file"):
        open_own(tmp_path / "pipe", os.O_RDONLY)
    victim = plant(tmp_path / f".a.{os.getpid()}.tmp")
    (Root.of(tmp_path) / "a").write(b"ours")
    assert untouched(victim)
    victim.unlink(missing_ok=True)
    victim = plant(tmp_path / f".b.{os.getpid()}.tmp")
    write_atomic(tmp_path / "b", "ours")
    assert untouched(victim)
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text() == "ours"


@pytest.mark.parametrize(
    ("name", "kind", "opens"),
    [
        ("run/.lock", ConfigError, lambda at: RunLock(at / "run").__enter__()),
        ("cache/locks/key.lock", DataError, lambda at: cache.lock_entry(at / "cache", "key").__enter__()),
        (".out.preparing/lock", DataError, lambda at: PreparedOutput(at / "out", None, None, {})._locked().__enter__()),
        ("run/metrics.jsonl", ConfigError, lambda at: JsonLines(at / "run/metrics.jsonl")),
        ("run/logs/rank-0000.log", ConfigError, lambda at: open_log(at / "run/logs/rank-0000.log")),
    ],
)
def test_no_file_that_a_command_opens_is_a_link(
    name: str, kind: type[Exception], opens: Callable[[Path], object], tmp_path: Path, plant: Callable[[Path], Path]
) -> None:
    victim = plant(tmp_path / name)
    with pytest.raises(kind, match="is a link or no plain file"):
        opens(tmp_path)
    assert untouched(victim)


def test_a_lock_is_one_process_s_until_its_file_is_closed(tmp_path: Path) -> None:
    with open_lock(tmp_path / "lock") as mine, open_lock(tmp_path / "lock") as other:
        assert files.lock(mine, wait=False)
        assert not files.lock(other, wait=False)
        assert not files.lock(other, wait=False, shared=True)
        mine.close()
        assert files.lock(other, wait=True)
    assert (tmp_path / "lock").read_bytes() == b"", "the file stays"


def test_a_write_is_durable_in_order_or_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash after any of these steps leaves the old file or the new one, whole."""
    steps: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def recorded_fsync(descriptor: int) -> None:
        steps.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "bytes")
        fsync(descriptor)

    def recorded_replace(self: Path, target: Path) -> Path:
        steps.append("name")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(Path, "replace", recorded_replace)
    write_atomic(tmp_path / "file", "new")
    assert steps == ["bytes", "name", "folder"]
    assert (tmp_path / "file").read_text() == "new"
    (tmp_path / "file").write_text("old")
    monkeypatch.setattr(os, "fsync", raises(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        write_atomic(tmp_path / "file", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"


NOBODY = 65534
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A place that anyone may write, as /tmp."""
    place = tmp_path / "shared"
    place.mkdir()
    place.chmod(0o1777)
    return place


@AS_ROOT
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_fault_16_what_another_user_put_in_a_shared_place_does_not_count(kind: str, shared: Path) -> None:
    target, trap, victim = shared.parent / "target", shared / "trap", shared / "victim"
    (target / "sub").mkdir(parents=True)
    if kind == "folder":
        (trap / "sub").mkdir(parents=True)
    else:
        trap.symlink_to(target)
    victim.write_text("")
    for path in (trap, victim):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    told = rf" must belong to you, and user {NOBODY} may have put it there because anyone may write {shared}"
    for path in (trap / "lock", trap / "sub/lock"):
        with pytest.raises(UntrustedError, match=f"{trap}{told}"):
            open_own(path, os.O_RDWR | os.O_CREAT)
    with pytest.raises(UntrustedError, match=f"{victim}{told}"):
        open_own(victim, os.O_RDWR)
    with pytest.raises(DataError, match=f"{trap}{told}"):
        cache.open_entry(trap, "tokens", "key", lambda _: True)
    assert [entry.name for entry in target.rglob("*")] == ["sub"]


@AS_ROOT
def test_fault_16_folders_that_a_team_shares_and_links_of_its_own_still_work(shared: Path) -> None:
    team, place = shared.parent / "team", shared / "mine"
    (team / "locks").mkdir(parents=True)
    (team / "locks" / "key.lock").touch()
    for path in (team, team / "locks", team / "locks" / "key.lock"):
        os.chown(path, NOBODY, NOBODY)
    team.chmod(0o2775)
    place.mkdir()
    (place / "up").symlink_to(team)
    for root in (team, place / "up"):
        with cache.lock_entry(root, "key") as exclusive:
            assert exclusive


def test_fault_16_folders_that_are_open_to_all_or_for_one_user(shared: Path, tmp_path: Path) -> None:
    with pytest.raises(UntrustedError, match=r"\(1777\) must be 1775 or stricter, .* or choose a folder below it$"):
        require_trusted(shared, files.ANYONE_WRITES)
    files.make_folder(shared / "graphs")
    require_trusted(shared / "graphs", files.ANYONE_WRITES)
    umask = os.umask(0)
    try:
        files.make_folder(shared / "cache" / "tokens")
    finally:
        os.umask(umask)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (shared / "cache", shared / "cache/tokens")]
    assert modes == [0o700, 0o775], "no other user can write them"
    folder, link = tmp_path / "alone", tmp_path / "link"
    folder.mkdir(mode=0o700)
    require_trusted(folder, files.OTHERS)
    link.symlink_to(folder)
    with pytest.raises(UntrustedError, match="link must be a folder of yours, and no link: remove it"):
        require_trusted(link, files.OTHERS)
    folder.chmod(0o750)
    with pytest.raises(UntrustedError, match=r"\(0750\) must be 0700 or stricter, as others may use it"):
        require_trusted(folder, files.OTHERS)
    if os.geteuid() == 0:
        folder.chmod(0o700)
        os.chown(folder, NOBODY, NOBODY)
        with pytest.raises(UntrustedError, match="alone must be a folder of yours"):
            require_trusted(folder, files.OTHERS)


def test_a_path_that_may_not_be_used_is_refused_and_other_errors_are_not(tmp_path: Path) -> None:
    for code in (errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.ESTALE):
        refusal = files.path_refusal(OSError(code, os.strerror(code), b"runs/\xff"))
        assert str(refusal) == f"the path runs/\\udcff cannot be used: {os.strerror(code)}"
    assert files.path_refusal(OSError(errno.EACCES, "of no path")) is None
    assert files.path_refusal(FileNotFoundError(errno.ENOENT, "a fault of ours", "x")) is None
    # Fault 15: a path that is no UTF-8 does not end a write.
    path = os.fsdecode(b"run-\xfc")
    write_atomic(tmp_path / "a.json", path)
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == "run-?"
    assert json_text({"path": path}) == '{"path": "run-?"}'
    # The room is that of the disk where a path will be.
    assert abs(files.free_bytes(tmp_path / "not" / "yet") - files.free_bytes(tmp_path)) < 2**30
