"""`shardwise recipes`."""

from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.config import load_config, recipe_names, recipe_text


def test_the_list_says_what_each_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == recipe_names()
    assert all(len(line.split()) > 5 for line in lines)


def test_a_recipe_is_copied_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "quickstart", "--write", "mine.yaml"]) == 0
    assert capsys.readouterr().out == "wrote mine.yaml; train it with: shardwise train mine.yaml\n"
    assert Path("mine.yaml").read_text() == recipe_text("quickstart")
    assert load_config("mine.yaml") == load_config("quickstart")
    Path("mine.yaml").write_text("edited")
    assert main(["recipes", "--write", "mine.yaml", "quickstart"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert Path("mine.yaml").read_text() == "edited"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["quikstart"], "did you mean quickstart?"),
        (["--schema", "quickstart"], "--schema stands alone: it prints one schema for all recipes"),
    ],
)
def test_mistakes(
    arguments: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", *arguments]) == 2
    assert text in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
