"""Ranks but the first write to their logs, native output included."""

import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.base.terminal import take_any_character
from shardwise.launch.rank_output import output_restored

SCRIPT = """
import os, sys
from pathlib import Path
from shardwise.launch.rank_output import redirect
print("before")
redirect(int(sys.argv[1]), Path(sys.argv[2]))
print("printed")
os.write(1, b"native out\\n")
os.write(2, b"native error\\n")
os.kill(os.getpid(), 9)
"""


def run(rank: int, log: Path) -> str:
    command = [sys.executable, "-c", SCRIPT, str(rank), str(log)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout


def test_all_ranks_but_the_first_write_to_their_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "rank-0001.log"
    assert run(1, log) == "before\n"
    assert run(1, log) == "before\n"
    assert log.read_text() == "printed\nnative out\nnative error\n" * 2
    log = tmp_path / "rank-0000.log"
    assert "native out" in run(0, log)
    assert not log.exists()


def test_fault_15_a_training_of_a_program_prints_any_character(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "out").open("w", encoding="ascii") as file:
        monkeypatch.setattr(sys, "stdout", file)
        with output_restored():
            take_any_character()
            print("TP 2 × PP 2")
        with pytest.raises(UnicodeEncodeError):
            print("×")
        file.truncate()
    assert (tmp_path / "out").read_text(encoding="ascii") == "TP 2 ? PP 2\n"
