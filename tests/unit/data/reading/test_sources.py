"""Reading text: documents and pieces, and one sentence for every kind of bad file."""

import itertools
import json
import os
import re
import sysconfig
from pathlib import Path

import pytest

from shardwise.base.errors import DataError
from shardwise.config import BUILT_IN_TEXTS, DataConfig
from shardwise.data.reading import text_sources
from shardwise.data.reading.megatron_files import IndexedFile
from shardwise.data.reading.raw_tokens import is_raw_tokens
from shardwise.data.reading.text_sources import PIECE_CHARACTERS, Source, open_text_shard, open_text_source
from tests.unit.data.small_runs import fill


def documents(source: Source) -> list[str]:
    found, text = [], ""
    for piece in source.pieces():
        text += piece.text
        if piece.ends_document:
            found.append(text)
            text = ""
    assert not text, "the last document must end"
    return found


def source_of(path: Path, **keys: str) -> Source:
    return open_text_source(DataConfig(path=str(path), **keys))


def read(path: Path, **keys: str) -> list[str]:
    return documents(source_of(path, **keys))


def failure(path: Path, **keys: str) -> str:
    with pytest.raises(DataError) as caught:
        read(path, **keys)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_is_one_document_and_a_line_of_jsonl_is_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffErste Zeile\r\nzweite – Zeile".encode())
    (tmp_path / "b.jsonl").write_text('{"text": "one\\n"}\n\n{"text": "two", "id": 3}\n', encoding="utf-8")
    assert read(tmp_path / "a.txt") == ["Erste Zeile\r\nzweite – Zeile"]
    assert read(tmp_path / "b.jsonl") == ["one\n", "two"]
    assert read(tmp_path / "b.jsonl", format="text") == [(tmp_path / "b.jsonl").read_text(encoding="utf-8")]
    assert read(tmp_path) == ["Erste Zeile\r\nzweite – Zeile", "one\n", "two"]
    # A folder is read in the order of its paths.
    names = ("b/2.txt", "a.txt", "b/1.md", "c.txt", ".hidden/x.txt", "b/.x.txt")
    assert read(fill(tmp_path / "folder", {name: name for name in names})) == ["a.txt", "b/1.md", "b/2.txt", "c.txt"]


@pytest.mark.parametrize("unit", ["some words, and more;\n\n", "no-space-at-all", "äöü – ", "   "])
def test_long_texts_come_in_pieces_that_join_to_the_whole(tmp_path: Path, unit: str) -> None:
    text = unit * (3 * PIECE_CHARACTERS // len(unit)) + "end"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8", newline="")
    pieces = list(source_of(tmp_path / "a.txt").pieces())
    assert len(pieces) >= 3
    assert max(len(piece.text) for piece in pieces) <= PIECE_CHARACTERS
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert "".join(piece.text for piece in pieces) == text
    if unit.startswith("some"):  # cut between a word and the space after it
        for left, right in itertools.pairwise(pieces):
            assert left.text[-1].isalnum()
            assert right.text[0].isspace()


@pytest.mark.parametrize("name", BUILT_IN_TEXTS)
def test_each_built_in_text_has_a_source_and_is_no_data_set_of_the_hub(name: str) -> None:
    data = DataConfig(dataset=name)
    assert (data.is_built_in, data.is_hub_dataset) == (True, False)
    assert data.is_chat == BUILT_IN_TEXTS[name].holds_chat
    assert open_text_source(data).name == name
    assert f"{name} = {BUILT_IN_TEXTS[name].description}" in str(DataConfig.model_fields["dataset"].description)
    assert not DataConfig(dataset=name, path="a.txt").is_built_in, "a path is read instead"
    assert not DataConfig(dataset=f"acme/{name}").is_built_in


def test_the_python_text_is_sources_and_topics_without_tests() -> None:
    source = open_text_source(DataConfig(dataset="python"))
    root = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(root).as_posix() for path in source.files]
    assert names == sorted(names)
    assert {"abc.py", "json/decoder.py"} <= set(names)
    folders = {folder for name in names for folder in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "site-packages", "encodings"}
    assert "pydoc_data/topics.py" not in names
    texts = documents(source)
    assert any('The "assert" statement' in text and text.startswith("The ") for text in texts), "a topic of help()"
    assert 4_000_000 < sum(map(len, texts)) < 14_000_000


