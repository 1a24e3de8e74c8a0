"""The tutorials: every command of every page runs on several ranks, at a small size, and what a page names is so."""

import ast
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scripts import tutorial_bert, tutorial_zero1
from scripts.tutorial_common import cut, random_trainer
from scripts.tutorial_outputs import BLOCK
from shardwise.config import load_config
from shardwise.distributed.mesh import Mesh
from tests.arch.source import ROOT
from tests.e2e.command import metrics
from tests.e2e.test_pages import Block, assert_healthy, follow

pytestmark = pytest.mark.timeout(900)  # a page's first test runs all of its commands
FOLDER = ROOT / "docs" / "tutorials"
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.md"))}


@dataclass(frozen=True)
class Followed:
    """A folder in which every command of a page was run in its order, and how each block ended."""

    at: Path
    blocks: list[tuple[Block, int, str, str]]
    """Each with its exit code, standard output and standard error."""

    def run(self, name: str) -> Path:
        return self.at / "runs" / name

    def results(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run(name) / "results.json").read_text())
        return found

    def losses(self, name: str) -> list[float]:
        return [line["loss"] for line in metrics(self.run(name), "step")]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Any:
    followed: dict[str, Followed] = {}

    def follow(page: str) -> Followed:
        if page not in followed:
            followed[page] = _follow(page, tmp_path_factory.mktemp(page))
        return followed[page]

    return follow


def _follow(page: str, at: Path) -> Followed:
    return Followed(at, list(follow(f"docs/tutorials/{page}.md", at, quick=False)))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_command_runs(page: str, pages: Any) -> None:
    followed = pages(page)
    assert len(followed.blocks) > (1 if page == "all-five" else 5)
    for ended in followed.blocks:
        assert_healthy(*ended)


# ---- what the runs were


@pytest.mark.slow
def test_llama2_7b(pages: Any) -> None:
    followed = pages("llama2-7b")
    layout = followed.results("llama2-7b")["layout"]
    assert layout == {"ranks": 4, "tensor": 2, "sequence": True, "pipeline": 1, "data": 2, "zero": 1}
    assert load_config(str(followed.run("llama2-7b") / "config.yaml"), []).train.recompute == "selective"
    assert followed.results("ten-steps")["layout"]["ranks"] == 1
    assert followed.losses("ten-steps") == pytest.approx(followed.losses("llama2-7b"), rel=1e-5)
    assert (followed.at / "llama.yaml").read_text() == (
        ROOT / "src/shardwise/config/recipes/llama2-7b.yaml"
    ).read_text()


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
    assert "final loss" in "".join(out for block, _, out, _ in followed.blocks if "examples/zero1.py" in block.code)
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
    (shown,) = (out for block, _, out, _ in followed.blocks if "grep final_loss" in block.code)
    losses = [float(loss) for loss in re.findall(r'"final_loss": ([\d.]+)', shown)]
    assert len(losses) == 2, shown
    assert losses[0] == pytest.approx(losses[1], rel=1e-5), "what the page's commands print"
    assert len(followed.losses("gpt3-tiny")) == 30
    assert followed.results("gpt3-tiny")["layout"]["pipeline"] == 4
    assert followed.results("gpt3-23b")["layout"]["pipeline"] == 2


# ---- what the pages say


@pytest.mark.parametrize("recipe", ["bert-tiny", "gpt2-xl-tiny"])
def test_what_the_scripts_measure_trains(recipe: str) -> None:
    trainer = random_trainer(load_config(recipe, ["train.global_batch=2"]), Mesh(device="cpu"))
    assert trainer.step().loss == pytest.approx(math.log(509), rel=0.2)


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
    for file, test in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", prose):
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert not test or test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test
    for module in re.findall(r"`python -m ([\w.]+)`", prose):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists()
