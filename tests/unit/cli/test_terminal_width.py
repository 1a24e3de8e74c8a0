"""In a terminal of 80 columns no prose is longer, and no word is cut; elsewhere lines stay whole."""

import io
import shlex
import sys
from pathlib import Path

import pytest

from shardwise.base.terminal import fit_to_terminal
from shardwise.cli import main

COMMANDS = [
    "",
    "explain loss-spike",
    "train llama2-7b",
    "train llama2-tiny parallel.tensor=3 train.global_batch=7 train.zzz=1 zzz.a=1",
    "trian",
    "plan llama2-70b --device h100:1",
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(command: str, stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch) -> str:
    text = stream()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, text)
    main(shlex.split(command))
    monkeypatch.undo()
    return text.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_all_that_a_command_shows_fits(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plain = shown(command, io.StringIO, monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    text = shown(command, Terminal, monkeypatch)
    assert text.strip()
    assert not [line for line in text.splitlines() if len(line) > 80]
    assert text.split() == plain.split(), "a word is cut"


def test_a_file_gets_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "word " * 40
    assert fit_to_terminal(text, io.StringIO()) == text
    monkeypatch.setenv("COLUMNS", "80")
    assert all(len(line) <= 80 for line in fit_to_terminal(text, Terminal()).splitlines())


def test_a_command_can_be_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    command = "shardwise train llama2-tiny train.steps=40 --run-dir 'runs/a b' --nproc 2"
    assert fit_to_terminal(f"resume: {command}", Terminal()) == f"resume: {command}"
