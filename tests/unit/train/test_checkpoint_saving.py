"""What a run says of its saves, and of its traces: which steps are recorded, and what is refused."""

import io
import json
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from shardwise.base.errors import ConfigError, LostPeerError, RunError, see
from shardwise.checkpoint.save import SavedCheckpoint
from shardwise.config import check_layout, config_from_sections
from shardwise.distributed.mesh import Mesh
from shardwise.runs.folder import FollowedFolder, RunDirectory
from shardwise.train.build import build_trainer
from shardwise.train.checkpoint_saving import CheckpointSaver
from shardwise.train.observers import Observer, run_observers
from shardwise.train.profiler_trace import Trace
from shardwise.train.reporter import Reporter
from shardwise.train.step_record import Progress
from tests.dist.training import make_config, make_data
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


@pytest.mark.slow
@pytest.mark.parametrize(("trace", "steps"), [("2:4", {"step 2", "step 3"}), ("3:9", {"step 3", "step 4"})])
def test_runs_without_pipelines(tmp_path: Path, trace: str, steps: set[str], capfd: pytest.CaptureFixture[str]) -> None:
    """The second ends with the run, before its last step."""
    config = make_config(train={"steps": 4}, log={"profile": trace, "drift_every": 0, "tensorboard": False})
    layout, mesh = check_layout(config, 1), Mesh(device="cpu")
    run, stream = RunDirectory(tmp_path / "run"), io.StringIO()
    with Reporter(run, config, layout, 0, device_name="cpu", stream=stream) as reporter:
        trainer = build_trainer(config, mesh, make_data(), reporter)
        unsaved: Any = SimpleNamespace(flags=None, stopped_by=None)
        record = Observer(1, lambda record, _: reporter.step(record))
        with closing(Trace(config.log, mesh, run)) as recording:
            trainer.run(partial(run_observers, [record]), unsaved, recording.step)
    assert "profiler" not in capfd.readouterr().err, "torch's profiler tells of itself"
    first = trace.partition(":")[0]
    assert f"trace of steps {first} to {int(first) + 1}: {run.trace(0)}; ui.perfetto.dev" in stream.getvalue()
    events = json.loads(run.trace(0).read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("ph") == "X"]
    assert {name for name in names if name.startswith("step ")} == steps
    micro_batches = range(layout.accumulation(config.train))
    wanted = [f"{kind}, micro-batch {number}" for kind in ("forward", "backward") for number in micro_batches]
    for name in (*wanted, "optimizer"):
        assert names.count(name) == 2, name


@pytest.mark.parametrize("trace", ["5", "5:", "0:3", "5:5", "1:2:3", 5, [5]])
def test_what_is_no_range_of_steps_is_refused(trace: object) -> None:
    values = make_config().model_dump(mode="json") | {"log": {"profile": trace}}
    shown = repr(trace) if isinstance(trace, str) else str(trace).lower()
    with pytest.raises(ConfigError) as caught:
        config_from_sections(values)
    assert caught.value.problems == [
        f"log.profile ({shown}) must be START:STOP with 1 ≤ START < STOP, such as 10:12 for the steps 10 and 11"
    ]
