"""Tokenizers: trained exactly as large as asked, loaded by transformers, and the user's own."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from shardwise.base.errors import ConfigError, DataError
from shardwise.config import load_config
from shardwise.data.formats.prepared_data import document_ends
from shardwise.data.tokens import tokenizer as tokenizer_module
from shardwise.data.tokens.encoding import DocumentMarks
from shardwise.data.tokens.tokenizer import END_OF_DOCUMENT, Tokenizer, open_user_tokenizer, train_tokenizer

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
    wanted = r"tokenizer\.json has no token that ends a document .*: name one as eos_token .*, or set data\.append_eod"
    with pytest.raises(DataError, match=wanted):
        DocumentMarks.of(tokenizer, append_eod=None, prepend_bos=None)
    config = load_config("gpt-tiny", ["data.eod_mask_loss=true", "data.path=x"])
    with pytest.raises(ConfigError, match=r"needs the id of the token that ends a document: set data\.eod_token"):
        document_ends(config.data, tmp_path)
    tokenizer_module.export_user_tokenizer(str(tmp_path), tokenizer, tmp_path / "export")
    assert tokenizer_module.special_token_ids(tmp_path / "export") == {"bos_token_id": None, "eos_token_id": None}
    named = json.loads((tmp_path / "export/special_tokens_map.json").read_text(encoding="utf-8"))
    assert named == {}
