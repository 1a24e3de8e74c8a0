"""Files of token ids, as their makers wrote them: every token once, in order, and what is refused."""

import gzip
import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise import load_recipe
from shardwise.base.errors import ConfigError, DataError
from shardwise.cli import main
from shardwise.data.open_data import prepare_data
from shardwise.data.preview import inspect_data, preview_data
from shardwise.data.reading import token_files
from tests.unit.data.small_runs import batches_of, saved_tokenizer, sized

ROWS = [[(7 * row + place) % 300 for place in range(3 + row % 40)] for row in range(200)]
JOINED = list(chain.from_iterable(ROWS))


def prepared(path: Path | str, **keys: Any) -> Any:
    sizes = {key: keys.pop(key) for key in ("vocab_size", "length") if key in keys}
    config = sized(sizes.get("vocab_size", 512), sizes.get("length", 16), 0, path=str(path), **{"split": "1,0", **keys})
    return prepare_data(config, Path(str(path).split("*")[0]).parent / "cache")


def tokens(path: Path | str, **keys: Any) -> list[int]:
    data = prepared(path, **keys)
    return [int(token) for part in ("train", "eval", "test") for token in data.tokens[part][:]]


def refused(path: Path | str, **keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        prepared(path, **keys)
    assert "\n" not in str(caught.value), "one sentence"
    return str(caught.value)


def lines(path: Path, rows: list[Any], key: str = "input_ids") -> Path:
    content = "".join(json.dumps({"id": 7, key: row}) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def table(path: Path, rows: list[Any], kind: Callable[[Any], Any], key: str = "input_ids") -> Path:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    # The library `datasets` makes such a column of values of several types.
    calls = pa.ListArray.from_arrays(range(len(rows) + 1), pa.array(["{}"] * len(rows), pa.json_()))
    parquet.write_table(pa.table({key: pa.array(rows, kind(pa)), "calls": calls}), path, row_group_size=50)
    return path


KINDS: dict[str, Callable[[Any], Any]] = {
    "list": lambda pa: pa.list_(pa.int32()),
    "fixed": lambda pa: pa.list_(pa.int64(), 3),
    "large view": lambda pa: pa.large_list_view(pa.uint16()),
    "uint64": lambda pa: pa.list_(pa.uint64()),
}


@pytest.mark.parametrize(
    ("kind", "key"), [("list", "input_ids"), ("fixed", "tokens"), ("large view", "tokens"), ("uint64", "input_ids")]
)
def test_rows_of_parquet(kind: str, key: str, tmp_path: Path) -> None:
    rows = [row[:3] for row in ROWS] if kind == "fixed" else ROWS
    path = table(tmp_path / "a.parquet", rows, KINDS[kind], key)
    keys = {} if key == "input_ids" else {"text_key": key}
    data = prepared(path, **keys)
    assert data.tokens["train"].tolist() == list(chain.from_iterable(rows))
    assert (data.tokenizer_path, data.vocab_size) == (None, 512)
    assert ", 200 rows, " in data.summary
    assert tokens(path, format="tokens", **keys) == tokens(path, format="parquet", **keys)


@pytest.mark.parametrize("name", ["a.json.gz", "rows"])
def test_rows_of_json_lines(name: str, tmp_path: Path) -> None:
    assert tokens(lines(tmp_path / name, [[], *ROWS])) == JOINED
    nested = tmp_path / "nested.jsonl"
    nested.write_text("".join(json.dumps({"meta": {"ids": row}}) + "\n\n" for row in ROWS))
    assert tokens(nested, text_key="meta.ids") == JOINED


def test_a_text_goes_first_and_folders_hold_many_files(tmp_path: Path) -> None:
    both = tmp_path / "both.jsonl"
    both.write_text("".join(json.dumps({"input_ids": [1], "text": "word " * 9}) + "\n" for _ in range(99)))
    tokenizer = saved_tokenizer(tmp_path / "tokenizer", "word " * 81, 260)
    assert prepared(both, tokenizer=tokenizer).tokenizer_path is not None
    folder = tmp_path / "rows"
    (folder / "more").mkdir(parents=True)
    lines(folder / "0.jsonl", ROWS[:50])
    lines(folder / "more/1.jsonl.gz", ROWS[50:])
    (folder / "_SUCCESS").touch()
    (folder / "README.md").write_text("about")
    assert tokens(folder) == JOINED
    seen = dict(preview_data(sized(512, 16, 0, path=str(folder))).rows)["data"]
    assert "2 files with rows of tokens in 'input_ids'" in seen
    (folder / "more/2.txt").write_text("text")
    assert "more/2.txt must hold lists of token ids in 'text' or 'input_ids', as" in refused(folder)


def test_ends_of_rows_are_said_and_put_on_request(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", ROWS)
    said = "rows end with different tokens: data.append_eod=true puts an end of document after each"
    assert prepared(path).summary.endswith(said)
    ended = list(chain.from_iterable([*row, 500] for row in ROWS))
    assert tokens(path, append_eod=True, eod_token=500) == ended
    assert tokens(lines(tmp_path / "b.jsonl", [[*row, 500] for row in ROWS]), append_eod=True, eod_token=500) == ended
    assert prepared(tmp_path / "b.jsonl").summary.endswith("; each row ends with the token 500")
    assert "data.append_eod (true) needs the id that ends a document" in refused(path, append_eod=True)
    assert "data.append_eod (false) must be null" in refused(path, append_eod=False)
    packed = prepared(path, append_eod=True, eod_token=500, packing="best_fit", length=64)
    assert packed.packed["train"].facts.documents == len(ROWS)


def test_rows_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for row, says in (
        ([1, 600], "token 1 (600) must be in 0 … 511: set model.vocab_size to that of the tokenizer"),
        ([5, -1], "token 1 (-1) must be in 0 … 511"),
        ([5, 1.5], "token 1 (1.5) must be a whole number"),
        ([True], "token 0 (true) must be a whole number"),
        ("abc", "the field 'input_ids' must hold a list of whole numbers, not str (data.text_key)"),
        ([1 << 63], "a token (9223372036854775808) must be an id, and has too many digits"),
    ):
        assert refused(lines(path, [*ROWS, row])).startswith(f"{path}: line 201: {says}")
    path = tmp_path / "a.parquet"
    for rows, says in (
        ([*ROWS, [1, -2]], "row 200: token 1 (-2) must be in 0 … 511"),
        ([*ROWS, [1, None]], "row 200: token 1 is null"),
        ([*ROWS, None], "row 200: the column 'input_ids' is null"),
    ):
        table(path, rows, KINDS["list"])
        assert refused(path).startswith(f"{path}: {says}")
    table(path, ROWS, lambda pa: pa.list_(pa.float32()))
    assert refused(path).startswith(f"{path}: the column 'input_ids' holds list<")
    assert "and must hold lists of whole numbers (data.text_key)" in refused(path, text_key="input_ids")
    path = lines(tmp_path / "cut.jsonl.gz", ROWS)
    path.write_bytes(path.read_bytes()[:-90])
    assert "is cut off or damaged, gzip cannot unpack it" in refused(path)
    path = lines(tmp_path / "b.jsonl", ROWS)
    assert "data.streaming (true) must be false with data.path" in refused(path, streaming=True, tokenizer="gpt2")
    assert "data.split (train,test) must be weights" in refused(path, split="train,test")
    config = load_recipe("bert-tiny", data={"path": str(datatrove(tmp_path / "ds", "a.ds", ROWS)), "dataset": None})
    with pytest.raises(ConfigError, match=r"model\.family \(bert\) must have text, for its pairs of sentences"):
        prepare_data(config, tmp_path)


def datatrove(folder: Path, name: str, rows: Any, tokenizer: str = "Unknown Tokenizer|2", width: int = 2) -> Path:
    """A file of tokens with its index and metadata, as datatrove 0.10.1 lays them out."""
    path = folder / name
    folder.mkdir(exist_ok=True)
    joined = list(chain.from_iterable(rows))
    np.array(joined, f"<u{width}").tofile(path)
    np.cumsum([*map(len, rows)]).astype("<u8").tofile(folder / f"{name}.index")
    (folder / f"{name}.metadata").write_text(f"{tokenizer}|{width}\n{len(joined)}\n{len(joined)} T")
    return path


@pytest.mark.parametrize("width", [2, 4])
def test_files_of_datatrove(width: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "ds"
    datatrove(folder, "000_00000_shuffled.ds", ROWS[:120], width=width)
    datatrove(folder, "001_00000_shuffled.ds", ROWS[120:], width=width)
    datatrove(folder, "002_unshuffled.ds", [], width=width)
    (folder / "all.ds.metadata").write_text(f"gpt2|{width}\n9\n9 T")  # of all files, by the merger
    data = prepared(folder, split="80,15,5")
    assert tokens(folder, split="80,15,5") == JOINED
    ends = np.cumsum([*map(len, ROWS)])
    sizes = [len(data.tokens[part]) for part in ("train", "eval")]
    assert sizes == [ends[159], ends[189] - ends[159]], "whole documents"
    assert f"2 files (a file of datatrove, of uint{8 * width}), 200 documents" in data.summary
    packed = prepared(folder, packing="best_fit", length=64)
    assert packed.packed["train"].facts.documents == len(ROWS)
    config = sized(512, 16, 0, path=str(folder), split="1,0")
    ids = batches_of(config, tmp_path / "cache").global_batch(0, 2).inputs["ids_SB"][:, 0].tolist()
    assert any(JOINED[at : at + 16] == ids for at in range(0, len(JOINED), 16))
    found = inspect_data(str(folder), 2, {})
    assert (found.counts["documents"], found.lengths and found.lengths.most) == (200, 42)
    assert [sample.ids for sample in found.samples] == ROWS[:2]
    assert f"200 documents, {len(JOINED):,} tokens" in dict(preview_data(config).rows)["data"]
    assert main(["data", "inspect", str(folder)]) == 0
    assert "\ntokenizer  Unknown Tokenizer|2\n" in capsys.readouterr().out


def test_files_of_datatrove_that_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "ds"
    path = datatrove(folder, "a.ds", ROWS)
    index, metadata = folder / "a.ds.index", folder / "a.ds.metadata"
    whole, ends, number = path.read_bytes(), np.fromfile(index, "<u8"), len(JOINED)
    path.write_bytes(whole[:-10])
    assert f"({number - 5} ids of uint16) must have {number}, as a.ds.metadata says: copy it again" in refused(path)
    path.write_bytes(whole)
    for wrong in (ends[:-1], ends[::-1].copy()):
        wrong.tofile(index)
        assert f"a.ds.index must have the end of each document as 8 bytes, ascending to {number}" in refused(path)
    index.unlink()
    assert tokens(path) == JOINED, "an index is optional"
    assert "needs the id of the token that ends a document" in refused(path, packing="best_fit")
    metadata.write_text("gpt2\n5")
    assert "must have the lines TOKENIZER|BYTES, of 2 or 4 bytes, and the number of ids" in refused(path)
    metadata.unlink()
    assert tokens(path) == JOINED, "of 2 bytes, as a vocabulary of 512 is"
    datatrove(folder, "a.ds", ROWS)
    assert "data.token_dtype (uint32) must be uint16, which" in refused(path, token_dtype="uint32")
    datatrove(folder, "a.ds", [*ROWS, [5, 512]])
    assert refused(path).startswith(f"{path}: token {number + 1} (512) must be in 0 … 511: set model.vocab_size")
    assert "must be null with data.path" in refused(path, append_eod=True)
    one = saved_tokenizer(tmp_path / "one", "one text" * 9, 259)
    two = saved_tokenizer(tmp_path / "two", "another, longer" * 9, 259)
    path = datatrove(tmp_path / "ds", "a.ds", [row for row in ROWS if max(row) < 259], f"{one}/tokenizer.json")
    assert prepared(path, tokenizer=one).vocab_size == 259
    assert f"must be the tokenizer that {path}.metadata names ({one}/tokenizer.json, " in refused(path, tokenizer=two)
    config = sized(512, 16, 0, path=str(path), tokenizer=two)
    assert any("must be the tokenizer that" in problem for problem in preview_data(config).problems), "in a dry run"


def test_shards_of_llm_c_and_arrays(tmp_path: Path) -> None:
    for number in range(2):
        header = np.zeros(256, "<i4")
        half = np.array(list(chain.from_iterable(ROWS[100 * number : 100 * number + 100])), "<u2")
        header[:3] = 20240520, 1, len(half)
        (tmp_path / f"x_train_{number:06d}.bin").write_bytes(header.tobytes() + half.tobytes())
    header[0] = 20240522
    (tmp_path / "hellaswag_val.bin").write_bytes(header.tobytes() + half.tobytes())
    assert tokens(f"{tmp_path}/x_train_*.bin") == JOINED
    assert "hellaswag_val.bin holds the questions of an evaluation of llm.c" in refused(tmp_path)
    saved, raw, narrow, words, negative = (tmp_path / f"{name}.npy" for name in ("saved", "raw", "bytes", "words", "n"))
    np.save(saved, np.array(JOINED, ">i4"))
    assert tokens(saved) == JOINED
    np.array(JOINED, "<u4").tofile(raw)
    way = "and a vocabulary of 512 would be uint16: say which by data.token_dtype"
    assert f"look like ids of uint32, {way}" in refused(raw)
    assert tokens(raw, token_dtype="uint32") == tokens(raw, vocab_size=70_000) == JOINED
    assert inspect_data(str(raw), 1, {}).counts["tokens"] == len(JOINED), "of uint32, as the bytes look"
    np.array([3, 250] * 99, "u1").tofile(narrow)
    assert tokens(narrow, vocab_size=256) == [3, 250] * 99, "the narrowest dtype, as OLMo-core's"
    assert "of data.path" in refused(narrow, vocab_size=256, length=500)
    np.array([3, 250] * 99, "<u2").tofile(words)
    assert "look like ids of uint16, and a vocabulary of 256 would be uint8" in refused(words, vocab_size=256)
    np.save(negative, np.array([1, -100] * 40))
    assert refused(negative).startswith(f"{negative}: token 1 (-100) must be in 0 … 511")
    assert "names no files of tokens that exist" in refused(tmp_path / "none.npy", format="tokens")


def test_a_token_that_no_block_shows_is_found_when_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start looks at a part of large files."""
    monkeypatch.setattr(token_files, "_BLOCK_TOKENS", 2)
    ids = np.zeros(9_000, "<u2")
    ids[[4_000, 8_999]] = 512, 5
    ids.tofile(tmp_path / "a.npy")
    data = prepared(tmp_path / "a.npy", token_dtype="uint16")
    for read in (lambda row: row.take(np.array([5, 4_000])), lambda row: row[3_000:5_000]):
        with pytest.raises(DataError, match=r"a\.npy: token 4000 \(512\) must be in 0 … 511"):
            read(data.tokens["train"])
    ids[8_999] = 600
    ids.tofile(tmp_path / "a.npy")
    assert "a.npy: token 8999 (600) must be in 0 … 511" in refused(tmp_path / "a.npy", token_dtype="uint16")