def test_links_are_followed_once(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.txt").write_text("a", encoding="utf-8")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "loop").symlink_to(folder)
    os.mkfifo(folder / "pipe")
    assert read(folder) == ["a"]
    (folder / "z.txt").symlink_to(tmp_path / "nowhere")
    assert failure(folder) == f"{folder}/z.txt cannot be read: No such file or directory"


def test_the_stamp_follows_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one", encoding="utf-8")
    assert source_of(file).stamp() is None, "written a moment ago: time stamps cannot tell it from a later change"
    monkeypatch.setattr(text_sources, "_SETTLED_SECONDS", -1.0)
    first = source_of(file).stamp()
    assert first is not None
    assert source_of(file).stamp() == first
    assert source_of(file, format="jsonl").stamp() != first
    status = file.stat()
    file.write_text("two", encoding="utf-8")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert source_of(file).stamp() != first, "the same size and time of modification, but not of change"
    # Fault 13: before files were told by their content, the cache kept what was read of them as plain text.
    (tmp_path / "a.json").write_text('{"text": "one"}\n', encoding="utf-8")
    before = text_sources._stamp([tmp_path / "a.json"], ["files", None, "text"])
    assert source_of(tmp_path / "a.json").stamp() != before


def test_missing_empty_and_odd_paths(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.path \(none\.txt\) does not exist in /"):
        open_text_source(DataConfig(path="none.txt"))
    (tmp_path / "empty.txt").touch()
    assert failure(tmp_path / "empty.txt").startswith(f"{tmp_path}/empty.txt holds no text: it is empty")
    with pytest.raises(DataError, match=r"cannot be read: File name too long|does not exist in /"):  # Python 3.14's
        open_text_source(DataConfig(path="x" * 300))
    (tmp_path / "folder").mkdir()
    assert "the folder has none" in failure(tmp_path / "folder")
    os.mkfifo(tmp_path / "pipe")
    assert "must be a file or a folder" in failure(tmp_path / "pipe")


@pytest.mark.parametrize(("before", "bad"), [(0, b"\xff"), (PIECE_CHARACTERS - 1, b"\xe9 rest"), (131, b"\xe2\x82")])
def test_invalid_utf8_is_placed(tmp_path: Path, before: int, bad: bytes) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"x" * before + bad)
    assert failure(file).startswith(f"{file}: byte {before} (0x{bad[0]:02x}) is not UTF-8, and must be UTF-8: ")


def test_bad_lines_are_placed(tmp_path: Path) -> None:
    for line, says in (
        (b"not json", " is not JSON that can be read (Expecting value: line 1 column 1 (char 0)): a .jsonl holds one"),
        (b'{"deep": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", " is not JSON that can be read ("),
        (b"[1, 2]", " is JSON but not an object"),
        (b'{"body": "x", "id": 1}', " has no field 'text': set data.text_key to the field that holds the text (body, "),
        (b'{"text": 3}', ": the field 'text' must hold text, not int"),
        (b'{"text": "\xe9"}', ", byte 10 (0xe9) is not UTF-8"),
        (b'{"text": "\\ud800"}', ": the field 'text' has half a surrogate pair"),
    ):
        file = tmp_path / "a.jsonl"
        file.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
        assert failure(file).startswith(f"{file}: line 2{says}")


def test_fault_15_fields_of_any_kind_and_within_others(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x", "id": ' + b"9" * 5000 + b', "deep": [[[{"a": NaN}]]]}\n')
    assert read(tmp_path / "a.jsonl") == ["x"]
    lines = [
        {"meta": {"body": "in"}},
        {"meta.body": "literal", "meta": {"body": "in"}},
        {"meta": {"body": "in2"}, "text": 1},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read(tmp_path / "a.jsonl", text_key="meta.body") == ["in", "literal", "in2"]
    (tmp_path / "b.jsonl").write_text('{"a.b": {"c": {"d.e": "deep"}}, "a": {"b": 1}}\n')
    assert read(tmp_path / "b.jsonl", text_key="a.b.c.d.e") == ["deep"]
    assert "line 1 has no field 'a.x': set data.text_key to the field that holds the text (a.b, a.b.c)" in failure(
        tmp_path / "b.jsonl", text_key="a.x"
    )
    assert "the field 'a.b.c' must hold text, not dict" in failure(tmp_path / "b.jsonl", text_key="a.b.c")


def test_fault_15_a_column_within_another_one(tmp_path: Path) -> None:
    rows = [
        {"meta": {"body": "one", "id": 1}, "x": {"y": {"z": "deep"}}},
        {"meta": {"body": "two", "id": 2}, "x": {"y": {"z": "end"}}},
    ]
    table = pytest.importorskip("datasets").Dataset.from_list(rows)
    table.to_parquet(str(tmp_path / "a.parquet"))
    table.save_to_disk(str(tmp_path / "saved"))
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    for path, file in ((tmp_path / "a.parquet", tmp_path / "a.parquet"), (tmp_path / "saved", arrow)):
        assert read(path, text_key="meta.body") == ["one", "two"]
        assert "has no column 'meta.text'" in failure(path, text_key="meta.text")
        shard = open_text_shard(str(file), DataConfig(path="x", text_key="meta.body"))
        assert ["".join(blocks) for _, blocks in shard.documents(1)] == ["two"]
    assert read(tmp_path / "saved", text_key="x.y.z") == ["deep", "end"]
    table.rename_column("meta", "m").add_column("m.body", ["first", "second"]).to_parquet(str(tmp_path / "b.parquet"))
    assert read(tmp_path / "b.parquet", text_key="m.body") == ["first", "second"]


@pytest.mark.parametrize("name", ["train.bin", "a.npy", "a.ds"])
def test_raw_tokens_are_told_how_to_convert_them(name: str, tmp_path: Path) -> None:
    """Small ids are valid UTF-8, and would even be read as text."""
    (tmp_path / "notes.txt").write_text("text")
    file = tmp_path / name
    file.write_bytes(b"\x05\x00\x20\x00")
    assert is_raw_tokens(file)
    command = f"`shardwise data prepare {file} PREFIX` makes PREFIX.bin and PREFIX.idx of raw tokens"
    assert failure(tmp_path) == failure(file) == f"{file} holds raw tokens, not text: {command}"
    if file.suffix == ".bin":
        with pytest.raises(DataError, match=re.escape(f"reads train.bin and train.idx together; {command}") + "$"):
            IndexedFile.open(file)
    file.with_suffix(".idx").touch()
    assert failure(tmp_path) == f"{file} holds tokens, not text: name the data by their prefix, {file.with_suffix('')}"


def test_fault_13_what_is_no_data_in_a_folder_is_left_out_and_named(tmp_path: Path) -> None:
    names = ("_SUCCESS", "_delta_log/0.json", "a.json.crc", "dataset_info.json", ".cache/x")
    fill(tmp_path, dict.fromkeys(names, "") | {"LICENSE": "rights", "README.md": "about"})
    assert read(tmp_path) == ["rights", "about"], "there is nothing else"
    (tmp_path / "a.json").write_text('{"text": "one"}\n', encoding="utf-8")
    source = source_of(tmp_path)
    assert documents(source) == ["one"]
    assert source.described() == "read as JSON lines, left out LICENSE, README.md, _SUCCESS and 2 more"
    assert read(tmp_path, format="jsonl") == ["one"]
    assert read(tmp_path, format="text") == ["rights", "about", '{"text": "one"}\n']
    assert read(tmp_path / "README.md") == ["about"], "a file that is named is read"
    for name in ("a.json", "README.md", "LICENSE"):
        (tmp_path / name).unlink()
    assert failure(tmp_path).endswith("and the folder has none but _SUCCESS, a.json.crc and dataset_info.json")
