"""What a start leaves behind that is refused."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from shardwise.base.errors import ConfigError, LaunchError
from shardwise.runs.folder import RunDirectory
from tests.command_line import CommandLine


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shardwise.cli.train.accelerators", lambda: ("cpu", 0))
    monkeypatch.setattr("shardwise.cli.run_preparation.prepare_data", lambda config, announce: None)


@pytest.mark.parametrize("has_former", [True, False])
def test_a_first_start_that_is_refused_leaves_nothing(
    has_former: bool, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    if has_former:
        RunDirectory("runs/former").create().mark_latest()

    def refused(_command: Sequence[str], _nproc: int, run_path: Path) -> None:
        RunDirectory(run_path).mark_latest()
        raise LaunchError("the model is wrong", ConfigError.exit_code)

    monkeypatch.setattr("shardwise.launch.local.launch", refused)
    assert "the model is wrong" in cli.refused("train", "llama2-tiny", "--nproc", "2")
    assert sorted(path.name for path in Path("runs").iterdir()) == (["former", "latest"] if has_former else [])
    if has_former:
        assert Path("runs/latest").readlink() == Path("former")
    # What was there before stays.
    RunDirectory("runs/mine").create()
    cli("train", "llama2-tiny", "--nproc", "2", "--run-dir", "runs/mine", code=2)
    assert Path("runs/mine").is_dir()


def test_a_run_that_has_taken_a_step_stays(monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    def refused(_command: Sequence[str], _nproc: int, run_path: Path) -> None:
        RunDirectory(run_path).metrics.write_text('{"event": "step", "step": 1}\n')
        raise LaunchError("a callback is wrong", ConfigError.exit_code)

    monkeypatch.setattr("shardwise.launch.local.launch", refused)
    cli("train", "llama2-tiny", "--nproc", "2", "--run-dir", "runs/long", code=2)
    assert Path("runs/long").is_dir()
