"""What one rank of a pipeline holds of a model."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from shardwise.models.blocks import Family
from shardwise.plan.stage import Stage


def gives_losses(model: nn.Module) -> bool:
    """Whether a model returns losses, and not the input of the next pipeline stage."""
    return model.part.is_last if isinstance(model, Family) else True


class Stages(nn.ModuleList):
    """The stages of one rank, in the order of the model; each is a model of its family that is built as a `Part`.

    Attributes:
        plan: which stages they are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.plan: list[Stage] = []

    def add(self, stage: Stage, model: nn.Module) -> None:
        """Append the next stage."""
        self.plan.append(stage)
        self.append(model)

    def pairs(self) -> Iterator[tuple[Stage, nn.Module]]:
        """Each stage with its model."""
        return zip(self.plan, self, strict=True)
