"""A model of the user's own in a plan: it is built without data, and a family's model like it stands for it."""

from __future__ import annotations

from shardwise.base import units
from shardwise.base.mesh_axes import CHOSEN_DEGREES, TENSOR
from shardwise.cli.train import check_user_code
from shardwise.config import Config
from shardwise.estimates import memory
from shardwise.models.own_shapes import own_shapes


def own_model_stand_in(config: Config, fixed: set[str]) -> tuple[Config, str]:
    """The configuration to plan with a family's model in place of the user's own, and what was counted of that one.

    Keys that its class does not take are put into `fixed`. ConfigError: the class cannot be built, or its forward reads
    values of its input.
    """
    check_user_code(config)
    shapes = own_shapes(config, accelerator=True)
    fixed |= {axis.key for axis in CHOSEN_DEGREES if axis is not TENSOR}
    fixed |= set() if shapes.is_cut else {"parallel.tensor", "parallel.sequence"}
    fixed |= set() if shapes.recomputes else {"train.recompute"}
    return memory.config_for_memory_estimate(config, shapes, True), (
        f"{config.model.family} was built without data: {shapes.parameters:,} parameters, {shapes.token_flops:.4g} "
        f"FLOPs per token, {units.size(shapes.saved_bytes)} of activations (train.micro_batch="
        f"{config.train.micro_batch}); times are those of a Llama of the same width, depth and matrices"
    )
