"""The command line is a contract: its help is frozen in tests/arch/help and changes only on purpose.

After a deliberate change, write the snapshots anew: `python tests/arch/test_help.py`.
"""

import contextlib
import io
import os
import re
import sys
from pathlib import Path
from unittest import mock

import pytest

from shardwise.cli import main

SNAPSHOTS = Path(__file__).with_name("help")


def help_of(*command: str) -> str:
    shown = io.StringIO()
    with (
        mock.patch.dict(os.environ, COLUMNS="100", NO_COLOR="1", TERM="dumb"),
        contextlib.redirect_stdout(shown),
        pytest.raises(SystemExit) as ended,
    ):
        main([*command, "--help"])
    assert ended.value.code == 0, command
    return shown.getvalue()


def current(*command: str) -> dict[str, str]:
    """The help of a command and, where it lists commands or actions as {one,two}, of each of these."""
    text = help_of(*command)
    listed = re.search(r"\{([a-z,]+)\}\s+\.\.\.", text)
    assert listed or command, "shardwise --help lists its commands"
    found = {"-".join(["shardwise", *command]): text}
    for name in listed[1].split(",") if listed else ():
        found |= current(*command, name)
    return found


def in_one_line(text: str) -> str:
    """Without the line breaks, and with the values of options as Python 3.13 and later write them."""
    return " ".join(re.sub(r"(-\w) (\S+), (--[\w-]+) \2", r"\1, \3 \2", text).split())


def test_help_is_frozen() -> None:
    found = current()
    frozen = {path.stem: path.read_text(encoding="utf-8") for path in SNAPSHOTS.glob("*.txt")}
    if sys.version_info >= (3, 13):
        found, frozen = ({name: in_one_line(text) for name, text in each.items()} for each in (found, frozen))
    assert found == frozen


if __name__ == "__main__":
    SNAPSHOTS.mkdir(exist_ok=True)
    for old in SNAPSHOTS.glob("*.txt"):
        old.unlink()
    for name, text in current().items():
        SNAPSHOTS.joinpath(f"{name}.txt").write_text(text, encoding="utf-8")
