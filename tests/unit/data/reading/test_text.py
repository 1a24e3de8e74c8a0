"""Packed text and parquet: the same documents as plain files have, and one sentence for every kind of bad file."""

import bz2
import gzip
import io
import json
import lzma
import random
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardwise.base.errors import see
from shardwise.data.describe import inspect
from shardwise.data.reading.text_sources import PIECE_CHARACTERS, announce_empty, open_shard, open_source
from shardwise.data.samples.streaming import read_documents
from tests.unit.data.reading.test_sources import DataConfig, failure, read

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


def test_the_format_goes_before_the_name(tmp_path: Path) -> None:
    write_parquet(tmp_path / "part-0", pa.array(["a", "b"], pa.large_string()), key="body")
    assert read(tmp_path / "part-0", format="parquet", text_key="body") == ["a", "b"]
    (tmp_path / "lines.gz").write_bytes(gzipped(jsonl(["a", "b"])))
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
    packed = gzipped(jsonl([f"document {number}" for number in range(20_000)]))
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
    for empty in (b"", gzipped(b"\n")):
        file.write_bytes(empty)
        assert failure(file) == f"{file} is empty: remove it or put one JSON object on each line"
    file.write_bytes(gzipped(b"\xe9"))
    assert failure(file, format="text").startswith(f"{file}: byte 0 (0xe9) is not UTF-8")


def test_empty_documents_are_left_out_and_counted(tmp_path: Path) -> None:
    texts = ["", "a", "", "b", ""]
    (tmp_path / "a.jsonl.gz").write_bytes(gzipped(jsonl(texts)))
    write_parquet(tmp_path / "b.parquet", texts)
    source = open_source(DataConfig(path=str(tmp_path)))
    assert [piece.text for piece in source.pieces()] == ["a", "b"] * 2
    said: list[str] = []
    announce_empty(source, said.append)
    assert said == [f"{tmp_path}: 6 empty documents left out"]
    for file in tmp_path.iterdir():
        shard = open_shard(str(file), DataConfig(path="x"))
        assert [pieces[0].text for _, pieces in read_documents(shard, 0)] == ["a", "b"]
        assert inspect(str(file), 3, {}).notes == [f"{file}: 3 empty documents left out"]
    (tmp_path / "c.jsonl").write_bytes(jsonl(["", ""]))
    assert failure(tmp_path / "c.jsonl") == f"{tmp_path}/c.jsonl holds no text: all of its documents are empty"


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["a"] * 70 + [None], ": row 70: the column 'text' is null: remove the row"),
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
FILES = {
    "a.json": LINES,
    "a.ndjson": b"\xef\xbb\xbf" + LINES,
    "a.JSONL": LINES,
    "a.txt": b"\n" + LINES,
    "part-00000": LINES.replace(b"\n", b"\r\n"),
    "a.jsonl.zst": packed(jsonl(TEXTS[:2]), "zstd") + SKIPPED + packed(jsonl(TEXTS[2:]), "zstd"),
    "b.jsonl.zst": SKIPPED + packed(LINES, "zstd"),
    "a.xz": lzma.compress(LINES),
    "a.lzma": lzma.compress(LINES, format=lzma.FORMAT_ALONE),
    "a.JSON.BZ2": bz2.compress(LINES),
    "a.lz4": packed(LINES, "lz4"),
    "gzip.jsonl": gzipped(LINES),
    "bzip2.gz": bz2.compress(LINES),
    "utf-16.jsonl": LINES.decode().encode("utf-16"),
    "utf-16.json": b"\xfe\xff" + LINES.decode().encode("utf-16-be"),
    "utf-32.jsonl.gz": gzipped(LINES.decode().encode("utf-32")),
}


