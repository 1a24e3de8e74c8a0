"""What a run tells of graphs that its cache lacks or cannot keep. On several ranks: tests/dist/test_kept_graphs.py."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.config import check_layout, load_config
from shardwise.distributed.mesh import Mesh
from shardwise.train.compile import run_graphs
from shardwise.train.compile.graph_cache import GraphCache
from shardwise.train.compile.run_graphs import RunGraphs
from shardwise.train.compile.units import BLOCK, HEAD, CapturedGraph


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


def test_kernels_are_trusted_only_where_all_graphs_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(run_graphs, "trusted_kernels", lambda: nullcontext(calls.append("trusted")))
    for backend, expected in (("inductor", []), ("inductor", ["trusted"]), ("aot_eager", ["trusted"])):
        run(tmp_path, f"compile.backend={backend}")
        assert calls == expected, backend
    run(tmp_path, "compile.backend=aot_eager")
    assert calls == ["trusted"], "another backend has no kernels of Inductor"


PROGRAM = """
import subprocess, sys
from contextlib import nullcontext
import torch
from shardwise.distributed.torch_private import compiler_counts, prepare_compiler, trusted_kernels

started, start = [], subprocess.Popen.__init__
def counted(process, args, *others, **options):
    started.append(args)
    start(process, args, *others, **options)
subprocess.Popen.__init__ = counted
prepare_compiler(1)
x = torch.linspace(0, 1, 64)
def function(x):
    return torch.softmax(torch.sin(x) * 2, -1)
with trusted_kernels() if sys.argv[1] == "trusted" else nullcontext():
    torch.testing.assert_close(torch.compile(function, fullgraph=True)(x), function(x))
# What asks a compiler for its version has one argument.
print(sum(len(args) > 2 for args in started), compiler_counts().hits)
"""


@pytest.mark.slow
def test_a_trusted_kernel_is_loaded_without_a_process_and_a_missing_one_compiled(tmp_path: Path) -> None:
    def processes(mode: str) -> tuple[int, int]:
        variables = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", PROGRAM, mode], env=variables, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        started, hits = map(int, done.stdout.split())
        return started, hits

    assert processes("cold")[1] == 0
    assert processes("cold")[0] > 0, "the compiler tries the processor's instructions again"
    assert processes("trusted") == (0, 1)
    for library in tmp_path.rglob("*.main.so"):
        library.unlink()
    assert processes("trusted") == (1, 1), "one kernel is compiled"


def test_a_damaged_graph_is_told(tmp_path: Path) -> None:
    run(tmp_path)
    for entry in GraphCache(tmp_path).entries():
        with zipfile.ZipFile(entry.path) as archive:
            inside = archive.getinfo("code").header_offset + 100
        content = bytearray(entry.path.read_bytes())
        content[inside] ^= 255
        entry.path.write_bytes(content)
    told = f"compile: block (training) is not in {tmp_path} in a file that can be read; `shardwise compile` puts"
    assert run(tmp_path)[0][0].startswith(told)


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    _, problem = run(tmp_path / "file")
    assert problem is not None
    assert problem.startswith(f"compiled graphs are not kept: compile.cache_dir ({tmp_path}/file) cannot be written: ")
