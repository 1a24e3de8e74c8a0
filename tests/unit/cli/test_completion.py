"""`shardwise --completion SHELL` prints a script by which the shell completes commands, options, recipes and keys."""

import shutil
import subprocess
import sys

import pytest

from shardwise.cli import main


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_knows_commands_options_recipes_and_keys(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["--completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("checkpoint", "diff", "run-dir", "llama2-tiny", "train.global_batch="):
        assert word in script
    if shutil.which(shell):
        assert subprocess.run([shell, "-n"], input=script, text=True, capture_output=True).stderr == ""


@pytest.mark.parametrize("arguments", [["--completion"], ["--completion", "csh"], ["--completion=csh"]])
def test_another_shell_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "must be bash, zsh or fish" in capsys.readouterr().err


def test_the_library_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--completion", "bash"]) == 2
    assert "pip install 'shardwise[completion]'" in capsys.readouterr().err
