"""What the ranks of several machines leave in one cache of graphs, and how a run's folder ends."""

import os
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from shardwise.base.errors import ConfigError
from shardwise.config import check_layout, load_config
from shardwise.distributed.mesh import Group, Mesh
from shardwise.train.compile.compiled_units import BLOCK, HEAD, CapturedGraph
from shardwise.train.compile.graph_cache import FACTS, GraphCache
from shardwise.train.compile.run_graphs import RunGraphs

UNITS = (BLOCK, HEAD)


def keep(cache: Path, required: bool) -> tuple[Path, str]:
    """Each rank is a machine of its own, and compiles one of the units."""
    keys = f"compile.cache_dir={cache}", f"compile.require_cached={str(required).lower()}"
    config = load_config("llama2-tiny", ["parallel.pipeline=2", "compile.enabled=true", *keys])
    mesh, said = Mesh(pipeline=2), list[str]()
    compilation: Any = SimpleNamespace(graphs=[])
    rank, problem = Group.world().rank, ""
    with mock.patch.dict(os.environ, {"LOCAL_RANK": "0"}):
        try:
            with RunGraphs(config, check_layout(config, 2), mesh, compilation, said.append) as keeper:
                work = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
                (work / UNITS[rank]).write_text("code")
                compilation.graphs.append(CapturedGraph(UNITS[rank], training=True, is_hit=False, seconds=1.0))
                keeper.keep_new()
        except ConfigError as error:
            problem = str(error)
    return work, problem


def content(cache: Path) -> dict[str, set[str]]:
    entries = GraphCache(cache).entries()
    return {entry.facts["unit"]: set(zipfile.ZipFile(entry.path).namelist()) - {FACTS} for entry in entries}


def test_a_machine_keeps_the_graphs_that_it_compiled_until_their_code_does_not_fit(ranks: Any, tmp_path: Path) -> None:
    """Pipeline stages on several machines compile different graphs; each stores what its own folder has."""
    found = ranks(2).run(keep, tmp_path / "cache", False)
    assert content(tmp_path / "cache") == {BLOCK: {BLOCK}, HEAD: {HEAD}}
    assert not any(work.exists() or problem for work, problem in found)
    for work, problem in ranks(2).run(keep, tmp_path / "cache", True):
        assert "the cached code did not fit and was removed: block (training), loss of the head (training)" in problem
        assert not work.exists(), "a refusal leaves the compiler's folder"
    assert content(tmp_path / "cache") == {}
