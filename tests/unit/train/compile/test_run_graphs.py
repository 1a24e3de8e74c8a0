"""The folders of compilers: each is there as long as its process, and no longer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.train.compile.run_graphs import WorkFolder, compiled_files, remove_left_over

HOLD = """
from shardwise.train.compile.run_graphs import WorkFolder
print(WorkFolder().path, flush=True)
input()
"""


@pytest.fixture(autouse=True)
def _among(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_a_folder_stays_while_its_process_lives_and_goes_when_it_is_killed(tmp_path: Path) -> None:
    own = WorkFolder()
    command = [sys.executable, "-c", HOLD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        folder = Path(other.stdout.readline().strip())
        assert folder.parent == tmp_path
        remove_left_over()
        assert folder.is_dir(), "a folder that is in use was removed"
        other.kill()
    remove_left_over()
    assert [*tmp_path.iterdir()] == [own.path]
    own.remove()
    assert not [*tmp_path.iterdir()]


def test_a_folder_without_a_lock_may_be_a_new_one(tmp_path: Path) -> None:
    new, old = (tmp_path / f"shardwise-graphs-{os.getuid()}-{name}" for name in ("new", "99999999999999999999-x"))
    for folder in (new, old):
        folder.mkdir()
    os.utime(old, (0, 0))
    remove_left_over()
    assert [*tmp_path.iterdir()] == [new]


def test_locks_and_parts_of_files_are_nothing_compiled(tmp_path: Path) -> None:
    folder = WorkFolder()
    for name in ("ab/code.so", "ab/code.lock", "half.tmp"):
        (folder.path / name).parent.mkdir(exist_ok=True)
        (folder.path / name).touch()
    assert compiled_files(folder.path) == {folder.path / "ab/code.so"}
    folder.remove()
