"""Lines that are wrapped to fit a terminal."""

import io
import shlex
from pathlib import Path

import pytest

from shardwise.base import terminal


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("folder", ["runs/plain", "runs/o'brien", "runs/with space", 'runs/a "b"'])
def test_a_command_that_is_wrapped_stays_the_same_command(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    words = ["shardwise", "train", "llama2-tiny", "train.steps=100", "parallel.tensor=2", "--run-dir", folder]
    lines = terminal.fitted(f"resume: {shlex.join(words)}", Screen()).split("\n")
    assert len(lines) > 2
    assert all(line.endswith(" \\") for line in lines[:-1])
    pasted = "\n".join(lines).removeprefix("resume: ").replace("\\\n", "")
    assert shlex.split(pasted) == words


def test_a_sentence_with_an_apostrophe_is_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    text = f"resume: the same command with --run-dir {Path('/data/o')}'brien and so on until the line is long"
    assert " ".join(terminal.fitted(text, Screen()).split()) == text
