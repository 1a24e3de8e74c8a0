"""What a run tells of graphs that its cache lacks or cannot keep. On several ranks: tests/dist/test_kept_graphs.py."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.config import check_layout, load_config
from shardwise.distributed.mesh import Mesh
from shardwise.train.compile.graph_cache import GraphCache
from shardwise.train.compile.run_graphs import RunGraphs
from shardwise.train.compile.units import BLOCK, HEAD, CapturedGraph

OTHER = (
    "model.hidden_size=32",
    "model.intermediate_size=48",
    "model.num_key_value_heads=2",
    "model.num_attention_heads=2",
)


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


def test_the_facts_that_differ_from_the_nearest_graph_are_told(tmp_path: Path) -> None:
    assert run(tmp_path, *OTHER)[1] is None
    said, _ = run(tmp_path)
    told = f"compile: block (training) is not in {tmp_path}; the nearest graph there differs: model.hidden_size is 64 "
    assert said[0].startswith(f"{told}here, and 32 there; "), said[0]
    assert said[0].endswith("; and 1 more")


def test_a_damaged_graph_is_told(tmp_path: Path) -> None:
    run(tmp_path)
    for entry in GraphCache(tmp_path).entries():
        with zipfile.ZipFile(entry.path) as archive:
            inside = archive.getinfo("code").header_offset + 100
        content = bytearray(entry.path.read_bytes())
        content[inside] ^= 255
        entry.path.write_bytes(content)
    told = f"compile: the file of block (training) in {tmp_path} cannot be read or is damaged; `shardwise compile` puts"
    assert run(tmp_path)[0][0].startswith(told)


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    _, problem = run(tmp_path / "file")
    assert problem is not None
    assert problem.startswith(f"compiled graphs are not kept: compile.cache_dir ({tmp_path}/file) cannot be written: ")
