"""Data sets of the library `datasets`: saved ones, text and tokens, the splits, and one sentence for what is wrong."""

import json
import re
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from shardwise.base.errors import ConfigError, DataError
from shardwise.config import DataConfig
from shardwise.data.formats.prepared_data import PreparedText, make_batches
from shardwise.data.open_data import data_format_of, prepare_data
from shardwise.data.preview import inspect_data
from shardwise.data.reading.dataset_tables import _HubTables, fetch_dataset
from shardwise.data.reading.text_sources import TableShard
from tests.unit.data.reading.test_sources import read
from tests.unit.data.small_runs import batches_of, refusal, saved_rows, sized, stories, text_of

TEXTS = stories()[:100]
ROWS = [np.random.default_rng(number).integers(0, 512, 40 + number).tolist() for number in range(100)]
JOINED = [*chain(*ROWS)]


def save_splits(at: Path, columns: dict[str, Any], **ends: tuple[int, int]) -> Path:
    datasets.disable_progress_bars()
    whole = datasets.Dataset.from_dict(columns)
    tables = {name: whole.select(range(*rows)) for name, rows in ends.items()}
    datasets.DatasetDict(tables).save_to_disk(at, num_shards=dict.fromkeys(tables, 2))
    return at


def prepared(path: Path, **data: str) -> PreparedText:
    return prepare_data(sized(512, 64, 0, path=str(path), **data), path.parent / "cache")


def failure(path: Path, **data: str) -> str:
    return refusal(sized(512, 64, 0, path=str(path), **data), path.parent / "cache")


def test_a_column_of_text_is_prepared_as_any_text(tmp_path: Path) -> None:
    """Empty rows, as WikiText has them, are no documents; all else is as the same text from a file."""
    path = saved_rows(tmp_path / "saved", id=range(len(TEXTS) + 2), body=["", *TEXTS, ""])
    assert data_format_of(DataConfig(path=str(path))).name == "datasets"
    assert read(path, text_key="body") == TEXTS
    data = prepared(path, text_key="body")
    assert data.summary.startswith(f"{path}: ")
    assert ", 100 documents, " in data.summary
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{number:03}.txt").write_text(text, encoding="utf-8", newline="")
    assert prepared(tmp_path / "texts").fingerprint == data.fingerprint


def test_named_splits_are_the_parts(tmp_path: Path) -> None:
    path = save_splits(tmp_path / "saved", {"text": TEXTS}, train=(0, 80), valid=(80, 90), test=(90, 100))
    data = prepared(path, split="train,valid,test")
    end = "<|endoftext|>"
    for part, texts in (("train", TEXTS[:80]), ("eval", TEXTS[80:90]), ("test", TEXTS[90:])):
        assert text_of(data, data.tokens[part]) == end.join([*texts, ""]), part
        assert data.count(part) == len(data.tokens[part])
    assert make_batches(sized(512, 64, 0, path=str(path)), data, "test") is not None
    swapped = prepared(path, split="valid,train")
    assert (text_of(swapped, swapped.tokens["train"]), swapped.count("test")) == (end.join([*TEXTS[80:90], ""]), 0)
    assert prepared(path, split="train").count("eval") == 0
    by_weight = prepared(path, split="90,10")
    cut = [text_of(by_weight, by_weight.tokens[part]).split(end) for part in ("train", "eval")]
    assert sorted(filter(None, chain(*cut))) == sorted(TEXTS[:80]), "weights cut the split that is called train"


def test_what_is_cached_is_of_one_table_and_its_splits(tmp_path: Path) -> None:
    first = save_splits(tmp_path / "first", {"text": TEXTS}, train=(0, 80), test=(80, 100))
    second = save_splits(tmp_path / "second", {"text": TEXTS}, train=(0, 70), test=(70, 100))
    assert prepared(first, split="train,test").count("train") > prepared(second, split="train,test").count("train")
    before = prepared(saved_rows(tmp_path / "saved", input_ids=ROWS)).fingerprint
    assert prepared(saved_rows(tmp_path / "saved", input_ids=ROWS[:-1])).fingerprint != before


