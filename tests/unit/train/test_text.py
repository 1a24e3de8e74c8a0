"""Text as it comes: no character is broken, and the pieces are the whole."""

import pytest

from shardwise.data.tokens.tokenizer import Tokenizer, train_tokenizer
from shardwise_use.generation import _Detokenizer

TEXT = "naïve 键 and 🎹🎹, then Ωmega\n  done."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """256 bytes and hardly a merge: every other character is spread over tokens."""
    return train_tokenizer(["the ring the ring", "then and then"], 262, "test")


def pieces(tokenizer: Tokenizer, text: str, prompt: str = "") -> list[str]:
    detokenizer = _Detokenizer(tokenizer, tokenizer.encode(prompt).tolist())
    return [*(detokenizer.push(int(token)) for token in tokenizer.encode(text)), detokenizer.finish()]


def test_the_pieces_are_the_text_and_a_character_comes_with_its_last_byte(tokenizer: Tokenizer) -> None:
    for prompt in ["", "the ", "the ring and a long prompt before 键"]:
        found = pieces(tokenizer, TEXT, prompt)
        assert "".join(found) == TEXT
        assert len([piece for piece in found if piece]) > 10, "it comes piece by piece"
        assert all("\ufffd" not in piece for piece in found)
    assert pieces(tokenizer, "a🎹b") == ["a", "", "", "", "🎹", "b", ""]
    detokenizer, start = _Detokenizer(tokenizer), int(tokenizer.encode("🎹")[0])
    found = [detokenizer.push(token) for token in (start, *tokenizer.encode("abc").tolist())]
    assert "".join(found) == "\ufffdabc", "bytes that are no text do not stop what follows"
    # Its decoder drops the space before the first token: one decoded by itself would lose it each time.
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    vocabulary = {"<unk>": 0, "</s>": 1, "▁the": 2, "▁ring": 3, "s": 4}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(backend, "</s>")
    detokenizer = _Detokenizer(tokenizer, [2])
    assert [detokenizer.push(token) for token in (3, 4, 2)] == [" ring", "s", " the"]
