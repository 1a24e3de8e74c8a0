"""The person's side of a conversation, with a model that a thread plays. Real ones: tests/e2e/test_chat.py."""

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
from typing import Any

import pytest

from shardwise_use.cli.chat import _Terminal

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
