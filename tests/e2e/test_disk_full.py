"""A disk that is full, or read-only, when a checkpoint is due: the run goes on, and what was saved before stays."""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardwise.checkpoint.format.verify import verify_checkpoint
from shardwise.checkpoint.storage.checkpoint_folders import list_checkpoints
from shardwise.checkpoint.storage.root import Root
from tests.e2e.command import ALONE, Outcome, imported_first, metrics, miniature, shardwise

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mounts a small disk")

ON_A_DISK = 'mount -t tmpfs -o size=4m none disk && { "$@"; code=$?; cp -a disk after; exit $code; }'
"""A small disk of its own, which is gone with the last process that sees it; `after` is a copy of what was on it."""
NAMESPACES = (("unshare", "-m"), ("unshare", "-Urm"))

HOOK = """
import os, shutil, signal
from pathlib import Path
if os.environ.get("EVENTS") and os.environ.get("RANK") is None:
    from shardwise.checkpoint.storage.root import Root
    from shardwise.train.trainer import Trainer
    events = dict(each.split(":") for each in os.environ["EVENTS"].split(","))
    free_bytes, step, run, filler = Root.free_bytes, Trainer.step, Trainer.run, Path("disk/filler")
    def running(self, observers, saving, traced):
        self.saving = saving
        return run(self, observers, saving, traced)
    def untrue(self):
        Root.free_bytes = free_bytes
        return 2**40
    def stepping(self, *further):
        name = events.get(str(self.progress.step + 1))
        if name is not None:
            self.saving.saver.wait()
            if filler.exists():
                filler.unlink()
        if name is not None and name.startswith("full"):
            left = 0 if name == "full to the brim" else 150 * 1024
            filler.write_bytes(bytes(shutil.disk_usage("disk").free - left))
        if name in ("full in the middle", "full to the brim"):
            Root.free_bytes = untrue
        if name == "full at a stop":
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *further)
    Trainer.step, Trainer.run = stepping, running
"""
"""Events at the beginning of steps, in the process that prepares saves; between saves, so that each meets one event."""
QUIET = ("train.eval_every=0", "log.sample_tokens=0", "checkpoint.every=2")
BYTES = r"\d[\d.]* [KM]iB( \([\d,]+ bytes\))?"


@dataclass(frozen=True)
class Ran:
    outcome: Outcome
    run: Path

    @property
    def warnings(self) -> list[str]:
        return [event["text"] for event in metrics(self.run, "warning")]

    def saved(self) -> list[int]:
        return [event["step"] for event in metrics(self.run, "checkpoint")]


def on_a_disk() -> tuple[str, ...]:
    for namespace in NAMESPACES:
        tried = [*namespace, "mount", "-t", "tmpfs", "none", "/mnt"]
        if subprocess.run(tried, capture_output=True, check=False).returncode == 0:
            return (*namespace, "sh", "-c", ON_A_DISK, "sh")
    pytest.skip("no small disk can be mounted here, neither as root nor in a user namespace")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """All of a run on a disk that is full again and again, and at the save of a stop that was asked for."""
    events = {3: "full in the middle", 5: "full", 7: "full to the brim", 9: "room", 11: "full at a stop"}
    at = tmp_path_factory.mktemp("full")
    (at / "disk").mkdir()
    variables = imported_first(HOOK, at / "hook")
    variables["EVENTS"] = ",".join(f"{step}:{name}" for step, name in events.items())
    command = ("train", miniature(at), *QUIET, "train.steps=12", "checkpoint.keep=null", "--run-dir", "disk/run")
    outcome = shardwise(*command, at=at, program=(*on_a_disk(), *ALONE), **variables)
    return Ran(outcome, at / "after/run")


def test_a_full_disk_costs_checkpoints_and_no_run_but_at_its_last_save(full: Ran) -> None:
    full.outcome.failed(1)
    assert [event["step"] for event in metrics(full.run, "step")] == list(range(1, 12)), "steps or their lines are lost"
    assert full.saved() == [2, 10], "once there is room a save works again"
    assert [text.split(":")[0] for text in full.warnings] == [f"no checkpoint of step {step}" for step in (4, 6, 8)]
    for text in full.warnings:
        assert "disk/run/checkpoints" in text
        assert re.search(BYTES, text), f"the bytes are missing: {text}"
        assert text.endswith("; the run continues (`shardwise explain save-failed`)")
    middle, before, brim = full.warnings
    assert re.search(f"the checkpoint of step 6 needs {BYTES} in disk/run/checkpoints, where {BYTES} are free", before)
    for text in (middle, brim):
        assert ".partial/" in text
        assert "cannot be written: the disk is full; it needs " in text
        assert ", free is " in text
    root = Root.of(full.run / "checkpoints")
    assert root.names() == ["run.json", "step-00000002", "step-00000010"], "parts of a save that failed are left"
    for found in list_checkpoints(root):
        assert found.problem is None
        assert not verify_checkpoint(found.folder).problems
    text = full.outcome.failed(1)
    assert "\nFAILED at step 11: the checkpoint of step 11 could not be saved: " in text
    assert "\n1 step since checkpoint 10 is lost\n" in text
    assert metrics(full.run, "stop")[0]["reason"].startswith("failed: RunError: the checkpoint of step 11")
    assert not (full.run / "results.json").exists()


def test_a_place_that_cannot_be_written_is_refused_before_a_step(tmp_path: Path) -> None:
    where = "/proc/checkpoints"
    text = shardwise(
        *("train", miniature(tmp_path), f"checkpoint.path={where}", "--run-dir", "run"), at=tmp_path
    ).failed(2)
    assert text.startswith(f"shardwise: checkpoint.path: {where} cannot be made: ")
    assert text.count("\n") == 1
    assert not (tmp_path / "run/config.yaml").exists(), "the folder looks like that of a run that began"
