"""The text that a model reads in a conversation."""

from pathlib import Path

import pytest

from shardwise.base.errors import ConfigError
from shardwise.data.tokens.chat_template import ChatTemplate
from shardwise.data.tokens.tokenizer import Tokenizer, train_tokenizer
from shardwise.train.conversation import Text

TEMPLATE = "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}\n{% endfor %}a:"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["a b"], 257, "text")  # a token for each byte


def read(text: Text) -> str:
    return text.tokenizer.decode(text.ids())


def test_without_a_template_a_turn_begins_a_text_and_an_empty_one_continues_it(tokenizer: Tokenizer) -> None:
    text = Text(tokenizer, None, window=10, max_tokens=3)
    with pytest.raises(ConfigError, match="there is no text yet that could be continued: write some"):
        text.ids()
    text.add("user", "")
    assert not text.messages
    text.add("user", "abc")
    text.add("assistant", "def")
    text.add("user", "")
    assert read(text) == "abcdef"
    text.add("assistant", "ghij")
    text.add("user", "")
    # The model reads 10 tokens at most, of which the last of an answer of 3 is not read.
    assert read(text) == "cdefghij"
    text.add("user", "new")
    assert read(text) == "new"


def test_the_oldest_messages_give_way(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    template = ChatTemplate.of(tmp_path)
    text = Text(tokenizer, template, window=24, max_tokens=5, system="be")
    for turn in ("12", "34"):
        text.add("user", turn)
        text.add("assistant", "x")
    text.add("user", "5")
    assert read(text) == "s:be\nu:34\na:x\nu:5\na:"
    text.messages.clear()
    text.add("user", "0123456789abcdef")
    with pytest.raises(ConfigError) as caught:
        text.ids()
    assert str(caught.value) == (
        "your text (26 tokens with its marks) must be at most 20 tokens, so that --max-tokens (5) fit into the 24 that "
        "the model reads"
    )
