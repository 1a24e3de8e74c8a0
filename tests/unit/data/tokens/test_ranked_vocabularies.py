"""Vocabularies of ranks: Mistral's tekken.json, and files of tiktoken that are known by their digest."""

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest

from shardwise.base.errors import DataError
from shardwise.data.tokens import ranked_vocabularies
from shardwise.data.tokens.tokenizer import Tokenizer, keep_user_tokenizer

TOKENS = [bytes([byte]) for byte in range(256)] + [
    token.encode() for token in ("th", "he", "the", " t", " the", "ab", "bc", "abc", "cab", "é", "日", "\n\n", "  ")
]
PATTERN = r"\p{N}| ?\p{L}+|\s+"
TEXTS = ["the cab abcab\n\nthe 日é  x", "", "abcabc bcab", "12 the", "\x00ÿ"]


def by_rank(text: str) -> list[int]:
    """The ids as tiktoken finds them: the neighbours whose union has the lowest rank are joined first."""
    ranks = {token: rank for rank, token in enumerate(TOKENS)}
    ids = []
    for piece in re.findall(r"[0-9]| ?[^\W\d_]+|\s+|[^\w\s]+", text):
        parts = [bytes([byte]) for byte in piece.encode()]
        while not (piece.encode() in ranks and len(parts) == 1):
            pairs = [(ranks.get(left + right, 9_999), at) for at, (left, right) in enumerate(zip(parts, parts[1:]))]  # noqa: B905, RUF007
            rank, at = min(pairs, default=(9_999, 0))
            if piece.encode() in ranks:
                parts = [piece.encode()]
            elif rank == 9_999:
                break
            else:
                parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [ranks[part] for part in parts]
    return ids


def tekken(path: Path, **changes: object) -> Path:
    described = {
        "config": {"pattern": PATTERN, "default_vocab_size": 12 + len(TOKENS) - 2, "default_num_special_tokens": 12},
        "vocab": [{"rank": rank, "token_bytes": base64.b64encode(t).decode()} for rank, t in enumerate(TOKENS)],
        "special_tokens": [{"rank": n, "token_str": name} for n, name in enumerate(("<unk>", "<s>", "</s>"))],
    }
    path.write_text(json.dumps({**described, **changes}))
    return path


def test_tekken(tmp_path: Path) -> None:
    """The file may have more tokens than the vocabulary, and fewer special tokens."""
    tokenizer = Tokenizer.load(tekken(tmp_path / "tekken_1.json"))
    expected = [[12 + number for number in by_rank(text.replace("\n\n", "").replace("  ", " "))] for text in TEXTS]
    texts = [text.replace("\n\n", "").replace("  ", " ") for text in TEXTS]
    assert [encoding.ids for encoding in tokenizer.encodings(texts)] == expected
    assert (tokenizer.vocab_size, tokenizer.token_of(11), tokenizer.end_of_document_id) == (279, "<SPECIAL_11>", 2)
    assert tokenizer.begin_of_document == "<s>"
    tekken(tmp_path / "tekken.json")
    kept = keep_user_tokenizer(str(tmp_path), 279, tmp_path / "kept", None)
    assert Tokenizer.load(tmp_path / "kept").digest == kept.digest == tokenizer.digest
    assert json.loads((tmp_path / "kept/special_tokens_map.json").read_text())["bos_token"] == "<s>"
    unlisted = Tokenizer.load(tekken(tmp_path / "tekken_2.json", special_tokens=None, config={"pattern": PATTERN}))
    assert (unlisted.token_of(3), unlisted.token_of(19), unlisted.vocab_size) == ("[INST]", "[TOOL_CONTENT]", 289)


@pytest.mark.parametrize("changes", [{"vocab": [{"token_bytes": "?"}]}, {"config": {}}, {"vocab": 5}])
def test_no_tekken(changes: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tekken\.json is no tekken\.json of Mistral \(.*\): copy it again"):
        Tokenizer.load(tekken(tmp_path / "tekken.json", **changes))


@pytest.mark.parametrize("name", ["a.tiktoken", "tokenizer.model"])
def test_a_known_vocabulary_of_tiktoken(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Special tokens keep their ids, with gaps before and between them."""
    content = b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(TOKENS))
    (tmp_path / name).write_bytes(content)
    special = {"<|endoftext|>": 270, "<|endofprompt|>": 290}
    monkeypatch.setitem(ranked_vocabularies._TIKTOKEN, hashlib.sha256(content).hexdigest(), (PATTERN, special))
    tokenizer = Tokenizer.load(tmp_path / name)
    assert [encoding.ids for encoding in tokenizer.encodings(TEXTS)] == [by_rank(text) for text in TEXTS]
    assert tokenizer.encode("the<|endofprompt|>").tolist() == [258, 290]
    assert (tokenizer.end_of_document_id, tokenizer.vocab_size) == (270, 291)
