"""Dropout that knows which random numbers belong to which element.

Legend: S sequence, B batch, H hidden, n heads, g = ranks of the tensor-parallel group.

Two modes. `fast` draws each mask from a generator seeded by (seed, step, first sample, layer, site, shard): ranks that
hold different parts of an activation draw different masks, ranks that hold the same activation draw the same, and
nothing has to be saved to draw it again. `invariant` makes each element's fate a hash of (seed, step, global sample,
layer, site, element): the mask, and with it the loss, is the same at any layout.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise import device as devices
from shardwise.config import DropoutMode
from shardwise.mesh import Ranks
from shardwise.parallel.arguments import sharing_group
from shardwise.plan.chunks import MASK_CHUNK_ELEMENTS
from shardwise.random_bits import INCREMENT, hashed, mixed


@dataclass(frozen=True)
class DropoutKey:
    """What a forward pass of one micro-batch draws its masks from.

    It travels with the activations, so that recompute draws the same masks, whatever ran in between.

    Attributes:
        seed: the run's seed.
        step: the optimizer step.
        samples_B: each sample's number in the run, on the model's device.
        first_sample: the first of these numbers, on the host.
        mode: see above.
    """

    seed: int
    step: int
    samples_B: Tensor
    first_sample: int
    mode: DropoutMode = "fast"

    def number(self, *place: int) -> int:
        """A 63-bit hash of the key's seed and step and of a place in the model."""
        return hashed(self.seed, self.step, *place)

    def seeded(self, device: torch.device, layer: int, site: int, shard: int) -> AbstractContextManager[None]:
        """Inside, torch's generator of the device begins at a state of this place's own (`fast` mode)."""
        return devices.seeded(device, self.number(self.first_sample, layer, site, shard))

    def keep(self, rows: Tensor, width: int, p: float, layer: int, site: int, columns: range | None = None) -> Tensor:
        """Which elements stay (`invariant` mode), each with probability 1 - p: booleans `[R, B, width]`.

        Element j of row `rows[i]` of a sample has the number `rows[i] · width + j` there. With `columns`, only these of
        each row are drawn.
        """
        columns = columns or range(width)
        place = torch.full((), self.number(layer, site), device=rows.device)  # `tensor` would wait for a copy
        stream_B1 = mixed(self.samples_B ^ place).unsqueeze(1)
        # A hash is uniform over the signed 64-bit integers: a share p of them lies below this threshold.
        threshold = min(math.floor(p * 2.0**64), 2**64 - 1) - 2**63
        column = torch.arange(columns.start, columns.stop, device=rows.device)
        keep = torch.empty((len(rows), len(self.samples_B), len(columns)), dtype=torch.bool, device=rows.device)
        chunk = max(1, MASK_CHUNK_ELEMENTS // (len(self.samples_B) * len(columns)))
        for start in range(0, len(rows), chunk):
            elements = rows[start : start + chunk].view(-1, 1, 1) * width + column
            torch.ge(mixed(stream_B1 + elements * INCREMENT), threshold, out=keep[start : start + chunk])
        return keep


class Dropout(nn.Module):
    """`y = x · keep / (1 - p)` on an activation `[S, B, H]`, or a rank's part of it, `[S/g, B, H]` or `[S, B, H/g]`.

    Without a key, as in evaluation, y is x.

    Args:
        p: the probability that an element becomes 0.
        layer, site: its place in the model.
        group: the ranks that share the activation.
        sequence_parallel_enabled: whether each has a part of the sequence.
        input_is_parallel: whether each has a part of the width, as a row-parallel layer's input.
    """

    def __init__(
        self,
        p: float,
        *,
        layer: int,
        site: int,
        group: Ranks | None = None,
        sequence_parallel_enabled: bool = False,
        input_is_parallel: bool = False,
    ) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"the dropout probability ({p}) must be in [0, 1]")
        self.p, self.layer, self.site = p, layer, site
        if sequence_parallel_enabled and input_is_parallel:
            raise ValueError("sequence_parallel_enabled and input_is_parallel must not both be true: one dim is cut")
        is_cut = sequence_parallel_enabled or input_is_parallel
        group = sharing_group(type(self).__name__, group, needed=is_cut)
        self._shard = group.rank if is_cut else 0
        self._width_shards = group.size if input_is_parallel else 1

    def forward(self, x: Tensor, key: DropoutKey | None) -> Tensor:
        if key is None or not self.p:
            return x
        if key.mode == "fast":
            with key.seeded(x.device, self.layer, self.site, self._shard):
                dropped: Tensor = torch.native_dropout(x, self.p, True)[0]
            return dropped
        rows, width = x.shape[0], x.shape[-1]
        row, column = (0, self._shard * width) if self._width_shards > 1 else (self._shard * rows, 0)
        positions = torch.arange(row, row + rows, device=x.device)
        columns = range(column, column + width)
        keep = key.keep(positions, width * self._width_shards, self.p, self.layer, self.site, columns)
        return scaled(x, keep, self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}, layer={self.layer}, site={self.site}"


def scaled(x: Tensor, keep: Tensor, p: float) -> Tensor:
    """`x · keep / (1 - p)`; of the mask, one byte an element is kept for the backward pass."""
    return x * keep * (1.0 / (1.0 - p)) if p < 1.0 else x * 0.0
