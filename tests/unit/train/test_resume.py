"""What a run sees where it saves, before anything is trained."""

from pathlib import Path
from typing import Any

import pytest

from shardwise.config import Config
from shardwise.errors import ConfigError
from shardwise.store.root import Root
from shardwise.train.resume import look
from tests.dist.training import make_config
from tests.stored import small_tensors, write_checkpoint


def config(**checkpoint: Any) -> Config:
    return make_config(checkpoint=checkpoint)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With checkpoints of steps 100 and 200, of which the second is not complete."""
    for step in (100, 200):
        write_checkpoint(Root.of(tmp_path / "run"), step, small_tensors(1), ranks=1)
    (tmp_path / "run/step-00000200/manifest.json").unlink()
    return tmp_path / "run"


def test_a_new_run_has_an_empty_place(tmp_path: Path) -> None:
    standing = look(config(), tmp_path / "none", is_resumed=False)
    assert (standing.found, standing.candidates) == ((), ())
    assert not (tmp_path / "none").exists(), "the folder is made by the first save"


def test_a_place_of_its_own_is_tried_at_once(tmp_path: Path) -> None:
    look(config(path=str(tmp_path / "far/run")), tmp_path / "none", is_resumed=False)
    assert list((tmp_path / "far/run").iterdir()) == []
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"checkpoint.path: .*/file/run cannot be "):
        look(config(path=str(tmp_path / "file/run")), tmp_path / "none", is_resumed=False)


def test_another_runs_checkpoints_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"must be empty for a new run, it has a checkpoint of step 200"):
        look(config(path=str(folder)), folder, is_resumed=False)


def test_what_is_tried_and_in_which_order(folder: Path) -> None:
    standing = look(config(), folder, is_resumed=True)
    assert [each.step for each in standing.candidates] == [200, 100]
    assert all(each.manifest is None for each in standing.found), "manifests are large, and each rank reads the one"
    standing = look(config(resume=100), folder, is_resumed=True)
    assert [each.step for each in standing.candidates] == [100]
    assert [each.step for each in standing.found] == [200, 100]
    with pytest.raises(ConfigError, match=r"checkpoint.resume \(200\) must be the step of an intact checkpoint"):
        look(config(resume=200), folder, is_resumed=True)
