"""What one rank of a pipeline holds of a model."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from shardwise.models.blocks import Family
from shardwise.plan.stage import Stage


def gives_losses(model: nn.Module) -> bool:
    """Whether a model ends with its losses, and not with what the next pipeline stage takes."""
    return model.part.is_last if isinstance(model, Family) else True


class Stages(nn.ModuleList):
    """The stages of one rank, in the order of the model; each is a model of its family that is only a `Part`.

    Attributes:
        plan: which stages of the model they are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.plan: list[Stage] = []

    def add(self, stage: Stage, model: nn.Module) -> None:
        """Put the next stage behind those that are there."""
        self.plan.append(stage)
        self.append(model)

    def pairs(self) -> Iterator[tuple[Stage, nn.Module]]:
        """Each stage with its model."""
        return zip(self.plan, self, strict=True)
