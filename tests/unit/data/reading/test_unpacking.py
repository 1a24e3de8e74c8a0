"""Compressed shards are unpacked once, and give what they gave; bad copies are made again."""

import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from shardwise.base.errors import DataError
from shardwise.data.formats.prepared_data import make_batches
from shardwise.data.open_data import prepare_data
from shardwise.data.samples.sentence_pairs import ShardBatches
from tests.unit.data.formats.test_hdf5 import config
from tests.unit.data.hdf5_shards import arrays, write


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """Two shards of 40 and 30 rows, compressed."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for number, (first, rows) in enumerate(((0, 40), (40, 30))):
        write(folder / f"wiki_training_{number}.hdf5", arrays(rows, first), compression="gzip")
    return folder


def batches(folder: Path, cache: Path, told: list[str] | None = None) -> ShardBatches:
    chosen = config(str(folder), split="1,0")
    found = make_batches(chosen, prepare_data(chosen, cache, (told if told is not None else []).append), "train")
    assert isinstance(found, ShardBatches)
    return found


def test_every_row_is_as_it_was_packed(packed: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    for number, (first, rows) in enumerate(((0, 40), (40, 30))):
        write(plain / f"wiki_training_{number}.hdf5", arrays(rows, first))
    told: list[str] = []
    unpacked, wanted = batches(packed, tmp_path / "cache", told), batches(plain, tmp_path / "other", told)
    for consumed in (0, 50, 100):
        mine, theirs = (each.global_batch(consumed, 20) for each in (unpacked, wanted))
        for name, array in theirs.inputs.items():
            assert np.array_equal(mine.inputs[name], array), f"{name} after {consumed} samples"
    (line,) = told
    assert line.startswith("unpacking 2 shards, ")
    assert line.endswith(f": once, then cached in {tmp_path / 'cache'}")
    batches(packed, tmp_path / "cache", told)
    assert len(told) == 1, "what is there is unpacked again"


def entries(cache: Path) -> Iterator[Path]:
    return (path for path in (cache / "shards").iterdir())


@pytest.mark.parametrize("damage", ["truncated", "manifest", "source"])
def test_a_damaged_or_old_copy_is_made_anew(damage: str, packed: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    wanted = batches(packed, cache).global_batch(0, 70).inputs
    folder = sorted(entries(cache))[0]
    array = folder / "input_ids.npy"
    match damage:
        case "truncated":
            array.write_bytes(array.read_bytes()[:-7])
        case "manifest":
            (folder / "manifest.json").write_text("[]")
        case "source":
            changed = arrays(40, 100)
            write(packed / "wiki_training_0.hdf5", changed, compression="gzip")
            found = batches(packed, cache).shards.take(np.arange(40))
            assert np.array_equal(found["input_ids"], changed["input_ids"])
            return
    told: list[str] = []
    again = batches(packed, cache, told).global_batch(0, 70).inputs
    assert all(np.array_equal(again[name], wanted[name]) for name in wanted)
    assert [line.split(",")[0] for line in told] == ["unpacking 1 shard"]


def test_a_disk_that_fills_up_is_a_sentence(packed: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(DataError, match=r"data cache .* cannot be written: File too large; set SHARDWISE"):
            batches(packed, tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(entries(tmp_path / "cache"))


def test_the_room_is_looked_at_before(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(DataError) as caught:
        batches(packed, tmp_path / "cache")
    assert caught.value.problems == [
        f"the data cache {tmp_path / 'cache'} (1000 B free) must have room for 2 shards that 15.4 KiB take "
        "unpacked: set SHARDWISE_CACHE to a folder with room, or write the shards without compression"
    ]
    assert not (tmp_path / "cache" / "shards").exists()
