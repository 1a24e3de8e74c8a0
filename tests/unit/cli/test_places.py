"""What a command is given as a place of checkpoints, where that is none that answers."""

import threading

import pytest

from shardwise.cli import main
from shardwise.storage import reach
from shardwise.storage.root import Root

URL = "memory://far/run"
COMMANDS = {
    "inspect": (["checkpoint", "inspect", URL], 1),
    "verify": (["checkpoint", "verify", URL], 1),
    "prune": (["checkpoint", "prune", URL, "--keep", "1"], 1),
    "diff": (["checkpoint", "diff", URL, URL], 2),  # 1 is a difference
    "export": (["checkpoint", "export", URL, "out"], 1),
    "import": (["checkpoint", "import", URL, "out"], 1),
    "evaluate": (["evaluate", URL], 1),
    "generate": (["generate", URL, "--prompt", "a"], 1),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_nobody_waits_for_a_place_that_does_not_answer(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reach, "PATIENCE_SECONDS", 0.01)
    exists = Root.exists
    monkeypatch.setattr(Root, "exists", lambda root: exists(root) if root.is_local else threading.Event().wait())
    arguments, code = COMMANDS[command]
    assert main(arguments) == code
    assert capsys.readouterr().err == f"shardwise: {URL} cannot be reached: no answer within 0 s\n"
