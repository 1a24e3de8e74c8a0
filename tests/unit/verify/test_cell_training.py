"""What stops the comparison of a layout with one process. Whole verifications: tests/e2e/test_verify.py."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwise.base.errors import RunError
from shardwise.config import Config, load_config
from shardwise.verify.cell_training import ReferenceTraining, train_cell, train_reference
from shardwise.verify.layouts import Cell
from shardwise.verify.miniature import miniature
from shardwise.verify.tolerance import Tolerance


@pytest.fixture(scope="module")
def config() -> Config:
    return small(bitwise=False)


def small(*, bitwise: bool) -> Config:
    recipe = load_config("llama2-tiny", ["model.num_hidden_layers=1", "train.global_batch=2", "train.micro_batch=1"])
    return miniature(recipe, [Cell()], 2, has_accelerator=False, bitwise=bitwise)


def test_tensors_of_another_model_are_named(config: Config, tmp_path: Path) -> None:
    source = train_reference(config, Cell(), tmp_path)
    found = ReferenceTraining.load(tmp_path)
    weights = {name: tensor for name, tensor in found.weights.items() if name != "model.norm.weight"}
    (tmp_path / "other").mkdir()
    ReferenceTraining(found.losses, weights | {"more.weight": torch.ones(2)}, found.gradients).save(tmp_path / "other")
    told = "the tensors of the model must be those of one process: they lack more.weight and have model.norm.weight"
    with pytest.raises(RunError, match=told):
        train_cell(config, Cell(), tmp_path / "other", source, tmp_path / "target")


def test_other_bits_are_named(tmp_path: Path) -> None:
    config = small(bitwise=True)
    source = train_reference(config, Cell(), tmp_path)
    differences, _ = train_cell(config, Cell(), tmp_path, source, tmp_path / "same")
    assert differences.problems(Tolerance.of(config), "A") == []
    found = ReferenceTraining.load(tmp_path)
    middle, end = found.states
    states = (middle | {"exp_avg/lm_head.weight": "0" * 8}, end | {"the gradient norm of step 2": "0x1.0p+0"})
    next_losses = [loss * (1 + 2**-52) for loss in found.losses]
    (tmp_path / "other").mkdir()
    replace(found, losses=next_losses, states=states).save(tmp_path / "other")
    differences, _ = train_cell(config, Cell(), tmp_path / "other", source, tmp_path / "target")
    losses, resumed, *others = differences.problems(Tolerance.of(config), "A")
    assert losses.startswith("the losses differ by ")
    assert resumed.startswith("after the checkpoint of A was read the losses differ by ")
    assert others == [
        "exp_avg/lm_head.weight differs in the middle of the training, and must be equal",
        "after the checkpoint of A was read the gradient norm of step 2 differs at the end",
    ]
