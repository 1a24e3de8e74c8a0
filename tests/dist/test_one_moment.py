"""A new optimizer is its class and one record: dry run, plan, training with ZeRO-1, resume and verify then know it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.cli.entry import main
from shardwise.config import Layout, load_config
from shardwise.estimates.memory import checkpoint_bytes, expected_memory
from shardwise.verify.cell_training import train_reference
from shardwise.verify.layouts import Cell
from shardwise.verify.miniature import miniature
from shardwise.verify.tolerance import Tolerance
from tests.dist.one_moment import recorded, train_and_resume
from tests.rank_pool import RankPool

RECIPE = "llama2-tiny"
CHOICE = "optimizer.name=momentum"


def test_a_dry_run_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    with recorded():
        assert main(["train", RECIPE, CHOICE, "--dry-run"]) == 0
    assert "\n# optimizer      momentum\n" in capsys.readouterr().out


def test_a_plan_lists_layouts_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    with recorded():
        assert main(["plan", RECIPE, CHOICE, "--device", "cpu:2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plans"]


@pytest.mark.parametrize("mode", ["float32", "mixed"])
def test_memory_and_checkpoint_are_smaller_by_one_moment(mode: str) -> None:
    layout = Layout(2)
    with recorded():
        configs = [
            load_config(RECIPE, [choice, f"precision.mode={mode}"]) for choice in (CHOICE, "optimizer.name=adamw")
        ]
        memory, adamw_memory = (expected_memory(config, layout) for config in configs)
        saved, adamw_saved = (checkpoint_bytes(config) for config in configs)
    assert memory is not None
    assert adamw_memory is not None
    assert saved is not None
    assert adamw_saved is not None
    itemsize = 4 if mode == "float32" else 2
    elements = memory.parameters // itemsize
    assert adamw_memory.optimizer - memory.optimizer == 4 * elements // layout.data
    assert adamw_memory.total - memory.total == 4 * elements // layout.data
    weights = saved // (itemsize + 4 * (1 if mode == "float32" else 2))
    assert adamw_saved - saved == 4 * weights


def test_two_ranks_with_zero_train_and_resume_like_one_process(
    tmp_path: Path, ranks: Callable[[int], RankPool]
) -> None:
    cell = Cell(ranks=2, zero=1)
    with recorded():
        config = miniature(load_config(RECIPE, [CHOICE]), [cell], 4, has_accelerator=False)
        source = train_reference(config, Cell(), tmp_path)
    for differences, state in ranks(2).run(train_and_resume, config, cell, tmp_path, source):
        assert differences.problems(Tolerance.of(config), "one process") == []
        assert state == ["moment"]
