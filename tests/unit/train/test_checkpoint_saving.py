"""What a run says of its saves: that it goes on without a checkpoint, where it does."""

import io
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from shardwise.base.errors import LostPeerError, RunError, see
from shardwise.checkpoint.save import SavedCheckpoint
from shardwise.distributed.mesh import Mesh
from shardwise.runs.folder import FollowedFolder, RunDirectory
from shardwise.train.checkpoint_saving import CheckpointSaver
from shardwise.train.step_record import Progress
from tests.unit.train.test_report import config, reporter

LOST = "rank 0 lost the connection to another rank"
FAILED = SavedCheckpoint(24, "step-00000024", 0, 0.0, 0.0, LOST, lost_peer=True)


class Ended:
    """Saves that have ended."""

    def __init__(self, *saves: SavedCheckpoint) -> None:
        self.saves = list(saves)

    def wait(self) -> None:
        pass

    def finished(self) -> list[SavedCheckpoint]:
        found, self.saves = self.saves, []
        return found


@contextmanager
def checkpoints(path: Path, *saves: SavedCheckpoint) -> Iterator[tuple[CheckpointSaver, io.StringIO]]:
    made, stream = reporter(path)
    saver: Any = Ended(*saves)
    with made:
        training: Any = SimpleNamespace(config=config(), mesh=Mesh(device="cpu"), progress=Progress(step=7))
        yield CheckpointSaver(training, saver, made, lambda: None), stream


def test_a_save_that_fails_ends_the_run_and_is_told(tmp_path: Path) -> None:
    with checkpoints(tmp_path, FAILED) as (saving, stream):
        with pytest.raises(RunError, match="a rank is gone"), saving:
            raise RunError("a rank is gone")
        assert stream.getvalue() == f"warning: no checkpoint of step 24: {LOST}{see('checkpoints#save-failed')}\n"
    # The launcher names the rank that ended; this one only says what it waited for.
    said = rf"^{LOST} while the checkpoint of step 24 was saved$"
    with checkpoints(tmp_path, FAILED) as (saving, _), pytest.raises(LostPeerError, match=said):
        saving.finish()


def test_fault_23_a_run_goes_on_in_its_folder_when_that_is_renamed(tmp_path: Path) -> None:
    run, told = RunDirectory(tmp_path / "runs" / "a"), []
    run.path.mkdir(parents=True)
    with checkpoints(tmp_path / "reported") as (saving, stream):
        saving.followed = FollowedFolder(run.path)
        for name in ("runs/b", "runs/sub/c", "other/d"):
            place = tmp_path / name
            place.parent.mkdir(exist_ok=True)
            run.path.resolve().rename(place)
            for _ in range(2):
                saving.follow()
            told.append(f"the run's folder was renamed to {place}: the run goes on there, and a link of the old name")
            (run.path / place.name).write_text("")
        (tmp_path / "runs").rename(tmp_path / "old")
        place.rename(tmp_path / "e")
        saving.finish()
        assert (run.path / "d").exists(), "the folder above it was renamed too"
        said = " ".join(stream.getvalue().split())
        assert [said.count(text) for text in told] == [1, 1, 1]
        with mock.patch.object(FollowedFolder, "follow") as follow:
            saving.after_step(is_last=False, agreed_flags=saving.flags())
        assert follow.call_count == 1, "a step looks once for the folder"
        run.path.unlink()
        run.path.mkdir()
        with pytest.raises(RunError, match=r"a link of the old name cannot be made \(File exists\): start again with"):
            saving.follow()
        saving.followed = FollowedFolder(tmp_path / "e")
        shutil.rmtree(tmp_path / "e")
        with pytest.raises(RunError, match="was removed or moved to another disk while the run trained: start again"):
            saving.follow()
    # This machine's kernel then has the old name, as a mount of another machine's disk has.
    (tmp_path / "a").mkdir()
    followed = FollowedFolder(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    with mock.patch.object(Path, "readlink", return_value=tmp_path / "a (deleted)"):
        followed.follow()
    assert (tmp_path / "a").samefile(tmp_path / "b")
