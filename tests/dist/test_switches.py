"""`train.switches`: each leaves every number and bit of a training as it is."""

from typing import Any

import pytest
import torch

from shardwise.base.errors import ConfigError, RunError
from shardwise.distributed import devices
from shardwise.optim.zero import ZeroRedundancyOptimizer
from tests.dist import dense, switches
from tests.dist.checkpoints import make_trainer
from tests.dist.test_zero import make_model
from tests.dist.training import make_config

CELLS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (1, {"precision": {"mode": "bfloat16"}}),
    (2, {"precision": {"mode": "mixed"}, "model": {"tie_word_embeddings": True}}),
    (2, {"optimizer": {"zero": 0}, "train": {"bitwise": True}, "parallel": {"grain": 1}}),
    (2, {"parallel": {"tensor": 2, "sequence": True}}),
    (2, {"parallel": {"pipeline": 2}}),
]


@pytest.mark.parametrize(
    ("world", "sections"),
    [pytest.param(*cell, marks=pytest.mark.slow if number else ()) for number, cell in enumerate(CELLS)],
)
def test_an_update_in_the_backward_pass_has_the_same_bits(ranks: Any, world: int, sections: dict[str, Any]) -> None:
    for is_equal, updated in dense.run(ranks, world, switches.both, sections, "update_in_backward"):
        assert is_equal
        assert updated > switches.STEPS, "buckets were updated before the pass ended"


def test_switches_for_cuda_do_nothing_elsewhere() -> None:
    assert switches.both({}, "cuda_graphs") == switches.both({}, "flash_attention_3") == (True, 0)


def test_a_gpu_without_flash_attention_3_refuses_it() -> None:
    with pytest.raises(ConfigError, match=r"needs torch 2\.11 and the module flash_attn_interface: No module named"):
        devices.use_flash_attention_3(torch.device("cuda"))


def test_a_loss_that_is_not_finite_is_told_with_the_weights_that_it_changed() -> None:
    config = make_config(optimizer={"max_norm": None}, train={"switches": ("update_in_backward",)})
    trainer = make_trainer(config)
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(float("nan"))
    with pytest.raises(RunError, match="weights are updated: go on from a checkpoint, without update_in_backward"):
        trainer.step()


def test_an_optimizer_that_clips_refuses() -> None:
    optimizer = ZeroRedundancyOptimizer(make_model().parameters(), torch.optim.AdamW, lr=1e-3)
    with pytest.raises(ConfigError, match="needs max_norm=None, stage 0 or 1"):
        optimizer.update_in_backward()
