"""Raw token ids become Megatron's files: their dtype, their documents, and what is refused."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.base.errors import ConfigError, DataError
from shardwise.data.prepare import from_raw_tokens
from shardwise.data.prepare.from_raw_tokens import RawConversionJob, convert_raw_tokens
from shardwise.data.prepare.output import PreparationOutcome
from shardwise.data.preview import inspect_data
from shardwise.data.reading.megatron_files import IndexedFile
from shardwise.data.reading.raw_tokens import is_raw_tokens
from shardwise.data.tokens.tokenizer import Tokenizer
from tests.unit.data.small_runs import saved_tokenizer

END = 9
IDS = [5, 600, END, 700, END, END, 300, 8]
DOCUMENTS = [[5, 600, END], [700, END], [END], [300, 8]]


def write(path: Path, ids: list[int], dtype: str = "<u2") -> Path:
    path.write_bytes(np.array(ids, dtype=dtype).tobytes())
    return path


def convert(path: Path, output: str, force: bool = False, **options: Any) -> tuple[PreparationOutcome, list[str]]:
    """What comes of a conversion, and what is said."""
    said: list[str] = []
    job = RawConversionJob(path, path.with_name(output), **options)
    return convert_raw_tokens(job, force=force, announce=said.append), said


def converted(path: Path, **options: Any) -> list[list[int]]:
    """The documents that a conversion makes."""
    convert(path, "out", **options)
    file = IndexedFile.open(path.with_name("out"))
    starts = file.starts(np.arange(file.num_documents + 1)).tolist()
    return [file.tokens[start:end].tolist() for start, end in pairwise(starts)]


@pytest.mark.parametrize(("dtype", "block"), [("uint16", 1), ("uint32", 3), ("uint16", 100)])
def test_raw_tokens_become_documents(dtype: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_raw_tokens, "_BLOCK", block)
    path = write(tmp_path / "train.bin", IDS, np.dtype(dtype).newbyteorder("<").str)
    assert is_raw_tokens(path)
    assert converted(path, dtype=dtype, eod_token=END) == DOCUMENTS
    assert IndexedFile.open(tmp_path / "out").sizes.tolist() == [3, 2, 1, 2]
    assert not is_raw_tokens(tmp_path / "out.bin")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out.bin", "out.idx", "out.json", "train.bin"]


def test_raw_tokens_without_an_end_token_are_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "train.bin", IDS)
    assert converted(path) == [IDS]
    monkeypatch.setattr(from_raw_tokens, "_BLOCK", 2)
    monkeypatch.setattr(from_raw_tokens, "_LONGEST_SEQUENCE", 4)
    path = write(tmp_path / "again.bin", [*IDS, END])
    convert(path, "long", eod_token=8)
    file = IndexedFile.open(tmp_path / "long")
    assert (file.documents.tolist(), file.sizes.tolist()) == ([0, 2, 3], [4, 4, 1])
    assert file.tokens.tolist() == [*IDS, END]


@pytest.mark.parametrize(
    ("ids", "dtype", "dtypes"),
    [
        ([*range(12)] * 400, "uint16", "uint16 or uint32"),
        ([*range(12)] * 33, "int64", "uint16, uint32 or int64"),
        ([700, 90, 0, 0] * 5, "uint16", "uint16 or int64"),
    ],
)
def test_bytes_that_fit_several_dtypes_are_asked_about(ids: list[int], dtype: str, dtypes: str, tmp_path: Path) -> None:
    path = write(tmp_path / "train.bin", ids, np.dtype(dtype).newbyteorder("<").str)
    with pytest.raises(DataError, match=rf"train\.bin may be ids of {dtypes}: say which by --token-dtype"):
        converted(path)
    assert converted(path, dtype=dtype) == [ids]


SHARDS = {(20240520, 1): ("uint16", 50256), (20240801, 7): ("uint32", 128000)}
"""llm.c's magic and version → the dtype of its ids, and the token before each document."""


def shard(path: Path, magic: int, version: int, ids: list[int], number: int | None = None) -> Path:
    """A shard as llm.c's `write_datafile` lays it out."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(ids) if number is None else number
    dtype = SHARDS.get((magic, version), ("uint16", 0))[0]
    path.write_bytes(header.tobytes() + np.array(ids, dtype=dtype).tobytes())
    return path


@pytest.mark.parametrize("version", SHARDS)
def test_a_shard_of_llm_c_is_documents(version: tuple[int, int], tmp_path: Path) -> None:
    dtype, end = SHARDS[version]
    ids = [end, 5, 600, end, 700, end, 300, 8]
    path = shard(tmp_path / "fineweb_val_000000.bin", *version, ids)
    assert converted(path) == [[end], [5, 600, end], [700, end], [300, 8]]
    _, said = convert(path, "mine", eod_token=600)
    assert said[0] == f"reading {path} as a shard of llm.c, of {dtype}"
    assert IndexedFile.open(tmp_path / "mine").sizes.tolist() == [3, 5]
    other = "uint32" if dtype == "uint16" else "uint16"
    with pytest.raises(DataError, match=rf"--token-dtype \({other}\) must be {dtype}, which .* is by its header"):
        converted(path, dtype=other)
    shard(path, *version, ids, number=9)
    with pytest.raises(DataError, match=rf"\(8 ids of {dtype}\) must have 9, as the header of llm\.c says: copy it"):
        converted(path)


def test_the_tokenizer_of_raw_tokens_ends_their_documents_and_checks_them(tmp_path: Path) -> None:
    text = "The ring of keys was lost in spring. A song went with it!\n" * 4
    named = saved_tokenizer(tmp_path / "tokenizer", text, 270)
    end = Tokenizer.load(Path(named)).end_of_document_id
    assert converted(write(tmp_path / "train.bin", [5, end, 6]), tokenizer=named) == [[5, end], [6]]
    found = inspect_data(str(tmp_path / "out"), 1, {})
    assert found.samples[0].text is not None, "the manifest names the tokenizer"
    path = write(tmp_path / "other.bin", [5, 270])
    with pytest.raises(DataError, match=r"the highest id \(270\), read as uint16, must be below 270, the vocabulary"):
        convert(path, "no", tokenizer=named)
    path = write(tmp_path / "labels.bin", [5, -100], "<i8")
    with pytest.raises(DataError, match=r"labels\.bin: the lowest id \(-100\) must be at least 0"):
        convert(path, "no", dtype="int64")
    assert not list(tmp_path.glob("*no*"))


def test_what_is_no_file_of_raw_tokens_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "empty.bin").write_bytes(b"")
    for name, size in (("odd", 3), ("empty", 0)):
        with pytest.raises(DataError, match=rf"{name}\.bin \({size} bytes\) must be above 0 and a mul"):
            converted(tmp_path / f"{name}.bin")
    path = write(tmp_path / "train.bin", IDS)
    with pytest.raises(ConfigError, match=r"must not be INPUT .* itself"):
        convert(path, "train")
