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
        """In float32 that of the contract. bfloat16 rounds what ranks exchange, at other places in each layout.

        It has 8 bits: 2^-8 is the distance between two numbers near 1. A loss is a mean over many rounded numbers, and
        may differ by a quarter of that. A gradient is a sum of numbers that cancel, and may differ by 8 times as much;
        where it is also added up in bfloat16, by 64 times as much.
        """
        dtypes = config.precision.resolved(accelerator=True)
        if dtypes.parameter == dtypes.gradient == dtypes.reduce == "float32":
            return Tolerance(1e-5, 1e-5)
        is_mixed = dtypes.gradient == dtypes.reduce == "float32"
        return Tolerance(2.0**-10, (8 if is_mixed else 64) * 2.0**-8)

    @property
    def is_of_float32(self) -> bool:
        """Whether this is the contract's."""
        return self.losses <= 1e-5


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
