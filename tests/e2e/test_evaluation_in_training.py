"""Evaluation sets and tasks within a training, which is the same with and without them."""

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from shardwise.data.tokens.tokenizer import Tokenizer
from tests.arch.source import ROOT
from tests.e2e.command import metrics, miniature, shardwise, within
from tests.e2e.conftest import Trained
from tests.e2e.test_pages import assert_shown, blocks
from tests.task_files import write_tasks

TEXT = "The ring of keys — naïve, 键 — was lost in spring, and a song went with it.\n"


@pytest.fixture(scope="module")
def evaluated(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of `trained` once more, at TP 2 with sequence parallelism, with two sets."""
    at = tmp_path_factory.mktemp("evaluated")
    (at / "own.txt").write_text(TEXT * 3, encoding="utf-8")
    layout = ["parallel.tensor=2", "parallel.sequence=true", "precision.mode=float32"]
    sets = "evaluation.sets={own: own.txt, held: {dataset: tiny, split: '50,50'}}"
    outcome = shardwise("train", miniature(at), *layout, sets, at=at).succeeded()
    assert "evaluation of own at step 2: loss " in outcome.out
    return (at / "runs/latest").resolve()


def numbers(run: Path, event: str, *names: str) -> list[list[Any]]:
    return [[line[name] for name in names] for line in metrics(run, event)]


def test_each_set_has_the_loss_that_evaluate_prints(trained: Trained, evaluated: Path, tmp_path: Path) -> None:
    for event, names in (("step", ("step", "loss", "grad_norm", "param_norm")), ("eval", ("step", "loss"))):
        assert numbers(evaluated, event, *names) == numbers(trained.run, event, *names)
    assert numbers(evaluated, "eval_set", "step", "set") == [[s, name] for s in (0, 2, 4) for name in ("own", "held")]
    results = json.loads((evaluated / "results.json").read_text(encoding="utf-8"))
    last = {event["set"]: event["loss"] for event in metrics(evaluated, "eval_set")}
    assert {name: values["loss"] for name, values in results["evaluation_sets"].items()} == last
    drawn = json.loads(within("report", evaluated, "--json", at=evaluated).succeeded().out)
    assert {name: columns[-1][2] for name, columns in drawn["set_curves"].items()} == last
    # And bits per byte: the losses of all its tokens but the first, over the bytes of these tokens.
    own = metrics(evaluated, "eval_set")[-2]
    out = within("evaluate", evaluated, f"data.path={evaluated.parent.parent / 'own.txt'}", "--json", at=tmp_path).out
    alone = json.loads(out)
    for name in ("loss", "perplexity", "bits_per_byte"):
        assert own[name] == pytest.approx(alone[name], rel=1e-6)
    tokenizer = Tokenizer.load(evaluated / "checkpoints/step-00000004")
    ids = tokenizer.encode(TEXT * 3)
    size = len((TEXT * 3).encode()) - len(tokenizer.decode(ids[:1]).encode())
    # The end of the document is a target too, without a byte.
    assert own["bits_per_byte"] == pytest.approx(own["loss"] * len(ids) / (math.log(2) * size), rel=1e-9)


@pytest.mark.slow
def test_a_training_is_scored_on_tasks_as_evaluate_scores_its_checkpoint(tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path / "tasks")
    keys = ["evaluation.tasks=[choice,writing]", f"evaluation.tasks_path={tasks}", "evaluation.limit=3"]
    cut = ("evaluation.tasks_every=3", "precision.mode=float32", "parallel.tensor=2", "--run-dir", "run")
    outcome = shardwise("train", miniature(tmp_path), *keys, *cut, at=tmp_path).succeeded()
    assert "task choice at step 3: acc " in outcome.out
    run = tmp_path / "run"
    assert numbers(run, "eval_task", "step", "task") == [[s, name] for s in (3, 4) for name in ("choice", "writing")]
    last = {line["task"]: line["metrics"] for line in metrics(run, "eval_task")[-2:]}
    assert {task: set(names) for task, names in last.items()} == {
        "choice": {"acc,none", "acc_norm,none"}, "writing": {"exact_match,none"}
    }  # fmt: skip
    assert json.loads((run / "results.json").read_text(encoding="utf-8"))["tasks"] == last
    drawn = json.loads(within("report", run, "--json", at=tmp_path).succeeded().out)
    assert [column[0] for column in drawn["task_curves"]["acc"]["choice"]] == [3, 4]
    options = ("--tasks", "choice,writing", "--tasks-path", tasks, "--limit", "3", "--json")
    results = json.loads(within("evaluate", run, "precision.mode=float32", *options, at=tmp_path).out)["results"]
    for task, values in last.items():
        assert {name: results[task][name] for name in values} == values


@pytest.mark.slow
def test_the_page_on_tasks_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs/evaluate-and-generate.md").read_text(encoding="utf-8")
    section = page.partition("\n## Tasks")[2].partition("\n## ")[0]
    task, questions, commands = re.findall(r"^```(?:yaml|json|sh)\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/places.yaml").write_text(task, encoding="utf-8")
    (tmp_path / "places.jsonl").write_text(questions, encoding="utf-8")
    once, cut, training = (shlex.split(line)[1:] for line in commands.replace("\\\n", "").splitlines())
    recipe = str(miniature(tmp_path))
    # The page trains `runs/tiny` before; here its model is the one that is trained with tasks.
    small = ["train", recipe, *training[2:], "--nproc", "1"]
    shardwise(*small, at=tmp_path).succeeded()
    assert [event["step"] for event in metrics(tmp_path / "runs/tasks", "eval_task")] == [4]
    table = within(*once[:1], "runs/tasks", *once[2:], at=tmp_path).succeeded().out
    scores = json.loads(shardwise(*cut[:1], "runs/tasks", *cut[2:], at=tmp_path).succeeded().out)
    assert "|places|" in table.replace(" ", "")
    (block,) = (each for each in blocks("docs/evaluate-and-generate.md") if each.heading == "Tasks")
    assert_shown(block, table)
    assert scores["results"]["places"]["acc,none"] in (0.0, 0.5, 1.0)
