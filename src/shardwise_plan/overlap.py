"""Seconds of collectives that the computations beside them do not hide.

A matrix product and a collective that are cut into p pieces, of a and b seconds each, take `a + b + (p - 1)·max(a, b)`:
the first piece of a gather arrives before the first product, and the last piece of a sum leaves after the last one. In
a ring, each rank multiplies its own part first, so that p - 1 pieces travel behind products. A collective beside one
whole product is hidden as far as the product is longer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from shardwise_plan import device_seconds
from shardwise_plan.device_seconds import DeviceConstants, LinkedRanks
from shardwise_plan.device_specs import Device

TensorOverlap = Literal["pieces", "symmetric_memory", "user_buffers"]
"""How a program overlaps: as `parallel.tensor_overlap`, or with the user buffers of Transformer Engine."""

Product = Callable[[int], float]
"""Seconds of one piece of a matrix product that is cut into so many pieces along its rows."""

_PIECES = 4  # of shardwise (layers/matmul.py), and Transformer Engine's default (`num_splits`)
# Processors that kernels which sum in user buffers take from the products beside them: Transformer Engine's default
# (`num_sm`). Gathers go round by copies between devices.
_SUM_PROCESSORS = 16


@dataclass(frozen=True)
class TensorCollectives:
    """The predicted seconds of a block's collectives over tensor parallelism."""

    device: Device
    constants: DeviceConstants
    group: LinkedRanks
    gathered: float  # bytes of an input that is gathered
    summed: float  # bytes of an output, or of the gradient of an input, that is summed
    sequence_parallel: bool  # True if inputs are gathered and sums scattered; otherwise sums are all-reduced
    overlap: TensorOverlap | None  # how products hide them; None if they take turns

    def gather_before(self, product: Product) -> float:
        """Return the seconds that a product's input adds to it."""
        if self.group.ranks == 1 or not self.sequence_parallel:
            return 0.0
        if self.overlap is None:
            return self._collective(self.gathered)
        if self.overlap == "pieces":
            return self._start + self._in_pieces(product, self.gathered)
        return self._round(product, self.gathered)

    def sum_after(self, product: Product) -> float:
        """Return the seconds that the sum of a product's output over the ranks adds to it."""
        if self.group.ranks == 1:
            return 0.0
        if self.overlap is None:
            return self._collective(self.summed)
        if self.overlap == "symmetric_memory":
            return self._round(product, self.summed)
        if self.overlap == "pieces":
            return self._start + self._in_pieces(product, self.summed)
        piece = product(1) / _PIECES
        sent = self._collective(self.summed / _PIECES) - self._start
        return sent + (_PIECES - 1) * max(0.0, sent - piece) + self._taken(_PIECES * sent, product(1))

    def sum_behind(self, product: Product) -> float:
        """Return the seconds that a sum adds to a product that does not need it."""
        if self.group.ranks == 1:
            return 0.0
        sent = self._collective(self.summed)
        if self.overlap is None:
            return sent
        taken = self._taken(sent, product(1)) if self.overlap == "user_buffers" else 0.0
        return max(0.0, sent - product(1)) + taken

    def gather_behind(self, product: Product) -> float:
        """Return the seconds that a gather adds to a product that does not need it."""
        if self.group.ranks == 1 or not self.sequence_parallel:
            return 0.0
        return max(0.0, self._collective(self.gathered) - product(1))

    @property
    def _start(self) -> float:
        return self.constants.start if self.device.is_accelerator else self.constants.wait

    def _collective(self, size: float) -> float:
        return device_seconds.collective(
            self.device, self.constants, self.group, size, reduces_all=not self.sequence_parallel
        )

    def _in_pieces(self, product: Product, size: float) -> float:
        """Return the seconds beyond those of the whole product, once the first collective has started."""
        piece = product(_PIECES)
        sent = self._collective(size / _PIECES) - self._start
        return _PIECES * piece - product(1) + sent + (_PIECES - 1) * max(0.0, sent - piece)

    def _round(self, product: Product, size: float) -> float:
        """Return the seconds beyond those of the whole product where a part of each rank goes round the ring."""
        ranks = self.group.ranks
        inside = self.group.inside >= ranks
        sent = device_seconds.message(self.device, self.constants, size / ranks, inside=inside)
        # With user buffers, pieces of the product run side by side, and fill the processors together.
        piece = product(1) / ranks if self.overlap == "user_buffers" else product(ranks)
        return ranks * piece - product(1) + (ranks - 1) * max(0.0, sent - piece)

    def _taken(self, sent: float, product: float) -> float:
        """Return by how much a product takes longer as sums take processors while they are on their way."""
        processors = self.device.processors
        if processors <= _SUM_PROCESSORS:
            return 0.0
        return min(sent, product) * _SUM_PROCESSORS / (processors - _SUM_PROCESSORS)


def ring_seconds(computed: float, sent: float, ranks: int) -> float:
    """Predict the seconds beyond those of a computation whose operand goes round a ring of ranks beside it."""
    if ranks == 1:
        return 0.0
    return (ranks - 1) * max(0.0, sent / (ranks - 1) - computed / ranks)
