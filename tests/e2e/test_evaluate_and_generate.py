"""`shardwise evaluate`, `generate` and `chat`, and evaluation sets and tasks within a training."""

import json
import math
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.data.tokens.tokenizer import Tokenizer, train_tokenizer
from shardwise_use.cli import evaluate, generate
from tests.arch.source import ROOT
from tests.e2e import processes
from tests.e2e.command import ALONE, CASES, UNDER_TORCHRUN, Outcome, environment, metrics, miniature, shardwise, within
from tests.e2e.conftest import Trained
from tests.e2e.test_pages import assert_shown, blocks
from tests.hugging_face import save
from tests.task_files import write_tasks

PAGE = (ROOT / "docs" / "evaluate-and-generate.md").read_text(encoding="utf-8")
TEXT = "The ring of keys — naïve, 键 — was lost in spring, and a song went with it.\n" * 4
EVALUATED_TEXT = "The ring of keys — naïve, 键 — was lost in spring, and a song went with it.\n"


def answer(outcome: Outcome) -> dict[str, Any]:
    """The one JSON object that was printed."""
    assert outcome.code == 0, outcome.err
    (line,) = outcome.out.splitlines()
    facts: dict[str, Any] = json.loads(line)
    return facts


def test_the_page_names_every_way_to_cut_a_model() -> None:
    keys = {key for key in (*evaluate.KEYS, *generate.KEYS) if key.startswith("parallel.")}
    assert "parallel.pipeline" in keys
    assert [key for key in sorted(keys) if key not in PAGE] == []


@pytest.mark.slow
def test_inside_torchrun_they_join(trained: Trained, tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text(TEXT[:60])
    given = ("evaluate", trained.run, "--json", "data.path=own.txt")
    one, two = (answer(shardwise(*given, at=tmp_path, **options)) for options in ({}, {"program": UNDER_TORCHRUN}))
    assert two["layout"]["data"] == 2
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
    asked = ("generate", trained.run, "parallel.tensor=2", "--prompt", "The", "--max-tokens", "3", "--json")
    assert len(answer(shardwise(*asked, at=tmp_path, program=UNDER_TORCHRUN))["tokens"]) == 3


@pytest.mark.slow
def test_a_run_is_evaluated_alike_at_any_layout(trained: Trained, tmp_path: Path) -> None:
    whole = answer(within("evaluate", trained.run, "--json", at=tmp_path))
    cut = answer(shardwise("evaluate", trained.run, "--json", "--nproc", "4", "parallel.context=2", at=tmp_path))
    assert cut["layout"] == {"ranks": 4, "tensor": 1, "sequence": False, "pipeline": 1, "data": 2, "context": 2}
    assert cut["counted"] == whole["counted"]
    assert cut["loss"] == pytest.approx(whole["loss"], rel=1e-6)


def test_a_run_goes_on_with_a_text_alike_at_any_layout(trained: Trained, tmp_path: Path) -> None:
    options = ("--prompt", "The ring", "--max-tokens", "8", "--json")
    alone = answer(within("generate", trained.run, *options, at=tmp_path))
    cut = answer(shardwise("generate", trained.run, *options, "parallel.tensor=2", at=tmp_path))
    assert alone["text"] == cut["text"]
    assert len(alone["tokens"]) == 8


def test_a_run_means_its_newest_intact_checkpoint(trained: Trained, tmp_path: Path) -> None:
    at = tmp_path
    (at / "own.txt").write_text(TEXT[:60])
    run = tmp_path / "run" / "checkpoints"
    run.parent.mkdir()
    assert "holds no checkpoint" not in within("evaluate", run.parent, at=at).failed(2)
    run.mkdir()
    assert "holds no checkpoint yet" in within("evaluate", run.parent, at=at).failed(2)
    intact = trained.run / "checkpoints/step-00000004"
    shutil.copytree(intact, run / "step-00000004")
    shutil.copytree(intact, run / "step-00000030")
    (run / "step-00000030" / "manifest.json").unlink()
    done = within("evaluate", run.parent, "data.path=own.txt", "--json", at=at)
    assert answer(done)["model"].endswith("step-00000004")
    assert "step-00000030 has no manifest.json" in done.err


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of transformers' models with tokenizers of their own, and a text."""
    at = tmp_path_factory.mktemp("foreign")
    (at / "own.txt").write_text(TEXT)
    (at / "short.txt").write_text("x")
    for case in ("gpt", "bert"):
        save(case, at / case, vocab_size=270)
        train_tokenizer([TEXT], 270, "test", pairs=case == "bert").save(at / case)
    save("gpt", at / "small")
    train_tokenizer([TEXT], 270, "test").save(at / "small")
    save("gpt", at / "mute")
    (at / "empty").mkdir()
    (at / "latin.txt").write_bytes(b"na\xefve")
    weights = shutil.copytree(at / "gpt", at / "diverged") / "model.safetensors"
    held = load_file(weights)
    held["transformer.ln_f.bias"][:3] = torch.nan
    save_file(held, weights, {"format": "pt"})
    return at


def test_a_hugging_face_folder(foreign: Path) -> None:
    facts = answer(within("evaluate", "gpt", "data.path=own.txt", "--json", at=foreign))
    assert facts["part"] == "all"
    assert facts["sequence_length"] == 24
    assert facts["perplexity"] > 1
    both = answer(shardwise("evaluate", "bert", "data.path=own.txt", "--json", "--nproc", "2", at=foreign))
    assert both["loss"] == pytest.approx(sum(both["losses"].values()))
    assert 0 <= both["mlm_accuracy"] <= 1
    assert "perplexity" not in both


WRONG = CASES["wrong use"]


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_told_in_a_sentence(case: str, foreign: Path) -> None:
    line, text = WRONG[case]
    said = within(*shlex.split(line), at=foreign, SHARDWISE_CACHE=str(foreign / "cache"))
    complaint = said.failed(2)
    assert said.out == ""
    assert text in complaint
    assert "checkpoint.load" not in complaint, "the user gave an argument, not that key"


def test_what_a_rank_meets_is_told_once(foreign: Path) -> None:
    """Weights that do not fit: found by every rank, said by the launcher, nothing left behind."""
    damaged = foreign / "damaged"
    shutil.copytree(foreign / "gpt", damaged)
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps(config | {"n_layer": 3}))
    told = shardwise("generate", damaged, "--prompt", "a", "parallel.tensor=2", at=foreign).failed(2)
    assert told.count("lacks transformer.h.2") > 0
    assert "CHECKPOINT (" in told


