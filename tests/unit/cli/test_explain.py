"""`shardwise explain` prints entries of the troubleshooting pages (their texts: tests/arch/test_troubleshooting.py)."""

import pytest

from tests.command_line import CommandLine


def test_an_entry_is_message_cause_and_fix(cli: CommandLine) -> None:
    said = cli("explain", "killed-rank").out
    message = "rank … was killed (SIGKILL; usually out of memory)"
    assert said.startswith(f"Message: {message}\n\nCause: The process was killed from outside")
    assert "\n\nFix: Look at the system's log (`dmesg`)" in said
    assert cli("explain", "training#killed-rank").out == said


def test_a_message_that_was_pasted_is_found(cli: CommandLine) -> None:
    message = "shardwise: the number of ranks (3) must be a multiple of parallel.tensor (2): nearest 2 or 4"
    assert cli("explain", message).out.startswith("Message: the number of ranks (…) must be a multiple of\n")


@pytest.mark.parametrize(
    ("name", "hint"), [("kiled-rank", "did you mean killed-rank?"), ("zzz", "`shardwise explain` lists all names")]
)
def test_an_unknown_name_is_refused(name: str, hint: str, cli: CommandLine) -> None:
    assert cli.refused("explain", name) == f"shardwise: no entry explains {name!r}: {hint}\n"
