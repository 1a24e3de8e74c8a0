"""The tutorials: every command of every page runs, at a small size, and what a page shows and names is so."""

import ast
import json
import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from scripts import tutorial_bert, tutorial_zero1
from scripts.tutorial_common import cut
from scripts.tutorial_outputs import BLOCK, bash
from shardwise.config import load_config
from shardwise.data.tokens.tokenizer import train_tokenizer
from tests.arch.source import ROOT, config_fields
from tests.e2e import tutorial_commands
from tests.e2e.command import environment, metrics
from tests.hugging_face import save

pytestmark = pytest.mark.timeout(900)  # a page's first test runs all of its commands
FOLDER = ROOT / "docs" / "tutorials"
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.md"))}

# gpt-neox-20b as `tutorial_commands` makes it small.
NEOX = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 2048,
    "hidden_act": "gelu_fast",
}


@dataclass(frozen=True)
class Followed:
    """A folder in which every command of a page was run in its order, and how each block ended."""

    at: Path
    blocks: list[tuple[str, int, str, str]]
    """Its text, exit code, standard output and standard error."""

    def run(self, name: str) -> Path:
        return self.at / "runs" / name

    def results(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run(name) / "results.json").read_text())
        return found

    def losses(self, name: str) -> list[float]:
        return [line["loss"] for line in metrics(self.run(name), "step")]


def equip(at: Path) -> None:
    """What the pages expect a reader to have: a corpus, tokenizers, EleutherAI's weights, and the checkout's files."""
    corpus = (ROOT / "src/shardwise/data/corpus/tiny.jsonl").read_text(encoding="utf-8")
    for name in ("wiki.jsonl", "wikitext.jsonl"):
        (at / name).write_text(corpus, encoding="utf-8")
    texts = [json.loads(line)["text"] for line in corpus.splitlines()]
    for name in ("llama-2-7b", "gpt-neox-20b", "gpt2"):
        train_tokenizer(texts, 500, name).save(at / name)
    train_tokenizer(texts, 500, "bert", pairs=True).save(at / "bert-large-uncased")
    for file in ("docs/tutorials/bert-mini.yaml", "examples/zero1.py"):
        (at / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, at / file)


