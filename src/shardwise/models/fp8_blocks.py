"""The layers of a model whose products are in fp8: those in its blocks, which are the entries of its module lists."""

from __future__ import annotations

from torch import nn

from shardwise.base.errors import ConfigError
from shardwise.config import Config
from shardwise.config.size_rules import FP8_MULTIPLE
from shardwise.layers.fp8 import Scaling
from shardwise.layers.linear import RowParallelLinear, linear_layers


def multiply_in_fp8(model: nn.Module, config: Config) -> None:
    """Let all column- and row-parallel layers in the blocks of a model multiply in fp8.

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
        layer.scaling = Scaling(layer.group, cuts_outputs=not isinstance(layer, RowParallelLinear))
