"""The command line is a contract: its help is frozen in tests/arch/help and changes only on purpose.

After a deliberate change, write the snapshots anew: `python tests/arch/test_help.py`.
"""

import contextlib
import importlib
import io
import os
import re
import sys
from pathlib import Path
from unittest import mock

from shardwise.cli import main
from shardwise.cli.entry import COMMANDS
from shardwise.cli.help import module_of

SNAPSHOTS = Path(__file__).with_name("help")


def help_of(*command: str) -> str:
    shown = io.StringIO()
    with mock.patch.dict(os.environ, COLUMNS="80", NO_COLOR="1", TERM="dumb"), contextlib.redirect_stdout(shown):
        try:
            code: object = main([*command, "--help"])
        except SystemExit as ended:  # argparse's
            code = ended.code
    assert code == 0, command
    return shown.getvalue()


def current() -> dict[str, str]:
    """The help of the command line, of each command and of each action, in a terminal of 80 columns."""
    names: list[list[str]] = [[]]
    for command in COMMANDS:
        actions = getattr(importlib.import_module(module_of(command)), "ACTIONS", ())
        names += [[command], *([command, action] for action in actions)]
    return {"-".join(["shardwise", *name]): help_of(*name) for name in names}


def in_one_line(text: str) -> str:
    """Without the line breaks, and with the values of options as Python 3.13 and later write them."""
    return " ".join(re.sub(r"(-\w) (\S+), (--[\w-]+) \2", r"\1, \3 \2", text).split())


def test_help_is_frozen() -> None:
    helps = current()
    frozen = {path.stem: path.read_text(encoding="utf-8") for path in SNAPSHOTS.glob("*.txt")}
    found = helps
    if sys.version_info >= (3, 13):
        found, frozen = ({name: in_one_line(text) for name, text in each.items()} for each in (helps, frozen))
    assert found == frozen
    wide = {name: [line for line in text.splitlines() if len(line) > 80] for name, text in helps.items()}
    assert not {name: lines for name, lines in wide.items() if lines}
    # But for the usage, whose parts argparse keeps whole.
    cut = {name: re.findall(r"\w-\n", text) for name, text in helps.items()}
    assert not {name: ends for name, ends in cut.items() if ends}
    text = help_of()
    assert [line.split()[0] for line in re.findall(r"(?m)^  ([a-z].+)", text)] == COMMANDS


if __name__ == "__main__":
    SNAPSHOTS.mkdir(exist_ok=True)
    for old in SNAPSHOTS.glob("*.txt"):
        old.unlink()
    for name, text in current().items():
        SNAPSHOTS.joinpath(f"{name}.txt").write_text(text, encoding="utf-8")
