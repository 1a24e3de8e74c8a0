"""In a terminal of 80 columns no prose is longer, and no word is cut; elsewhere lines stay whole."""

import io
import re
from pathlib import Path

import pytest

from shardwise.base.parsing import parse_yaml
from shardwise.base.terminal import fit_to_terminal
from tests.command_line import CommandLine
from tests.monitor_runs import Start, write_run


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


@pytest.mark.parametrize(
    "line",
    [
        "plan llama2-tiny --device h100:2",
        "train llama2-7b --dry-run --nproc 128",
        "top --once runs/run",
        "report runs/run runs/other",
    ],
)
def test_what_a_command_prints_fits(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    """With the words that a file gets; a dry run stays YAML."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("run", "other"):
        write_run(Path("runs", name), [Start(0, 24)], experts=True)
    whole = cli(*line.split()).out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    shown = cli(*line.split()).out
    assert max(map(len, shown.splitlines())) <= 80
    if "--dry-run" in line:
        # The host's free memory differs from moment to moment.
        first, second = (re.sub(r"#|[\d.]+", "", text).split() for text in (shown, whole))
        assert first == second
        assert parse_yaml(shown, "shown") == parse_yaml(whole, "whole")
