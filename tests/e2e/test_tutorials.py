"""The tutorials: what their scripts measure, and what a page names, is so; test_pages.py runs their commands."""

import ast
import math
import re
from typing import Any

import pytest

from scripts import tutorial_bert, tutorial_zero1
from scripts.tutorial_common import cut, random_trainer
from scripts.tutorial_outputs import BLOCK
from shardwise.config import load_config
from shardwise.distributed.mesh import Mesh
from tests.arch.source import ROOT

FOLDER = ROOT / "docs" / "tutorials"
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.md"))}


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
