"""docs/outputs.md: its commands run, with a smaller model, and they print what it shows."""

import re
import shlex
from pathlib import Path

import pytest

from shardwise_watch.curves import LOSSES
from tests.arch.source import ROOT
from tests.e2e.command import metrics, miniature, shardwise, within
from tests.e2e.test_pages import blocks

PAGE = (ROOT / "docs" / "outputs.md").read_text(encoding="utf-8")


def shape(line: str) -> str:
    """A line without its numbers, and without the folder of runs."""
    return re.sub(r"\S*/runs/", "runs/", re.sub(r"[\d,.]+(e-\d+)?( (s|ms|k|M)\b)?", "#", line))


def test_the_page_names_what_a_loss_may_be_called() -> None:
    assert [name for name in LOSSES if f"`{name}`" not in PAGE.replace("\n", " ")] == []


@pytest.mark.slow
def test_the_commands_print_what_the_page_shows(tmp_path: Path) -> None:
    (block,) = blocks("docs/outputs.md")
    commands = block.code.replace("llama2-tiny", f"{miniature(tmp_path)} train.steps=20 train.eval_every=0")
    *trainings, comparison = (shlex.split(line)[1:] for line in commands.splitlines())
    printed = [shardwise(*training, at=tmp_path).succeeded().out for training in trainings]
    printed.append(within(*comparison, at=tmp_path).succeeded().out)
    assert [event["step"] for event in metrics(tmp_path / "runs/tiny", "step")] == [5, 10, 15, 20]
    assert (tmp_path / "loss.svg").exists()
    shapes = {shape(line) for text in printed for line in text.splitlines()}
    shown = re.sub(r"\\\n +|^\.\.\.\n", "", block.shown, flags=re.MULTILINE).splitlines()
    assert len(shown) == 10
    assert [line for line in shown if shape(line) not in shapes] == [], "the page shows lines that are not printed"
