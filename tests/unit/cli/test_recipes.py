"""`shardwise recipes`."""

from pathlib import Path

import pytest

from shardwise.config import load_config, recipe_names, recipe_text
from tests.command_line import CommandLine


def test_the_list_says_what_each_is_for(cli: CommandLine) -> None:
    lines = cli("recipes").out.splitlines()
    assert [line.split()[0] for line in lines] == recipe_names()
    assert all(len(line.split()) > 5 for line in lines)


def test_a_recipe_is_copied_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    monkeypatch.chdir(tmp_path)
    said = cli("recipes", "quickstart", "--write", "mine.yaml").out
    assert said == "wrote mine.yaml; train it with: shardwise train mine.yaml\n"
    assert Path("mine.yaml").read_text() == recipe_text("quickstart")
    assert load_config("mine.yaml") == load_config("quickstart")
    Path("mine.yaml").write_text("edited")
    assert "exists already" in cli.refused("recipes", "--write", "mine.yaml", "quickstart")
    assert Path("mine.yaml").read_text() == "edited"
