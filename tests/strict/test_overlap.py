"""New parameters travel behind the next forward pass: no module reads one before it is complete."""

from collections.abc import Callable

import pytest
import torch

from shardwise.config import Config
from shardwise.models.blocks import units
from tests.dist.checkpoints import make_trainer
from tests.dist.training import FAMILIES, MODEL, make_config
from tests.rank_pool import RankPool

STEPS = 3
SIZES = {name: size for name, size in MODEL.items() if name not in ("family", "num_key_value_heads")}


def steps(config: Config, behind: bool) -> tuple[list[float], list[int], list[torch.Tensor]]:
    """Losses, the gathers that are under way after each step, and the parameters at the end."""
    trainer = make_trainer(config)
    gathers, losses, late = trainer.optimizer.gathers, [], []

    def train() -> None:
        for _ in range(STEPS):
            losses.append(trainer.step().loss)
            late.append(len(gathers._pending))

    if behind:
        with gathers.behind_forward(units(trainer.model), trainer.optimizer.buckets):
            train()
    else:
        train()
    return losses, late, [p.detach().cpu() for p in trainer.model.parameters()]


@pytest.mark.parametrize(
    ("world", "sections"),
    [
        (2, {}),
        (2, {"model": {"tie_word_embeddings": True}, "train": {"recompute": "full"}}),
        pytest.param(2, {"model": SIZES | FAMILIES["bert"]}, marks=pytest.mark.slow),
        pytest.param(2, {"model": SIZES | FAMILIES["gpt_neox"]}, marks=pytest.mark.slow),
        (4, {"parallel": {"tensor": 2, "sequence": True}}),
        (4, {"parallel": {"pipeline": 2, "schedule": "1f1b"}}),
    ],
    ids=["DP 2", "tied, full recompute", "BERT", "GPT-NeoX", "TP 2 and sequence parallelism", "PP 2"],
)
def test_gathers_end_before_their_parameters_are_read(
    world: int, sections: dict[str, dict[str, object]], strict: Callable[..., RankPool]
) -> None:
    """While a collective runs, the strict device shows NaN in its tensors."""
    optimizer = {"zero": 1, "bucket_mib": 0.02}
    config = make_config(**{"optimizer": optimizer, **sections})
    for plain, found in zip(
        strict(world).run(steps, config, False), strict(world).run(steps, config, True), strict=True
    ):
        assert found[0] == plain[0]
        assert plain[1] == [0] * STEPS
        assert all(late > 2 for late in found[1]), f"gathers under way after each step: {found[1]}"
        for a, b in zip(found[2], plain[2], strict=True):
            assert torch.equal(a, b)
