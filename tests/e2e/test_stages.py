"""`data.stages` with longer sequences by the command: stopped before, at and after the border, and at other layouts."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.base.errors import ConfigError
from shardwise.config import load_config
from shardwise.runs.folder import RunDirectory
from shardwise.train.resume import checkpoints_at_start
from tests.e2e.command import metrics, miniature, shardwise, within

BORDER = 3
STAGES = f"[{{at: {BORDER}, sequence_length: 64, global_batch: 4, micro_batch: 1, rope_theta: 50000.0}}]"
TRAINING = (
    "model.max_position_embeddings=64", "data.packing=best_fit", f"data.stages={STAGES}", "train.steps=6",
    "train.eval_every=0", "checkpoint.every=2", "checkpoint.keep=null", "log.tensorboard=false", "log.sample_tokens=0",
)  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that nothing stops."""
    folder = tmp_path_factory.mktemp("stages")
    shardwise("train", miniature(folder), *TRAINING, "--run-dir", "alone", "--nproc", "1", at=folder).succeeded()
    return folder


@pytest.fixture(scope="module")
def stopped(place: Path) -> Path:
    """Beside it a run that stops three times and goes back, and one of several layouts."""
    folder, command = place, ("train", miniature(place), *TRAINING)
    for stop_after in (BORDER - 1, 1, 1):
        one = ("--run-dir", "stopped", "--nproc", "1", f"train.stop_after={stop_after}")
        shardwise(*command, *one, at=folder).succeeded()
    back = ("--run-dir", "stopped", "--nproc", "1", f"checkpoint.resume={BORDER - 1}")
    shardwise(*command, *back, at=folder).succeeded()
    cut = ("parallel.pipeline=2", "--nproc", "4", f"train.stop_after={BORDER + 1}")
    shardwise(*command, "--run-dir", "cut", *cut, at=folder).succeeded()
    shardwise(*command, "--run-dir", "cut", "--nproc", "1", at=folder).succeeded()
    return folder


def steps(run: Path) -> list[dict[str, Any]]:
    return list(metrics(run, "step"))


@pytest.mark.slow
def test_a_run_that_is_stopped_around_the_border_or_cut_otherwise_is_the_same(stopped: Path) -> None:
    place = stopped
    alone = steps(place / "alone")
    # The last of each step: the run went back across the border.
    events = [*{event["step"]: event for event in steps(place / "stopped")}.values()]
    for name in ("step", "loss", "grad_norm", "lr", "tokens", "samples"):
        assert [event[name] for event in events] == [event[name] for event in alone]
    assert "to go back once more" not in (place / "stopped/logs/rank-0000.log").read_text(encoding="utf-8")
    assert [event["tokens"] for event in alone] == [256 * step for step in range(1, 7)]
    assert [event["samples"] for event in alone] == [8, 16, 24, 28, 32, 36]
    # The one start that goes back, and that of the next stage in its process.
    returns = [event["went_back"] for event in metrics(place / "stopped", "start")]
    assert (returns[-2:], sum(returns)) == ([True, False], 1)
    cut = steps(stopped / "cut")
    assert [event["step"] for event in cut] == [1, 2, 3, 4, 5, 6]
    for expected, event in zip(steps(stopped / "alone"), cut, strict=True):
        assert event["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_a_checkpoint_is_that_of_its_stage_and_the_border_no_restart(place: Path) -> None:
    expected = {BORDER: (10000.0, 32), 6: (50000.0, 64)}
    for step, (theta, length) in expected.items():
        folder = f"alone/checkpoints/step-{step:08d}"
        described = json.loads((place / folder / "config.json").read_text(encoding="utf-8"))
        assert described["rope_theta"] == theta
        result = json.loads(within("evaluate", folder, "--json", at=place).succeeded().out)
        assert result["sequence_length"] == length
    log = (place / "alone/logs/rank-0000.log").read_text(encoding="utf-8")
    assert f"6, 1 to {BORDER} in this stage" in log
    assert f"6, {BORDER} of them done, {BORDER + 1} to 6 in this stage" in log
    (border,) = [line for line in log.splitlines() if line.startswith(f"step {BORDER}/6")]
    assert " left " in border
    assert "\n6 steps in " in log
    results = json.loads((place / "alone/results.json").read_text(encoding="utf-8"))
    seconds = sum(event["step_seconds"] for event in steps(place / "alone"))
    assert (results["steps_before"], results["tokens"]) == (0, 1536)
    assert results["tokens_per_second"]["average"] == pytest.approx(1536 / seconds)
    assert results["time_to_train_seconds"] > seconds
    starts = list(metrics(place / "alone", "start"))
    assert [event["steps_before"] for event in starts] == [0, BORDER]
    assert starts[1]["seconds_before_training"] < 60, "the time of the steps before is not that of a start"
    report = json.loads(within("report", "alone", "--json", at=place).succeeded().out)
    assert (report["starts"], report["later_starts"]) == (1, [])


def test_stages_of_a_branch_a_dry_run_and_a_changed_run(place: Path) -> None:
    changed = f"data.stages={STAGES.replace(str(BORDER), '4', 1)}"
    refused = within("branch", "alone@6", "train.steps=8", changed, at=place).failed(2)
    assert "the sequence lengths before step 6, from which the run goes on, must stay" in refused
    told = within("train", miniature(place), *TRAINING, "--dry-run", at=place).succeeded().out
    assert "8 × 32 tokens up to step 3, 4 × 64 tokens up to step 6; the other rows are of the neediest" in told
    assert "256 per step, 1,536 in all" in told
    changed = ("--change", "data.stages", "data.stages=[]", "train.steps=8")
    said = within("train", "--run-dir", "alone", *changed, "--dry-run", at=place).failed(2)
    problem = "the sequence lengths of data.stages must keep 64 tokens together"
    assert problem in said
    run = RunDirectory(place / "alone")
    recorded = load_config(str(run.config))
    config = load_config(str(run.config), ["data.stages=[]", "train.steps=8"])
    with pytest.raises(ConfigError, match=problem):
        checkpoints_at_start(config, run, recorded.recorded())
