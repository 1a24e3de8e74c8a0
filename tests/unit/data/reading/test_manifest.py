"""The manifest beside prepared data: whose tokenizer it is."""

from pathlib import Path

from shardwise.data.reading.data_manifest import read_manifest, write_manifest

FACTS = {"format": "megatron", "source": {"name": "text"}, "options": {}, "documents": 1, "sequences": 1, "tokens": 3}


def test_what_was_written_is_read_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    assert read_manifest(path) is None
    write_manifest(path, {**FACTS, "tokenizer": {"name": "own", "sha256": 64 * "0"}})
    found = read_manifest(path)
    assert found is not None
    assert found["tokens"] == 3
    for other in ("[]", "{}", '{"kind": "shardwise.prepared", "version": 1}', "{", '{"text": "of the user"}'):
        path.write_text(other)
        assert read_manifest(path) is None, other
