"""Dropout that knows which random numbers belong to which element.

Legend: S sequence, B batch, H hidden, n heads, g = ranks of the tensor-parallel group.

Two modes. `fast` draws each mask from a generator seeded by (seed, step, first sample, layer, site, shard): ranks that
hold different parts of an activation draw different masks, ranks that hold the same activation draw the same, and
nothing has to be saved to draw it again. `invariant` makes each element's fate a hash of (seed, step, global sample,
layer, site, element): the mask, and with it the loss, is the same at any layout.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.config import DropoutMode
from shardwise.distributed import devices
from shardwise.distributed.devices import to_device
from shardwise.distributed.mesh import Ranks
from shardwise.distributed.random_bits import INCREMENT, hashed, mixed
from shardwise.layers.arguments import sharing_group
from shardwise.layers.chunks import MASK_CHUNK_ELEMENTS


@dataclass(frozen=True)
class Place:
    """Where in the model a mask is drawn.

    Attributes:
        layer, site: numbers of the block, and of the place in it.
        shard: the part of the activation that this rank has; 0 where it has all of it.
    """

    layer: int
    site: int
    shard: int = 0


class _Masks:
    """The masks of `invariant` mode, from what a key knows of a place."""

    samples_B: Tensor

    def keep(self, rows: Tensor, width: int, p: float, place: Place, columns: Tensor | None = None) -> Tensor:
        """Which elements stay (`invariant` mode), each with probability 1 - p: booleans `[R, B, width]`.

        Element j of row `rows[i]` of a sample has the number `rows[i] · width + j` at its `place` in the model. With
        `columns`, only these of each row are drawn.
        """
        column = torch.arange(width, device=rows.device) if columns is None else columns
        stream_B1 = mixed(self.samples_B ^ self.stream(place, rows.device)).unsqueeze(1)
        # A hash is uniform over the signed 64-bit integers: a share p of them lies below this threshold.
        threshold = min(math.floor(p * 2.0**64), 2**64 - 1) - 2**63
        if torch.compiler.is_compiling():  # one kernel, which holds nothing between its operations
            return mixed(stream_B1 + (rows.view(-1, 1, 1) * width + column) * INCREMENT) >= threshold
        keep = torch.empty((len(rows), len(self.samples_B), len(column)), dtype=torch.bool, device=rows.device)
        chunk = max(1, MASK_CHUNK_ELEMENTS // (len(self.samples_B) * len(column)))
        for start in range(0, len(rows), chunk):
            elements = rows[start : start + chunk].view(-1, 1, 1) * width + column
            torch.ge(mixed(stream_B1 + elements * INCREMENT), threshold, out=keep[start : start + chunk])
        return keep

    def stream(self, place: Place, device: torch.device) -> Tensor:
        """The number of a place's masks, `[]`, on the device."""
        raise NotImplementedError


