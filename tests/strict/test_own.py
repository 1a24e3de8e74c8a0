"""Programs and models of a user's own on the strict device."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from shardwise import LAMB
from shardwise.config import Config
from tests.dist import test_drift as drift
from tests.dist import test_own_loop as loops
from tests.dist import test_own_training as training
from tests.dist.checkpoints import make_trainer
from tests.dist.own_models import Plain
from tests.dist.training import make_config
from tests.rank_pool import Pools
from tests.strict.ranks import OnDevice

scaled = loops.test_all_ranks_skip_a_scaled_step_whose_gradient_is_not_finite_on_one


@pytest.mark.parametrize(
    "test",
    [
        loops.test_frozen_parameters_take_the_first_ranks_values,
        loops.test_other_parameters_on_another_rank_are_refused_with_the_first_difference,
        loops.test_layers_without_a_seed_agree_on_the_first_ranks,
        loops.test_clips_the_whole_models_gradient_by_hand_with_and_without_overlap,
        partial(scaled, True, {}),
        partial(scaled, False, {"optimizer_class": LAMB, "lr": 0.01}),
        loops.test_tensor_parallel_ranks_skip_a_scaled_step_together,
        training.test_plain_dropout_differs_between_replicas_micro_batches_and_steps_and_can_be_repeated,
    ],
    ids=lambda test: getattr(test, "func", test).__name__.removeprefix("test_"),
)
def test_loops_that_name_no_device(test: Callable[[Any], None], strict: Pools) -> None:
    """What tests/dist finds on the CPU, with `torch.set_default_device`."""
    test(lambda size: OnDevice(strict(size)))


def steps(config: Config) -> list[float]:
    trainer = make_trainer(config)
    return [*(trainer.step().loss for _ in range(3)), *trainer.evaluator.held_out()]


def state_after_a_step() -> bool:
    """Whether a step with dropout leaves the device's generator as it was, for what the user draws."""
    trainer = training.trainer("Dropping")
    before = torch.strict.get_rng_state()
    trainer.step()
    return torch.equal(torch.strict.get_rng_state(), before)


def test_a_users_own_random_numbers_are_theirs(strict: Pools) -> None:
    assert strict(1).run(state_after_a_step) == [True]


def test_a_model_whose_layers_have_no_seed(strict: Pools) -> None:
    """With tensor parallelism it is trained and evaluated as in one process on the CPU."""
    model = {"family": "tests.dist.own_models:Sharded", "vocab_size": 131}
    wanted = steps(make_config(model=model))
    for found in strict(2).run(steps, make_config(model=model, parallel={"tensor": 2})):
        assert found == pytest.approx(wanted, rel=1e-6)


def ties() -> list[bool]:
    """Whether modules that share a weight share it as the constructor made them, and after the model has moved."""
    config = make_config(model={"family": "tests.dist.own_models:Plain", "vocab_size": 131})
    model = make_trainer(config).model
    made = Plain(131)
    made.to(torch.accelerator.current_accelerator())
    return [each.head.weight is each.embedding.weight for each in (made, model)]


def test_a_tie_survives_the_move_to_the_device(strict: Pools) -> None:
    """`Module.to` alone would break it there."""
    assert strict(1).run(ties) == [[False, True]]


def test_copies_that_drift_apart_are_found(strict: Pools) -> None:
    """A norm is on both tensor-parallel ranks, and a row of Q on one."""
    assert strict(2).run(drift.drift, 2, torch.float32, {1: (drift.QKV, 0, 3)}) == [None] * 2
    said = strict(2).run(drift.drift, 2, torch.float32, {1: (drift.NORM, 63, 31)})
    text = f"step 5: replicated parameters have drifted apart: model.{drift.NORM} on ranks [1] differs from rank 0"
    assert said == [f"{text} (`shardwise explain drifted-parameters`)"] * 2
