"""Tokenizers, and what documents begin and end with: the same from text to tokens, and part of every cache's key."""

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from shardwise.base.errors import ConfigError, DataError
from shardwise.config import load_config
from shardwise.data.formats.prepared_data import document_ends, make_batches
from shardwise.data.open_data import prepare_data
from shardwise.data.preview import inspect_data, preview_data
from shardwise.data.reading.megatron_files import IndexedFile
from shardwise.data.reading.text_sources import TextPiece
from shardwise.data.tokens import encoding
from shardwise.data.tokens import tokenizer as tokenizer_module
from shardwise.data.tokens.encoding import DocumentMarks, document_texts, document_tokens
from shardwise.data.tokens.tokenizer import Tokenizer, export_user_tokenizer, open_user_tokenizer, train_tokenizer
from shardwise.data.tokens.tokenizer_files import END_OF_DOCUMENT
from tests.unit.data.prepare.jobs import Folder
from tests.unit.data.small_runs import config, saved_rows

TEXT = ["The quick brown fox jumps over the lazy dog.\n" * 3, "def quick(fox):\n    return fox.jumps(over='dog')\n" * 2]
STRANGE = "tabs\tand  spaces\r\n\n\n日本語 🦊 \x00 naïve café — “quotes” 12345\n"


def wordlevel(path: Path, words: list[str]) -> Path:
    backend = Backend(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    backend.save(str(path))
    return path


def test_training_is_deterministic(tmp_path: Path) -> None:
    """Another process, other threads and another hash seed give the same file."""
    code = f"""
from pathlib import Path
from shardwise.data.tokens.tokenizer import train_tokenizer
train_tokenizer({TEXT!r}, 300, "text").save(Path({str(tmp_path)!r}))
"""
    train_tokenizer(TEXT, 300, "text").save(tmp_path / "here")
    expected = (tmp_path / "here" / "tokenizer.json").read_bytes()
    for threads in ("1", "3"):
        environment = {"PYTHONPATH": ":".join(sys.path), "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        subprocess.run([sys.executable, "-c", code], check=True, env=environment)
        assert (tmp_path / "tokenizer.json").read_bytes() == expected


def test_the_vocabulary_that_is_named_is_the_one_that_is_reached() -> None:
    def expect(size: int, told: str) -> str:
        with pytest.raises(DataError, match=told) as caught:
            train_tokenizer(TEXT, size, "text")
        return str(caught.value)

    said = expect(5000, r"model\.vocab_size \(5000\) must be at most \d+, the vocabulary that text")
    reached = int(said.split("at most ")[1].split(",")[0])
    assert train_tokenizer(TEXT, reached, "text").vocab_size == reached
    expect(reached + 1, "must be at most")
    expect(2**31 - 1, r"model\.vocab_size \(2147483647\) must be at most 1048576 where the tokenizer is")
    assert train_tokenizer(TEXT, 257, "text").vocab_size == 257
    expect(256, r"model\.vocab_size \(256\) must be at least 257")


def test_any_text_survives_a_round_trip_here_and_in_transformers(tmp_path: Path) -> None:
    ours = train_tokenizer(TEXT, 300, "text")
    ours.save(tmp_path)
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.eos_token, theirs.eos_token_id) == (END_OF_DOCUMENT, ours.end_of_document_id)
    assert len(theirs) == ours.vocab_size == 300
    for text in (*TEXT, STRANGE):
        ids = ours.encode(text)
        assert ids.dtype == np.int64
        assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False) == text
        assert ids.tolist() == ours.encode_rows([text])[0].tolist()
        assert ids.tolist() == theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.decode([ours.end_of_document_id]) == END_OF_DOCUMENT
    assert ours.encode(f"a{END_OF_DOCUMENT}b").tolist()[1] == ours.end_of_document_id
    reloaded = Tokenizer.load(tmp_path)
    assert reloaded.encode(STRANGE).tolist() == ours.encode(STRANGE).tolist()
    assert reloaded.end_of_document == END_OF_DOCUMENT


