"""The units of a model: modules whose forward pass needs some of the parameters, and nobody else does at that time."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from shardwise.layers.embedding import ParallelEmbedding, ParallelLMHead


def stages_of(model: nn.Module) -> list[nn.Module]:
    """Return the pipeline stages of a rank's model; a model that is no list of stages is the only one."""
    return list(model) if isinstance(model, nn.ModuleList) else [model]


def units(model: nn.Module) -> dict[nn.Module, list[nn.Parameter]]:
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
