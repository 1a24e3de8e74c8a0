"""Folders of other programs are answered with the command that makes a model's folder of them."""

from pathlib import Path

import pytest

from shardwise.base.errors import ConfigError
from shardwise.checkpoint.format.weight_files import check_weights, no_weights_text
from shardwise.cli import main
from tests.rows import rows_of

ROWS = rows_of(__file__)

FOLDERS = ROWS["folders"]


@pytest.mark.parametrize("case", FOLDERS)
def test_the_command_of_a_converter_is_named(case: str, tmp_path: Path) -> None:
    names, command = FOLDERS[case]
    folder = tmp_path / "global_step3"
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    with pytest.raises(ConfigError) as caught:
        check_weights(folder)
    (problem,) = caught.value.problems
    assert problem.startswith(f"checkpoint.load ({folder}) must be the folder of a model, and it is a")
    assert command.format(folder, tmp_path) in problem
    others = ["context", "config.json", "checkpoint_metadata.json"]
    assert "must hold model.safetensors" in no_weights_text("x", others), "other folders have no converter"


def test_each_command_that_opens_a_model_names_the_converter(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for command in ["checkpoint import {0} {0}/out", "evaluate {0}", "train llama3-tiny checkpoint.load={0} --dry-run"]:
        (tmp_path / "adapter_config.json").touch()
        assert main(command.format(tmp_path).split()) == 2
        (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("shardwise: ")]
        assert "merge_and_unload" in line
