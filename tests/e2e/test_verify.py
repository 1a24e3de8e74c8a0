"""`shardwise verify` with real ranks: the contract kept, broken by a seeded fault, and a verification that is ended."""

import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardwise.config import Config
from shardwise.verify.layouts import Cell
from shardwise.verify.tolerance import ChoiceDifferences, LayoutDifferences
from shardwise.verify.verification import CellOutcome, Verification
from tests.arch.source import ROOT
from tests.e2e import processes
from tests.e2e.command import imported_first, outcome, shardwise, start, within
from tests.e2e.test_pages import assert_shown, blocks

PAGE = (ROOT / "docs" / "verify.md").read_text(encoding="utf-8")
FAULTS = """
import os

if "RANK" in os.environ:
    from shardwise.optim.buckets import Bucket
    from shardwise.train.passes import Passes

    start, forward = Bucket.start_reduction, Passes.run

    def scaled(self):  # at DP 2 alone: other buckets are of one rank
        if self.group.size == 2:
            self.gradients.mul_(1.01)
        start(self)

    def failing(self, *arguments, **options):
        if self._mesh.tp.size == 2:
            raise RuntimeError("no such kernel")
        return forward(self, *arguments, **options)

    Bucket.start_reduction, Passes.run = scaled, failing
"""
"""What a rank imports first: gradients of DP 2 are 1 % too large, and TP 2 fails."""


def on_the_page() -> tuple[list[str], str]:
    """The arguments of the page's first command, and its output with # for each number that differs by machine."""
    block, shown = re.findall(r"^```(?:sh|text)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[:2]
    return shlex.split(block.splitlines()[0], comments=True)[1:], plain(shown)


def plain(text: str) -> str:
    return " ".join(re.sub(r"\d\.\de-\d\d|\b0\b|\d\.\d{6}", "#", text).split())


def without_training(monkeypatch: pytest.MonkeyPatch, differences: LayoutDifferences) -> None:
    """All layouts differ by the same numbers."""

    def verify(_config: Config, cells: Sequence[Cell], _folder: Path) -> Verification:
        outcomes = [CellOutcome(cell, differences, ()) for cell in (*cells, Cell())]
        return Verification((4.8, 4.7), outcomes, choices=differences.choices.differing)

    monkeypatch.setattr("shardwise.verify.verification.verify", verify)


def test_the_page_shows_what_the_command_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_training(monkeypatch, LayoutDifferences(0.0, 1e-7, 2e-7, 1e-7, "w", "g"))
    arguments, shown = on_the_page()
    assert plain(within(*arguments, at=tmp_path).succeeded().out) == shown
    _, block = blocks("docs/verify.md")
    without_training(monkeypatch, LayoutDifferences(0.0, 1e-7, 2e-7, 1e-7, "w", "g", choices=ChoiceDifferences(3)))
    assert_shown(block, within(*shlex.split(block.code)[1:], at=tmp_path).succeeded().out)


@pytest.mark.slow
def test_the_page_runs(tmp_path: Path) -> None:
    arguments, shown = on_the_page()
    done = shardwise(*arguments, at=tmp_path, TMPDIR=str(tmp_path)).succeeded()
    assert plain(done.out) == shown, "the page shows another output than the command has"
    assert done.err == ""
    assert not list(tmp_path.iterdir()), "a verification leaves nothing behind"


def test_a_seeded_fault_is_found_and_named_and_the_other_layouts_go_on(tmp_path: Path) -> None:
    layouts = ("parallel.sequence=false", "optimizer.zero=1")
    hook = imported_first(FAULTS, tmp_path / "hook")
    done = shardwise(
        "verify", "llama2-tiny", "--nproc", "2", "--json", "--layouts", *layouts,
        at=tmp_path, TMPDIR=str(tmp_path), **hook,
    )  # fmt: skip
    assert done.code == 1, done.err
    found = json.loads(done.out)
    data, pipeline, tensor, alone = found["layouts"]
    assert found["broken"] == 2, [one["problems"] for one in found["layouts"]]
    assert any(re.match(r"the gradient of \S+ differs by 1\.\de-02 of its norm", text) for text in data["problems"])
    assert data["source"] == pipeline["source"] == "one process, on cpu", "a fault is passed on with its checkpoint"
    assert pipeline["problems"] == []
    assert "RuntimeError: no such kernel" in tensor["problems"][0]
    assert alone["problems"] == []
    assert alone["source"] == "one process, on cpu"


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    job = start("verify", "llama2-tiny", "--nproc", "2", "--layouts", "all", at=tmp_path, TMPDIR=str(tmp_path))
    assert processes.wait_for(lambda: len(processes.ranks(job.pid)) == 2, 60), "no ranks were started"
    ranks = processes.ranks(job.pid)
    os.kill(ranks[1], signal.SIGSTOP)  # it does not yet ask for its end with its parent, and rank 0 waits for it
    job.send_signal(signal.SIGINT)
    ended = outcome(job, 30)
    assert ended.code == 1
    assert ended.err == "shardwise: the verification was stopped by Ctrl-C (SIGINT)\n"
    assert processes.wait_for(lambda: not any(map(processes.alive, ranks.values())), 10), "a rank lives on"
    assert not list(tmp_path.iterdir())
