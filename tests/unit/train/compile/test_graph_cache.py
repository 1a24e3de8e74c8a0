"""The folder of compiled graphs: whole files or none, whatever else writes, dies or is damaged."""

import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from shardwise.base.errors import ConfigError
from shardwise.train.compile.graph_cache import CachedGraph, GraphCache

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
