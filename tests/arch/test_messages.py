"""The lists of all messages are current, and a test asserts each message."""

import ast

import pytest

from scripts.message_pages import pages
from scripts.messages import FOLDER, literal, marks, messages, words
from tests.arch.source import ROOT, tree


@pytest.mark.parametrize("page", pages())
def test_a_list_of_messages_is_current(page: str) -> None:
    assert (FOLDER / page).read_text(encoding="utf-8") == pages()[page], "run `make pages`"


def test_messages_are_found() -> None:
    """Of an error, of a check, and with an entry."""
    found = {message.text: message for message in messages()}
    assert len(found) > 700
    assert "output size (…) must be divisible by the group's size (…)" in found
    assert found["free disk space under … (…) must be at least …"].file == "verify/doctor/machine.py"
    assert any(message.entry == "runs#number-of-ranks" for message in messages())


def test_a_test_asserts_each_message() -> None:
    """A part of each, of four words or more where the values between leave so many, stands in a test."""
    texts = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        nodes = (node for node in ast.walk(tree(path)) if isinstance(node, ast.Constant | ast.JoinedStr))
        texts += [" ".join(words(text.replace("\\", ""))) for text in map(literal, nodes) if text]
    asserted = " | ".join(texts)
    lacking = [f"{m.file}: {m.text}" for m in messages() if not any(mark in asserted for mark in marks(m.text))]
    assert not lacking, "no test asserts these messages:\n" + "\n".join(lacking)
