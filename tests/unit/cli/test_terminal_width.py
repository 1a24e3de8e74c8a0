"""In a terminal of 80 columns no prose is longer, and no word is cut; elsewhere lines stay whole."""

import io

import pytest

from shardwise.base.terminal import fit_to_terminal


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_file_gets_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "word " * 40
    assert fit_to_terminal(text, io.StringIO()) == text
    monkeypatch.setenv("COLUMNS", "80")
    assert all(len(line) <= 80 for line in fit_to_terminal(text, Terminal()).splitlines())


def test_a_command_can_be_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    command = "shardwise train llama2-tiny train.steps=40 --run-dir 'runs/a b' --nproc 2"
    assert fit_to_terminal(f"resume: {command}", Terminal()) == f"resume: {command}"
