"""Packed text and parquet: the same documents as plain files have, and one sentence for every kind of bad file."""

import bz2
import gzip
import io
import json
import lzma
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardwise.base.errors import see
from shardwise.data.preview import inspect_data
from shardwise.data.reading.text_sources import PIECE_CHARACTERS, announce_empty, open_text_shard
from shardwise.data.samples.text_stream import stream_documents
from tests.unit.data.reading.test_sources import DataConfig, failure, read, source_of

TEXTS = ["one\n", "two – zwei", "x" * (PIECE_CHARACTERS + 5), "four"]


def gzipped(content: bytes) -> bytes:
    """The content packed by gzip without the time, which would change the names of the tests that have it."""
    return gzip.compress(content, mtime=0)


def jsonl(texts: Sequence[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def write_parquet(path: Path, texts: Any, *, key: str = "text", **options: Any) -> None:
    pq.write_table(pa.table({"id": range(len(texts)), key: texts}), path, **options)


def test_all_kinds_hold_the_same_documents(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS))
    # Two members, as `cat a.gz b.gz` makes them.
    (tmp_path / "b.jsonl.gz").write_bytes(gzipped(jsonl(TEXTS[:2])) + gzipped(jsonl(TEXTS[2:])))
    write_parquet(tmp_path / "c.parquet", TEXTS, row_group_size=2)
    write_parquet(tmp_path / "d.parquet", pa.array(TEXTS).dictionary_encode(), compression="zstd")
    (tmp_path / "e.txt.gz").write_bytes(gzipped("\ufeffpacked – text".encode()))
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet", "d.parquet"):
        assert read(tmp_path / name) == TEXTS, name
    assert read(tmp_path / "e.txt.gz") == ["packed – text"]
    assert read(tmp_path) == [*TEXTS * 4, "packed – text"]


def test_a_large_parquet_takes_little_memory(tmp_path: Path) -> None:
    """One row group of 64 MB, which is never in memory as a whole."""
    texts = [f"{number} " + "words and more " * 600 for number in range(7_000)]
    write_parquet(tmp_path / "a.parquet", texts, use_dictionary=False, row_group_size=len(texts))
    del texts
    pieces = source_of(tmp_path / "a.parquet").pieces()
    next(pieces)
    before = pa.total_allocated_bytes()
    most = max(pa.total_allocated_bytes() for _ in pieces)
    assert most - before < 12 << 20, f"{most - before:,} bytes"


def test_bad_gzip_and_other_encodings(tmp_path: Path) -> None:
    packed = gzipped(jsonl([f"document {number}" for number in range(20_000)]))
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(packed[:-9])
    for damaged in (packed[:-9], packed[:10] + b"\xff" + packed[11:], packed[:-8] + bytes(8)):
        file.write_bytes(damaged)
        assert failure(file).startswith(f"{file} is cut off or damaged, gzip cannot unpack it (")
        assert failure(file).endswith(f"): fetch or copy it again{see('data#file-cut-off')}")
    for empty in (b"", gzipped(b"\n")):
        file.write_bytes(empty)
        assert failure(file) == f"{file} holds no text: it is empty, or all of its documents are"
    file.write_bytes(jsonl(TEXTS))
    assert read(file) == TEXTS, "the content decides, and not the name"
    (tmp_path / "a.gz").write_bytes(gzipped("a".encode("utf-16")))
    said = f"{tmp_path / 'a.gz'} must be in UTF-8, and is in UTF-16 or UTF-32: convert it with `iconv -t UTF-8`"
    assert failure(tmp_path / "a.gz") == said


def test_empty_documents_are_left_out_and_counted(tmp_path: Path) -> None:
    texts = ["", "a", "", "b", ""]
    (tmp_path / "a.jsonl.gz").write_bytes(gzipped(jsonl(texts)))
    write_parquet(tmp_path / "b.parquet", texts)
    source = source_of(tmp_path)
    assert [piece.text for piece in source.pieces()] == ["a", "b"] * 2
    said: list[str] = []
    announce_empty(source, said.append)
    assert said == [f"{tmp_path}: 6 empty documents left out"]
    for file in tmp_path.iterdir():
        shard = open_text_shard(str(file), DataConfig(path="x"))
        assert [pieces[0].text for _, pieces in stream_documents(shard, 0)] == ["a", "b"]
        assert inspect_data(str(file), 3, {}).notes == [f"{file}: 3 empty documents left out"]
    (tmp_path / "c.jsonl").write_bytes(jsonl(["", ""]))
    file = tmp_path / "c.jsonl"
    assert failure(file) == f"{file} holds no text: it is empty, or all of its documents are"


def test_bad_rows_and_files_of_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for texts, says in (
        (["a"] * 70 + [None], ": row 70: the column 'text' is null: remove the row"),
        ([1, 2], ": the column 'text' must hold text, not int64 (data.text_key)"),
        ([["a"], ["b"]], ": the column 'text' must hold text, not list<element: string> (data.text_key)"),
        ([b"a", b"b"], ": the column 'text' must hold text, not binary (data.text_key)"),
        (pa.array([], pa.string()), " holds no text: it is empty, or all of its documents are"),
    ):
        write_parquet(tmp_path / "a.parquet", texts)
        assert failure(tmp_path / "a.parquet") == f"{tmp_path}/a.parquet{says}"
    file = tmp_path / "a.parquet"
    write_parquet(file, TEXTS, key="body")
    assert failure(file) == (
        f"{file} has no column 'text': set data.text_key to the column that holds the text (id and body)"
        f"{see('data#no-such-field')}"
    )
    whole = file.read_bytes()
    for content in (b"", b"text", whole[:-1], whole[:4] + bytes(300) + whole[304:]):
        file.write_bytes(content)
        assert failure(file, text_key="body").startswith(f"{file} must be a parquet file, and it is none, cut off or")
    latin = pa.Array.from_buffers(pa.string(), 1, pa.array([b"caf\xe9"]).buffers())
    write_parquet(file, latin)
    assert failure(file).startswith(f"{file}: row 0, byte 3 of the column 'text' (0xe9) is not UTF-8")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install 'shardwise[parquet]'" in failure(file)


def packed(content: bytes, codec: str) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as file:
        file.write(content)
    return sink.getvalue().to_pybytes()


def archive() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        file.addfile(tarfile.TarInfo("a.txt"))
    return buffer.getvalue()


LINES = jsonl(TEXTS)
SKIPPED = b"\x50\x2a\x4d\x18\x04\0\0\0data"
"""A frame of zstd without content, with which pzstd begins."""
PARQUET = io.BytesIO()
pq.write_table(pa.table({"text": TEXTS}), PARQUET)
FILES = {
    "a.json": LINES,
    "a.txt": b"\n" + LINES,
    "part-00000": LINES.replace(b"\n", b"\r\n"),
    "a.jsonl.zst": packed(jsonl(TEXTS[:2]), "zstd") + SKIPPED + packed(jsonl(TEXTS[2:]), "zstd"),
    "a.xz": lzma.compress(LINES),
    "streams.xz": lzma.compress(jsonl(TEXTS[:2])) + bytes(8) + lzma.compress(jsonl(TEXTS[2:])) + bytes(1 << 19),
    "streams.bz2": bz2.compress(jsonl(TEXTS[:2])) + bz2.compress(jsonl(TEXTS[2:])),
    "a.lzma": lzma.compress(LINES, format=lzma.FORMAT_ALONE),
    "a.lz4": packed(LINES, "lz4"),
    "bzip2.gz": bz2.compress(LINES),
    "part-0": PARQUET.getvalue(),
}


@pytest.mark.parametrize("name", FILES)
def test_fault_13_files_are_read_as_their_content_says(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(FILES[name])
    assert read(path) == TEXTS
    shard = open_text_shard(str(path), DataConfig(path=str(path)))
    ends = [after for after, _ in shard.documents(0)]
    for number, after in enumerate(ends, start=1):
        assert ["".join(blocks) for _, blocks in shard.documents(after)] == TEXTS[number:], "a stream that goes on"


NO_TEXT = {
    "a.json": (json.dumps([{"text": "a"}], indent=1).encode(), "JSON without one object on each line"),
    "a.jsonl.gz": (gzipped(b'{\n "text": "a"\n}'), "JSON without one object on each line"),
    "a.csv": (b"1,a\n", "a table of separated values"),
    "tar.gz": (gzipped(archive()), "a tar archive"),
    "a.txt": (b"%PDF-1.7\n", "a PDF document"),
    "a.bz2": (bz2.compress(b"<mediawiki>"), "XML or HTML"),
    "index": (b"\n<!DOCTYPE HTML>", "XML or HTML"),
    "wiki_00": (b'<doc id="12" url="https://w.org?curid=12" title="Anarchism">\nAnarchism\n', "XML or HTML"),
    "a.wet.gz": (gzipped(b"WARC/1.0\r\nWARC-Type: warcinfo\r\n"), "an archive of web pages (WARC, or WET of Common Cr"),
    "twice.gz": (gzipped(gzipped(LINES)), "binary data"),
}


@pytest.mark.parametrize("name", NO_TEXT)
def test_fault_13_what_is_no_text_is_named_with_a_way_on(name: str, tmp_path: Path) -> None:
    content, kind = NO_TEXT[name]
    (tmp_path / name).write_bytes(content)
    said = failure(tmp_path / name)
    assert said.startswith(f"{tmp_path / name} is {kind}")
    assert "must be plain text, JSON lines or parquet: convert or unpack it first, leave it out, or set data." in said


@pytest.mark.parametrize("text", ["{name} is here", '["Why?" he said.', "Hi,you\n\na,b\nc,d\n"])
def test_fault_13_prose_that_begins_as_other_kinds_do_is_prose(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    assert read(tmp_path / "a.txt") == [text]


@pytest.mark.parametrize("codec", ["xz", "bz2", "zstd", "lz4"])
def test_fault_13_packed_files_that_are_cut_off_or_damaged(codec: str, tmp_path: Path) -> None:
    content = jsonl([f"{number * number}" for number in range(5000)])
    whole = {"xz": lzma.compress, "bz2": bz2.compress}.get(codec, lambda content: packed(content, codec))(content)
    second = whole[:4] + b"\xff" * 8 + whole[12:]  # whose damaged begin Python's readers take for the end
    damages = [whole[:-5], whole[:12] + b"\xff" * 200 + whole[212:], whole + second, whole + whole[:-5]]
    for damaged in damages + [whole + b"\n"] * (codec in ("xz", "bz2")):
        (tmp_path / "a").write_bytes(damaged)
        assert "is cut off or damaged" in failure(tmp_path / "a")


def test_fault_13_zstd_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(packed(LINES, "zstd"))
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(LINES))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    said = failure(tmp_path / "a.jsonl.zst")
    assert said.startswith("files packed by zstd need pyarrow (")
    assert said.endswith("): pip install 'shardwise[parquet]'")
    monkeypatch.setitem(sys.modules, "lzma", None)
    assert "is packed by xz, which this Python cannot unpack (" in failure(tmp_path / "a.jsonl.xz")
