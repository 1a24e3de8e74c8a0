"""`shardwise compile`, and the training that finds its graphs: what docs/compile.md shows, run as a reader would."""

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
    """Another number of layers has the same graphs, which are listed, and are compiled once."""

    def plain(text: str) -> list[str]:
        return sorted(re.sub(r"\[\d/|(?:\d+ min )?[\d.]+ m?s,|[\d.]+ KiB", "#", line) for line in text.splitlines())

    assert plain(shown.compiled.succeeded().out) == plain(texts()[0])
    assert texts()[1].strip() in shown.trained.succeeded().out
    (event,) = metrics(shown.at / "run", "compile")
    assert (event["graphs"], event["hits"], event["misses"]) == (4, 4, 0)
    out = within("compile", "--list", "--cache-dir", "graphs", at=shown.at).succeeded().out
    assert out.count("TP 2 + SP") == 2
    assert out.splitlines()[-1].startswith("2 graphs, ")
    out = shardwise(*shown.compile, at=shown.at, **KNOWN).succeeded().out
    assert out.count("in the cache") == 2
    assert "Total failed compilations: 0" in out
    done = shardwise(*shown.train, *SMALL, "train.micro_batch=1", "--run-dir", "other", at=shown.at, **KNOWN)
    said = done.failed(2)
    assert " ".join(texts()[2].split()) in " ".join(said.split()), said
    assert not (shown.at / "other").exists(), "a refused start leaves nothing"


def test_a_graph_break_names_file_line_and_module(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BREAKING)
    sizes = ("model.family=mine:Model", "model.vocab_size=512", "data.dataset=tiny", "optimizer.lr=1e-3")
    train = ("train.steps=2", "train.global_batch=4", "train.sequence_length=16")
    (tmp_path / "recipe.yaml").write_text("{}")
    compiled = ("compile.enabled=true", "compile.backend=aot_eager")
    said = shardwise("train", "recipe.yaml", *sizes, *train, *compiled, at=tmp_path).failed(2)
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
