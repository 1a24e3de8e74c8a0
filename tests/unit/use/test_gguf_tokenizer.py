"""Tokenizers in the terms of llama.cpp; tests/interop/llama-cpp compares the ids of texts."""

import json
from typing import Any

import pytest

from shardwise.base.errors import ConfigError
from shardwise.data.tokens.tokenizer import train_tokenizer
from shardwise_use.gguf_tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, gguf_vocabulary

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@pytest.fixture(scope="module")
def own() -> dict[str, Any]:
    described: dict[str, Any] = json.loads(
        train_tokenizer(["to be or not to be " * 9] * 3, 262, "text")._backend.to_str()
    )
    return described


def pieces(*merges: str, tokens: tuple[str, ...] = ("a", "b", "c", "ab", "abc")) -> dict[str, Any]:
    """A tokenizer as Llama 2's."""
    prefix = {"type": "Prepend", "prepend": "▁"}
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    vocabulary = {name: number for number, name in enumerate(["<unk>", *BYTES, *tokens])}
    model = {"type": "BPE", "byte_fallback": True, "unk_token": "<unk>", "merges": [*merges], "vocab": vocabulary}
    normalizer = {"type": "Sequence", "normalizers": [prefix, spaces]}
    return {"model": model, "added_tokens": [], "normalizer": normalizer, "pre_tokenizer": None}


def test_a_tokenizer_of_our_own(own: dict[str, Any]) -> None:
    written = gguf_vocabulary(own, 270)
    assert (written.model, written.pre, written.notes) == ("gpt2", "gpt-2", ())
    assert (written.tokens[0], written.types[0], written.types[1]) == ("<|endoftext|>", CONTROL, NORMAL)
    assert (written.tokens[262:264], written.types[262:]) == (["[PAD262]", "[PAD263]"], [UNUSED] * 8)
    assert [merge.count(" ") for merge in written.merges] == [1] * (262 - 257)
    assert gguf_vocabulary(own | {"normalizer": {"type": "NFC"}}, 270).notes == (
        "llama.cpp does not bring text into Unicode's form NFC, as this tokenizer does",
    )


def test_pieces_have_scores() -> None:
    written = gguf_vocabulary(pieces("a b", "ab c"), 270)
    assert (written.model, written.has_space_prefix) == ("llama", True)
    assert [written.types[number] for number in (0, 1, 256, 257)] == [UNKNOWN, BYTE, BYTE, NORMAL]
    assert written.scores[257:262] == [0, 0, 0, 0, -1]


def test_other_rules_are_refused(own: dict[str, Any]) -> None:
    for change, reason in (
        ({"normalizer": {"type": "Lowercase"}}, r"it rewrites text \(Lowercase\) before it splits it"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}, "no rule of llama.cpp splits text"),
        ({"model": {"type": "Unigram"}}, "it is of type Unigram, and only BPE is written"),
        ({"model": {"type": "BPE", "end_of_word_suffix": "</w>"}}, "its tokens have marks within words or"),
    ):
        with pytest.raises(ConfigError, match=reason) as caught:
            gguf_vocabulary(own | change, 270)
        assert str(caught.value).endswith("export without --gguf, for a reader that takes tokenizer.json as it is")


def test_pieces_that_would_be_joined_otherwise_are_refused() -> None:
    for described, reason in (
        (pieces("a b"), "it does not join 'ab' and 'c', whose union is a token"),
        (pieces("b c", "a b", "a bc", "ab c", tokens=("a", "b", "c", "ab", "bc", "abc")), None),
        (pieces("b c", "a bc", "a b", "ab c", tokens=("a", "b", "c", "ab", "bc", "abc")), "have others between them"),
        (pieces("a b", "ab c") | {"normalizer": None}, "it rewrites other text than spaces"),
        (pieces("a b", "ab c") | {"pre_tokenizer": {"type": "Whitespace"}}, "it splits text by Whitespace, and lla"),
    ):
        if reason is None:
            assert gguf_vocabulary(described, 270).model == "llama"
            return
        with pytest.raises(ConfigError, match=reason):
            gguf_vocabulary(described, 270)
