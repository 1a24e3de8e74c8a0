"""`shardwise verify`: what it refuses, and what it prints of what was found."""

import json
from pathlib import Path

import pytest

from shardwise.cli.verify import _Verified
from shardwise.config import load_config
from shardwise.verify.layouts import Cell, layouts_to_verify, parse_layouts
from shardwise.verify.miniature import miniature
from shardwise.verify.tolerance import LayoutDifferences
from shardwise.verify.verification import CellOutcome, Verification
from tests.command_line import CommandLine

EXACT = LayoutDifferences(0.0, 9.8e-8, 4.1e-7, 1e-7, "w", "g")


@pytest.fixture(autouse=True)
def _nothing_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shardwise.base.hardware.accelerators", lambda: ("cpu", 0))


def test_more_ranks_than_accelerators_are_refused(monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    monkeypatch.setattr("shardwise.base.hardware.accelerators", lambda: ("nvidia", 2))
    said = cli.refused("verify", "llama2-tiny", "--nproc", "4")
    assert "--nproc (4) must be at most the number of accelerators (2): " in said


def verified(*layouts: str, failing: int = 0) -> _Verified:
    """Of which the first `failing` layouts broke the contract, the first of them without any number."""
    recipe = load_config("gpt3-23b")
    cells = layouts_to_verify(recipe, "cpu", 8, parse_layouts(layouts))
    config = miniature(recipe, cells, 4, has_accelerator=False)
    outcomes = [CellOutcome(cell, EXACT, ()) for cell in cells]
    if failing:
        outcomes[:failing] = [CellOutcome(cell, EXACT, ("the losses differ by 1.0e-03",)) for cell in cells[:failing]]
        broken = "rank 1 failed: RuntimeError: broken\ntraceback: /tmp/rank-0001.log"
        outcomes[0] = CellOutcome(cells[0], None, (broken,))
    return _Verified("gpt3-23b", config, Verification((5.0, 4.9), [*outcomes, CellOutcome(Cell(), EXACT, ())]), ())


@pytest.mark.parametrize(("layouts", "failing"), [((), 2), (("all",), 0)])
def test_a_row_for_each_layout(layouts: tuple[str, ...], failing: int, capsys: pytest.CaptureFixture[str]) -> None:
    verified(*layouts, failing=failing).show()
    lines = capsys.readouterr().out.splitlines()
    table = lines[next(number for number, line in enumerate(lines) if line.lstrip().startswith("TP  ")) :]
    assert ("recompute selective" in lines[lines.index(table[0]) - 1]) != bool(layouts), "what all share stands above"
    assert len(table[1 : table.index("")]) == (912 if layouts else 25)
    assert sum(line.startswith("✗") for line in table) == failing
    assert ("BROKEN by" in lines[-1]) == bool(failing)
    assert ("  traceback: /tmp/rank-0001.log" in lines) == bool(failing)


def test_json_has_every_number() -> None:
    facts = json.loads(json.dumps(verified(failing=1).facts()))
    assert (facts["broken"], len(facts["layouts"])) == (1, 26)
    assert facts["layouts"][1]["gradients"] == EXACT.gradients
    assert facts["layouts"][0]["problems"]
    assert facts["miniature"]["model"]["family"] == "gpt"
