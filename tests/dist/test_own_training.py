"""What training does for a model of the user's own: chance, evaluation, a loss that is a mean, and swapped axes."""

from typing import Any

import pytest

from shardwise.base.errors import ConfigError
from shardwise.train.build import build_trainer
from shardwise.train.model_checks import mean_text
from tests.dist.dense import mesh as shared_mesh
from tests.dist.training import make_config, make_data


def trainer(name: str, **keys: Any) -> Any:
    config = make_config(model={"family": f"tests.dist.own_models:{name}", "vocab_size": 131, **keys})
    mesh = shared_mesh(1)
    return build_trainer(config, mesh, make_data())


def masks() -> tuple[list[list[bool]], list[list[bool]]]:
    """Of two steps, and of the same two steps of a second trainer."""
    first, again = trainer("Dropping"), trainer("Dropping")
    for one in (first, again):
        one.step()
        one.step()
    return first.model.kept, again.model.kept


def test_plain_dropout_differs_between_replicas_micro_batches_and_steps_and_can_be_repeated(ranks: Any) -> None:
    everyone = ranks(2).run(masks)
    for first, again in everyone:
        assert first == again, "the same step drew other masks"
    drawn = [tuple(mask) for kept, _ in everyone for mask in kept]
    assert len(drawn) == 2 * 2 * 2, "2 ranks, 2 steps, 2 micro-batches"
    assert len(set(drawn)) == len(drawn), "two masks of other samples are the same"


def test_the_key_is_none_in_evaluation() -> None:
    made = trainer("NeedsKey")
    made.evaluator.held_out()
    evaluated = len(made.model.keys)
    made.step()
    assert evaluated
    assert made.model.keys == [False] * evaluated + [True] * (len(made.model.keys) - evaluated)
    assert made.model.keys[-1]


@pytest.mark.parametrize(("name", "warned"), [("Mean", True), ("Dropping", False)])
def test_a_mean_is_not_taken_for_a_sum(name: str, warned: bool) -> None:
    made = trainer(name)
    text = mean_text(made.config.model, made.config.hooks.loss, made.step().loss)
    if not warned:
        assert text is None
        return
    assert "ids and targets [sequence, batch], must return the sum of its targets' losses, not their mean" in text


def test_a_mean_over_targets_is_refused_before_a_step() -> None:
    with pytest.raises(ConfigError, match="forward must return the sum of its targets' losses, not their mean"):
        trainer("MeanOfTargets")


def test_a_model_that_swaps_sequence_and_batch_is_refused() -> None:
    assert all(module.training for module in trainer("Summing").model.modules())
    with pytest.raises(ConfigError, match=r"ids and targets must be read as \[sequence, batch\]"):
        trainer("Summing", axis=1)


def test_a_model_is_in_evaluation_mode_for_an_evaluation_alone() -> None:
    """What a user's own dropout layers go by."""
    made, modes = trainer("Dropping"), []
    made.model.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    made.evaluator.held_out()
    assert set(modes) == {False}
    modes.clear()
    made.step()
    assert set(modes) == {True}
