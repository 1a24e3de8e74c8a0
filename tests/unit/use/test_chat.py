"""The two sides of a conversation; the other one is a thread (real ones: tests/e2e/test_evaluate_and_generate.py)."""

import argparse
import io
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from shardwise.base.errors import ConfigError
from shardwise.data.tokens.chat_template import ChatTemplate
from shardwise.data.tokens.tokenizer import Tokenizer, train_tokenizer
from shardwise.distributed.mesh import Mesh
from shardwise_use.chat_session import ChatTranscript, _ChatSession
from shardwise_use.cli.chat import _Terminal
from shardwise_use.generation import open_token_reader

Model = Callable[[Connection], None]


def talk(model: Model, lines: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the lines to a model, to which the other end of the channel is given."""
    here, there = Pipe()
    thread = threading.Thread(target=model, args=(there,))
    thread.start()
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    values = {"temperature": 0.8, "top_p": 0.9, "seed": 5, "max_tokens": 16}
    _Terminal(here, argparse.Namespace(**values), shows_stats=False).run()
    here.close()
    thread.join()
    there.close()


def test_ctrl_c_stops_the_answer_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    requests: list[Any] = []

    def model(channel: Connection) -> None:
        channel.send({"ready": True, "has_template": False, "max_tokens": 8})
        requests.append(channel.recv())
        channel.send({"piece": "a long"})
        os.kill(os.getpid(), signal.SIGINT)
        # Without a stop this waits for ever.
        requests.append(channel.recv())
        channel.send({"end": "stopped", "tokens": 2, "prefill_seconds": 0.5, "decode_seconds": 0.5})
        requests.append(channel.recv())
        channel.send({"piece": "short"})
        channel.send({"end": "eos", "tokens": 1, "prefill_seconds": 0.5, "decode_seconds": 0.0})

    talk(model, "one\n/temperature 0\ntwo\n", monkeypatch)
    first = {"text": "one", "temperature": 0.8, "top_p": 0.9, "seed": 5}
    assert requests == [first, {"stop": True}, {**first, "text": "two", "temperature": 0.0, "seed": 6}]
    shown = capsys.readouterr()
    assert shown.out == "a long\nshort\n"
    assert shown.err == "an answer has at most 8 tokens, half of what the model reads\n"


EARLY_END = """\
import argparse, threading
from multiprocessing import Pipe
from shardwise_use.cli.chat import _Terminal

here, there = Pipe()

def model():
    there.send({"ready": True, "has_template": False, "max_tokens": 16})
    there.send({"piece": there.recv()["text"][::-1]})
    there.send({"end": "eos", "tokens": 1})

threading.Thread(target=model, daemon=True).start()
values = {"temperature": 0.8, "top_p": 0.9, "seed": 5, "max_tokens": 16}
_Terminal(here, argparse.Namespace(**values), shows_stats=False).run()
"""


def test_an_end_of_input_that_comes_before_the_prompt_leaves() -> None:
    """As `script` sends it to a terminal while the model is loaded."""
    controller, terminal = pty.openpty()
    os.write(controller, b"question\n\x04")
    process = subprocess.Popen([sys.executable, "-c", EARLY_END], stdin=terminal, stdout=terminal)
    os.close(terminal)
    try:
        assert process.wait(30) == 0
    finally:
        process.kill()
    shown = os.read(controller, 1 << 16).decode()
    os.close(controller)
    assert shown.endswith("\r\n> question\r\nnoitseuq\r\n\r\n")


TEMPLATE = "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}\n{% endfor %}a:"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["a b"], 257, "text")  # a token for each byte


def read(transcript: ChatTranscript) -> str:
    return transcript.tokenizer.decode(transcript.ids())


def test_without_a_template_a_turn_begins_a_text_and_an_empty_one_continues_it(tokenizer: Tokenizer) -> None:
    transcript = ChatTranscript(tokenizer, None, window=10, max_tokens=3)
    with pytest.raises(ConfigError, match="there is no text yet that could be continued: write some"):
        transcript.ids()
    transcript.add("user", "")
    assert not transcript.messages
    transcript.add("user", "abc")
    transcript.add("assistant", "def")
    transcript.add("user", "")
    assert read(transcript) == "abcdef"
    transcript.add("assistant", "ghij")
    transcript.add("user", "")
    # The model reads 10 tokens at most, of which the last of an answer of 3 is not read.
    assert read(transcript) == "cdefghij"
    transcript.add("user", "new")
    assert read(transcript) == "new"


def test_the_oldest_messages_give_way(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    template = ChatTemplate.of(tmp_path)
    transcript = ChatTranscript(tokenizer, template, window=24, max_tokens=5, system="be")
    for turn in ("12", "34"):
        transcript.add("user", turn)
        transcript.add("assistant", "x")
    transcript.add("user", "5")
    assert read(transcript) == "s:be\nu:34\na:x\nu:5\na:"
    pairs = ChatTranscript(tokenizer, template, window=18, max_tokens=5)
    for role, text in (("user", "12"), ("assistant", "x"), ("user", "5")):
        pairs.add(role, text)
    assert read(pairs) == "u:5\na:", "an answer stays without its question"
    before = [*transcript.messages]
    transcript.add("user", "0123456789abcdef")
    with pytest.raises(ConfigError) as caught:
        transcript.ids()
    assert str(caught.value) == (
        "your text (26 tokens with its marks) must be at most 20 tokens, so that an answer of 5 fits into the 24 that "
        "the model reads"
    )
    assert transcript.messages[:-1] == before, "what was said before a refused message is forgotten"


class Alphabet(nn.Module):
    """A model that continues a text in the order of the alphabet."""

    def logits(self, ids_SB: Tensor) -> Tensor:
        return nn.functional.one_hot(ids_SB + 1, 257).float()


class Person:
    """The other end of the channel.

    Args:
        requests: what it asks, in this order.
        patience: pieces of text after which it stops an answer.
    """

    def __init__(self, requests: list[dict[str, Any]], patience: int) -> None:
        self.heard: list[dict[str, Any]] = []
        self._requests = requests
        self._patience = patience
        self._waits = 0

    def recv(self) -> dict[str, Any]:
        if not self._requests:
            raise EOFError
        return self._requests.pop(0)

    def send(self, message: dict[str, Any]) -> None:
        self.heard.append(message)

    def poll(self, seconds: float = 0.0) -> bool:
        if seconds:
            self._waits += 1
            # At first the person has written nothing for a while.
            return self._waits > 1
        return sum("piece" in message for message in self.heard) == self._patience


def test_an_answer_ends_by_a_token_by_its_length_or_by_a_stop(tokenizer: Tokenizer) -> None:
    greedy = {"temperature": 0.0, "top_p": 1.0, "seed": 1}
    turns = [{"text": "ab", **greedy}, {"text": "", **greedy}, {"stop": True}, {"reset": True}, {"text": "", **greedy}]
    person: Any = Person([*turns, {"text": "u", **greedy}], patience=6)
    mesh = Mesh(device="cpu")
    model = Alphabet()
    transcript = ChatTranscript(tokenizer, None, window=20, max_tokens=4)
    stops = {int(tokenizer.encode("x")[0])}
    _ChatSession(model, mesh, None, open_token_reader(model, mesh, 20), transcript, stops, person).run()
    ready, *heard = person.heard
    assert ready == {"ready": True, "has_template": False, "max_tokens": 4}
    answers = "".join(message.get("piece", "") + ("|" if "end" in message else "") for message in heard)
    # The second answer is stopped at its first letter, and the last one ends before the x.
    assert answers == "cdef|g|vw|"
    assert [message["end"] for message in heard if "end" in message] == ["max_tokens", "stopped", "eos"]
    assert [message["refused"][:22] for message in heard if "refused" in message] == ["there is no text yet t"]
