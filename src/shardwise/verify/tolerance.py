"""The largest differences that a layout may have from one process, and their judgement."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.config import Config


@dataclass(frozen=True)
class Tolerance:
    """The largest differences from one process that a verified layout may have."""

    losses: float  # largest relative difference of the loss of a step
    gradients: float  # largest difference of a tensor's gradient, relative to its norm

    @staticmethod
    def of(config: Config) -> Tolerance:
        """Return the contract's tolerance for float32, and a wider one for bfloat16.

        bfloat16 rounds the numbers that ranks exchange, at other places in each layout. It has 8 bits: 2^-8 is the
        distance between two numbers near 1. A loss is a mean over many rounded numbers, and may differ by a quarter of
        that. A gradient is a sum of numbers that cancel, and may differ by 8 times as much; where it is also added up
        in bfloat16, or where its products round to fp8 what differs, by 64 times as much. In bit-equal training nothing
        may differ.
        """
        if config.is_bit_equal:
            return Tolerance(0.0, 0.0)
        dtypes = config.precision.resolved(accelerator=True)
        in_fp8 = config.precision.matmul is not None
        if dtypes.parameter == dtypes.gradient == dtypes.reduce == "float32" and not in_fp8:
            return Tolerance(1e-5, 1e-5)
        is_mixed = dtypes.gradient == dtypes.reduce == "float32" and not in_fp8
        return Tolerance(2.0**-10, (8 if is_mixed else 64) * 2.0**-8)


@dataclass(frozen=True)
class ChoiceDifferences:
    """The experts that routers chose and that differ from those of one process."""

    differing: int = 0  # number of choices for a token that one process did not make
    wrong: str = ""  # the first one that differs although the scores were not nearly equal; empty if there is none


@dataclass(frozen=True)
class LayoutDifferences:
    """The largest differences of a layout from one process."""

    weights: float  # difference of an initial weight, relative to the largest weight of its tensor
    losses: float  # relative difference of a loss before the checkpoint changed hands
    gradients: float  # difference of a tensor's gradient in the first step, relative to its norm
    resumed: float  # relative difference of a loss after another layout's checkpoint was read
    weight: str = ""  # tensor with the largest difference of a weight
    gradient: str = ""  # tensor with the largest difference of a gradient
    state: str = ""  # in bit-equal training, first gradient norm or tensor of the state whose bits differ in the middle
    resumed_state: str = ""  # likewise at the end, after another layout's checkpoint was read
    # Experts that routers chose. Where some differ, the others are those with one process' choices.
    choices: ChoiceDifferences = ChoiceDifferences()

    def problems(self, tolerance: Tolerance, source: str) -> list[str]:
        """Return the breaches of the contract; `source` names the layout whose checkpoint was read."""
        breaches = []
        if self.weights:
            breaches.append(f"the initial {self.weight} differs by {self.weights:.1e}, and must be equal")
        # `not … <=` and not `>`: a difference that is not a number is a breach.
        if not self.gradients <= tolerance.gradients:
            breaches.append(f"the gradient of {self.gradient} differs by {self.gradients:.1e} of its norm")
        if not self.losses <= tolerance.losses:
            breaches.append(f"the losses differ by {self.losses:.1e}")
        if not self.resumed <= tolerance.losses:
            breaches.append(f"after the checkpoint of {source} was read the losses differ by {self.resumed:.1e}")
        if self.state:
            breaches.append(f"{self.state} differs in the middle of the training, and must be equal")
        if self.resumed_state:
            breaches.append(f"after the checkpoint of {source} was read {self.resumed_state} differs at the end")
        if self.choices.wrong:
            breaches.append(f"{self.choices.wrong} is not that of one process, though no scores were nearly equal")
        return breaches
