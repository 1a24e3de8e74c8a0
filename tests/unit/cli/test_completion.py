"""`shardwise --completion SHELL` prints a script by which the shell completes commands, options, recipes and keys."""

import shutil
import subprocess
import sys

import pytest

from tests.command_line import CommandLine


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_knows_commands_options_recipes_and_keys(shell: str, cli: CommandLine) -> None:
    pytest.importorskip("shtab")
    script = cli("--completion", shell).out
    for word in ("checkpoint", "diff", "run-dir", "llama2-tiny", "train.global_batch="):
        assert word in script
    if shutil.which(shell):
        assert subprocess.run([shell, "-n"], input=script, text=True, capture_output=True).stderr == ""


@pytest.mark.parametrize("arguments", [["--completion"], ["--completion=csh"]])
def test_another_shell_is_refused(arguments: list[str], cli: CommandLine) -> None:
    assert "must be bash, zsh or fish" in cli.refused(*arguments)


def test_the_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert "pip install 'shardwise[completion]'" in cli.refused("--completion", "bash")
