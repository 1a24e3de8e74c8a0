"""What a run sees where it saves, before anything is trained."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.checkpoint_format.manifest import Manifest
from shardwise.checkpoint_format.owner import Owner, take
from shardwise.checkpoint_format.verify import verify
from shardwise.config import Config
from shardwise.errors import ConfigError, RunError
from shardwise.runlog import RunDirectory, RunLock
from shardwise.storage.root import Root, StoreError
from shardwise.train import resume
from shardwise.train.record import Progress
from shardwise.train.resume import goes_back, look, went_back
from tests.dist.training import make_config
from tests.stored import small_tensors, write_checkpoint

STORED: dict[str, Any] = {"checkpoint": {}}


def config(**checkpoint: Any) -> Config:
    return make_config(checkpoint=checkpoint)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With checkpoints of steps 100 and 200, of which the second is not complete."""
    for step in (100, 200):
        write_checkpoint(Root.of(tmp_path / "checkpoints"), step, small_tensors(1), ranks=1)
    (tmp_path / "checkpoints/step-00000200/manifest.json").unlink()
    return tmp_path / "checkpoints"


def test_a_new_run_has_an_empty_place(tmp_path: Path) -> None:
    standing = look(config(), RunDirectory(tmp_path / "none"), None)
    assert (standing.found, standing.candidates) == ((), ())
    assert not (tmp_path / "none").exists(), "the folder is made by the first save"


def test_a_place_of_its_own_is_tried_at_once(tmp_path: Path) -> None:
    look(config(path=str(tmp_path / "far/run")), RunDirectory(tmp_path / "none"), None)
    assert list((tmp_path / "far/run").iterdir()) == []
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"checkpoint.path: .*/file/run cannot be "):
        look(config(path=str(tmp_path / "file/run")), RunDirectory(tmp_path / "none"), None)


def test_another_runs_checkpoints_are_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"checkpoint.path .* must be empty for a new run, .* of step 200: give --run-dir"
    ):
        look(config(path=str(folder)), RunDirectory(tmp_path / "none"), None)
    with pytest.raises(
        ConfigError, match=r"--run-dir .* must be empty for a new run, .*checkpoint.load=.*/checkpoints/step-00000200"
    ):
        look(config(), RunDirectory(folder.parent), None)


def test_a_run_whose_checkpoints_are_elsewhere_does_not_begin_again(tmp_path: Path, folder: Path) -> None:
    run, other = RunDirectory(folder.parent), tmp_path / "other"
    with pytest.raises(ConfigError, match=rf"checkpoint.path \({other}\) has no .* step 200 as {folder}/step-00000200"):
        look(config(path=str(other)), run, STORED)
    folder.rename(tmp_path / "moved")
    assert look(config(path=str(other)), run, STORED).candidates == ()
    run.metrics.write_text('{"event": "checkpoint", "step": 200, "path": "s3://b/step-00000200"}\n{"event": "ch')
    with pytest.raises(ConfigError, match=rf"\({other}\) has no .* step 200 as s3://b/step-00000200: set"):
        look(config(path=str(other)), run, STORED)


def test_what_is_tried_and_in_which_order(folder: Path) -> None:
    standing = look(config(), RunDirectory(folder.parent), STORED)
    assert [each.step for each in standing.candidates] == [200, 100]
    assert all(each.manifest is None for each in standing.found), "manifests are large, and each rank reads the one"
    standing = look(config(resume=100), RunDirectory(folder.parent), STORED)
    assert [each.step for each in standing.candidates] == [100]
    assert [each.step for each in standing.found] == [200, 100]
    with pytest.raises(ConfigError, match=r"checkpoint.resume \(200\) must be the step of an intact checkpoint"):
        look(config(resume=200), RunDirectory(folder.parent), STORED)


def test_a_complete_checkpoint_that_a_crash_left_without_its_name_is_taken(folder: Path) -> None:
    """And gets its name; that of another run, or where a new run would save, is left as it is."""
    name, partial = folder / "step-00000100", folder / ".step-00000100.partial"
    name.rename(partial)
    with pytest.raises(ConfigError, match=r"must be empty for a new run"):
        look(config(path=str(folder)), RunDirectory(folder.parent / "none"), None)
    (folder / "step-00000200").rename(folder / "notes")
    with pytest.raises(ConfigError, match=rf"has a checkpoint of step 100: .* checkpoint.load={partial} for"):
        look(config(path=str(folder)), RunDirectory(folder.parent / "none"), None)
    assert partial.is_dir()
    (found,) = look(config(), RunDirectory(folder.parent), STORED).candidates
    assert (found.step, found.folder.local(), found.problem) == (100, name, None)
    assert verify(found.folder).sound
    assert not partial.exists()


