"""What stops the comparison of a layout with one process. Whole verifications: tests/e2e/test_verify.py."""

from pathlib import Path

import pytest
import torch

from shardwise.base.errors import RunError
from shardwise.config import Config, load_config
from shardwise.verify.cell_training import Reference, make_trainer, measure, save, train_reference
from shardwise.verify.layouts import Cell
from shardwise.verify.miniature import miniature


@pytest.fixture(scope="module")
def config() -> Config:
    recipe = load_config("llama2-tiny", ["model.num_hidden_layers=1", "train.global_batch=2", "train.micro_batch=1"])
    return miniature(recipe, [Cell()], 2, has_accelerator=False)


def test_a_checkpoint_that_cannot_be_saved_is_told(config: Config, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"the checkpoint could not be saved: .*file"):
        save(make_trainer(config, Cell()), tmp_path / "file")


def test_tensors_of_another_model_are_named(config: Config, tmp_path: Path) -> None:
    source = train_reference(config, Cell(), tmp_path)
    found = Reference.load(tmp_path)
    weights = {name: tensor for name, tensor in found.weights.items() if name != "model.norm.weight"}
    (tmp_path / "other").mkdir()
    Reference(found.losses, weights | {"more.weight": torch.ones(2)}, found.gradients).save(tmp_path / "other")
    told = "the tensors of the model must be those of one process: they lack more.weight and have model.norm.weight"
    with pytest.raises(RunError, match=told):
        measure(config, Cell(), tmp_path / "other", source, tmp_path / "target")
