"""A new optimizer is its class and one record: dry run, plan, training with ZeRO-1, resume and verify then know it."""

from pathlib import Path
from typing import Any

from shardwise.config import load_config
from shardwise.verify.cell_training import train_reference
from shardwise.verify.layouts import Cell
from shardwise.verify.miniature import miniature
from shardwise.verify.tolerance import Tolerance
from tests.command_line import CommandLine
from tests.dist.one_moment import recorded, train_and_resume

RECIPE = "llama2-tiny"
CHOICE = "optimizer.name=momentum"


def test_a_dry_run_names_it_and_a_plan_lists_layouts_for_it(cli: CommandLine) -> None:
    with recorded():
        assert "\n# optimizer      momentum\n" in cli("train", RECIPE, CHOICE, "--dry-run").out
        assert cli.facts("plan", RECIPE, CHOICE, "--device", "cpu:2")["plans"]


def test_two_ranks_with_zero_train_and_resume_like_one_process(tmp_path: Path, ranks: Any) -> None:
    cell = Cell(ranks=2, zero=1)
    with recorded():
        config = miniature(load_config(RECIPE, [CHOICE]), [cell], 4, has_accelerator=False)
        source = train_reference(config, Cell(), tmp_path)
    for differences, state in ranks(2).run(train_and_resume, config, cell, tmp_path, source):
        assert differences.problems(Tolerance.of(config), "one process") == []
        assert state == ["moment"]