@pytest.mark.parametrize("name", FILES)
def test_fault_13_files_are_read_as_their_content_says(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(FILES[name])
    assert read(path) == TEXTS
    shard = open_shard(str(path), DataConfig(path=str(path)))
    ends = [after for after, _ in shard.documents(0)]
    for number, after in enumerate(ends, start=1):
        assert ["".join(blocks) for _, blocks in shard.documents(after)] == TEXTS[number:], "a stream that goes on"


@pytest.mark.parametrize(
    "content",
    [gzipped(b"a caf\xc3\xa9\n"), "a café\n".encode("utf-16"), bz2.compress("a café\n".encode("utf-16"))],
)
def test_fault_13_plain_text_is_unpacked_and_decoded(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    assert read(tmp_path / "a.txt") == read(tmp_path / "a.txt", format="text") == ["a café\n"]


def test_fault_13_parquet_of_any_name(tmp_path: Path) -> None:
    write_parquet(tmp_path / "part-0", TEXTS)
    assert read(tmp_path / "part-0") == TEXTS
    (tmp_path / "a.parquet.gz").write_bytes(gzipped((tmp_path / "part-0").read_bytes()))
    assert "is a parquet file packed by gzip, which cannot be read in parts" in failure(tmp_path / "a.parquet.gz")


def zipped(name: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(name, b"data")
    return buffer.getvalue()


RANDOM = random.Random(1).randbytes(4000).translate(None, b"\0")
ARRAY = json.dumps([{"text": "a"}, {"text": "b"}], indent=1).encode()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", ARRAY, "is a JSON array, and JSON must have one object on each line: convert it, for example with"),
        ("a b.txt", ARRAY, "`jq -c '.[]' '{file}' > lines.jsonl`, or set data.format=text to read it as plain text"),
        ("a.json.gz", gzipped(ARRAY), "`gzip -dc {file} | jq -c '.[]' > lines.jsonl`"),
        ("a.json", b'["a", "b"]', "`jq -c '{{text: .[]}}' {file} > lines.jsonl`"),
        ("a.jsonl", b'{\n "text": "a"\n}', "is JSON with objects of several lines, and JSON must have one object"),
        ("a.json", b'{"v": [\n 1], "rows": [\n {"text": "a"}]}', "`jq -c '.' {file} > lines.jsonl`"),
        ("a.json", b'{"text": "a", "rows": [\n {"text": "a"}]}', "`jq -c '.' {file} > lines.jsonl`"),
        ("a.json", b'{"v": 1,\n"my rows": [\n {"text": "a"}]}', "`jq -c '.[\"my rows\"][]' {file} > lines.jsonl`"),
        ("a.json", b'{"data":[{"text":"a"},\n{"text":"b"}]}', "`jq -c '.data[]' {file} > lines.jsonl`"),
        (
            "a",
            b'{"v": "1", "data":[{"text":"a"}]}\n',
            "line 1 holds objects in the list 'data': put each on its",
        ),
        ("a.jsonl", b'{"data":[{"body":"a"}]}', "for example with `jq -c '.data[]'`"),
        (
            "a.json",
            b'{"body": "a", "notes": [{"id": 1}]}',
            "set data.text_key to the field that holds the text (body,",
        ),
        ("a.json", b'{"id":{"0":1},"text":{"0":"a"}}', "is a whole table, as pandas writes it: write it with to_json"),
        ("a.json", b'{"columns":["text"],"index":[0],"data":[["a"]]}', "is a whole table, as pandas writes it: write"),
        ("a.json", b'{"0":{"text":"a"},"1":{"text":"b"}}', "is a whole table, as pandas writes it: write it with to"),
        (
            "a.json",
            b'{\n "text":{\n  "0":"a"}}',
            "is a table by columns, as pandas writes JSON: write it with to_",
        ),
        (
            "a.txt",
            b"id\tsaid\n1\ta\n2\tb\n",
            "is a table of separated values, not plain text: convert it",
        ),
        ("a.json", b"prose", "line 1 is not JSON"),
        ("a.csv", b"1,a\n", "pandas.read_csv('{file}', sep=',').to_json('lines.jsonl', orient='records', lines=True)"),
        ("a.TSV", b"1\ta\n", r"sep='\t'"),
        ("a.txt", b'"id";"text"\r\n1;a\n', "is a table of separated values, not plain text: convert it, for example"),
        ("a.gz", gzipped(archive()), "is a tar archive, not plain text: unpack it with tar -xf, and name"),
        ("a.7z", b"7z\xbc\xaf\x27\x1c", ": unpack it with 7z x, or leave it out"),
        ("a.docx", b"PK\x03\x04\x14\0", "is a zip archive (or a .docx, .xlsx or .epub, which are such archives)"),
        ("a.txt", b"%PDF-1.7\n", "is a PDF document, not plain text: extract its text, for example with pdfto"),
        ("a.bz2", bz2.compress(b"<mediawiki>"), "is XML, not plain text: extract its text, for example with wikiex"),
        (
            "index",
            b"\n<!DOCTYPE HTML>",
            "is HTML, not plain text: extract its text, for example with trafil",
        ),
        ("a.xml", b"\xef\xbb\xbf<?xml version='1.0'?>", "is XML, not plain text: extract its text (of Wikipedia"),
        ("a.gz", gzipped(gzipped(LINES)), "is packed twice, by gzip and then by gzip: unpack it once"),
        ("a.txt", "a\n".encode("utf-16-le"), "looks like UTF-16LE without the mark that begins such files: convert"),
        ("a.txt", b"\x05\0\x20\0\x07\0", "byte 1 is null, so the file holds binary data and no text: leave it out"),
        (
            "a.jsonl.br",
            RANDOM,
            "and its name says that it is packed: unpack it, for example with brotli -d",
        ),
        ("a.Z", RANDOM, "unpack it, for example with pigz -dc, or leave it out"),
        ("a.json.deflate", zlib.compress(LINES), "unpack it, for example with pigz -dc, or leave it out"),
        ("a", b"\x89LZO\0\r\n\x1a\n", "is packed by lzop, not plain text: unpack it with lzop -d"),
        ("a", b"\xff\x06\0\0sNaPpY", "is packed by snappy, not plain text: unpack it with snzip -d"),
        ("a.txt", RANDOM, "is not UTF-8, and its control characters show binary data: leave it out"),
        ("a.jsonl", RANDOM[:40], "is not UTF-8, and its control characters show binary data: leave it out"),
        ("a.txt", b"x" * (1 << 14) + RANDOM, "is not UTF-8, and control characters beside it show binary data: leave"),
        (
            "a.txt",
            b"caf\xe9 " * 9 + b"\x1a",
            "is not UTF-8: convert the file from the encoding that it has, for example",
        ),
        ("a.pt", zipped("archive/data.pkl"), "is a file of torch.save or of numpy's savez, not plain text: write the"),
        ("a.npz", zipped("arr_0.npy"), "is a file of torch.save or of numpy's savez, not plain text: write the"),
        ("a.txt", b"\xff\xfe\0\xd8a", "begins with the mark of UTF-16 and is not UTF-16 (unexpected end of data)"),
        ("a.txt", b"x" * (1 << 14) + b"\xe9\0", "is not UTF-8, and control characters beside it show binary data:"),
    ],
)
def test_fault_13_what_is_no_text_is_named_with_a_way_on(name: str, content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    said = failure(tmp_path / name)
    assert said.startswith(str(tmp_path / name))
    assert says.format(file=tmp_path / name) in said


@pytest.mark.parametrize(
    "text", ["{name} is here", "[Music] la la", '["Why?" he said.', "Dear text, and you", "Hi,you\n\na,b\nc,d\n"]
)
def test_fault_13_prose_that_begins_as_other_kinds_do_is_prose(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    assert read(tmp_path / "a.txt") == [text]


@pytest.mark.parametrize("codec", ["xz", "bz2", "zstd", "lz4"])
def test_fault_13_packed_files_that_are_cut_off_or_damaged(codec: str, tmp_path: Path) -> None:
    content = jsonl([f"{number * number}" for number in range(5000)])
    whole = {"xz": lzma.compress, "bz2": bz2.compress}.get(codec, lambda content: packed(content, codec))(content)
    (tmp_path / "a").write_bytes(whole[:-5])
    assert "is cut off: its " in failure(tmp_path / "a")
    (tmp_path / "a").write_bytes(whole[:12] + b"\xff" * 200 + whole[212:])
    assert "cannot unpack it (" in failure(tmp_path / "a")


def test_fault_13_zstd_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(packed(LINES, "zstd"))
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(LINES))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    said = failure(tmp_path / "a.jsonl.zst")
    assert said.startswith("files packed by zstd need pyarrow (")
    assert said.endswith("): pip install 'shardwise[parquet]'")
    monkeypatch.setitem(sys.modules, "lzma", None)
    assert "is packed by xz, which this Python cannot unpack (" in failure(tmp_path / "a.jsonl.xz")
