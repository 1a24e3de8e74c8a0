"""The parts of a model that are called one after another, each with its own parameters."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from shardwise.parallel import ParallelLMHead


def units(model: nn.Module) -> dict[nn.Module, list[nn.Parameter]]:
    """The model, its pipeline stages, its blocks and its heads, each with the parameters that no unit inside it has.

    A call of a unit reads no other parameters than these before it calls the units inside it. (A smaller module may be
    used by other methods than its forward, so that a hook of its forward comes too late.)
    """
    inside = [
        *(child for module in model.modules() if isinstance(module, nn.ModuleList) for child in module),
        *(module for module in model.modules() if isinstance(module, ParallelLMHead)),
    ]
    found = dict.fromkeys([model, *inside])
    return {unit: list(_own(unit, found.keys() - {unit})) for unit in found}


def _own(module: nn.Module, others: set[nn.Module]) -> Iterator[nn.Parameter]:
    yield from module.parameters(recurse=False)
    for child in module.children():
        if child not in others:
            yield from _own(child, others)
