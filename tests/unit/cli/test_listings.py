"""`shardwise recipes`, `shardwise explain` and `shardwise --completion`."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.config import load_config, recipe_names, recipe_text
from tests.command_line import CommandLine


def test_recipes_are_listed_and_copied_once(cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = cli("recipes").out.splitlines()
    assert [line.split()[0] for line in lines] == recipe_names()
    assert all(len(line.split()) > 5 for line in lines)
    monkeypatch.chdir(tmp_path)
    said = cli("recipes", "quickstart", "--write", "mine.yaml").out
    assert said == "wrote mine.yaml; train it with: shardwise train mine.yaml\n"
    assert Path("mine.yaml").read_text() == recipe_text("quickstart")
    assert load_config("mine.yaml") == load_config("quickstart")
    Path("mine.yaml").write_text("edited")
    assert "exists already" in cli.refused("recipes", "--write", "mine.yaml", "quickstart")
    assert Path("mine.yaml").read_text() == "edited"


def test_an_entry_is_found_by_its_name_or_message(cli: CommandLine) -> None:
    said = cli("explain", "killed-rank").out
    message = "rank … was killed (SIGKILL; usually out of memory)"
    assert said.startswith(f"Message: {message}\n\nCause: The process was killed from outside")
    assert "\n\nFix: Look at the system's log (`dmesg`)" in said
    assert cli("explain", "training#killed-rank").out == said
    for name, hint in (("kiled-rank", "did you mean killed-rank?"), ("zzz", "`shardwise explain` lists all names")):
        assert cli.refused("explain", name) == f"shardwise: no entry explains {name!r}: {hint}\n"
    message = "shardwise: the number of ranks (3) must be a multiple of parallel.tensor (2): nearest 2 or 4"
    assert cli("explain", message).out.startswith("Message: the number of ranks (…) must be a multiple of\n")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_knows_commands_options_recipes_and_keys(shell: str, cli: CommandLine) -> None:
    pytest.importorskip("shtab")
    script = cli("--completion", shell).out
    for word in ("checkpoint", "diff", "run-dir", "llama2-tiny", "train.global_batch="):
        assert word in script
    if shutil.which(shell):
        assert subprocess.run([shell, "-n"], input=script, text=True, capture_output=True).stderr == ""


def test_another_shell_or_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    for arguments in (["--completion"], ["--completion=csh"]):
        assert "must be bash, zsh or fish" in cli.refused(*arguments)
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert "pip install 'shardwise[completion]'" in cli.refused("--completion", "bash")
