"""What a run tells of graphs that its cache lacks or cannot keep (on ranks: tests/dist/test_compiled_training.py)."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.config import check_layout, load_config
from shardwise.distributed.mesh import Mesh
from shardwise.train.compile.compiled_units import BLOCK, HEAD, CapturedGraph
from shardwise.train.compile.run_graphs import RunGraphs


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)


def run(cache: Path, *keys: str) -> tuple[list[str], str | None]:
    """What a run that compiles two graphs is told at its start, and why they are not kept."""
    named = ["compile.enabled=true", "compile.backend=aot_eager", f"compile.cache_dir={cache}", *keys]
    config, said = load_config("llama2-tiny", named), list[str]()
    compilation: Any = SimpleNamespace(graphs=[])
    with RunGraphs(config, check_layout(config, 1), Mesh(device="cpu"), compilation, said.append) as keeper:
        (Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "code").write_bytes(bytes(range(256)) * 20)
        compilation.graphs += [CapturedGraph(unit, training=True, is_hit=False, seconds=1.0) for unit in (BLOCK, HEAD)]
        return said, keeper.keep_new()[1]


def test_a_missing_graph_is_told(tmp_path: Path) -> None:
    assert run(tmp_path)[1] is None
    assert run(tmp_path)[0] == []
    said, _ = run(tmp_path, "train.micro_batch=1")
    assert said[0].startswith(f"compile: block (training) is not in {tmp_path} with the same keys, threads, "), said[0]


PROGRAM = """
import subprocess, sys
from pathlib import Path
import torch
from shardwise.distributed.torch_private import compiler_counts, kept_function, prepare_compiler

started, start = [], subprocess.Popen.__init__
def counted(process, args, *others, **options):
    started.append(args)
    start(process, args, *others, **options)
subprocess.Popen.__init__ = counted
prepare_compiler(1)
def function(layer, x, other=None):
    y = torch.softmax(torch.sin(layer(x)) * 2, -1)
    return y if other is None else y + other
x = torch.linspace(0, 1, 64).reshape(8, 8)
layers = [torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)]
kept = kept_function(Path(sys.argv[1]), torch.compile(function, fullgraph=True, dynamic=False), (layers[0], x))
for layer in layers:
    assert kept.guard_check(layer, x)
    torch.testing.assert_close(kept.fn(layer, x), function(layer, x))
assert not kept.guard_check(layers[0], x[:4]), "another shape"
assert not kept.guard_check(layers[0], x, x), "a tensor in place of None"
# What asks a compiler for its version has one argument.
counts = compiler_counts()
print(sum(len(args) > 2 for args in started), counts.graphs, counts.hits)
"""


@pytest.mark.slow
def test_a_kept_function_is_loaded_without_a_process_and_its_missing_kernels_compiled(tmp_path: Path) -> None:
    def counts() -> tuple[int, ...]:
        variables = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        program = [sys.executable, "-c", PROGRAM, str(tmp_path / "function.traced")]
        done = subprocess.run(program, env=variables, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        return tuple(map(int, done.stdout.split()))

    started, *cold = counts()
    assert started > 1
    assert cold == [1, 0]
    assert counts() == (0, 1, 1), "it is not captured again, and no process tries or compiles anything"
    for library in tmp_path.rglob("*.main.so"):
        library.unlink()
    started, *warm = counts()
    assert started > 0, "kernels are compiled"
    assert warm == [1, 1]
    (tmp_path / "function.traced").write_bytes(b"damaged")
    assert counts()[1:] == (1, 0), "a file that cannot be read is written again"
