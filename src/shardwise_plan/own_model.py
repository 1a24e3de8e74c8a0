"""A model of the user's own in a plan: it is built without data, and a family's model like it stands for it."""

from __future__ import annotations

from shardwise.base import units
from shardwise.cli.train import check_user_code
from shardwise.config import Config, check_layout
from shardwise.estimates.memory import expected_memory
from shardwise.models.own_shapes import own_shapes


def sized_own(config: Config, fixed: set[str]) -> tuple[Config, int, str]:
    """The configuration with a family's model, the bytes that the own one adds, and what was counted, as a sentence.

    Keys that its class does not take, and the size of the micro-batch that was counted, are put into `fixed`.

    Raises:
        ConfigError: the class cannot be built, or its forward reads values of its input.
    """
    check_user_code(config)
    shapes = own_shapes(config, accelerator=True)
    fixed |= {"parallel.pipeline", "parallel.context", "parallel.expert", "train.micro_batch"}
    fixed |= set() if shapes.is_cut else {"parallel.tensor", "parallel.sequence"}
    fixed |= set() if shapes.recomputes else {"train.recompute"}
    sized = shapes.sized(config)
    alone = sized.with_keys(parallel={"tensor": 1, "sequence": False}, train={"recompute": "none"})
    memory = expected_memory(alone, check_layout(alone, 1), True)
    assert memory is not None, "the shapes of a family are known"
    counts = (
        f"{config.model.family} was built without data: {shapes.parameters:,} parameters, {shapes.token_flops:.4g} "
        f"FLOPs per token, {units.size(shapes.saved_bytes)} of activations (train.micro_batch="
        f"{config.train.micro_batch}); times are those of a Llama of the same width, depth and matrices"
    )
    return sized, max(0, shapes.saved_bytes - memory.activations - memory.loss), counts