def test_no_manifest_is_read_to_see_what_is_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a large run takes rank 0 many seconds: a restore reads the newest, and older ones where it must."""
    for step in (300, 400, 500):
        write_checkpoint(folder, step)
    read: list[str] = []
    plain = Manifest.read

    def counted(where: Root) -> Manifest:
        read.append(where.name)
        return plain(where)

    monkeypatch.setattr(Manifest, "read", counted)
    look(config(), RunDirectory(folder.parent), STORED)
    assert not read
    look(config(resume=300), RunDirectory(folder.parent), STORED)
    assert read == ["step-00000500", "step-00000300"]


def test_the_same_command_goes_back_once(tmp_path: Path) -> None:
    """Stopped after it went back to 100, it goes on from 300: neither back again, nor past the batches again."""
    asked = make_config(checkpoint={"resume": 100}, train={"skip_batches": 2})
    first = Manifest.read(write_checkpoint(tmp_path / "checkpoints", 100))
    assert goes_back(asked, first)
    schedule = {"name": "linear", **went_back(asked, first)}
    for step in (200, 300):
        after = Manifest.read(write_checkpoint(tmp_path / "checkpoints", step, schedule=schedule))
    assert [each.step for each in look(asked, RunDirectory(tmp_path), STORED).candidates] == [300, 200, 100]
    assert not goes_back(asked, after)
    assert went_back(config(), after) == went_back(asked, after), "a run that goes on forgets that it went back"
    another = make_config(checkpoint={"resume": 100}, train={"skip_batches": 3})
    assert [each.step for each in look(another, RunDirectory(tmp_path), STORED).candidates] == [100]
    assert goes_back(another, after)
    assert went_back(config(), first) == {}


class Told:
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warning(self, text: str) -> None:
        self.warnings.append(text)


@pytest.mark.parametrize("seen", ["at a glance", "on the way"])
def test_only_damage_is_rolled_back_for(seen: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that does not answer holds what it holds."""
    found = look(config(), RunDirectory(folder.parent), STORED).candidates
    if seen == "at a glance":
        found = (found[0], replace(found[1], problem="no answer", unreadable=True))

    def read_manifest(*_: object) -> Manifest:
        raise StoreError("no answer")

    monkeypatch.setattr(resume, "read_manifest", read_manifest)
    mesh, told = SimpleNamespace(world=None), Told()
    with pytest.raises(RunError, match=r"checkpoint of step 100 could not be used, and no older .*: no answer; start"):
        resume.restore_first(found, config(), None, None, mesh, Progress(), told)  # type: ignore[arg-type]
    (warning,) = told.warnings
    assert warning.startswith("the checkpoint of step 200 was left out: "), "what a killed save leaves is no checkpoint"
    assert "set aside" not in warning


def test_a_place_has_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = (RunDirectory(tmp_path / name).create() for name in ("ours", "theirs"))
    at = config(path=str(tmp_path / "place"))
    root = look(at, theirs, None).root
    take(root, Owner.here(theirs.id(), theirs.path))
    with RunLock(theirs.path), pytest.raises(ConfigError, match=rf"must be a run's own, .* that of {theirs.path} on "):
        look(at, ours, None)
    look(at, ours, None)  # the other has saved nothing, and is gone
    write_checkpoint(root, 100)
    with pytest.raises(ConfigError, match=rf"must be a run's own.*, or remove {root}/run.json if that run is gone"):
        look(at, ours, STORED)
    assert [each.step for each in look(at, RunDirectory(theirs.path), STORED).candidates] == [100]
    (root / "run.json").remove()
    take(root, Owner.here(ours.id(), ours.path))
    assert look(at, ours, STORED).candidates, "a place of an older version is nobody's"
    monkeypatch.setattr("platform.node", lambda: "elsewhere")
    with pytest.raises(ConfigError, match=r"must be a run's own"):
        look(at, theirs, STORED)
