"""Dropout and recompute of every family: the same masks again, and masks that agree where they should."""

from typing import Any

import pytest
import torch

from shardwise.config import Config
from shardwise.train.build import build_trainer
from tests.dist.cells import DROPOUT
from tests.dist.dense import mesh as shared_mesh
from tests.dist.training import FAMILIES, make_config, make_data, sizes, train

SIZES = sizes(heads=4, spread=0.05)


def configuration(family: str, dropout: str, sequence: bool = True, **train: Any) -> Config:
    model = SIZES | FAMILIES[family] | dict.fromkeys(DROPOUT[family], 0.1)
    parallel = {"tensor": 2, "sequence": sequence}
    return make_config(model=model, parallel=parallel, train={"micro_batch": 2, "dropout_mode": dropout, **train})


@pytest.mark.slow
@pytest.mark.parametrize("dropout", ["fast", "invariant"])
@pytest.mark.parametrize("family", FAMILIES)
def test_recompute_draws_the_same_masks(family: str, dropout: str, ranks: Any) -> None:
    """To the bit, on TP 2 × DP 2 with sequence parallelism, accumulation and dropout."""
    wanted, *others = (
        ranks(4).run(train, configuration(family, dropout, recompute=how), 1)[0]
        for how in ("none", "selective", "full")
    )
    for how, found in zip(("selective", "full"), others, strict=True):
        assert found.losses == wanted.losses, f"{how} recompute changes the losses"
        for name, gradient in wanted.gradients.items():
            assert torch.equal(found.gradients[name], gradient), f"{how} recompute changes the gradient of {name}"


def losses_and_masks(config: Config) -> tuple[list[float], list[bool]]:
    """Losses on this rank, and of the first block's output which elements its last dropout removed."""
    mesh = shared_mesh(config.parallel.tensor)
    trainer = build_trainer(config, mesh, make_data(config.model.vocab_size))
    removed: list[bool] = []
    layer = trainer.model.layers[0]  # type: ignore[index, union-attr]
    layer.mlp_dropout.register_forward_hook(lambda _module, _args, y: removed.extend((y == 0).flatten().tolist()))
    losses = [trainer.step().loss for _ in range(3)]
    return losses, removed


@pytest.mark.parametrize("sequence", [False, True])
def test_fast_masks_agree_where_activations_are_copies_and_differ_elsewhere(sequence: bool, ranks: Any) -> None:
    everyone = ranks(4).run(losses_and_masks, configuration("gpt", "fast", sequence))
    for losses, _ in everyone:
        assert losses == everyone[0][0], "ranks of one job report different losses"
    (_, first), (_, neighbour), (_, other_replica), _ = everyone
    assert len(first) == len(neighbour) > 1000
    agreeing = sum(a == b for a, b in zip(first, neighbour, strict=True)) / len(first)
    if sequence:
        assert abs(agreeing - 0.82) < 0.02, f"masks of other parts of the sequence agree on {agreeing:.0%}, not 82 %"
    else:
        assert agreeing == 1.0, "the residual stream is a copy on both ranks, but its masks differ"
    between = sum(a == b for a, b in zip(first, other_replica, strict=True)) / len(first)
    assert abs(between - 0.82) < 0.02, f"masks of other samples agree on {between:.0%}, not 82 %"