def chat(trained: Trained, *arguments: str, lines: str) -> Outcome:
    typed = trained.at / "lines.txt"
    typed.write_text(lines)
    return shardwise(*arguments, at=trained.at, stdin=typed)


def test_a_text_is_continued_as_generate_continues_it(trained: Trained) -> None:
    run = str(trained.run)
    expected = within("generate", run, "--prompt", "The ring", "--max-tokens", "6", "--temperature", "0", at=trained.at)
    greedy = ("--max-tokens", "6", "--temperature", "0")
    once = chat(trained, "chat", run, *greedy, lines="The ring\n")
    assert once.code == 0, once.err
    assert f"The ring{once.out}" == expected.out
    twice = "The ring\n\n/reset\n\nThe ring\n"
    cut = chat(trained, "generate", run, "--interactive", *greedy, "parallel.tensor=2", lines=twice)
    # The second answer continues the first one. After the reset an empty line is refused, and the last text is new.
    assert "there is no text yet" in cut.err
    assert cut.out.startswith(once.out)
    assert cut.out.endswith(once.out)
    assert len(cut.out) > 2 * len(once.out)


def test_commands_and_refusals(trained: Trained) -> None:
    lines = "\n/temperature warm\n/temperature 0\n/help\n/reset\nThe ring\n/quit\nnever read\n"
    done = chat(trained, "chat", str(trained.run), "--max-tokens", "3", "--stats", lines=lines)
    assert done.code == 0
    loading, nothing, wrong, commands, stats = done.err.splitlines()
    assert loading == f"loading {trained.run} …"
    assert nothing == "there is no text yet that could be continued: write some"
    assert wrong == "/temperature (warm) must be a number of at least 0, such as /temperature 0.7"
    assert commands.startswith("/reset begins anew")
    assert stats.startswith("3 tokens; the first after 0.")


@pytest.mark.slow
def test_the_terminal_and_the_model_end_together(trained: Trained) -> None:
    command = [*ALONE, "chat", str(trained.run)]
    with subprocess.Popen(
        command, cwd=trained.at, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        process.stdin.write("The ring\n")
        process.stdin.flush()
        process.stdout.read(1)
        (model,) = processes.descendants(process.pid)
        process.kill()
    assert processes.wait_for(lambda: not processes.alive(model), 60)


@pytest.fixture(scope="module")
def evaluated(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of `trained` once more, at TP 2 with sequence parallelism, with two sets."""
    at = tmp_path_factory.mktemp("evaluated")
    (at / "own.txt").write_text(EVALUATED_TEXT * 3, encoding="utf-8")
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
    ids = tokenizer.encode(EVALUATED_TEXT * 3)
    size = len((EVALUATED_TEXT * 3).encode()) - len(tokenizer.decode(ids[:1]).encode())
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
