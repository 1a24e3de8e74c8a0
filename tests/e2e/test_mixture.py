"""`data.mixture` and `data.stages` by the command: the same run at other layouts, its numbers by source, a branch."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import metrics, miniature, shardwise, within

MIXTURE = (
    "{web: {dataset: tiny, weight: 0.7}, code: {path: code, weight: 0.3}, more: {path: more.jsonl, split: '40,60'}}"
)
STAGES = "[{at: 3, weights: {code: 1, more: 2}}]"
KEYS = ("data.dataset=null", f"data.mixture={MIXTURE}", "train.steps=6", "log.tensorboard=false", "log.sample_tokens=0")
TRAINING = (*KEYS, "checkpoint.every=2", "checkpoint.keep=null")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    command = ("train", recipe, *TRAINING, f"data.stages={STAGES}")
    shardwise(*command, "--run-dir", "alone", "--nproc", "1", at=folder).succeeded()
    shardwise(*command, "--run-dir", "cut", "parallel.pipeline=2", "--nproc", "2", at=folder).succeeded()
    return folder


def steps(run: Path) -> list[dict[str, Any]]:
    return list(metrics(run, "step"))


def test_a_mixture_trains_alike_at_every_layout_and_its_losses_are_parts_of_the_loss(place: Path) -> None:
    alone, cut = steps(place / "alone"), steps(place / "cut")
    assert [event["step"] for event in cut] == [1, 2, 3, 4, 5, 6]
    for expected, event in zip(alone, cut, strict=True):
        assert event["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        for name, numbers in expected["sources"].items():
            found = event["sources"][name]
            assert (found["samples"], found["share"]) == (numbers["samples"], numbers["share"])
            assert (found["loss"] or 0.0) == pytest.approx(numbers["loss"] or 0.0, rel=1e-5)
    before = {"web": 0, "code": 0, "more": 0}
    for event in steps(place / "alone"):
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


def test_the_user_reads_the_sources_and_a_branch_may_have_other_stages(place: Path) -> None:
    told = (place / "alone/logs/rank-0000.log").read_text(encoding="utf-8")
    assert "epochs of" in told
    assert "warning: the source more is read" in told
    assert "teaches little (arXiv:2305.16264): lower its weight, or give it more text" in told
    once = within("top", "alone", "--once", at=place).succeeded().out
    assert re.search(r"^sources +code loss", once, re.MULTILINE), once
    within("report", "alone", at=place).succeeded()
    assert "Training loss by source" in (place / "alone/report.html").read_text(encoding="utf-8")
    refused = within("branch", "alone@4", "train.steps=8", "data.stages=[{at: 2, weights: {web: 1}}]", at=place)
    assert "the stages before step 4, from which the run goes on, must stay" in refused.failed(2)
    assert not [*place.glob("runs/alone-*")], "a branch that is refused leaves no folder"
    later = "data.stages=[{at: 3, weights: {code: 1, more: 2}}, {at: 5, weights: {late: 1}}]"
    late = "data.mixture.late={path: code, weight: null}"
    branch = ("branch", "alone@4", "train.steps=7", late, later, "--run-dir", "branch", "--nproc", "1")
    shardwise(*branch, at=place).succeeded()
    read = [
        {name: numbers["samples"] for name, numbers in event["sources"].items()} for event in steps(place / "branch")
    ]
    assert [numbers["late"] for numbers in read] == [0, 8, 16]
    assert len({numbers["more"] for numbers in read}) == 1, "after step 5 it is read no more"
