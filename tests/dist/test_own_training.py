"""Training of a model of the user's own: chance, evaluation, wrong losses and axes, hooks, pipeline stages."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.base.errors import ConfigError
from shardwise.config import Config
from shardwise.train.build import build_trainer
from shardwise.train.model_checks import mean_text
from shardwise_use.generation import TokenSampler, generate_tokens
from tests.dist import checkpoints
from tests.dist.dense import mesh as shared_mesh
from tests.dist.training import Outcome, make_config, make_data, train, whole
from tests.sweeps import few


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


@pytest.mark.parametrize(("name", "warned"), [("Mean", True), ("Dropping", False)])
def test_a_mean_is_not_taken_for_a_sum(name: str, warned: bool) -> None:
    made = trainer(name)
    text = mean_text(made.config.model, made.config.hooks.loss, made.step().loss)
    if not warned:
        assert text is None
        return
    assert "ids and targets [sequence, batch], must return the sum of its targets' losses, not their mean" in text


def test_a_mean_over_targets_and_swapped_axes_are_refused_before_a_step() -> None:
    with pytest.raises(ConfigError, match="forward must return the sum of its targets' losses, not their mean"):
        trainer("MeanOfTargets")
    assert all(module.training for module in trainer("Summing").model.modules())
    with pytest.raises(ConfigError, match=r"ids and targets must be read as \[sequence, batch\]"):
        trainer("Summing", axis=1)


def test_a_model_is_in_evaluation_mode_for_an_evaluation_alone() -> None:
    made = trainer("NeedsKey")
    made.evaluator.held_out()
    evaluated = len(made.model.keys)
    made.step()
    assert evaluated
    assert made.model.keys == [False] * evaluated + [True] * (len(made.model.keys) - evaluated)
    assert made.model.keys[-1]
    # What a user's own dropout layers go by.
    made, modes = trainer("Dropping"), []
    made.model.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    made.evaluator.held_out()
    assert set(modes) == {False}
    modes.clear()
    made.step()
    assert set(modes) == {True}


def test_hooks_train_alike_when_the_model_is_cut(ranks: Any) -> None:
    hooks = {
        "loss": "tests.own_hooks:cross_entropy",
        "optimizer": "tests.own_hooks:SignMomentum",
        "optimizer_options": {"momentum": 0.5},
    }
    plain = make_config()
    one = make_config(hooks=hooks)
    cut = make_config(hooks=hooks, parallel={"tensor": 2, "sequence": True})
    alone, whole = train(plain, steps=1), train(one)
    assert alone.losses[0] == pytest.approx(whole.losses[0], rel=1e-6)  # it is the family's own loss
    for outcome in ranks(2).run(train, cut):
        assert outcome.losses == pytest.approx(whole.losses, rel=1e-5)
        assert outcome.norms == pytest.approx(whole.norms, rel=1e-5)
        assert outcome.evaluation[0] == pytest.approx(whole.evaluation[0], rel=1e-5)
    assert whole.losses[3] < whole.losses[0]


SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
CELLS = [
    ("Sharded", {"tensor": 2, "schedule": "interleaved"}),
    ("Plain", {"schedule": "interleaved_zero_bubble"}),
    ("Plain", {"schedule": "dualpipev"}),
]


def configuration(name: str, **sections: Any) -> Config:
    return make_config(model={"family": f"tests.dist.own_blocks:{name}", **SIZES}, **sections)


@functools.cache
def alone(name: str) -> Outcome:
    return train(configuration(name))


@pytest.mark.parametrize(("name", "parallel"), few(CELLS, CELLS[0]))
def test_stages_train_like_one_process(name: str, parallel: dict[str, Any], ranks: Any) -> None:
    """PP 2 × TP or DP 2: the weights of one process to the bit, then its losses, norms and gradients."""
    wanted = alone(name)
    world = 2 if parallel.get("schedule") == "dualpipev" else 4  # it needs twice as many micro-batches as ranks
    outcomes = ranks(world).run(train, configuration(name, parallel={"pipeline": 2, **parallel}))
    found = whole(outcomes)
    for outcome in outcomes:
        assert outcome.losses == pytest.approx(wanted.losses, rel=1e-5)
        assert outcome.norms == pytest.approx(wanted.norms, rel=1e-5)
        assert outcome.evaluation == pytest.approx(wanted.evaluation, rel=1e-5)
    assert found.weights.keys() == wanted.weights.keys()
    assert found.gradients.keys() == wanted.gradients.keys()
    for key, weight in wanted.weights.items():
        assert torch.equal(found.weights[key], weight), f"{key} begins otherwise"
        gradient = wanted.gradients[key]
        assert (found.gradients[key] - gradient).norm() <= 1e-5 * gradient.norm(), f"the gradient of {key} differs"


def test_a_checkpoint_of_stages_goes_on_in_one_process(ranks: Any, tmp_path: Path) -> None:
    config = configuration("Plain", parallel={"pipeline": 2}, optimizer={"zero": 3})
    ranks(4).run(checkpoints.run, config, 2, 0, None, str(tmp_path))
    resumed = checkpoints.run(configuration("Plain"), 0, 2, checkpoints.step_folder(tmp_path, 2), None)
    assert resumed.losses == pytest.approx(alone("Plain").losses[2:], rel=1e-5)


def drawn(config: Config) -> tuple[list[int], float]:
    """Tokens that the model draws after a prompt, and a loss of the user's own."""
    mesh = shared_mesh(1, config.parallel.pipeline)
    trainer = build_trainer(config, mesh, make_data(config.model.vocab_size))
    loss = trainer.step().loss
    trainer.model.eval()
    sampler = TokenSampler(1.0, seed=3)
    return list(generate_tokens(trainer.model, mesh, [1, 2, 3], 8, sampler, parallel=config.parallel)), loss


def test_stages_draw_the_same_text_and_take_a_loss_of_the_users_own(ranks: Any) -> None:
    hooks = {"loss": "tests.own_hooks:cross_entropy"}
    tokens, loss = drawn(configuration("Plain", hooks=hooks))
    for found in ranks(2).run(drawn, configuration("Plain", hooks=hooks, parallel={"pipeline": 2})):
        assert found[0] == tokens
        assert found[1] == pytest.approx(loss, rel=1e-5)
    assert loss == pytest.approx(alone("Plain").losses[0], rel=1e-5)


def refused(config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        build_trainer(config, shared_mesh(1, 2), make_data(config.model.vocab_size))
    return str(caught.value)


def test_swapped_axes_of_stages_are_refused_on_every_rank(ranks: Any) -> None:
    for said in ranks(2).run(refused, configuration("Swapped", parallel={"pipeline": 2})):
        assert (
            "own_blocks:Swapped): ids and targets must be read as [sequence, batch], but a loss depends on the" in said
        )


def masks_of_blocks(config: Config) -> list[list[bool]]:
    """Of the blocks of this rank, in each micro-batch of a step."""
    trainer: Any = build_trainer(config, shared_mesh(1, 2), make_data(config.model.vocab_size))
    trainer.step()
    return [mask for stage in trainer.model for block in stage.blocks for mask in block.kept]


def test_plain_dropout_differs_between_stages(ranks: Any) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2}
    model = {"family": "tests.dist.own_blocks:Dropping", **sizes}
    first, last = ranks(2).run(masks_of_blocks, make_config(model=model, parallel={"pipeline": 2}))
    assert len(first) == len(last) == 4, "a block on each rank, and four micro-batches"
    assert len({tuple(mask) for mask in first + last}) == 8
