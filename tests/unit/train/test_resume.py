"""What a run sees where it saves, before anything is trained."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from shardwise.base.errors import ConfigError, RunError, StoreError, see
from shardwise.checkpoint.format.manifest import IMPORTED, Manifest
from shardwise.checkpoint.format.verify import verify_checkpoint
from shardwise.checkpoint.storage.checkpoint_choice import goes_back, recorded_return
from shardwise.checkpoint.storage.root import Root
from shardwise.checkpoint.storage.run_identity import RunOwner, record_owner
from shardwise.config import Config, check_changes
from shardwise.data.samples.batch import BlendedBatches
from shardwise.data.samples.causal import TokenBatches
from shardwise.data.samples.order import MixtureStage
from shardwise.runs.folder import RunDirectory, RunLock
from shardwise.train import resume
from shardwise.train.resume import checkpoints_at_start
from shardwise.train.step_record import Progress
from tests.dist.training import make_config, make_data
from tests.stored import small_tensors, write_checkpoint

STORED: dict[str, Any] = {"checkpoint": {}}


def config(**checkpoint: Any) -> Config:
    return make_config(checkpoint=checkpoint)


def found_by(chosen: Config, run: Path | RunDirectory, stored: dict[str, Any] | None = STORED) -> list[int]:
    """The steps that a run tries; one without a stored configuration is new."""
    run = RunDirectory(run) if isinstance(run, Path) else run
    return [each.step for each in checkpoints_at_start(chosen, run, stored).candidates]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With checkpoints of steps 100 and 200, of which the second is not complete."""
    for step in (100, 200):
        write_checkpoint(Root.of(tmp_path / "checkpoints"), step, small_tensors(1), ranks=1)
    (tmp_path / "checkpoints/step-00000200/manifest.json").unlink()
    return tmp_path / "checkpoints"


def test_checkpoints_of_another_run_or_another_place_are_refused(tmp_path: Path, folder: Path) -> None:
    told = r"checkpoint.path .* must be empty for a new run, .* of step 200: give --run-dir"
    with pytest.raises(ConfigError, match=told):
        found_by(config(path=str(folder)), tmp_path / "none", None)
    told = r"--run-dir .* must be empty for a new run, .*checkpoint.load=.*/checkpoints/step-00000200"
    with pytest.raises(ConfigError, match=told):
        found_by(config(), folder.parent, None)
    run, other = RunDirectory(folder.parent), tmp_path / "other"
    elsewhere = config(path=str(other))
    told = (
        rf"checkpoint.path \({other}\) has no checkpoint, and the run in {run.path} saved that of step 200 as {folder}/"
    )
    explained = re.escape(see("checkpoints#place-changed"))
    with pytest.raises(ConfigError, match=rf"{told}step-00000200.*{explained}$"):
        found_by(elsewhere, run)
    folder.rename(tmp_path / "moved")
    assert found_by(elsewhere, run) == []
    run.metrics.write_text('{"event": "checkpoint", "step": 200, "path": "s3://b/step-00000200"}\n{"event": "ch')
    with pytest.raises(ConfigError, match=rf"\({other}\) has no .* step 200 as s3://b/step-00000200: set"):
        found_by(elsewhere, run)


def test_what_is_tried_in_which_order_and_what_a_crash_left_without_its_name(folder: Path) -> None:
    checkpoints = checkpoints_at_start(config(), RunDirectory(folder.parent), STORED)
    assert [each.step for each in checkpoints.candidates] == [200, 100]
    assert all(each.manifest is None for each in checkpoints.saved), "manifests are large, and each rank reads the one"
    checkpoints = checkpoints_at_start(config(resume=100), RunDirectory(folder.parent), STORED)
    assert [each.step for each in checkpoints.candidates] == [100]
    assert [each.step for each in checkpoints.saved] == [200, 100]
    with pytest.raises(ConfigError, match=r"checkpoint.resume \(200\) must be the step of an intact checkpoint"):
        found_by(config(resume=200), folder.parent)
    # And gets its name; that of another run, or where a new run would save, is left as it is.
    name, partial = folder / "step-00000100", folder / ".step-00000100.partial"
    name.rename(partial)
    new = config(path=str(folder)), folder.parent / "none", None
    with pytest.raises(ConfigError, match=r"must be empty for a new run"):
        found_by(*new)
    (folder / "step-00000200").rename(folder / "notes")
    with pytest.raises(ConfigError, match=rf"has a checkpoint of step 100: .* checkpoint.load={partial} for"):
        found_by(*new)
    assert partial.is_dir()
    (found,) = checkpoints_at_start(config(), RunDirectory(folder.parent), STORED).candidates
    assert (found.step, found.folder.local(), found.problem) == (100, name, None)
    assert verify_checkpoint(found.folder).sound
    assert not partial.exists()


