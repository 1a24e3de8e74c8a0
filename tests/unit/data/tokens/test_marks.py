"""What documents begin and end with: the same in every way from text to tokens, and part of every cache's key.

A long document is encoded in parts.
"""

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.base.errors import ConfigError, DataError
from shardwise.data.formats.prepared_data import make_batches
from shardwise.data.open_data import prepare_data
from shardwise.data.preview import inspect_data, preview_data
from shardwise.data.reading.megatron_files import IndexedFile
from shardwise.data.reading.text_sources import TextPiece
from shardwise.data.tokens import encoding
from shardwise.data.tokens.encoding import DocumentMarks, document_texts, document_tokens
from shardwise.data.tokens.tokenizer import Tokenizer, export_user_tokenizer, open_user_tokenizer, train_tokenizer
from tests.unit.data.prepare.jobs import Folder
from tests.unit.data.small_runs import config, saved_rows

CHOICES = [*product([None, True, False], [None, True])]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1), st.booleans(), *[st.sampled_from([None, 7])] * 2
)
def test_marks_stand_at_the_ends_of_documents(
    pieces: list[tuple[int, bool]], begun: bool, begin: int | None, end: int | None
) -> None:
    """Also of documents without tokens, and of one that began before."""
    begin = None if begin is None else begin + 1
    expected: list[list[int]] = []
    inside = begun
    for size, ends in pieces:
        before = [] if inside or begin is None else [begin]
        expected.append([*before, *[1] * size, *([end] if ends and end is not None else [])])
        inside = not ends
    sizes = np.array([size for size, _ in pieces])
    tokens, marked = DocumentMarks(begin, end).put(
        np.ones(sizes.sum(), dtype=np.int32), sizes, [ends for _, ends in pieces], begun=begun
    )
    assert tokens.tolist() == [token for row in expected for token in row]
    assert marked.tolist() == [len(row) for row in expected]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A text, and a tokenizer that begins a text with [CLS] and ends documents by [SEP]."""
    return Folder.fill(tmp_path_factory.mktemp("marks"), 40)


def expected_documents(folder: Folder, append_eod: bool | None, prepend_bos: bool | None) -> list[list[int]]:
    tokenizer = folder.tokenizer
    begin = [tokenizer.token_id("[CLS]")] if prepend_bos else []
    end = [] if append_eod is False else [tokenizer.token_id("[SEP]")]
    return [[*begin, *tokenizer.encode(text).tolist(), *end] for text in folder.documents]


@pytest.mark.parametrize(("append_eod", "prepend_bos"), [(None, None), (True, True), (False, True)])
def test_every_way_to_tokens_has_the_same(folder: Folder, append_eod: bool | None, prepend_bos: bool | None) -> None:
    keys: dict[str, Any] = {"append_eod": append_eod, "prepend_bos": prepend_bos}
    text, name = str(folder.at / "text.jsonl"), f"made-{append_eod}-{prepend_bos}"
    documents = expected_documents(folder, append_eod, prepend_bos)
    tokens = [token for row in documents for token in row]
    common = {"path": text, "tokenizer": str(folder.at / "tokenizer"), "split": "1,0", **keys}
    assert prepare_data(config(300, 32, **common), folder.at / "cache").beginning("train", 10**6) == tokens
    streamed = config(300, 32, **common, streaming=True)
    stream = prepare_data(streamed, folder.at / "cache")
    assert stream.beginning("train", 5) == documents[0][:5]
    batches = make_batches(streamed, stream, "train")
    block = batches._stream.block(batches._starts[0])
    assert sorted(block.samples.tokens.tolist()) == sorted(tokens)
    batches.close()
    folder.run(folder.job(name, append_eod=append_eod is not False, prepend_bos=bool(prepend_bos)))
    assert [*map(int, IndexedFile.open(folder.at / name).tokens)] == tokens
    found = inspect_data(text, 1, {"tokenizer": common["tokenizer"], **keys})
    around = [*["begins with [CLS]"] * bool(prepend_bos), *["ends with [SEP]"] * (append_eod is not False)]
    assert dict(found.rows)["a document"] == (" and ".join(around) or "has no tokens of its own around it")
    assert found.counts["bytes_per_token"] == sum(map(len, map(str.encode, folder.documents))) / len(tokens)


# More than a block, so that no token of a stream is in the cache.
@pytest.mark.parametrize("reading", [{}, {"streaming": True, "shuffle_buffer": 10}])
def test_caches_and_fingerprints_are_of_the_marks(folder: Folder, reading: dict[str, Any]) -> None:
    keys = {"path": str(folder.at / "text.jsonl"), "tokenizer": str(folder.at / "tokenizer"), "split": "1,0", **reading}
    marked = [config(300, 32, append_eod=end, prepend_bos=begin, **keys) for end, begin in CHOICES]
    prints = [prepare_data(each, folder.at / "cache").fingerprint for each in marked]
    assert prints[:2] == prints[2:4], "true is what null means"
    assert len(set(prints)) == 4, "other tokens are other data"


def test_a_begin_of_text_that_only_settings_name(tmp_path: Path) -> None:
    """GPT-2's and NeoX's tokenizers put nothing before a text, and name a token for it."""
    train_tokenizer(["some text"] * 9, 257, "text").save(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").unlink()
    assert Tokenizer.load(tmp_path).begin_of_document is None
    with pytest.raises(DataError, match=r"data\.prepend_bos \(true\) needs a token that begins a text, such as <s>"):
        DocumentMarks.of(open_user_tokenizer(str(tmp_path), 300), append_eod=None, prepend_bos=True)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "e"}}))
    export_user_tokenizer(str(tmp_path), Tokenizer.load(tmp_path), tmp_path / "export")
    for folder in (tmp_path, tmp_path / "export"):
        assert Tokenizer.load(folder).begin_of_document == "e", "a stream reads its tokenizer from the export"


@pytest.mark.parametrize("keys", [{"append_eod": False}, {"prepend_bos": True}])
def test_marks_of_what_holds_tokens_are_refused(folder: Folder, keys: dict[str, bool], tmp_path: Path) -> None:
    saved_rows(tmp_path / "rows", input_ids=[[1, 2, 3]] * 40)
    folder.run(folder.job("held"))
    text = r"data\.\w+ \((true|false)\) must be null with data\.path \(.*\), whose tokens are read as they are"
    keys = {**keys, "tokenizer": str(folder.at / "tokenizer")}
    for path in (folder.at / "held", tmp_path / "rows"):
        with pytest.raises(ConfigError, match=text):
            prepare_data(config(300, 32, path=str(path), **keys), tmp_path / "cache")
        with pytest.raises(ConfigError, match=text):
            inspect_data(str(path), 1, keys)
    (problem,) = preview_data(config(300, 32, path=str(folder.at / "held"), **keys)).problems
    assert "whose tokens are read as they are" in problem


TEXT = "The quick brown fox jumps over the lazy dog. " * 20


def test_a_long_document_has_the_tokens_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that splits text into words gives them; the document has one end."""
    monkeypatch.setattr(encoding, "_LONGEST", 100)
    tokenizer = train_tokenizer([TEXT], 280, "text")
    words = TEXT.split(" ")
    pieces = [("", TextPiece(word if number == 0 else f" {word}", False)) for number, word in enumerate(words)]
    pieces[-1] = ("", TextPiece(pieces[-1][1].text, ends_document=True))
    texts = [text for _, text in document_texts([*pieces, *pieces])]
    assert "".join(text.texts[0] for text in texts) == TEXT * 2
    assert max(text.characters for text in texts) < 110
    assert sum(text.ends_document for text in texts) == 2
    marks = DocumentMarks.of(tokenizer, append_eod=True, prepend_bos=False)
    found = [token for _, row, _ in document_tokens(pieces, tokenizer, marks, 300) for token in row.tolist()]
    assert found == [*tokenizer.encode(TEXT).tolist(), tokenizer.required_end()]
    pieces = [("train", TextPiece("a b", False)), ("eval", TextPiece(" c", True)), ("eval", TextPiece("d", True))]
    found = [(part, text.texts, text.ends_document) for part, text in document_texts(pieces)]
    assert found == [("train", ["a b"], False), ("eval", [" c"], True), ("eval", ["d"], True)]
