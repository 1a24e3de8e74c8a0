"""A run that goes on after its newest checkpoints were damaged, with another batch, and past some data."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import pytest

from shardwise.checkpoint.format.manifest import Manifest
from shardwise.checkpoint.format.verify import verify_checkpoint
from shardwise.checkpoint.storage.checkpoint_folders import list_checkpoints
from shardwise.checkpoint.storage.root import Root
from shardwise_watch.run import RunView
from tests.e2e.command import Outcome, metrics, miniature, shardwise

QUIET = ("train.eval_every=0", "log.tensorboard=false", "log.sample_tokens=0", "train.steps=8", "--run-dir", "run")
BY_TIME = ("checkpoint.every_minutes=1.0e-06", "checkpoint.buffer_mib=0.01", "checkpoint.keep=2")
UNREAD = """\
import os, sys
reader, writer = os.pipe()
os.dup2(writer, 1)
os.close(reader)
sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
from shardwise.cli import main
sys.exit(main())
"""
"""The command where the reader of its standard output has gone, as after `| head`."""
SMALLER = ("train.global_batch=4", "checkpoint.keep=1", "checkpoint.every=2")


@dataclass(frozen=True)
class Gone:
    run: Path
    begun: list[str]
    then: list[str]
    outcome: Outcome


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.fixture(scope="module")
def gone(tmp_path_factory: pytest.TempPathFactory) -> Gone:
    at = tmp_path_factory.mktemp("going-on")
    command = ("train", miniature(at), *QUIET)
    shardwise(*command, *BY_TIME, "train.stop_after=4", at=at).succeeded()
    root = Root.of(at / "run/checkpoints")
    begun = root.names()
    damage(at / "run/checkpoints/step-00000004/optimizer/rank-00000.safetensors")
    outcome = shardwise(*command, *SMALLER, "train.stop_after=3", at=at).succeeded()
    then = root.names()
    damage(at / "run/checkpoints/step-00000006/config.json")
    back = ("checkpoint.resume=6", "train.skip_batches=3", "checkpoint.keep=2")
    unread = at / "unread.py"
    unread.write_text(UNREAD)
    shardwise(*command, *SMALLER, *back, at=at, program=(sys.executable, str(unread))).succeeded()
    return Gone(at / "run", begun, then, outcome)


def test_a_run_goes_on_past_damage_and_past_some_data_with_another_batch(gone: Gone) -> None:
    """Each step is older than a checkpoint may be."""
    assert [event["step"] for event in metrics(gone.run, "checkpoint")][:4] == [1, 2, 3, 4]
    assert gone.begun == ["run.json", "step-00000003", "step-00000004"], "checkpoint.keep is 2"
    assert gone.then == ["run.json", "step-00000004.damaged", "step-00000006"], "checkpoint.keep is 1"
    assert [event["step"] for event in metrics(gone.run, "resume")] == [3, 6]
    warning, *_ = metrics(gone.run, "warning")
    assert warning["text"].startswith("the checkpoint of step 4 was left out: ")
    assert "rank-00000.safetensors is damaged: bytes " in warning["text"]
    assert warning["text"] in gone.outcome.out.replace("\n", " ")
    assert [event["step"] for event in metrics(gone.run, "step")] == [1, 2, 3, 4, 4, 5, 6, 7, 8]
    # As it was: no step is undone, and the batches that are left out from there on are not left out of it.
    warning = metrics(gone.run, "warning")[1]
    assert warning["text"].startswith("the checkpoint of step 6 is damaged, but all that its training needs is intact")
    assert "config.json is damaged: bytes " in warning["text"]
    assert [event["step"] for event in metrics(gone.run, "checkpoint")][-3:] == [6, 6, 8]
    _, mended = list_checkpoints(Root.of(gone.run / "checkpoints"))
    assert verify_checkpoint(mended.folder).sound
    manifest = Manifest.read(mended.folder)
    assert (manifest.step, manifest.samples, manifest.position) == (6, 36, 36)
    assert "went_back" not in manifest.schedule
    # Also in the first line after a resume; the loss of the first step 4, which was undone, is not among them.
    losses = [event["loss"] for event in metrics(gone.run, "step")]
    del losses[3]
    log = (gone.run / "logs/rank-0000.log").read_text()
    lines = re.findall(r"^step +(\d)/\d  .*  (\d+)-step mean ([\d.]+)  ", log, re.MULTILINE)
    told = {step: (steps, mean) for step, steps, mean in lines}
    assert told == {str(step): (str(step), f"{fmean(losses[:step]):.4f}") for step in range(1, 9)}
    assert RunView(gone.run, all_steps=False).state == "finished"
    assert metrics(gone.run, "stop")[-1]["reason"] == "finished"
    log = (gone.run / "logs/rank-0000.log").read_text()
    assert [line for line in log.splitlines() if line.startswith("step 8/8")]
    assert log.endswith(f"weights: {gone.run.name}/checkpoints/step-00000008\n"), log
    # 3 steps of 8 samples, 3 steps of 4, 3 batches of 4 left out, 2 steps of 4.
    assert [event["samples"] for event in metrics(gone.run, "step")][-5:] == [28, 32, 36, 40, 44]
    newest, _ = list_checkpoints(Root.of(gone.run / "checkpoints"))
    last = Manifest.read(newest.folder)
    assert (last.step, last.samples, last.position, last.tokens) == (8, 44, 56, 44 * 32)
    first, second = (event["changes"] for event in metrics(gone.run, "resume"))
    assert "train.global_batch 8 → 4" in first
    assert "train.skip_batches 0 → 3" in second
