"""The layers of a model whose products are in fp8: those in its blocks, which are the entries of its module lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from shardwise.base.errors import ConfigError
from shardwise.config import Config
from shardwise.config.size_rules import FP8_MULTIPLE
from shardwise.distributed.mesh import Group
from shardwise.distributed.placement import of_or_whole
from shardwise.layers.fp8 import Scaling, keep_scales
from shardwise.layers.linear import linear_layers
from shardwise.layers.units import units


def multiply_in_fp8(model: nn.Module, config: Config, context_group: Group | None = None) -> None:
    """Let all column- and row-parallel layers in the blocks of a model multiply in fp8.

    Args:
        context_group: the ranks that share each sample; None: each rank has samples of its own.

    Raises:
        ConfigError: the rank's part of a layer has a width that fp8 products do not take, or a model of the user's own
            has no such layer.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    layers = [layer for blocks in lists for layer in linear_layers(blocks)]
    if not layers and config.shapes is None:
        raise ConfigError(
            f"precision.matmul (fp8) must be left out with model.family {config.model.family}, which has no column- or "
            "row-parallel layer in a torch.nn.ModuleList"
        )
    for layer in layers:
        outputs, inputs = layer.weight.shape
        if outputs % FP8_MULTIPLE or inputs % FP8_MULTIPLE:
            raise ConfigError(
                f"widths of each rank's linear layers ({inputs} and {outputs}) must be multiples of {FP8_MULTIPLE} "
                "with precision.matmul (fp8): change them, or leave precision.matmul out"
            )
        cuts_outputs = not of_or_whole(layer.weight).cuts_columns
        layer.scaling = Scaling(layer.group, cuts_outputs, context_group or Group())


class WeightScales:
    """The scales of a model's weights during a step, whose micro-batches all have the same weights.

    The ranks agree on those of a unit, such as a block, in its first forward pass, where ZeRO-3 has gathered it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._is_kept = False
        self._weights: list[nn.Parameter] = []
        for unit, parameters in units(model).items():
            layers = [layer for layer in linear_layers(unit) if layer.scaling and layer.weight in set(parameters)]
            for group in dict.fromkeys(layer.group for layer in layers):
                weights = [layer.weight for layer in layers if layer.group is group]
                unit.register_forward_pre_hook(partial(self._before_forward, weights, group))
                self._weights += weights

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, no weight changes."""
        self._is_kept = True
        try:
            yield
        finally:
            self._is_kept = False
            for weight in self._weights:
                cast(Any, weight).fp8_scale = None

    @torch.no_grad()
    def _before_forward(self, weights: Sequence[nn.Parameter], group: Group, *_: object) -> None:
        if self._is_kept and getattr(weights[0], "fp8_scale", None) is None:
            keep_scales(weights, group)