def test_the_same_command_goes_back_once(tmp_path: Path) -> None:
    """Stopped after it went back to 100, it goes on from 300: neither back again, nor past the batches again."""
    asked = make_config(checkpoint={"resume": 100}, train={"skip_batches": 2})
    first = Manifest.read(write_checkpoint(tmp_path / "checkpoints", 100))
    assert goes_back(asked, first)
    schedule = {"name": "linear", **recorded_return(asked, first)}
    for step in (200, 300):
        after = Manifest.read(write_checkpoint(tmp_path / "checkpoints", step, schedule=schedule))
    assert found_by(asked, tmp_path) == [300, 200, 100]
    assert not goes_back(asked, after)
    assert recorded_return(config(), after) == recorded_return(asked, after), (
        "a run that goes on forgets that it went back"
    )
    another = make_config(checkpoint={"resume": 100}, train={"skip_batches": 3})
    assert found_by(another, tmp_path) == [100]
    assert goes_back(another, after)
    assert recorded_return(config(), first) == {}


@pytest.mark.parametrize(("asked", "position"), [(None, 900), (100, 900 + 2 * 8)])
def test_a_run_resumes_at_its_position(
    asked: int | None, position: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the data too, which is ahead of the samples where batches of 8 were left out."""
    chosen = make_config(checkpoint={"resume": asked or "auto"}, train={"skip_batches": 2 if asked else 0})
    write_checkpoint(tmp_path / "checkpoints", 100, position=900)
    monkeypatch.setattr("shardwise.checkpoint.restore.read_manifest", lambda folder, _world: Manifest.read(folder))
    monkeypatch.setattr("shardwise.checkpoint.restore.restore_checkpoint", lambda *_: SimpleNamespace(damage=()))
    candidates = checkpoints_at_start(chosen, RunDirectory(tmp_path), STORED).candidates
    progress = Progress()
    resume.restore_first_intact(candidates, training(chosen, progress), Told())  # type: ignore[arg-type]
    assert (progress.step, progress.samples, progress.tokens) == (100, 800, 25_600)
    assert progress.position == position


def test_other_data_are_refused_or_do_not_get_the_place_of_the_first_ones(tmp_path: Path) -> None:
    manifest = Manifest.read(write_checkpoint(tmp_path, 100))
    continued = training(config(), batches=TokenBatches(np.arange(99), 16, seed=1))
    resume.continue_data_from(manifest, replace(make_data(), fingerprint="tiny"), continued)
    with pytest.raises(ConfigError, match=r"the data .* must be those that the run began with \(fingerprint tiny"):
        resume.continue_data_from(manifest, replace(make_data(), fingerprint="other"), continued)
    # A stream has a state of its own, which means nothing to a mixture.
    manifest = Manifest.read(write_checkpoint(tmp_path / "stream", 100, rng={"stream": {"samples": 8, "epoch": 0}}))
    stages = MixtureStage(0, 0, {"web": 1.0})
    batches = BlendedBatches({"web": TokenBatches(np.arange(99), 16, seed=1)}, [stages])
    chosen, progress = config(), Progress()
    chosen.let_change(check_changes(["data.path", "data.mixture"]))
    progress.losses.extend([1.0, 2.0])
    resume.continue_data_from(manifest, replace(make_data(), fingerprint="other"), training(chosen, progress, batches))
    assert batches.order.stages == (stages,)
    assert not progress.losses, "the first losses of other data are no spikes"


def test_a_run_that_goes_on_stops_after_its_own_steps_and_other_programs_steps_resume(tmp_path: Path) -> None:
    chosen = make_config(train={"steps": 20, "stop_after": 5}).train
    assert [chosen.last_step(before) for before in (0, 10, 18)] == [5, 15, 20]
    assert config().train.last_step(10) == 20
    # A run that begins in their folder resumes; with weights alone it would begin, and is refused.
    chosen = config()
    model = chosen.recorded()["model"]
    root = Root.of(tmp_path / "checkpoints")
    write_checkpoint(root, 100, small_tensors(1), ranks=1, config={"model": model}, data=IMPORTED)
    assert found_by(chosen, tmp_path, None) == [100]
    assert found_by(config(resume=100), tmp_path, None) == [100]
    with pytest.raises(ConfigError, match=r"resumed only with the model .*\n  model.rope_theta \(1.0\) must be 1"):
        found_by(make_config(model={"rope_theta": 1.0}), tmp_path, None)
    write_checkpoint(root, 200, small_tensors(1), ranks=1, config={"model": model})
    with pytest.raises(ConfigError, match=r"--run-dir .* must be empty for a new run, it has a checkpoint of step 200"):
        found_by(chosen, tmp_path, None)


def training(chosen: Config, progress: Progress | None = None, batches: Any = None) -> Any:
    """A training without a model."""
    parts = {"feed": SimpleNamespace(batches=batches), "mesh": SimpleNamespace(world=None)}
    return SimpleNamespace(config=chosen, progress=progress or Progress(), model=None, optimizer=None, **parts)


class Told:
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warning(self, text: str) -> None:
        self.warnings.append(text)


@pytest.mark.parametrize("seen", ["at a glance", "on the way"])
def test_only_damage_is_rolled_back_for(seen: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that does not answer holds what it holds."""
    found = checkpoints_at_start(config(), RunDirectory(folder.parent), STORED).candidates
    if seen == "at a glance":
        found = (found[0], replace(found[1], problem="no answer", unreadable=True))

    silent = mock.Mock(side_effect=StoreError("no answer"))
    monkeypatch.setattr("shardwise.checkpoint.restore.read_manifest", silent)
    told = Told()
    with pytest.raises(RunError, match=r"checkpoint of step 100 could not be used, and no older .*: no answer; start"):
        resume.restore_first_intact(found, training(config()), told)  # type: ignore[arg-type]
    (warning,) = told.warnings
    assert warning.startswith("the checkpoint of step 200 was left out: "), "what a killed save leaves is no checkpoint"
    assert "set aside" not in warning


def test_a_place_has_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = (RunDirectory(tmp_path / name).create() for name in ("ours", "theirs"))
    at = config(path=str(tmp_path / "place"))
    root = checkpoints_at_start(at, theirs, None).root
    record_owner(root, RunOwner.here(theirs.id(), theirs.path))
    with RunLock(theirs.path), pytest.raises(ConfigError, match=rf"must be a run's own, .* that of {theirs.path} on "):
        found_by(at, ours, None)
    found_by(at, ours, None)  # the other has saved nothing, and is gone
    write_checkpoint(root, 100)
    with pytest.raises(ConfigError, match=rf"must be a run's own.*, or remove {root}/run.json if that run is gone"):
        found_by(at, ours)
    assert found_by(at, theirs) == [100]
    (root / "run.json").remove()
    record_owner(root, RunOwner.here(ours.id(), ours.path))
    assert found_by(at, ours), "a place of an older version is nobody's"
    monkeypatch.setattr("platform.node", lambda: "elsewhere")
    with pytest.raises(ConfigError, match=r"must be a run's own"):
        found_by(at, theirs)


def test_fault_17_a_copied_run_is_refused_and_a_moved_one_goes_on(tmp_path: Path) -> None:
    run, place = RunDirectory(tmp_path / "a").create(), tmp_path / "place"
    for root in (Root.of(run.checkpoints), Root.of(place)):
        write_checkpoint(root, 100)
        record_owner(root, RunOwner.here(run.id(), run.path))
    copied = RunDirectory(shutil.copytree(run.path, tmp_path / "b"))
    for at in ({}, {"path": str(place)}):
        with pytest.raises(ConfigError, match=rf"is a copy of {run.path}: .* `shardwise branch {run.path}`"):
            found_by(config(**at), copied)
    moved = RunDirectory(run.path.rename(tmp_path / "c"))
    for at in ({}, {"path": str(place)}):
        assert found_by(config(**at), moved) == [100]
    run.path.symlink_to(moved.path)  # as a run leaves it whose folder is renamed
    assert found_by(config(path=str(place)), moved)
