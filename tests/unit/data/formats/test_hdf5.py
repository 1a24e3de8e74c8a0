"""BERT's HDF5 shards: every row of every shard, compressed or not; which files are meant; what is refused."""

import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest

from shardwise.base.errors import DataError
from shardwise.config import Config
from shardwise.data.formats.hdf5 import _PreparedShards
from shardwise.data.formats.prepared_data import make_batches, make_evaluation_batches
from shardwise.data.open_data import data_format_of, prepare_data
from shardwise.data.reading.hdf5_files import KEYS
from shardwise.data.samples.batch import IGNORE, Batch
from shardwise.data.samples.sentence_pairs import ShardBatches
from tests.unit.data import small_runs
from tests.unit.data.hdf5_shards import arrays, write
from tests.unit.data.small_runs import batches_of, refusal, refusals

ARRAYS = (arrays(5), arrays(1, first=5, predictions=6), arrays(9, first=6))


def config(path: str, **options: Any) -> Config:
    return small_runs.config(family="bert", path=path, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three shards of unequal lengths, 15 samples in all; the second has other predictions and is compressed."""
    at = tmp_path_factory.mktemp("shards")
    for number, found in enumerate(ARRAYS):
        write(at / f"wiki_training_{number}.hdf5", found, compression="gzip" if number == 1 else None)
    write(at / "wiki_test_0.hdf5", arrays(3))
    return str(at)


def all_of(path: str) -> ShardBatches:
    place = Path(path)
    return batches_of(config(path, split="1,0"), (place if place.is_dir() else place.parent) / "cache")


def labels(positions: np.ndarray, ids: np.ndarray, length: int) -> np.ndarray:
    """Of one row, by the definition: the first position 0 ends the list."""
    found = np.full(length, IGNORE)
    for position, target in zip(positions, ids, strict=True):
        if position == 0:
            break
        found[position] = target
    return found


def numbers(batch: Batch) -> list[int]:
    """The samples of a batch, by what stands at place 1."""
    return (batch.inputs["ids_SB"][1] - 100).tolist()


def test_samples_are_those_of_the_definition(folder: str) -> None:
    batches = all_of(folder)
    assert batches.num_samples == 15
    batch = batches.global_batch(0, 15)
    order = numbers(batch)
    assert sorted(order) == list(range(15))
    for name, key in (("ids_SB", "input_ids"), ("mask_SB", "input_mask"), ("token_types_SB", "segment_ids")):
        assert np.array_equal(batch.inputs[name].T, np.concatenate([found[key] for found in ARRAYS])[order])
    next_sentence = np.concatenate([found["next_sentence_labels"] for found in ARRAYS])
    assert np.array_equal(batch.inputs["next_sentence_B"], next_sentence[order])
    expected = []
    for found in ARRAYS:
        pairs = zip(found["masked_lm_positions"], found["masked_lm_ids"], strict=True)
        expected += [labels(positions, ids, 16) for positions, ids in pairs]
    of_targets = zip(batch.inputs["positions_PB"].T, batch.inputs["targets_PB"].T, strict=True)
    for sample, (positions, targets) in zip(order, of_targets, strict=True):
        counted = targets != IGNORE
        own = np.full(16, IGNORE)
        own[positions[counted]] = targets[counted]
        assert np.array_equal(own, expected[sample])
    assert batch.counts.tolist() == [sum(int((each != IGNORE).sum()) for each in expected), 15]


def test_what_data_path_names(folder: str, tmp_path: Path) -> None:
    one = f"{folder}/wiki_training_0.hdf5"
    for path, samples in ((folder, 15), (one, 5), (f"{folder}/*_training_[02].hdf5", 14), (f"{folder}/wiki*", 18)):
        chosen = config(path, split="1,0")
        assert data_format_of(chosen.data).name == "hdf5"
        assert prepare_data(chosen, tmp_path / "cache").count("train") == samples * 16
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("text")
    for path in (str(tmp_path / "text"), str(tmp_path / "text" / "*.txt"), "x" * 5000, "none"):
        assert data_format_of(config(path).data).name == "text"
    assert data_format_of(config(one, format="text").data).name == "text"
    plain = Path(write(tmp_path / "plain", arrays(2)))
    assert prepare_data(config(str(plain), format="hdf5", split="1,0"), tmp_path / "cache").count("train") == 32


def test_parts_are_consecutive_and_fingerprints_are_theirs(folder: str, tmp_path: Path) -> None:
    chosen = config(folder, split="10,3,2", eval_every=1)
    data = prepare_data(chosen, tmp_path / "cache")
    assert isinstance(data, _PreparedShards)
    assert data.tokenizer_path is None
    copied = [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert sorted(copied) == ["locks", "shards"], "nothing but what is compressed is copied"
    assert len(list((tmp_path / "cache" / "shards").iterdir())) == 1
    assert [data.count(part) // 16 for part in ("train", "eval", "test")] == [10, 3, 2]
    assert (data.beginning("eval", 18)[1], data.beginning("eval", 18)[17]) == (110, 111)
    assert len(data.beginning("test", 100)) == 32
    for part, rows in (("train", range(10)), ("eval", range(10, 13)), ("test", range(13, 15))):
        for make in (make_batches, make_evaluation_batches):
            (batch,) = make(chosen, data, part).eval_batches(1, len(rows), 0, 1, len(rows))
            assert numbers(batch) == list(rows)

    def fingerprint(path: str, split: str = "2,1", **data: object) -> str:
        return prepare_data(config(path, split=split, **data), tmp_path / "cache").fingerprint

    (tmp_path / "copy").mkdir()
    for path in Path(folder).glob("*_training_*.hdf5"):
        (tmp_path / "copy" / path.name).write_bytes(path.read_bytes())
    copy, first = str(tmp_path / "copy"), fingerprint(folder)
    assert first == fingerprint(copy) == fingerprint(folder, max_predictions=5)
    with h5py.File(f"{copy}/wiki_training_2.hdf5", "r+") as file:
        file["input_ids"][8, 3] += 1
    others = [fingerprint(folder, "1,1"), fingerprint(copy), fingerprint(f"{folder}/*_training_[02].hdf5")]
    assert len({first, *others}) == 4


def test_files_that_are_no_shards_are_refused(tmp_path: Path) -> None:
    paths = [tmp_path / f"a_training_{number}.hdf5" for number in range(4)]
    paths[0].write_text("some text\n" * 100)
    write(paths[1], arrays(4))
    whole = paths[1].read_bytes()
    paths[1].write_bytes(whole[:3000])
    paths[2].symlink_to(tmp_path / "nowhere")
    paths[3].write_bytes(whole.replace(b"TREE", b"EERT"))
    text, truncated, link, damaged = refusals(config(str(tmp_path)), tmp_path / "cache")
    for path, said in zip(paths, (text, truncated), strict=False):
        assert said.startswith(f"{path} must be an HDF5 file, and it is none or damaged (")
    assert link == f"{paths[2]} cannot be read: No such file or directory"
    assert damaged.startswith(f"{paths[3]} cannot be read (")
    assert damaged.endswith("): it is damaged, copy it again")


def test_another_length_and_a_missing_library_are_told(
    tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.hdf5", arrays(4, length=32))
    assert refusal(config(path), tmp_path / "cache") == (
        f"{path}: the sequences (32 tokens) must have those of train.sequence_length (16): set "
        "train.sequence_length=32, or name other shards (`shardwise explain length-of-shards`)"
    )
    monkeypatch.setitem(sys.modules, "h5py", None)
    problem = refusal(config(folder), tmp_path)
    assert problem.startswith("HDF5 shards need h5py (")
    assert problem.endswith("): pip install 'shardwise[hdf5]'")


@pytest.mark.parametrize(
    ("key", "place", "value", "text"),
    [
        ("input_ids", (6, 3), 300, "input_ids[3] (300) must be in 0 … 299: set model.vocab_size"),
        ("masked_lm_positions", (6, 0), 16, "masked_lm_positions[0] (16) must be in 0 … 15"),
        ("masked_lm_positions", (6, 0), 4, "masked_lm_positions must name each position once, and 4 occurs twice"),
        ("input_mask", (6, slice(None)), 0, "input_mask must be 1 for a token or more"),
        ("segment_ids", (6, 5), 2, "segment_ids[5] (2) must be in 0 … 1: set model.type_vocab_size"),
    ],
)
def test_a_value_that_no_model_reads_is_named_when_it_is_read(
    key: str, place: tuple[int | slice, ...], value: int, text: str, tmp_path: Path
) -> None:
    found = arrays(8)
    found[key][place] = value
    path = write(tmp_path / "a.hdf5", found)
    batches = all_of(path)
    with pytest.raises(DataError) as caught:
        batches.global_batch(0, 8)
    assert str(caught.value).startswith(f"{path}: row 6: {text}")
    assert batches.collate(np.arange(5), np.zeros(5, np.int64), np.arange(5)).counts[1] == 5, "the others are read"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"masked_lm_ids": None}, " must have the array masked_lm_ids, and has input_ids, input_mask, masked_lm_"),
        ({"next_sentence_labels": np.s_[:5]}, ": next_sentence_labels (5 rows) must have as many as the other "),
        ({"input_mask": np.s_[:, :12]}, ": input_mask (12 tokens a row) must have as many as the other"),
        ({"segment_ids": np.s_[0]}, ": segment_ids (int32 of shape [16]) must hold integers of shape [rows, tokens a "),
        ({"input_ids": "f4"}, ": input_ids (float32 of shape [8, 16]) must hold integers"),
        (
            dict.fromkeys(KEYS, np.s_[:0]),
            ": input_ids (0 rows) must have as many as the other arrays (1), and at least 1: remove the file",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    """Arrays that are left out, cut or of another type."""
    found = arrays(8)
    for key, change in changes.items():
        array = found.pop(key)
        if change is not None:
            found[key] = array.astype(change) if isinstance(change, str) else array[change]
    path = write(tmp_path / "a.hdf5", found)
    assert refusal(config(path), tmp_path / "cache").startswith(path + text)


@pytest.mark.parametrize("way", ["link", "raw", "virtual"])
def test_an_array_that_leads_to_another_file_is_refused(way: str, tmp_path: Path) -> None:
    found = arrays(8)
    secret = found.pop("input_ids")
    outside = write(tmp_path / "outside.hdf5", {**found, "input_ids": secret})
    path = write(tmp_path / "a.hdf5", found)
    with h5py.File(path, "r+") as file:
        if way == "link":
            file["input_ids"] = h5py.ExternalLink(outside, "input_ids")
        elif way == "raw":
            size = secret.size * secret.dtype.itemsize
            file.create_dataset("input_ids", secret.shape, secret.dtype, external=[(outside, 0, size)])
        else:
            layout = h5py.VirtualLayout(secret.shape, secret.dtype)
            layout[:] = h5py.VirtualSource(outside, "input_ids", secret.shape)
            file.create_virtual_dataset("input_ids", layout)
    assert refusal(config(path), tmp_path / "cache") == (
        f"{path}: input_ids must lie in the file itself, and it refers to another file: write the shard again"
    )


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
