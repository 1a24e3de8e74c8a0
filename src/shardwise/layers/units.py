"""The units of a model: modules whose forward pass needs some of the parameters, and nobody else does at that time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from shardwise.distributed.mesh import Group
from shardwise.layers.embedding import ParallelEmbedding, ParallelLMHead
from shardwise.layers.linear import linear_layers


def unit_roots(model: nn.Module) -> list[nn.Module]:
    """Return the modules inside which a model's units are numbered: its pipeline stages, or the model itself."""
    return list(model) if isinstance(model, nn.ModuleList) else [model]


def parameters_by_unit(model: nn.Module) -> dict[nn.Module, list[nn.Parameter]]:
    """Map the model, its stages, embeddings, blocks and heads to the parameters that no unit inside them has.

    A call of a unit reads no other parameters than these before it calls the units inside it. Units of a stage are in
    the order of the model. A tied weight is in the embedding and in the head.
    """
    # Other small modules are no units: methods that are not their forward may use them, so that a hook comes too late.
    modules: dict[nn.Module, None] = {model: None}
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            modules |= dict.fromkeys(module)
        elif isinstance(module, ParallelEmbedding | ParallelLMHead):
            modules[module] = None
    in_order = [module for module in model.modules() if module in modules]
    return {unit: list(_parameters_outside(unit, modules.keys() - {unit})) for unit in in_order}


def _parameters_outside(module: nn.Module, excluded: set[nn.Module]) -> Iterator[nn.Parameter]:
    """Yield the parameters of a module that no module of `excluded` inside it has."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if child not in excluded:
            yield from _parameters_outside(child, excluded)


class WeightScales:
    """The fp8 scales of a model's weights during a step, whose micro-batches all have the same weights.

    The ranks agree on those of a unit, such as a block, in its first forward pass, where ZeRO-3 has gathered it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._is_kept = False
        self._weights: list[nn.Parameter] = []
        for unit, parameters in parameters_by_unit(model).items():
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
            from shardwise.layers.fp8 import keep_scales

            keep_scales(weights, group)
