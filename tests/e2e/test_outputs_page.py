"""docs/outputs.md, docs/fine-tuning.md and the tutorials: commands print what is shown, and what a page names is so."""

import ast
import json
import math
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts import tutorial_bert, tutorial_zero1
from scripts.tutorial_common import cut, random_trainer
from scripts.tutorial_outputs import BLOCK
from shardwise.config import load_config
from shardwise.distributed.mesh import Mesh
from shardwise_watch.curves import LOSSES
from tests.arch.source import ROOT
from tests.arch.test_docs import manifests
from tests.e2e.command import metrics, miniature, outcome, shardwise, start, within
from tests.e2e.test_pages import assert_shown, blocks

PAGE = (ROOT / "docs" / "outputs.md").read_text(encoding="utf-8")
SMALL = ["log.tensorboard=false", "log.sample_tokens=0", "train.eval_batches=1"]
STEPS = 12  # more than warm up
MESSAGES = [{"role": "user", "content": "What does a baker make?"}, {"role": "assistant", "content": "Bread."}]
FOLDER = ROOT / "docs" / "tutorials"
TUTORIAL_PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.md"))}
PODS = 2


def shape(line: str) -> str:
    """A line without its numbers, and without the folder of runs."""
    return re.sub(r"\S*/runs/", "runs/", re.sub(r"[\d,.]+(e-\d+)?( (s|ms|k|M)\b)?", "#", line))


def test_the_page_names_what_a_loss_may_be_called() -> None:
    assert [name for name in LOSSES if f"`{name}`" not in PAGE.replace("\n", " ")] == []


@pytest.mark.slow
def test_the_commands_print_what_the_page_shows(tmp_path: Path) -> None:
    (block,) = blocks("docs/outputs.md")
    commands = block.code.replace("llama2-tiny", f"{miniature(tmp_path)} train.steps=20 train.eval_every=0")
    *trainings, comparison = (shlex.split(line)[1:] for line in commands.splitlines())
    printed = [shardwise(*training, at=tmp_path).succeeded().out for training in trainings]
    printed.append(within(*comparison, at=tmp_path).succeeded().out)
    assert [event["step"] for event in metrics(tmp_path / "runs/tiny", "step")] == [5, 10, 15, 20]
    assert (tmp_path / "loss.svg").exists()
    shapes = {shape(line) for text in printed for line in text.splitlines()}
    shown = re.sub(r"\\\n +|^\.\.\.\n", "", block.shown, flags=re.MULTILINE).splitlines()
    assert len(shown) == 10
    assert [line for line in shown if shape(line) not in shapes] == [], "the page shows lines that are not printed"


def commands(heading: str) -> list[list[str]]:
    """The page's commands below a heading, with fewer steps; without `chat`, which waits for questions."""
    page = (ROOT / "docs" / "fine-tuning.md").read_text(encoding="utf-8")
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"^```sh\n(.*?)\n```", section, re.MULTILINE | re.DOTALL)
    text = block.replace("\\\n", "").replace("300", str(STEPS))
    lines = [shlex.split(line)[1:] for line in text.splitlines()]
    return [[argument.replace("step-00000" + str(STEPS), f"step-{STEPS:08}") for argument in line] for line in lines]