def test_a_users_file_is_taken_without_its_truncation_and_padding(tmp_path: Path) -> None:
    file = wordlevel(tmp_path / "mine.json", ["[UNK]", "[SEP]", "the", "fox"])
    tokenizer = open_user_tokenizer(str(file), 4)
    assert tokenizer.encode("the fox the fox the").tolist() == [2, 3, 2, 3, 2]
    assert tokenizer.end_of_document == "[SEP]"
    tokenizer_module.export_user_tokenizer(str(file), tokenizer, tmp_path / "export")
    assert sorted(path.name for path in (tmp_path / "export").iterdir()) == [
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert Tokenizer.load(tmp_path / "export").encode("fox the").tolist() == [3, 2]


@pytest.mark.parametrize("eos", ["fox", {"content": "fox", "lstrip": False}])
def test_a_users_folder_keeps_its_configuration(tmp_path: Path, eos: object) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    wordlevel(folder / "tokenizer.json", ["[UNK]", "[SEP]", "the", "fox"])
    before = tokenizer_module.user_tokenizer_digest(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos, "mine": True}), encoding="utf-8")
    assert tokenizer_module.user_tokenizer_digest(str(folder)) != before
    tokenizer = open_user_tokenizer(str(folder), 100)
    assert tokenizer.end_of_document == "fox"
    tokenizer_module.export_user_tokenizer(str(folder), tokenizer, tmp_path / "export")
    assert json.loads((tmp_path / "export" / "tokenizer_config.json").read_text(encoding="utf-8"))["mine"] is True


def test_fault_10_a_tokenizer_may_have_no_end_of_a_document(tmp_path: Path) -> None:
    """Only documents that are to be closed need one; what is saved for transformers names none."""
    wordlevel(tmp_path / "tokenizer.json", ["[UNK]", "the"])
    tokenizer = open_user_tokenizer(str(tmp_path), 100)
    assert DocumentMarks.of(tokenizer, append_eod=False, prepend_bos=None) == DocumentMarks(None, None)
    wanted = r"no token that ends a document .*: name one as eos_token .*, or set data\.append_eod=false"
    with pytest.raises(DataError, match=wanted):
        DocumentMarks.of(tokenizer, append_eod=None, prepend_bos=None)
    config = load_config("gpt-tiny", ["data.eod_mask_loss=true", "data.path=x"])
    with pytest.raises(ConfigError, match=r"needs the id of the token that ends a document: set data\.eod_token"):
        document_ends(config.data, tmp_path)
    tokenizer_module.export_user_tokenizer(str(tmp_path), tokenizer, tmp_path / "export")
    assert tokenizer_module.special_token_ids(tmp_path / "export") == {"bos_token_id": None, "eos_token_id": None}
    named = json.loads((tmp_path / "export/special_tokens_map.json").read_text(encoding="utf-8"))
    assert named == {}


CHOICES = [*product([None, True, False], [None, True])]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1), st.booleans(), *[st.sampled_from([None, 7])] * 2
)
@settings(deadline=None)
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


FOXES = "The quick brown fox jumps over the lazy dog. " * 20


def test_a_long_document_has_the_tokens_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that splits text into words gives them; the document has one end."""
    monkeypatch.setattr(encoding, "_LONGEST", 100)
    tokenizer = train_tokenizer([FOXES], 280, "text")
    words = FOXES.split(" ")
    pieces = [("", TextPiece(word if number == 0 else f" {word}", False)) for number, word in enumerate(words)]
    pieces[-1] = ("", TextPiece(pieces[-1][1].text, ends_document=True))
    texts = [text for _, text in document_texts([*pieces, *pieces])]
    assert "".join(text.texts[0] for text in texts) == FOXES * 2
    assert max(text.characters for text in texts) < 110
    assert sum(text.ends_document for text in texts) == 2
    marks = DocumentMarks.of(tokenizer, append_eod=True, prepend_bos=False)
    found = [token for _, row, _ in document_tokens(pieces, tokenizer, marks, 300) for token in row.tolist()]
    assert found == [*tokenizer.encode(FOXES).tolist(), tokenizer.required_end()]
    pieces = [("train", TextPiece("a b", False)), ("eval", TextPiece(" c", True)), ("eval", TextPiece("d", True))]
    found = [(part, text.texts, text.ends_document) for part, text in document_texts(pieces)]
    assert found == [("train", ["a b"], False), ("eval", [" c"], True), ("eval", ["d"], True)]
