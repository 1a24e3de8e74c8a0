"""`shardwise compile`: what it refuses, and what it does without a compiler."""

import io
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shardwise.base.errors import RunError
from shardwise.config import load_config
from shardwise.train.compile import worker
from shardwise.train.compile.compiled_units import BLOCK
from shardwise.train.compile.graph_cache import GraphCache
from tests.command_line import CommandLine

FACTS = {
    "unit": "block", "training": True, "parallel.tensor": 4, "parallel.sequence": False, "train.micro_batch": 1,
    "train.sequence_length": 2048, "device": "cpu, AVX2", "threads": 2, "torch": "2.12.0",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("shardwise.cli.compile.accelerators", lambda: ("cpu", 0))


def test_no_compiler_is_one_sentence(monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    from shardwise.train.compile import graph_facts as facts

    facts._compiler.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    said = cli.sentence("compile", "llama2-tiny")
    facts._compiler.cache_clear()
    assert said.startswith("shardwise: compile.enabled (true) needs a C++ compiler on a CPU, and there is no no-such-")


def test_the_cache_is_shown_shipped_and_emptied_and_must_be_writable(tmp_path: Path, cli: CommandLine) -> None:
    (tmp_path / "file").touch()
    cli("compile", "--import", "x", "--cache-dir", "file/below", code=2)
    GraphCache(tmp_path / "here").store(FACTS, tmp_path, [])
    GraphCache(tmp_path / "here").export(tmp_path / "x")
    for arguments in (["--import", "x"], ["llama2-tiny"]):
        captured = cli("compile", *arguments, "--cache-dir", "file/below", code=2)
        assert "compile.cache_dir (file/below) cannot be written" in captured.err
        assert "compiled in" not in captured.out, "it is told after all the work"
    GraphCache(tmp_path / "cache/compile").store(FACTS, tmp_path, [])
    out = cli("compile", "--list", "--export", "all").out
    assert "block (training)  TP 4    1 × 2,048    cpu, AVX2, 2 threads  2.12.0" in out
    assert "1 graph, " in out.splitlines()[-1]
    cli("compile", "--clean")
    assert "1 graph of all" in cli("compile", "--import", "all").out
    assert "block (training)" in cli("compile", "--list").out


class Idle(nn.Module):
    """A model of the user's own whose blocks take no part."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])
        self.weight = nn.Parameter(torch.ones(vocab_size))

    def forward(self, ids_SB: Tensor, targets_SB: Tensor) -> Tensor:
        return (self.weight[ids_SB] * self.weight[targets_SB]).sum()


def test_a_block_that_nothing_calls_is_no_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"family": f"{__name__}:Idle", "vocab_size": 300}
    values = load_config("llama2-tiny", ["compile.enabled=true"]).model_dump(mode="json") | {"model": model}
    job = {"config": values, "unit": BLOCK, "training": True, "rank": 0, "world": 1, "device": "cpu"}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(job | {"only_capture": True})))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(worker, "die_with_parent", lambda: None)
    with pytest.raises(RunError, match=f"{BLOCK} was not called: a forward pass of the model must call each of its"):
        worker.main()
