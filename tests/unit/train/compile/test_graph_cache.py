"""The cache of compiled graphs, and which facts of a run they depend on."""

import importlib
import json
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise.base.errors import ConfigError
from shardwise.config import check_layout, load_config
from shardwise.train.compile.compiled_units import BLOCK
from shardwise.train.compile.graph_cache import CachedGraph, Facts, GraphCache
from shardwise.train.compile.graph_facts import _SOURCES, _user_sources, graph_facts
from tests.rows import rows_of

ROWS = rows_of(__file__)

CODE = bytes(range(256)) * 20


def facts(**changed: Any) -> dict[str, Any]:
    return {"unit": "block", "training": True, "threads": 1, "torch": "2.13.0", "device": "cpu"} | changed


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """What a compiler left in its folder."""
    folder = tmp_path / "work"
    (folder / "ab").mkdir(parents=True)
    (folder / "ab/code.so").write_bytes(CODE)
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> GraphCache:
    return GraphCache(tmp_path / "cache")


def stored(cache: GraphCache, work: Path, **changed: Any) -> Path:
    return cache.store(facts(**changed), work, [work / "ab/code.so"]).path


def entry_of(cache: GraphCache, **changed: Any) -> CachedGraph:
    return cache.find(facts(**changed))


def test_what_is_stored_is_found_by_its_facts_and_unpacked(cache: GraphCache, work: Path) -> None:
    assert cache.find(facts()) is None
    stored(cache, work)
    entry = entry_of(cache)
    assert entry.facts == facts()
    archive = cache.read(entry)
    assert archive.read("ab/code.so") == CODE
    assert cache.find(facts(threads=2)) is None


@pytest.mark.parametrize("kept", [40, -1], ids=["half-written", "a wrong byte"])
def test_a_damaged_file_is_removed_and_never_used(kept: int, cache: GraphCache, work: Path) -> None:
    path = stored(cache, work)
    entry = entry_of(cache)
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        inside = archive.getinfo("ab/code.so").header_offset + 100
    path.write_bytes(whole[:kept] if kept >= 0 else whole[:inside] + b"\xff\xff" + whole[inside + 2 :])
    assert cache.read(entry) is None
    assert not path.exists()
    assert cache.entries() == []


def test_the_graphs_that_were_used_longest_ago_are_removed(cache: GraphCache, work: Path) -> None:
    paths = [stored(cache, work, threads=number) for number in range(3)]
    for age, path in enumerate(paths):
        os.utime(path, (1000 - age, 1000 - age))
    entry = entry_of(cache, threads=2)
    assert cache.read(entry) is not None, "it is the newest now"
    assert cache.prune(0, kept=[facts(threads=number) for number in range(3)]) == [], "they are in use"
    removed = cache.prune(2 * entry.bytes)
    assert [entry.facts["threads"] for entry in removed] == [1]
    assert sorted(entry.facts["threads"] for entry in cache.entries()) == [0, 2]


def test_an_export_is_taken_in_elsewhere_and_another_file_is_not(cache: GraphCache, tmp_path: Path, work: Path) -> None:
    there = GraphCache(tmp_path / "there")
    stored(cache, work)
    stored(cache, work, threads=2)
    assert len(cache.export(tmp_path / "all.graphs")) == 2
    assert len(there.take_in(tmp_path / "all.graphs")) == 2
    assert there.read(entry_of(there, threads=2)) is not None
    with pytest.raises(ConfigError, match="there is no file"):
        cache.take_in(tmp_path / "none")
    with zipfile.ZipFile(tmp_path / "empty", "w"):
        pass
    with pytest.raises(ConfigError, match=", and holds no graph"):
        cache.take_in(tmp_path / "empty")
    stored(cache, work)
    exported = tmp_path / "exported"
    cache.export(exported)
    content = exported.read_bytes()
    exported.write_bytes(content[:100] + b"????" + content[104:])
    with pytest.raises(ConfigError, match="cannot be read as one"):
        cache.take_in(exported)
    (tmp_path / "file").touch()
    text = r"compile\.cache_dir \(.*file\) cannot be written: .*; set it to another folder"
    with pytest.raises(ConfigError, match=text):
        stored(GraphCache(tmp_path / "file"), work)


