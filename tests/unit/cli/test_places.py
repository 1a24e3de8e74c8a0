"""What a command is given as a place of checkpoints, where that is none that answers."""

import threading
from pathlib import Path

import pytest

from shardwise.checkpoint.format.manifest import MANIFEST
from shardwise.checkpoint.storage import root as reach
from shardwise.checkpoint.storage.root import Root
from tests.command_line import CommandLine
from tests.stored import write_checkpoint

URL = "memory://far/run"
COMMANDS = {
    "inspect": (["checkpoint", "inspect", URL], 1),
    "diff": (["checkpoint", "diff", URL, URL], 2),  # 1 is a difference
    "export": (["checkpoint", "export", URL, "out"], 1),
    "evaluate": (["evaluate", URL], 1),
    "generate": (["generate", URL, "--prompt", "a"], 1),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_silent_place_is_given_up(command: str, monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    monkeypatch.setattr(reach, "PATIENCE_SECONDS", 0.01)
    exists = Root.exists
    monkeypatch.setattr(Root, "exists", lambda root: exists(root) if root.is_local else threading.Event().wait())
    arguments, code = COMMANDS[command]
    assert cli(*arguments, code=code).err == f"shardwise: {URL} cannot be reached: no answer within 0 s\n"


@pytest.mark.parametrize(
    "command",
    ["checkpoint inspect loop", "checkpoint export loop out", "data fetch loop out", "evaluate loop", "stop loop"],
)
def test_a_path_that_may_not_be_entered_is_wrong_input(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    """A link to itself stands for all of them: the superuser may enter every folder."""
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    assert "loop" in cli.refused(*command.split())


def test_one_checkpoint_has_no_others_to_remove(tmp_path: Path, cli: CommandLine) -> None:
    folder = write_checkpoint(tmp_path)
    said = cli.refused("checkpoint", "prune", folder, "--keep", "1")
    assert f"RUN ({folder}) must be a run's folder or a folder of checkpoints: it is one checkpoint" in said
    assert folder.exists()


def test_there_is_nothing_to_verify_where_no_save_was_completed(tmp_path: Path, cli: CommandLine) -> None:
    (write_checkpoint(tmp_path) / MANIFEST).local().unlink()
    said = cli.refused("checkpoint", "verify", tmp_path)
    assert f"{tmp_path} must hold a checkpoint that was completed: there is none" in said