def test_rows_of_tokens_are_joined_and_saved_data_need_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tokenizer, no end of document; one entry serves every length."""
    path = saved_rows(tmp_path / "saved", input_ids=ROWS, attention_mask=ROWS)
    data = prepared(path, split="1,0")
    assert data.tokens["train"].tolist() == JOINED
    assert (data.tokenizer_path, data.vocab_size, data.tokens["train"].dtype) == (None, 512, np.uint16)
    assert ", 100 rows, " in data.summary
    (entry,) = (tmp_path / "cache/tokens").iterdir()
    for length in (16, 100):
        chosen = sized(512, length, 0, path=str(path), split="1,0")
        inputs = batches_of(chosen, tmp_path / "cache").global_batch(0, 2).inputs
        for ids, targets in zip(inputs["ids_SB"].T.tolist(), inputs["targets_SB"].T.tolist(), strict=True):
            at = next(n for n in range(0, len(JOINED), length) if JOINED[n : n + length] == ids)
            assert targets == JOINED[at + 1 : at + length + 1]
    assert list((tmp_path / "cache/tokens").iterdir()) == [entry]
    text, tokens = saved_rows(tmp_path / "text", text=TEXTS), saved_rows(tmp_path / "tokens", input_ids=ROWS)
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert prepared(tokens).tokens["train"].tolist()[:50] == [*ROWS[0], *ROWS[1]][:50]
    assert prepared(text).fingerprint == prepared(text).fingerprint
    assert "has no column 'other'" in failure(text, text_key="other")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"datasets, which is not installed: pip install 'shardwise\[datasets\]'"):
        fetch_dataset(DataConfig(dataset="acme/tiny"), None)


def test_splits_must_be_chosen_and_hold_one_kind(tmp_path: Path) -> None:
    path = save_splits(tmp_path / "saved", {"text": TEXTS}, first=(0, 80), second=(80, 100))
    assert failure(path) == (
        f"data.split (95,5) must name the splits of data.path ({path}) to read, it has first and second: such as "
        "data.split=first,second"
    )
    path = saved_rows(tmp_path / "one", text=TEXTS)
    assert failure(path, split="train,test").endswith("it has none with names: give weights, such as 95,5")
    (tmp_path / "a.txt").write_text("text", encoding="utf-8")
    assert failure(tmp_path / "a.txt", split="train,test").endswith("is no data set with splits")
    tables = {name: datasets.Dataset.from_dict({"text": rows}) for name, rows in (("a", TEXTS), ("b", ROWS))}
    datasets.DatasetDict(tables).save_to_disk(tmp_path / "saved")
    assert failure(tmp_path / "saved", split="a,b") == (
        f"the column 'text' of data.path ({tmp_path}/saved) must hold text in all splits, or lists of integers in all, "
        "and it holds text in a and tokens in b (data.text_key)"
    )


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"text": ["a", None]}, "{}: row 1: the column 'text' is null: remove the row"),
        ({"input_ids": [[1], [], [2, None]]}, "{}: row 2: token 1 is null: a row must hold tokens alone"),
        ({"input_ids": [[1], [], [2, 3, 512, 600]]}, "{}: row 2: token 2 (512) must be in 0 … 511: set"),
        ({"input_ids": [[5]] * 64}, "the training part of {} (61 tokens at data.split=95,5) must be at least one"),
    ],
)
def test_bad_rows(columns: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = saved_rows(tmp_path / "saved", **columns)
    shown = f"data.path {path}" if "training part" in says else f"data.path ({path})"
    assert failure(path).startswith(says.format(shown))
    assert not list((tmp_path / "cache").glob("tokens/*")) or "training part" in says, "nothing is left that was read"


@pytest.mark.parametrize("outside", ["../outside", "/outside", ""])
def test_no_name_in_a_saved_data_set_leads_out_of_its_folder(outside: str, tmp_path: Path) -> None:
    saved_rows(tmp_path / "outside", text=TEXTS)
    path = save_splits(tmp_path / "saved", {"text": TEXTS}, train=(0, 80), test=(80, 100))
    state = path / "train" / "state.json"
    values = json.loads(state.read_text())
    values["_data_files"][0]["filename"] = f"{outside}/data-00000-of-00001.arrow"
    state.write_text(json.dumps(values))
    assert failure(path).startswith(f"{state} must name what lies in its own folder: '{outside}/data-")
    (path / "dataset_dict.json").write_text(json.dumps({"splits": [outside]}))
    assert failure(path).startswith(f"{path / 'dataset_dict.json'} must name what lies in its own folder: '{outside}'")


def test_a_card_names_no_file_outside_of_its_repository() -> None:
    for address in (
        "https://example.org/train.parquet",
        "{}../other@main/train.parquet",
        "zip://../a.jsonl::{}texts.zip",
        "/tmp/{}a.parquet",
    ):
        place = "hf://datasets/acme/tiny@0123/"
        tables, named = _HubTables("acme/tiny", None, Path("0123")), address.format(place)
        tables._require_own_files(place, {"train": [f"{place}en/a.parquet", f"zip://texts/a.jsonl::{place}texts.zip"]})
        with pytest.raises(DataError, match=rf"its card names {re.escape(named)}: set data\.path"):
            tables._require_own_files(place, {"train": [f"{place}a.parquet", named]})


def test_damaged_and_odd_folders(tmp_path: Path) -> None:
    path = saved_rows(tmp_path / "saved", text=TEXTS)
    (file,) = path.glob("*.arrow")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1000])
    assert failure(path).startswith(f"{file} is cut off or damaged (")
    (path / "state.json").write_text("{}", encoding="utf-8")
    assert failure(path) == f"{path}/state.json must list the data set's files: save it again"
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits/dataset_dict.json").write_text('{"splits": []}', encoding="utf-8")
    said = f"{tmp_path}/splits/dataset_dict.json must list the data set's splits: save it again"
    assert failure(tmp_path / "splits") == said
    (tmp_path / "folder").mkdir()
    assert "it has neither state.json nor dataset_dict.json" in failure(tmp_path / "folder", format="datasets")
    said = f"{tmp_path}/none is a data set without rows: save one that has some"
    assert failure(saved_rows(tmp_path / "none", text=[])) == said


@pytest.mark.parametrize("column", ["text", "input_ids"])
def test_values_that_lie_beyond_the_file(column: str, tmp_path: Path) -> None:
    """Its tables are mapped: unseen, they end the process."""
    rows = ["abcd" * 5] * 200 if column == "text" else [[1, 2, 3]] * 200
    path = saved_rows(tmp_path / "data", **{column: rows})
    (file,) = path.glob("*.arrow")
    offset = (20 if column == "text" else 3) * 100
    content, wrong = file.read_bytes(), (1 << 30).to_bytes(4, "little")
    offsets = b"".join((offset + step).to_bytes(4, "little") for step in (0, offset // 100))
    assert content.count(offsets) == 1
    file.write_bytes(content.replace(offsets, offsets[:4] + wrong))
    assert f"the column {column!r} is damaged (" in failure(path)
    assert failure(path).endswith("): copy or save the data set again")
    with pytest.raises(DataError, match="is damaged"):
        inspect_data(str(path), 1, {})
    if column == "text":
        with pytest.raises(DataError, match=r"\.arrow: rows 0 to 199: the column 'text' is damaged"):
            list(TableShard(file, column).documents(0))
