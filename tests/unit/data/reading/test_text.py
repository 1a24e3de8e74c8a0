"""Packed text and parquet: the same documents as plain files have, and one sentence for every kind of bad file."""

import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardwise.data.reading.sources import PIECE_CHARACTERS, open_source
from shardwise.errors import see
from tests.unit.data.reading.test_sources import DataConfig, failure, read

TEXTS = ["one\n", "two – zwei", "x" * (PIECE_CHARACTERS + 5), "four"]


def jsonl(texts: Sequence[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def write_parquet(path: Path, texts: Any, *, key: str = "text", **options: Any) -> None:
    pq.write_table(pa.table({"id": range(len(texts)), key: texts}), path, **options)


def test_all_kinds_hold_the_same_documents(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS))
    # Two members, as `cat a.gz b.gz` makes them.
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(jsonl(TEXTS[:2])) + gzip.compress(jsonl(TEXTS[2:])))
    write_parquet(tmp_path / "c.parquet", TEXTS, row_group_size=2)
    write_parquet(tmp_path / "d.parquet", pa.array(TEXTS).dictionary_encode(), compression="zstd")
    (tmp_path / "e.txt.gz").write_bytes(gzip.compress("\ufeffpacked – text".encode()))
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet", "d.parquet"):
        assert read(tmp_path / name) == TEXTS, name
    assert read(tmp_path / "e.txt.gz") == ["packed – text"]
    assert read(tmp_path) == [*TEXTS * 4, "packed – text"]


def test_the_format_goes_before_the_name(tmp_path: Path) -> None:
    write_parquet(tmp_path / "part-0", pa.array(["a", "b"], pa.large_string()), key="body")
    assert read(tmp_path / "part-0", format="parquet", text_key="body") == ["a", "b"]
    (tmp_path / "lines.gz").write_bytes(gzip.compress(jsonl(["a", "b"])))
    assert read(tmp_path / "lines.gz", format="jsonl") == ["a", "b"]
    (tmp_path / "c.parquet").write_text("text", encoding="utf-8")
    assert read(tmp_path / "c.parquet", format="text") == ["text"]


def test_a_large_parquet_takes_little_memory(tmp_path: Path) -> None:
    """One row group of 64 MB, which is never in memory as a whole."""
    texts = [f"{number} " + "words and more " * 600 for number in range(7_000)]
    write_parquet(tmp_path / "a.parquet", texts, use_dictionary=False, row_group_size=len(texts))
    del texts
    pieces = open_source(DataConfig(path=str(tmp_path / "a.parquet"))).pieces()
    next(pieces)
    before = pa.total_allocated_bytes()
    most = max(pa.total_allocated_bytes() for _ in pieces)
    assert most - before < 12 << 20, f"{most - before:,} bytes"


def test_bad_gzip(tmp_path: Path) -> None:
    packed = gzip.compress(jsonl([f"document {number}" for number in range(20_000)]))
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(packed[:-9])
    assert failure(file) == (
        f"{file} is cut off: its {len(packed) - 9:,} bytes end before what gzip packed does; fetch or copy it again"
        f"{see('data#file-cut-off')}"
    )
    file.write_bytes(packed[:10] + b"\xff" + packed[11:])
    assert failure(file).startswith(f"{file} is damaged before byte ")
    file.write_bytes(packed[:-8] + bytes(8))
    assert "CRC check failed" in failure(file)
    file.write_bytes(jsonl(TEXTS))
    assert failure(file) == f"{file} is not packed by gzip, as its name says: pack it, or rename it"
    for empty in (b"", gzip.compress(b"\n")):
        file.write_bytes(empty)
        assert failure(file) == f"{file} is empty: remove it or put one JSON object on each line"
    file.write_bytes(gzip.compress(jsonl(["fine"]) + b'{"text": ""}\n'))
    assert failure(file) == f"{file}: line 2: the field 'text' is empty: remove the line"
    file.write_bytes(gzip.compress(b"\xe9"))
    assert failure(file, format="text").startswith(f"{file}: byte 0 (0xe9) is not UTF-8")


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["a"] * 70 + [None], ": row 70: the column 'text' is null: remove the row"),
        (["a", ""], ": row 1: the column 'text' is empty: remove the row"),
        ([1, 2], ": the column 'text' must hold text, not int64 (data.text_key)"),
        ([["a"], ["b"]], ": the column 'text' must hold text, not list<element: string> (data.text_key)"),
        ([b"a", b"b"], ": the column 'text' must hold text, not binary (data.text_key)"),
        (pa.array([], pa.string()), " is empty: remove it or put rows into it"),
    ],
)
def test_bad_rows(texts: Any, says: str, tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", texts)
    assert failure(tmp_path / "a.parquet") == f"{tmp_path}/a.parquet{says}"


def test_bad_parquet(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    write_parquet(file, TEXTS, key="body")
    assert failure(file) == (
        f"{file} has no column 'text': set data.text_key to the column that holds the text (id and body)"
        f"{see('data#no-such-field')}"
    )
    whole = file.read_bytes()
    for content in (b"", b"text", whole[:-1]):
        file.write_bytes(content)
        assert failure(file, text_key="body").startswith(f"{file} must be a parquet file, and it is not or is cut off")
    file.write_bytes(whole[:4] + bytes(300) + whole[304:])
    assert failure(file, text_key="body").startswith(f"{file} is damaged (")
    latin = pa.Array.from_buffers(pa.string(), 1, pa.array([b"caf\xe9"]).buffers())
    write_parquet(file, latin)
    assert failure(file).startswith(f"{file}: row 0, byte 3 of the column 'text' (0xe9) is not UTF-8")


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "a.parquet", TEXTS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install 'shardwise[parquet]'" in failure(tmp_path / "a.parquet")