@dataclass(frozen=True)
class DropoutKey(_Masks):
    """What a forward pass of one micro-batch draws its masks from.

    It travels with the activations, so that recompute draws the same masks, whatever ran in between.

    Attributes:
        seed: the run's seed.
        step: the optimizer step.
        samples_B: `[B]`, each sample's number in the run, on the model's device.
        first_sample: the first of these numbers, on the host.
        mode: `fast` or `invariant`, see docs/dropout-and-recompute.md.
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
        """Inside, torch's generator of the device begins at a state of this place's own (`fast` mode).

        The place is a `layer`, a `site` in it, and the `shard` of the activation that the rank has.
        """
        return devices.seeded(device, self.number(self.first_sample, layer, site, shard))

    def stream(self, place: Place, device: torch.device) -> Tensor:
        return torch.full((), self.number(place.layer, place.site), device=device)  # `tensor` would wait for a copy

    def shard(self, place: Place) -> int:
        """The part of the activation that this rank has at a place."""
        return place.shard

    def dropped(self, x: Tensor, p: float, place: Place) -> Tensor:
        """Dropout of x `[…]` in `fast` mode: p is the probability of 0, and `place` where in the model it is."""
        with self.seeded(x.device, place.layer, place.site, place.shard):
            dropped: Tensor = torch.native_dropout(x, p, True)[0]
        return dropped

    def of_block(self, places: Sequence[Place]) -> BlockKey:
        """The key of the block that has these places."""
        numbers, shards = [0] * SITES, [0] * SITES
        for place in places:
            first = () if self.mode == "invariant" else (self.first_sample,)
            shard = () if self.mode == "invariant" else (place.shard,)
            numbers[place.site] = self.number(*first, place.layer, place.site, *shard)
            shards[place.site] = place.shard
        device = self.samples_B.device
        # A generator's seed is read on the host.
        where = torch.device("cpu") if self.mode == "fast" else device
        at = [to_device(torch.tensor(values), each) for values, each in ((numbers, where), (shards, device))]
        return BlockKey(self.samples_B, self.mode, *at)


SITES = 4
"""Places in a block."""


@dataclass(frozen=True)
class BlockKey(_Masks):
    """The part of a `DropoutKey` that concerns one block, in tensors: one compiled graph serves all blocks and ranks.

    Attributes:
        numbers: `[SITES]`: seeds of generators, on the host (`fast` mode), or numbers of streams.
        shards: `[SITES]`, the part of the activation that this rank has.
    """

    samples_B: Tensor
    mode: DropoutMode
    numbers: Tensor
    shards: Tensor

    def stream(self, place: Place, device: torch.device) -> Tensor:
        return self.numbers[place.site]

    def shard(self, place: Place) -> Tensor:
        return self.shards[place.site]

    def dropped(self, x: Tensor, p: float, place: Place) -> Tensor:
        dropped: Tensor = torch.ops.shardwise.dropout(x, self.numbers[place.site], p)[0]
        return dropped


AnyKey = DropoutKey | BlockKey


@functools.cache
def define_dropout() -> None:
    """Define the operator by which a compiled graph draws masks in `fast` mode: those that `DropoutKey` draws."""

    @torch.library.custom_op("shardwise::dropout", mutates_args=())
    def dropout(x: Tensor, number: Tensor, p: float) -> tuple[Tensor, Tensor]:
        with devices.seeded(x.device, int(number)):
            return torch.native_dropout(x, p, True)

    def shapes(x: Tensor, number: Tensor, p: float) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)

    def keep_mask(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(output[1])
        ctx.p = inputs[2]

    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        return scaled(dy, ctx.saved_tensors[0], ctx.p), None, None

    dropout.register_fake(shapes)
    dropout.register_autograd(backward, setup_context=keep_mask)


class Dropout(nn.Module):
    """`y = x · keep / (1 - p)` on an activation `[S, B, H]`, or a rank's part of it, `[S/g, B, H]` or `[S, B, H/g]`.

    Without a key, as in evaluation, y is x. docs/dropout-and-recompute.md says how masks are drawn.

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
        self.p = p
        if sequence_parallel_enabled and input_is_parallel:
            raise ValueError("sequence_parallel_enabled and input_is_parallel must not both be true: one dim is cut")
        is_cut = sequence_parallel_enabled or input_is_parallel
        group = sharing_group(type(self).__name__, group, needed=is_cut)
        self.place = Place(layer, site, group.rank if is_cut else 0)
        self._width_shards = group.size if input_is_parallel else 1

    def forward(self, x: Tensor, key: AnyKey | None) -> Tensor:
        if key is None or not self.p:
            return x
        if key.mode == "fast":
            return key.dropped(x, self.p, self.place)
        rows, columns = (torch.arange(x.shape[dim], device=x.device) for dim in (0, -1))
        shard, cuts = key.shard(self.place), self._width_shards
        if cuts > 1:
            columns += shard * len(columns)
        else:
            rows += shard * len(rows)
        return scaled(x, key.keep(rows, x.shape[-1] * cuts, self.p, self.place, columns), self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}, {self.place}"


def scaled(x: Tensor, keep: Tensor, p: float) -> Tensor:
    """`x · keep / (1 - p)`; of the mask, one byte an element is kept for the backward pass."""
    return x * keep * (1.0 / (1.0 - p)) if p < 1.0 else x * 0.0
