"""Mistral's tekken.json and vocabularies of tiktoken give the ids of their makers' own programs."""

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest

from shardwise.data.tokens import ranked_vocabularies
from shardwise.data.tokens.tokenizer import Tokenizer
from tests.interop.data_formats_texts import documents

ODD = [
    "",
    " ",
    "\n\n  \r\n\t x",
    "I'll he'S THEY'RE don't",
    "١٢٣ 12345678 Ⅷ½",
    "naïve café e\u0301 ǅ ﬁ",
    "日本語のテキスト、그리고 한국어 العربية हिन्दी",
    "🙂👩‍👩‍👧\ufeff\u200b\u00a0x\u3000y",
    "a" * 300,
    "def f(x):\n    return x**2  # done\n\n\n\tif  x:",
    "https://example.org/a/b?c=d&e=[f]",
    "\x00\x7f\x80",
]
TEXTS = [*documents(), *ODD]


@pytest.mark.parametrize("name", ["tekken_240718.json", "tekken_240911.json"])
def test_tekken_is_that_of_mistral_common(name: str, tmp_path: Path) -> None:
    import mistral_common
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer
    from transformers import AutoTokenizer

    file = Path(mistral_common.__file__).parent / "data" / name
    theirs = Tekkenizer.from_file(file)
    ours = Tokenizer.load(file)
    expected = [theirs.encode(text, bos=False, eos=False) for text in TEXTS]
    assert [encoding.ids for encoding in ours.encodings(TEXTS)] == expected
    assert ours.vocab_size == theirs.n_words
    assert [ours.token_of(number) for number in range(theirs.num_special_tokens)] == [
        theirs.id_to_piece(number) for number in range(theirs.num_special_tokens)
    ]
    assert (ours.end_of_document_id, ours.token_id(ours.begin_of_document)) == (theirs.eos_id, theirs.bos_id)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/tekken.json").symlink_to(file)
    library = AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert library(TEXTS, add_special_tokens=False)["input_ids"] == expected
    ours.save(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")(TEXTS, add_special_tokens=False)["input_ids"] == expected
    assert Tokenizer.load(tmp_path / "folder").digest == Tokenizer.load(tmp_path / "saved").digest == ours.digest


def ranks(name: str) -> dict[bytes, int]:
    """Ranks of the size of an encoding: those of tekken, as the encoding's own file is not here."""
    import mistral_common

    file = Path(mistral_common.__file__).parent / "data/tekken_240911.json"
    vocabulary = [base64.b64decode(row["token_bytes"]) for row in json.loads(file.read_text())["vocab"]]
    size = {"r50k_base": 50256, "p50k_base": 50280, "cl100k_base": 100256, "o200k_base": 130000}[name]
    tokens = vocabulary[:size]
    found = {token: rank for rank, token in enumerate(tokens)}
    if name == "p50k_base":  # which has a gap for <|endoftext|>
        found = {token: rank + (rank >= 50256) for token, rank in found.items()}
    return found


@pytest.mark.parametrize("name", ["r50k_base", "p50k_base", "cl100k_base", "o200k_base"])
def test_encodings_of_tiktoken(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pattern, the special tokens and the digest are those of tiktoken's registry."""
    import tiktoken
    import tiktoken_ext.openai_public as registry

    vocabulary = ranks(name)
    digests: list[str] = []

    def load(_url: str, expected_hash: str) -> dict[bytes, int]:
        digests.append(expected_hash)
        return vocabulary

    monkeypatch.setattr(registry, "load_tiktoken_bpe", load)
    described = getattr(registry, name)()
    theirs = tiktoken.Encoding(**{**described, "explicit_n_vocab": None})
    file = tmp_path / f"{name}.tiktoken"
    file.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in vocabulary.items()))
    known = ranked_vocabularies._TIKTOKEN[digests[0]]
    assert known[1] == described["special_tokens"]
    monkeypatch.setitem(ranked_vocabularies._TIKTOKEN, hashlib.sha256(file.read_bytes()).hexdigest(), known)
    ours = Tokenizer.load(file)
    assert [encoding.ids for encoding in ours.encodings(TEXTS)] == [theirs.encode_ordinary(text) for text in TEXTS]
    text = "".join(f"a{token}" for token in described["special_tokens"])
    assert ours.encode(text).tolist() == theirs.encode(text, allowed_special="all")
    assert ours.end_of_document_id == theirs.eot_token


@pytest.mark.parametrize("place", ["file", "folder"])
def test_llama_3_is_that_of_llama_models(place: str, tmp_path: Path) -> None:
    """Meta's own file and program. It names reserved ids otherwise since it has `<|step_id|>` and `<|image|>`."""
    from llama_models.llama3 import tokenizer

    file = Path(tokenizer.__file__).with_name("tokenizer.model")
    theirs = tokenizer.Tokenizer(file)
    (tmp_path / "tokenizer.model").symlink_to(file)
    ours = Tokenizer.load(file if place == "file" else tmp_path)
    assert [encoding.ids for encoding in ours.encodings(TEXTS)] == [
        theirs.model.encode_ordinary(text) for text in TEXTS
    ]
    names = [name for name in theirs.special_tokens if not re.search("reserved|step_id|image", name)]
    assert [ours.token_id(name) for name in names] == [theirs.special_tokens[name] for name in names]
    assert (ours.vocab_size, ours.end_of_document_id) == (theirs.n_words, theirs.eos_id)