def commands(at: Path) -> Path:
    """A folder of the commands that stand in for those of the pages: see `tutorial_commands`."""
    folder = at / "commands"
    folder.mkdir()
    for name in tutorial_commands.COMMANDS:
        call = shlex.join([sys.executable, tutorial_commands.__file__, name])
        (folder / name).write_text(f'#!/bin/sh\nexec {call} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def shown(page: str) -> list[tuple[str, str]]:
    """Blocks of commands of which a page shows what they print, with that text."""
    found = list(BLOCK.finditer(PAGES[page]))
    return [(one["code"], two["code"]) for one, two in pairwise(found) if two["language"] == "text"]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Any:
    followed: dict[str, Followed] = {}

    def follow(page: str) -> Followed:
        if page not in followed:
            followed[page] = _follow(page, tmp_path_factory.mktemp(page))
        return followed[page]

    return follow


def _follow(page: str, at: Path) -> Followed:
    equip(at)
    if "EleutherAI" in PAGES[page]:
        save("neox", at / "EleutherAI/gpt-neox-20b", **NEOX)
    variables = walk(at)
    ended = []
    for block in BLOCK.finditer(PAGES[page]):
        if block["language"] == "sh":
            done = bash(f"export PATH={variables['PATH']}\n{kept(block['code'])}", at, variables)
            ended.append((block["code"], done.returncode, done.stdout, done.stderr))
    return Followed(at, ended)


def walk(at: Path) -> dict[str, str]:
    """The environment of a reader who follows a page in the folder `at`."""
    variables = environment(HEAD="127.0.0.1", USUAL_PATH=os.environ["PATH"], PYTHONDONTWRITEBYTECODE="1")
    return {**variables, "PATH": f"{commands(at)}{os.pathsep}{os.environ['PATH']}"}


def kept(code: str) -> str:
    """A block without the line that puts the environment's own commands first on the path."""
    return code.replace('export PATH="$PWD/.venv/bin:$PATH"\n', "")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_what_its_commands_print(page: str, tmp_path: Path) -> None:
    equip(tmp_path)
    variables = walk(tmp_path)
    assert shown(page)
    for code, text in shown(page):
        done = bash(f"export PATH={variables['PATH']}\n{kept(code)}", tmp_path, variables)
        assert done.stdout == text, f"{page}.md is not current: run `python -m scripts.tutorial_outputs`\n{done.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_command_runs(page: str, pages: Any) -> None:
    followed = pages(page)
    assert len(followed.blocks) > 5
    for code, exit_code, out, err in followed.blocks:
        assert exit_code == 0, f"{code}\nexit code {exit_code}\n{out}\n{err}"
        assert "Traceback" not in out + err, f"{code}\n{out}\n{err}"
        assert "metrics.jsonl" not in code or '"loss": ' in out, f"{code}\n{out}: these lines show no loss"
    printed = {code: out for code, _, out, _ in followed.blocks}
    assert [code for code, text in shown(page) if printed[code] != text] == []


# ---- what the runs were


@pytest.mark.slow
def test_llama2_7b(pages: Any) -> None:
    followed = pages("llama2-7b")
    layout = followed.results("llama2-7b")["layout"]
    assert layout == {"ranks": 4, "tensor": 2, "sequence": True, "pipeline": 1, "data": 2, "zero": 1}
    assert load_config(str(followed.run("llama2-7b") / "config.yaml"), []).train.recompute == "selective"
    assert followed.results("ten-steps")["layout"]["ranks"] == 1
    assert followed.losses("ten-steps") == pytest.approx(followed.losses("llama2-7b"), rel=1e-5)
    assert (followed.at / "llama.yaml").read_text() == (ROOT / "src/shardwise/recipes/llama2-7b.yaml").read_text()


@pytest.mark.slow
def test_gpt_neox_20b(pages: Any) -> None:
    followed = pages("gpt-neox-20b")
    layout = followed.results("gpt-neox-20b")["layout"]
    assert layout == {"ranks": 2, "tensor": 2, "sequence": True, "pipeline": 1, "data": 1, "zero": 1}
    (start,) = metrics(followed.run("from-eleutherai"), "start")
    assert start["loaded"] == "EleutherAI/gpt-neox-20b"
    drawn, loaded = (followed.losses(name)[0] for name in ("gpt-neox-20b", "from-eleutherai"))
    assert abs(drawn - loaded) > 1e-3, "loaded weights must differ from drawn ones"


@pytest.mark.slow
def test_bert_large(pages: Any) -> None:
    followed = pages("bert-large")
    assert followed.results("bert-large")["layout"]["tensor"] == 2
    (start,) = metrics(followed.run("bert-large-phase2"), "start")
    assert start["loaded"] == "runs/bert-large/checkpoints/step-00000002"
    config = load_config(str(followed.run("bert-large-lamb") / "config.yaml"), [])
    assert (config.optimizer.name, config.optimizer.lr, config.train.steps) == ("lamb", 6e-3, 7032)
    one, two = followed.results("dp4"), followed.results("tp2-dp2")
    assert (one["layout"]["data"], two["layout"]["data"], two["layout"]["tensor"]) == (4, 2, 2)
    assert followed.losses("tp2-dp2") == pytest.approx(followed.losses("dp4"), rel=1e-5), "with dropout, too"
    assert (followed.at / "measured/bert-large.svg").stat().st_size > 5000


@pytest.mark.slow
def test_zero1_gpt2_xl(pages: Any) -> None:
    followed = pages("zero1-gpt2-xl")
    assert "final loss" in "".join(out for code, _, out, _ in followed.blocks if "examples/zero1.py" in code)
    config = json.loads(next(followed.run("gpt2-xl").glob("checkpoints/*/config.json")).read_text())
    assert (config["n_head"], config["n_embd"]) == (5, 80), "no size is rounded"
    assert followed.results("gpt2-xl")["layout"]["zero"] == 1
    assert followed.losses("four-nodes")[0] == pytest.approx(followed.losses("gpt2-xl")[0], rel=1e-2)
    assert (followed.at / "measured/zero1-gpt2-xl.svg").stat().st_size > 5000


@pytest.mark.slow
def test_gpt3_3d(pages: Any) -> None:
    followed = pages("gpt3-3d")
    layout = {"ranks": 8, "tensor": 2, "sequence": True, "pipeline": 2, "data": 2, "zero": 1}
    zbv, alone = followed.results("zbv"), followed.results("one-process")
    assert zbv["layout"].items() >= layout.items()
    assert (alone["layout"]["ranks"], alone["layout"]["pipeline"]) == (1, 1)
    assert followed.losses("zbv") == pytest.approx(followed.losses("one-process"), rel=1e-5)
    assert followed.losses("gpt3-tiny")[:20] == pytest.approx(followed.losses("one-process"), rel=1e-5)
    (shown,) = (out for code, _, out, _ in followed.blocks if "grep final_loss" in code)
    losses = [float(loss) for loss in re.findall(r'"final_loss": ([\d.]+)', shown)]
    assert len(losses) == 2, shown
    assert losses[0] == pytest.approx(losses[1], rel=1e-5), "what the page's commands print"
    assert len(followed.losses("gpt3-tiny")) == 30
    assert followed.results("gpt3-tiny")["layout"]["pipeline"] == 4
    assert followed.results("gpt3-23b")["layout"]["pipeline"] == 2


# ---- what the pages say


@pytest.mark.parametrize("script", [tutorial_bert, tutorial_zero1])
def test_tables_are_those_of_the_measured_numbers(script: Any) -> None:
    target = tutorial_bert.Target(script.NAME)
    _, inside, _ = cut(PAGES[script.NAME], script.NAME)
    assert inside == f"{script.text(target.load())}\n", f"run `python -m {script.__name__} --redraw`"


def test_bert_mini_is_bert_large_but_for_its_sizes() -> None:
    small, large = load_config(str(FOLDER / "bert-mini.yaml"), []), load_config("bert-large", [])
    for key in ("hidden_dropout_p", "attention_dropout_p", "norm_eps", "initializer_range", "activation", "head_dim"):
        assert getattr(small.model, key) == getattr(large.model, key), key
    for key in ("name", "schedule", "weight_decay", "betas", "eps", "max_norm", "zero"):
        assert getattr(small.optimizer, key) == getattr(large.optimizer, key), key
    assert small.train.sequence_length == large.train.sequence_length
    assert small.data.max_predictions == large.data.max_predictions


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_exists(page: str) -> None:
    prose = BLOCK.sub("", PAGES[page])
    sections = "|".join({key.partition(".")[0] for key in config_fields()})
    keys = set(re.findall(rf"`((?:{sections})\.[a-z_]+)\b(?!\()", prose))
    assert keys
    assert keys <= {*config_fields(), "model.config"}
    links = re.findall(r"\]\((?!https?:)([^)#]+)", prose)
    assert [link for link in links if not (FOLDER / link).exists()] == []
    for file, test in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", prose):
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert not test or test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test
    for module in re.findall(r"`python -m ([\w.]+)`", prose):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists()