def test_fault_16_programs_that_any_user_may_write_are_not_used(cache: GraphCache, tmp_path: Path, work: Path) -> None:
    path = stored(cache, work)
    assert path.stat().st_mode & 0o002 == 0
    path.chmod(0o666)
    assert cache.find(facts()) is None
    path.chmod(0o664)
    cache.root.chmod(0o2775)
    cache.require_trusted()
    entry = entry_of(cache)  # a team shares a folder by its group
    cache.root.chmod(0o777)
    told = r"compile.cache_dir \(.*\) cannot be trusted, and what is in it are programs: the mode of .*/cache \(0777\)"
    with pytest.raises(ConfigError, match=told):
        cache.require_trusted()
    assert cache.find(facts()) is None
    assert cache.read(entry) is None
    with pytest.raises(ConfigError, match=r"cannot be written: .* must be 0775 or stricter"):
        stored(cache, work)
    GraphCache(cache.root / "none").require_trusted()


CPU = torch.device("cpu")


def facts_of(*overrides: str, training: bool = True) -> Facts:
    config = load_config("llama2-tiny", overrides)
    return graph_facts(config, check_layout(config, config.parallel.ranks), CPU, BLOCK, training)


def differing(a: Facts, b: Facts) -> set[str]:
    return {key for key in {*a, *b} if a.get(key) != b.get(key)}


@pytest.mark.parametrize(
    "overrides",
    ROWS["shared"],
    ids=lambda overrides: overrides[0],
)
def test_runs_that_share_graphs(overrides: list[str]) -> None:
    assert facts_of(*overrides) == facts_of()


@pytest.mark.parametrize(
    ("override", "keys"),
    ROWS["not_shared"],
)
def test_runs_that_do_not(override: str, keys: list[str]) -> None:
    assert differing(facts_of(), facts_of(override)) == set(keys)


def test_what_beside_keys_decides_on_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts_of("train.recompute=full", "train.dropout_mode=invariant", training=False) == facts_of(training=False)
    # A folder that was renamed would leave the cached graphs of its former code in use.
    root = Path(shardwise.__file__).parent
    for pattern in _SOURCES:
        assert list(root.glob(pattern)), pattern
    files = {path for pattern in _SOURCES for path in root.glob(pattern)}
    assert root / "config/decoders.py" in files, "a factor on the scores of attention is a number in a graph"
    (tmp_path / "owned").mkdir()
    (tmp_path / "owned/__init__.py").touch()
    (tmp_path / "owned/parts.py").write_text("WIDTH = 8\n")
    (tmp_path / "owned/model.py").write_text("from owned.parts import WIDTH\n\n\nclass Model:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    model = importlib.import_module("owned.model").Model
    assert {path.name for path in _user_sources(model)} == {"__init__.py", "parts.py", "model.py"}
    for name in ("owned", "owned.parts", "owned.model"):
        del sys.modules[name]
    # Code is compiled for the very processor, and calls other matmuls on those that are not Intel's.
    before = facts_of()
    assert json.loads(json.dumps(before)) == before
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 77)
        patch.setattr("shardwise.train.compile.graph_facts._SOURCES", ("models/llama.py",))
        assert differing(before, facts_of()) == {"threads", "code"}
    monkeypatch.setattr("shardwise.distributed.devices.cpu_prefers_onednn", lambda: before["matmuls"] != "oneDNN")
    monkeypatch.setattr("shardwise.train.compile.graph_facts._compiler", lambda: "without AVX512")
    assert differing(before, facts_of()) == {"matmuls", "compiler and processor"}
