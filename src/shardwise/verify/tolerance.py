"""What a layout may differ by from one process, and how it is judged."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.config import Config


@dataclass(frozen=True)
class Tolerance:
    """The largest differences that keep the contract.

    Attributes:
        losses: relative, of each step. gradients: of each tensor, relative to its norm.
    """

    losses: float
    gradients: float

    @staticmethod
    def of(config: Config) -> Tolerance:
        """In float32 that of the contract; bfloat16 rounds what ranks exchange, at other places in each layout."""
        if config.precision.mode == "float32":
            return Tolerance(1e-5, 1e-5)
        return Tolerance(_BFLOAT16, 8 * _BFLOAT16)


_BFLOAT16 = 2.0**-8
"""The distance from 1 to the next bfloat16 below it, about 0.4 %."""


@dataclass(frozen=True)
class Differences:
    """The largest differences of a layout from one process.

    Attributes:
        weights: of the initial ones, relative to the tensor's largest. losses: before the checkpoint changed hands.
        gradients: of the first step. resumed: of the losses from another layout's checkpoint on.
        weight, gradient: the tensors with the largest differences.
    """

    weights: float
    losses: float
    gradients: float
    resumed: float
    weight: str = ""
    gradient: str = ""

    def problems(self, tolerance: Tolerance, source: str) -> list[str]:
        """What breaks the contract. `source`: whose checkpoint was read."""
        found = []
        if self.weights:
            found.append(f"the initial {self.weight} differs by {self.weights:.1e}, and must be equal")
        if not self.gradients <= tolerance.gradients:
            found.append(f"the gradient of {self.gradient} differs by {self.gradients:.1e} of its norm")
        if not self.losses <= tolerance.losses:
            found.append(f"the losses differ by {self.losses:.1e}")
        if not self.resumed <= tolerance.losses:
            found.append(f"after the checkpoint of {source} was read the losses differ by {self.resumed:.1e}")
        return found
