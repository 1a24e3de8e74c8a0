"""Each flag of eleven other programs, typed alone, is answered by what means the same here, or by why nothing does."""

import shlex
from pathlib import Path

import pytest

from tests.command_line import CommandLine

RECORD = Path(__file__).parent / "other_flags.txt"
ROWS = [
    tuple(cell.strip() for cell in line.split("|"))
    for line in RECORD.read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]


def said_to(flag: str, cli: CommandLine) -> list[str]:
    return cli.refused("train", "llama2-tiny", *shlex.split(flag)).strip().splitlines()


@pytest.mark.parametrize("program", sorted({program for program, _, _ in ROWS}))
def test_each_flag_is_answered_rightly(program: str, cli: CommandLine) -> None:
    for _, flag, answer in (row for row in ROWS if row[0] == program):
        first, *rest = said_to(flag, cli)
        if answer.startswith("…"):
            assert answer.removeprefix("… ") in first, (flag, first)
            # What can be left out is left out of the corrected command.
            left_out = ["corrected: shardwise train llama2-tiny"] if answer.startswith("… leave it out") else []
            assert rest == left_out, (flag, rest)
        else:
            assert rest == [f"corrected: shardwise train llama2-tiny {answer}"], (flag, first)


def test_the_record_has_every_program() -> None:
    assert len(ROWS) == 202
    assert len({program for program, _, _ in ROWS}) == 11
