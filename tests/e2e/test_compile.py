"""`shardwise compile`, and the training that finds its graphs: what docs/compile.md shows, run as a reader would."""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.arch.source import ROOT
from tests.e2e.command import Outcome, metrics, shardwise, within

PAGE = (ROOT / "docs" / "compile.md").read_text(encoding="utf-8")
SMALL = ("model.num_hidden_layers=2", "log.sample_tokens=0", "log.tensorboard=false")

KNOWN = {"TORCHINDUCTOR_VEC_ISA_OK": "1"}
"""What the processor can do is not tried out by each of the compiler's processes, which takes half of the time."""


@dataclass(frozen=True)
class Shown:
    """The page's two commands, run in the folder `at`."""

    at: Path
    compile: list[str]
    train: list[str]
    compiled: Outcome
    trained: Outcome


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    at = tmp_path_factory.mktemp("compile")
    (block,) = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    first, second = (shlex.split(line)[1:] for line in block.replace("\\\n", "").splitlines())
    compiled = shardwise(*first, at=at, **KNOWN)
    trained = shardwise(*second, *SMALL, "train.steps=2", "--run-dir", "run", at=at, **KNOWN)
    return Shown(at, first, second, compiled, trained)


def texts() -> Sequence[str]:
    return re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_page_runs(shown: Shown) -> None:
    """Another number of layers has the same graphs."""

    def plain(text: str) -> list[str]:
        return sorted(re.sub(r"\[\d/|(?:\d+ min )?[\d.]+ m?s,|[\d.]+ KiB", "#", line) for line in text.splitlines())

    assert plain(shown.compiled.succeeded().out) == plain(texts()[0])
    assert texts()[1].strip() in shown.trained.succeeded().out
    (event,) = metrics(shown.at / "run", "compile")
    assert (event["graphs"], event["hits"], event["misses"]) == (4, 4, 0)


@pytest.mark.slow
def test_the_cache_is_listed(shown: Shown) -> None:
    out = shardwise("compile", "--list", "--cache-dir", "graphs", at=shown.at).succeeded().out
    assert out.count("TP 2 + SP") == 2
    assert out.splitlines()[-1].startswith("2 graphs, ")


@pytest.mark.slow
def test_a_second_compilation_has_nothing_to_do(shown: Shown) -> None:
    out = shardwise(*shown.compile, at=shown.at, **KNOWN).succeeded().out
    assert out.count("in the cache") == 2
    assert "Total failed compilations: 0" in out


@pytest.mark.slow
def test_a_graph_of_other_facts_is_refused_with_the_difference(shown: Shown) -> None:
    done = shardwise(*shown.train, *SMALL, "train.micro_batch=1", "--run-dir", "other", at=shown.at, **KNOWN)
    said = done.failed(2)
    assert " ".join(texts()[2].split()) in " ".join(said.split()), said
    assert not (shown.at / "other").exists(), "a refused start leaves nothing"


@pytest.mark.slow
def test_a_training_refuses_to_compile_and_finds_what_was_compiled(tmp_path: Path) -> None:
    """By Inductor, of a model of one's own that has one small graph."""
    write_recipe(tmp_path, MENDED)
    required = ("compile.enabled=true", "compile.require_cached=true", "compile.cache_dir=graphs", "--run-dir", "run")
    refused = shardwise("train", "recipe.yaml", *required, at=tmp_path, **KNOWN).failed(2)
    assert "shardwise compile" in refused, refused
    assert not (tmp_path / "run").exists(), "a refused start leaves nothing"
    compiled = shardwise("compile", "recipe.yaml", "--cache-dir", "graphs", at=tmp_path, **KNOWN).succeeded()
    assert "Total successful compilations: 1\n" in compiled.out, compiled.out
    assert (
        within("compile", "--list", "--cache-dir", "graphs", at=tmp_path).out.splitlines()[-1].startswith("1 graph, ")
    )
    shardwise("train", "recipe.yaml", *required, at=tmp_path, **KNOWN).succeeded()
    (event,) = metrics(tmp_path / "run", "compile")
    assert (event["graphs"], event["hits"], event["misses"]) == (1, 1, 0)


def write_recipe(at: Path, model: str) -> None:
    (at / "mine.py").write_text(model)
    recipe = {"model": {"family": "mine:Model", "vocab_size": 512}, **json.loads(REST)}
    (at / "recipe.yaml").write_text(json.dumps(recipe))


def test_a_graph_break_names_file_line_and_module(tmp_path: Path) -> None:
    write_recipe(tmp_path, BREAKING)
    said = shardwise("train", "recipe.yaml", "compile.enabled=true", "compile.backend=aot_eager", at=tmp_path).failed(2)
    assert "blocks.0 is not: " in said, said
    assert "mine.py:8: " in said, said
    assert "set compile.enabled=false" in said, said


BREAKING = """\
import torch
from torch import nn


class Block(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        print(
            float(y.sum()))
        return y


class Model(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 8)
        self.blocks = nn.ModuleList([Block(8, 8)])
        self.head = nn.Linear(8, vocab_size)

    def forward(self, ids_SB, targets_SB):
        x = self.embedding(ids_SB)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x).flatten(0, 1)
        return nn.functional.cross_entropy(logits, targets_SB.flatten(), reduction="sum")
"""
MENDED = BREAKING.replace("print(", "(").replace("float(y.sum()))", "y.sum())")
REST = """{"train": {"steps": 2, "global_batch": 4, "sequence_length": 16}, "optimizer": {"lr": 1e-3},
"data": {"dataset": "tiny"}, "log": {"sample_tokens": 0, "tensorboard": false}}"""