@pytest.mark.slow
def test_the_page_runs(tmp_path: Path) -> None:
    base, tuned, evaluation, chat = commands("From pretraining to a model that answers")
    assert chat[:2] == ["chat", "runs/answers"]
    _, trained = (shardwise(*arguments, *SMALL, at=tmp_path).succeeded() for arguments in (base, tuned))
    training, looks = blocks("docs/fine-tuning.md")
    assert_shown(training, trained.out + within(*evaluation, at=tmp_path).out)
    checkpoint = tmp_path / "runs" / "answers" / "checkpoints" / f"step-{STEPS:08}"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    end = "<|endoftext|>\n"
    assert text == f"<|user|>\nWhat does a baker make?{end}<|assistant|>\nBread.{end}"
    assert AutoModelForCausalLM.from_pretrained(checkpoint).config.eos_token_id == tokenizer.eos_token_id

    # Stopped, and resumed at another layout.
    wanted = [line["loss"] for line in metrics(tmp_path / "runs" / "answers", "step")]
    again = ["runs/again" if argument == "runs/answers" else argument for argument in tuned]
    shardwise(*again, *SMALL, "train.stop_after=6", at=tmp_path).succeeded()
    shardwise(*again, *SMALL, "parallel.tensor=2", "parallel.sequence=true", at=tmp_path).succeeded()
    found = [line["loss"] for line in metrics(tmp_path / "runs" / "again", "step")]
    assert len(found) == len(wanted) == STEPS
    assert all(abs(mine - theirs) <= 1e-5 * theirs for mine, theirs in zip(found, wanted, strict=True))

    inspection, dry_run = commands("Your own conversations")
    (tmp_path / "chat.jsonl").write_text(f"{json.dumps({'messages': MESSAGES})}\n" * 40)
    shown, checked = within(*inspection, at=tmp_path).out, within(*dry_run, at=tmp_path).out
    assert "⟦Bread.<|endoftext|>⟧" in shown
    assert "chat.jsonl: conversations, 1 file" in checked
    assert_shown(looks, shown + checked)


@pytest.mark.parametrize("recipe", ["bert-tiny", "gpt2-xl-tiny"])
def test_what_the_scripts_measure_trains(recipe: str) -> None:
    trainer = random_trainer(load_config(recipe, ["train.global_batch=2"]), Mesh(device="cpu"))
    assert trainer.step().loss == pytest.approx(math.log(509), rel=0.2)


@pytest.mark.parametrize("script", [tutorial_bert, tutorial_zero1])
def test_tables_are_those_of_the_measured_numbers(script: Any) -> None:
    target = tutorial_bert.Target(script.NAME)
    _, inside, _ = cut(TUTORIAL_PAGES[script.NAME], script.NAME)
    assert inside == f"{script.text(target.load())}\n", f"run `python -m {script.__name__} --redraw`"


def test_bert_mini_is_bert_large_but_for_its_sizes() -> None:
    small, large = load_config(str(FOLDER / "bert-mini.yaml"), []), load_config("bert-large", [])
    for key in ("hidden_dropout_p", "attention_dropout_p", "norm_eps", "initializer_range", "activation", "head_dim"):
        assert getattr(small.model, key) == getattr(large.model, key), key
    for key in ("name", "schedule", "weight_decay", "betas", "eps", "max_norm", "zero"):
        assert getattr(small.optimizer, key) == getattr(large.optimizer, key), key
    assert small.train.sequence_length == large.train.sequence_length
    assert small.data.max_predictions == large.data.max_predictions


@pytest.mark.parametrize("page", TUTORIAL_PAGES)
def test_what_a_page_names_exists(page: str) -> None:
    prose = BLOCK.sub("", TUTORIAL_PAGES[page])
    for file, test in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", prose):
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert not test or test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test
    for module in re.findall(r"`python -m ([\w.]+)`", prose):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists()


@pytest.mark.slow
def test_pods_with_the_variables_of_the_manifest_train_together(tmp_path: Path) -> None:
    job: Any = manifests()[1]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert variables["PET_NNODES"] == str(job["spec"]["completions"]) == str(job["spec"]["parallelism"])
    # As one machine has them: fewer pods, a rank each, on loopback.
    variables |= {"PET_NNODES": str(PODS), "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1"}
    torchrun, *words = container["command"]
    assert torchrun == "torchrun"
    words[words.index("llama2-7b")] = miniature(tmp_path)
    program = (sys.executable, "-m", "torch.distributed.run")
    pods = [
        start(*words, *container["args"], at=tmp_path, program=program, **(variables | {"PET_NODE_RANK": str(number)}))
        for number in range(PODS)
    ]
    for pod in pods:
        assert outcome(pod).code == 0
    results = json.loads((tmp_path / "runs/llama2-7b/results.json").read_text())
    assert results["layout"]["ranks"] == PODS
