"""The folder of a preparation is one process's at a time, whatever the file system offers."""

import contextlib
import errno
import fcntl
from pathlib import Path

import pytest

from shardwise.base.errors import ConfigError
from shardwise.config import DataConfig
from shardwise.data.prepare.disk_room import estimate
from shardwise.data.prepare.work_folder import WorkFolder
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
        named = r"is being prepared by another process: wait for its end, or remove .*owner\.json if it has ended"
        with pytest.raises(ConfigError, match=named), WorkFolder(output).locked():
            raise AssertionError("two processes have one folder")
        WorkFolder(output).clear()
        with pytest.raises(ConfigError, match="another process"), WorkFolder(output).locked():
            raise AssertionError("two processes have one folder")
    with WorkFolder(output).locked():
        WorkFolder(output).save({"complete": False})
    assert sorted(path.name for path in (tmp_path / ".out.preparing").iterdir()) == ["lock", "state.json"]


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
