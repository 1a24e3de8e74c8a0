"""Choices of experts that differ from those of one process: which are counted, and which are no rounding."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardwise.config import load_config
from shardwise.config.routing import Routing
from shardwise.distributed.mesh import Group
from shardwise.layers.experts import choose
from shardwise.verify import recorded_choices
from shardwise.verify.cell_training import ReferenceTraining, train_cell, train_reference
from shardwise.verify.layouts import Cell
from shardwise.verify.miniature import miniature
from shardwise.verify.tolerance import Tolerance


def test_a_choice_that_no_rounding_explains_is_told_and_counted_once(tmp_path: Path) -> None:
    """The worst experts in the place of the best."""
    recipe = load_config("olmoe-tiny", ["model.num_hidden_layers=1", "train.global_batch=2"])
    config = miniature(recipe, [Cell()], 2, has_accelerator=False)
    source = train_reference(config, Cell(), tmp_path)
    number = sum(tensor.numel() for tensor in ReferenceTraining.load(tmp_path).choices.values())
    assert number == 2 * 4 * 4 * 16 * 2, "steps, blocks, samples, tokens, experts of each"

    def worst(routing: Routing, scores: Tensor) -> Tensor:
        return choose(routing, -scores)

    with mock.patch.object(recorded_choices, "choose", worst):
        differences, _ = train_cell(config, Cell(), tmp_path, source, tmp_path / "target")
    assert differences.choices.differing == number
    (told,) = differences.problems(Tolerance.of(config), "A")
    assert told == (
        "the choice of experts by model.layers.0.mlp.gate for token 0 of sample 0 is not that of one process, though "
        "no scores were nearly equal"
    )
    by_rank = [{("gate", 1): 2, ("gate", 2): 1}, {("gate", 1): 2}]
    with mock.patch.object(recorded_choices.collectives, "all_gather_objects", return_value=by_rank):
        assert recorded_choices._joined({}, Group()) == {("gate", 1): 2, ("gate", 2): 1}


@pytest.mark.parametrize(
    ("routing", "scores", "wanted", "is_wrong"),
    [
        # A third group has nearly the score of the one that stays.
        (
            Routing(8, 3, groups=4, chosen_groups=2),
            [0.5, 0.5 - 2e-6, 0.5, 0.5, 0.5, 0.5 - 1e-6, 0.5, 0.5 - 2e-6],
            [0, 1, 2],
            False,
        ),
        (Routing(4, 2), [0.4, 0.3, 0.3 - 1e-7, 0.1], [0, 2], False),
        (Routing(4, 2), [0.4, 0.3, 0.3 - 1e-4, 0.1], [0, 2], True),
        # The sums of the groups' scores are nearly equal, and no two scores are.
        (Routing(6, 2, groups=3, chosen_groups=1), [0.6, 0.4, 0.9, 0.1 - 1e-7, 0.0, 0.0], [2, 3], False),
        (Routing(6, 2, groups=3, chosen_groups=1), [0.6, 0.4, 0.9, 0.09, 0.0, 0.0], [2, 3], True),
    ],
)
def test_choices_of_nearly_equal_scores(
    routing: Routing, scores: list[float], wanted: list[int], is_wrong: bool
) -> None:
    found = recorded_choices.RecordedChoices({}, 1e-5)
    given = torch.tensor([scores])
    layer = mock.Mock(router=mock.Mock(routing=routing))
    found._compare(layer, given, choose(routing, given), torch.tensor([wanted]), [(("gate", 3), 5)])
    assert list(found.differing) == [(("gate", 3), 5)]
    assert bool(found.wrong) == is_wrong
