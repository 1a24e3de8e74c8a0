"""`shardwise branch`: runs that begin from a step of another, and the tree that `ls` and `report` show."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.arch.source import ROOT
from tests.e2e.command import CASES, Outcome, metrics, miniature, shardwise, within
from tests.e2e.test_pages import assert_shown, blocks

KEYS = (
    "checkpoint.every=2", "log.tensorboard=false", "log.sample_tokens=0", "optimizer.schedule=wsd",
    "optimizer.warmup_steps=2", "train.steps=6",
)  # fmt: skip


PAGE = (ROOT / "docs/branches.md").read_text(encoding="utf-8")
SIZES = {"=60 ": "=2 ", "@120": "@2", "=150": "=4", "=30 ": "=1 ", "@180": "@4", "=240": "=6"}
"""Steps of the page, in small."""


def page_commands(folder: Path) -> list[list[str]]:
    (text,) = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for steps, small in SIZES.items():
        text = text.replace(steps, small)
    text = text.replace("\\\n", "").replace("quickstart", shlex.join([str(miniature(folder)), *KEYS]))
    return [shlex.split(line)[1:] for line in text.splitlines()]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trunk of six steps at a constant rate, which saved its state after each second step."""
    folder = tmp_path_factory.mktemp("branch")
    shardwise(*page_commands(folder)[0], at=folder).succeeded()
    return folder


def branch(place: Path, *words: str) -> Outcome:
    return within("branch", *words, at=place)


def losses(run: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in metrics(run, "step")}


def test_the_page_runs(place: Path) -> None:
    _, short, long, *looks = page_commands(place)
    within(*short, "--prepare", at=place).succeeded()
    shardwise(*long, at=place).succeeded()
    printed = [within(*look, at=place).succeeded().out for look in looks]
    (block,) = blocks("docs/branches.md")
    assert_shown(block, "".join(printed))
    assert "trunk@2" in printed[0]
    assert "trunk@4" in printed[0]
    assert [event["step"] for event in metrics(place / "runs/long", "step")] == [5, 6]
    # Its first steps are the parent's, which other keys trained.
    complaint = within("audit", "runs/long", "--from", "0", at=place).failed(2)
    assert "--from (0) must be the step of a checkpoint, from 4 on, where this branch begins" in complaint
    assert complaint.rstrip().endswith("runs/long has 4 and 6")
    straight = ("train", miniature(place), *KEYS, "optimizer.decay_steps=2", "optimizer.decay_shape=sqrt")
    shardwise(*straight, "--run-dir", "straight", at=place).succeeded()
    expected = losses(place / "straight")
    assert losses(place / "runs/long") == {step: expected[step] for step in (5, 6)}
    assert not metrics(place / "runs/long", "warning")
    assert losses(place / "runs/trunk")[6] != expected[6]


def test_its_checkpoint_is_linked_and_outlives_that_of_the_parent(place: Path) -> None:
    branch(place, "runs/trunk@2", "--run-dir", "runs/linked", "train.steps=4", "--prepare").succeeded()
    linked = place / "runs/linked/checkpoints/step-00000002/model.safetensors"
    parents = place / "runs/trunk/checkpoints/step-00000002/model.safetensors"
    assert linked.samefile(parents)
    facts = json.loads((place / "runs/linked/branch.json").read_text())
    assert facts["step"] == 2
    assert facts["changes"] == ["train.steps 6 → 4"]
    identities = {json.loads((place / f"runs/{run}/run.json").read_text())["id"] for run in ("trunk", "linked")}
    assert len(identities) == 2
    parents.unlink()
    within("checkpoint", "verify", "runs/linked", at=place).succeeded()
    parents.hardlink_to(linked)


@pytest.mark.slow
def test_a_branch_may_have_another_layout_and_branches_of_its_own(place: Path) -> None:
    run = ("--run-dir", "runs/wide", "--nproc", "2", "parallel.tensor=2", "optimizer.decay_steps=1")
    shardwise("branch", "runs/trunk@4", *run, at=place).succeeded()
    branch(place, "runs/wide", "--run-dir", "runs/leaf", "train.steps=8", "--prepare").succeeded()
    rows = {row["run"]: row["parent"] for row in json.loads(within("ls", "--json", at=place).succeeded().out)["runs"]}
    assert rows["trunk"] is None
    assert (rows["wide"]["run"], rows["wide"]["step"]) == ("trunk", 4)
    assert (rows["leaf"]["run"], rows["leaf"]["step"]) == ("wide", 6)
    report = json.loads(within("report", "runs/trunk", "--json", at=place).succeeded().out)
    assert "wide" in [one["run"] for one in report["branches"]]
    assert "leaf" not in [one["run"] for one in report["branches"]]
    within("report", "runs/trunk", at=place).succeeded()
    page = " ".join((place / "runs/trunk/report.html").read_text().split())
    assert "Branch of <b>trunk</b> at step 4: parallel.tensor 1 → 2; optimizer.decay_steps 0 → 1" in page


@pytest.mark.parametrize(("words", "problem"), CASES["wrong branches"])
def test_a_wrong_branch_is_one_sentence_and_leaves_no_folder(place: Path, words: list[str], problem: str) -> None:
    before = sorted(place.rglob("config.yaml"))
    assert problem in branch(place, *words).failed(2)
    assert sorted(place.rglob("config.yaml")) == before
