"""Options and keys of earlier versions: each is answered by one sentence that names what to use."""

import pytest

from shardwise.cli import main
from shardwise.cli.entry import COMMANDS
from shardwise.config.suggestions import REMOVED


@pytest.mark.parametrize("spelling", REMOVED)
def test_what_was_removed_is_answered_by_what_to_use_instead(spelling: str, capsys: pytest.CaptureFixture[str]) -> None:
    *command, name = spelling.split()
    if not command:
        name, _, value = name.partition("=")
        command, name = ["train", "quickstart"], f"{name}={value or 'x'}"
    assert command[0] in COMMANDS
    assert main([*command, name]) == 2
    assert f"{spelling} was removed: {REMOVED[spelling]}" in capsys.readouterr().err
