"""The manifest beside prepared data: whose tokenizer it is."""

from pathlib import Path

import pytest

from shardwise.data.formats.prepared_data import other_tokenizer_problems
from shardwise.data.reading.data_manifest import read_manifest, write_manifest
from shardwise.data.tokens.tokenizer import Tokenizer, train_tokenizer

FACTS = {"format": "megatron", "source": {"name": "text"}, "options": {}, "documents": 1, "sequences": 1, "tokens": 3}


@pytest.fixture
def tokenizer() -> Tokenizer:
    return train_tokenizer(["some text of words"] * 3, 260, "test")


def test_what_was_written_is_read_and_nothing_else(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "data.json"
    assert read_manifest(path) is None
    write_manifest(path, {**FACTS, "tokenizer": {"name": "own", "sha256": tokenizer.digest}})
    found = read_manifest(path)
    assert found is not None
    assert found["tokens"] == 3
    for other in ("[]", "{}", '{"kind": "shardwise.prepared", "version": 1}', "{", '{"text": "of the user"}'):
        path.write_text(other)
        assert read_manifest(path) is None, other


def test_the_same_tokenizer_in_other_files_is_the_same(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(tmp_path / "saved")
    loaded = Tokenizer.load(tmp_path / "saved")
    assert loaded.digest == tokenizer.digest
    loaded.encode_rows(["text"], literally=True)
    assert loaded.digest == Tokenizer.load(tmp_path / "saved" / "tokenizer.json").digest, "use changes nothing"
    other = train_tokenizer(["words of another text"] * 3, 260, "test")
    assert other.digest != tokenizer.digest
    path = tmp_path / "data.json"
    write_manifest(path, {**FACTS, "tokenizer": {"name": "own", "sha256": tokenizer.digest}})
    assert other_tokenizer_problems(loaded, "saved", [path]) == []
    assert other_tokenizer_problems(other, "other", [tmp_path / "no.json"]) == []
    (problem,) = other_tokenizer_problems(other, "other", [path])
    assert problem.startswith(f"data.tokenizer (other, {other.digest[:12]}) must be the tokenizer that {path} names (")
