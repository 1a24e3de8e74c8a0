"""`data.mixture` and `data.stages` by the command: the same run at other layouts, numbers by source, borders."""

import json
import math
import re
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
MIXTURE = (
    "{web: {dataset: tiny, weight: 0.7}, code: {path: code, weight: 0.3}, more: {path: more.jsonl, split: '40,60'}}"
)
MIXED_STAGES = "[{at: 3, weights: {code: 1, more: 2}}]"
KEYS = ("data.dataset=null", f"data.mixture={MIXTURE}", "train.steps=6", "log.tensorboard=false", "log.sample_tokens=0")
MIXED_TRAINING = (*KEYS, "checkpoint.every=2", "checkpoint.keep=null")


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


@pytest.fixture(scope="module")
def mixed_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of one process, and one of a pipeline."""
    folder = tmp_path_factory.mktemp("mixture")
    (folder / "code").mkdir()
    source = Path(json.__file__).parent
    for name in ("decoder.py", "encoder.py"):
        (folder / "code" / name).write_bytes((source / name).read_bytes())
    stories = [
        json.dumps({"text": f"Story {number}: the fox came again, and {number} crows saw it."}) for number in range(5)
    ]
    (folder / "more.jsonl").write_text("\n".join(stories), encoding="utf-8")
    recipe = miniature(folder)
    command = ("train", recipe, *MIXED_TRAINING, f"data.stages={MIXED_STAGES}")
    shardwise(*command, "--run-dir", "alone", "--nproc", "1", at=folder).succeeded()
    shardwise(*command, "--run-dir", "cut", "parallel.pipeline=2", "--nproc", "2", at=folder).succeeded()
    return folder


def mixed_steps(run: Path) -> list[dict[str, Any]]:
    return list(metrics(run, "step"))


def test_a_mixture_trains_alike_at_every_layout_and_its_losses_are_parts_of_the_loss(mixed_place: Path) -> None:
    alone, cut = mixed_steps(mixed_place / "alone"), mixed_steps(mixed_place / "cut")
    assert [event["step"] for event in cut] == [1, 2, 3, 4, 5, 6]
    for expected, event in zip(alone, cut, strict=True):
        assert event["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        for name, numbers in expected["sources"].items():
            found = event["sources"][name]
            assert (found["samples"], found["share"]) == (numbers["samples"], numbers["share"])
            assert (found["loss"] or 0.0) == pytest.approx(numbers["loss"] or 0.0, rel=1e-5)
    before = {"web": 0, "code": 0, "more": 0}
    for event in mixed_steps(mixed_place / "alone"):
        sources = event["sources"]
        drawn = {name: numbers["samples"] - before[name] for name, numbers in sources.items()}
        before = {name: numbers["samples"] for name, numbers in sources.items()}
        assert sum(drawn.values()) == 8
        # Every sample has as many targets.
        parts = [numbers["loss"] * drawn[name] for name, numbers in sources.items() if drawn[name]]
        assert math.fsum(parts) / 8 == pytest.approx(event["loss"], rel=1e-6)
        assert all(sources[name]["loss"] is None for name in drawn if not drawn[name])
        assert math.fsum(numbers["share"] for numbers in sources.values()) == pytest.approx(1)
    # 24 samples by the weights 0.7 and 0.3, then 24 by 1 and 2.
    assert before == {"web": 17, "code": 15, "more": 16}


def test_the_user_reads_the_sources_and_a_branch_may_have_other_stages(mixed_place: Path) -> None:
    told = (mixed_place / "alone/logs/rank-0000.log").read_text(encoding="utf-8")
    assert "epochs of" in told
    assert "warning: the source more is read" in told
    assert "teaches little (arXiv:2305.16264): lower its weight, or give it more text" in told
    once = within("top", "alone", "--once", at=mixed_place).succeeded().out
    assert re.search(r"^sources +code loss", once, re.MULTILINE), once
    within("report", "alone", at=mixed_place).succeeded()
    assert "Training loss by source" in (mixed_place / "alone/report.html").read_text(encoding="utf-8")
    refused = within("branch", "alone@4", "train.steps=8", "data.stages=[{at: 2, weights: {web: 1}}]", at=mixed_place)
    assert "the stages before step 4, from which the run goes on, must stay" in refused.failed(2)
    assert not [*mixed_place.glob("runs/alone-*")], "a branch that is refused leaves no folder"
    later = "data.stages=[{at: 3, weights: {code: 1, more: 2}}, {at: 5, weights: {late: 1}}]"
    late = "data.mixture.late={path: code, weight: null}"
    branch = ("branch", "alone@4", "train.steps=7", late, later, "--run-dir", "branch", "--nproc", "1")
    shardwise(*branch, at=mixed_place).succeeded()
    read = [
        {name: numbers["samples"] for name, numbers in event["sources"].items()}
        for event in mixed_steps(mixed_place / "branch")
    ]
    assert [numbers["late"] for numbers in read] == [0, 8, 16]
    assert len({numbers["more"] for numbers in read}) == 1, "after step 5 it is read no more"
