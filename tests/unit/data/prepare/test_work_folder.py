"""The folder of a preparation is one process's at a time, whatever the file system offers."""

import contextlib
import errno
import fcntl
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.base.errors import ConfigError
from shardwise.config import DataConfig
from shardwise.data.prepare.work_folder import WorkFolder, estimate
from shardwise.data.reading.text_sources import open_source
from shardwise.data.tokens.tokenizer import train_tokenizer


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.usefixtures("no_locks")
def test_two_at_once_do_not_meet_where_there_are_no_file_locks(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with WorkFolder(output).locked():
        named = (
            rf"is being prepared by another process \({os.getpid()} on \S+\): wait for its end, or remove .*owner\.json"
        )
        with pytest.raises(ConfigError, match=named), WorkFolder(output).locked():
            raise AssertionError("two processes have one folder")
        WorkFolder(output).clear()
        with pytest.raises(ConfigError, match="another process"), WorkFolder(output).locked():
            raise AssertionError("two processes have one folder")
    with WorkFolder(output).locked():
        WorkFolder(output).save({"complete": False})
    assert sorted(path.name for path in (tmp_path / ".out.preparing").iterdir()) == ["lock", "state.json"]


@pytest.mark.usefixtures("no_locks")
def test_a_process_that_has_ended_here_hinders_nobody_and_one_elsewhere_may_still_be_at_work(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    folder = tmp_path / ".out.preparing"
    folder.mkdir()
    owner = folder / "owner.json"
    for left, refused in (
        ({"host": platform.node(), "pid": ended.pid}, False),
        ({"host": f"not-{platform.node()}", "pid": ended.pid}, True),
        ({"host": platform.node(), "pid": os.getpid()}, True),
        ({}, True),
    ):
        folder.mkdir(exist_ok=True)
        owner.write_text(json.dumps(left))
        refusal = pytest.raises(ConfigError, match=r"or remove .*owner") if refused else contextlib.nullcontext()
        with refusal, WorkFolder(tmp_path / "out").locked():
            assert json.loads(owner.read_text()) == {"host": platform.node(), "pid": os.getpid()}
        assert owner.exists() == refused, "what is not ours stays, what was ours goes"


def test_the_end_of_one_leaves_the_folder_of_the_next_alone(tmp_path: Path) -> None:
    first, second = WorkFolder(tmp_path / "out"), WorkFolder(tmp_path / "out")
    with contextlib.ExitStack() as held:
        with first.locked():
            first.remove()  # as when all is published
            held.enter_context(second.locked())
        assert second.folder.exists()


def test_a_text_that_code_makes_has_no_estimate() -> None:
    """The sizes of files are what an estimate is made of."""
    tokenizer = train_tokenizer(["a b"], 257, "text")
    stories, tiny = (
        estimate(data, open_source(data), tokenizer, sentences=False)
        for data in (DataConfig(dataset="stories"), DataConfig(dataset="tiny"))
    )
    assert stories is None
    assert tiny is not None
