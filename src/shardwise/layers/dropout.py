"""Dropout whose masks are a function of the place in the model and in the run.

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
from shardwise.distributed.mesh import Group, Ranks
from shardwise.distributed.random_bits import INCREMENT, hashed, splitmix64
from shardwise.layers.arguments import sharing_group
from shardwise.layers.chunks import MASK_CHUNK_ELEMENTS


@dataclass(frozen=True)
class Place:
    """The place in the model at which a dropout mask is drawn.

    Attributes:
        shard: number of the part of the activation that this rank has; 0 if it has all of it.
    """

    layer: int
    site: int
    shard: int = 0


class _Masks:
    """The masks of `invariant` mode."""

    samples_B: Tensor  # `[B]`, number of each sample in the run, on the model's device
    places_S: Tensor | None  # places of the tokens in the sequence, where context parallelism cuts it; None: 0, 1, …

    def keep(self, rows: Tensor, width: int, p: float, place: Place, columns: Tensor | None = None) -> Tensor:
        """Draw the elements that stay (`invariant` mode), each with probability 1 - p: booleans `[R, B, width]`.

        Element j of row `rows[i]` of a sample has the number `rows[i] · width + j` at its `place` in the model. With
        `columns`, only these of each row are drawn.
        """
        if columns is None:
            columns = torch.arange(width, device=rows.device)
        device = rows.device
        if not torch.compiler.is_compiling() and not devices.has_wide_integers(device):
            # A device that hashes in 32 bits would draw other masks, or none: the host draws them.
            rows, columns = rows.cpu(), columns.cpu()
        samples_B = self.samples_B.to(rows.device)
        stream_B1 = splitmix64(samples_B ^ self.stream(place, rows.device)).unsqueeze(1)
        # A hash is uniform over the signed 64-bit integers: a share p of them lies below this threshold.
        threshold = min(math.floor(p * 2.0**64), 2**64 - 1) - 2**63
        # The compiler makes one kernel, which holds nothing between its operations: there are no chunks to cut.
        if torch.compiler.is_compiling():
            return splitmix64(stream_B1 + (rows.view(-1, 1, 1) * width + columns) * INCREMENT) >= threshold
        keep = torch.empty((len(rows), len(samples_B), len(columns)), dtype=torch.bool, device=rows.device)
        chunk = max(1, MASK_CHUNK_ELEMENTS // (len(samples_B) * len(columns)))
        for start in range(0, len(rows), chunk):
            elements = rows[start : start + chunk].view(-1, 1, 1) * width + columns
            torch.ge(splitmix64(stream_B1 + elements * INCREMENT), threshold, out=keep[start : start + chunk])
        return keep.to(device)

    def stream(self, place: Place, device: torch.device) -> Tensor:
        """Return the number from which the masks of a place are hashed, `[]`, on the device."""
        raise NotImplementedError


@dataclass(frozen=True)
class DropoutKey(_Masks):
    """The source of all dropout masks of one micro-batch's forward pass.

    It travels with the activations, so that recompute draws the same masks, whatever ran in between.

    Attributes:
        seed: the run's seed.
        step: the optimizer step.
        samples_B: `[B]`, number of each sample in the run, on the model's device.
        first_sample: first of these numbers, on the host.
        mode: `fast` or `invariant`, see docs/dropout-and-recompute.md.
        places_S: as in the other keys.
    """

    seed: int
    step: int
    samples_B: Tensor
    first_sample: int
    mode: DropoutMode = "fast"
    places_S: Tensor | None = None

    def number(self, *place: int) -> int:
        """Return a 63-bit hash of the key's seed and step and of a place in the model."""
        return hashed(self.seed, self.step, *place)

    def seeded(self, device: torch.device, layer: int, site: int, shard: int) -> AbstractContextManager[None]:
        """Set torch's generator of the device to a state of this place alone, inside of a `with` (`fast` mode).

        The place is a `layer`, a `site` in it, and the `shard` of the activation that the rank has.
        """
        return devices.seeded(device, self.number(self.first_sample, layer, site, shard))

    def stream(self, place: Place, device: torch.device) -> Tensor:
        # `torch.tensor` would make it on the host, and wait for a copy.
        return torch.full((), self.number(place.layer, place.site), device=device)

    def shard(self, place: Place) -> int:
        """Return the number of the part of the activation that this rank has at a place."""
        return place.shard

    def dropped(self, x: Tensor, p: float, place: Place) -> Tensor:
        """Return x `[…]` after dropout with probability p at a place in the model (`fast` mode)."""
        with self.seeded(x.device, place.layer, place.site, place.shard):
            dropped: Tensor = torch.native_dropout(x, p, True)[0]
        return dropped

    def of_block(self, places: Sequence[Place]) -> BlockKey:
        """Return the key of the block that has these places."""
        numbers = [0] * SITES
        shards = [0] * SITES
        for place in places:
            if self.mode == "invariant":
                numbers[place.site] = self.number(place.layer, place.site)
            else:
                numbers[place.site] = self.number(self.first_sample, place.layer, place.site, place.shard)
            shards[place.site] = place.shard
        device = self.samples_B.device
        # The numbers of `fast` mode are a generator's seeds, which are read on the host.
        device_of_numbers = torch.device("cpu") if self.mode == "fast" else device
        return BlockKey(
            self.samples_B,
            self.mode,
            devices.to_device(torch.tensor(numbers), device_of_numbers),
            devices.to_device(torch.tensor(shards), device),
            self.places_S,
        )


SITES = 4
"""Places in a block."""


@dataclass(frozen=True)
class BlockKey(_Masks):
    """The part of a `DropoutKey` that concerns one block, in tensors: one compiled graph serves all blocks and ranks.

    Attributes:
        samples_B: `[B]`, number of each sample in the run.
        numbers: `[SITES]`, seeds of generators, on the host (`fast` mode), or numbers of streams.
        shards: `[SITES]`, number of the part of the activation that this rank has.
        places_S: as in the other keys.
    """

    samples_B: Tensor
    mode: DropoutMode
    numbers: Tensor
    shards: Tensor
    places_S: Tensor | None

    def stream(self, place: Place, device: torch.device) -> Tensor:
        return self.numbers[place.site].to(device)

    def shard(self, place: Place) -> Tensor:
        return self.shards[place.site]

    def dropped(self, x: Tensor, p: float, place: Place) -> Tensor:
        dropped: Tensor = torch.ops.shardwise.dropout(x, self.numbers[place.site], p)[0]
        return dropped


AnyKey = DropoutKey | BlockKey


@functools.cache
def define_dropout() -> None:
    """Define the operator by which a compiled graph draws in `fast` mode the masks that `DropoutKey` draws."""

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
        return apply_mask(dy, ctx.saved_tensors[0], ctx.p), None, None

    dropout.register_fake(shapes)
    dropout.register_autograd(backward, setup_context=keep_mask)


class Dropout(nn.Module):
    """`y = x · keep / (1 - p)` on an activation `[S, B, H]`, or a rank's part of it, `[S/g, B, H]` or `[S, B, H/g]`.

    Without a key, as in evaluation, y is x. docs/dropout-and-recompute.md says how masks are drawn.

    Args:
        p: the probability that an element becomes 0.
        layer: number of the block.
        site: number of the place in the block.
        group: the ranks that share the activation.
        sequence_parallel_enabled: true if each rank has a part of the sequence.
        input_is_parallel: true if each rank has a part of the width, as in the input of a row-parallel layer.
        context_group: the ranks that share each sample (`layers/context.py`).
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
        context_group: Group | None = None,
    ) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"the dropout probability ({p}) must be in [0, 1]")
        self.p = p
        if sequence_parallel_enabled and input_is_parallel:
            raise ValueError("sequence_parallel_enabled and input_is_parallel must not both be true: one dim is cut")
        is_cut = sequence_parallel_enabled or input_is_parallel
        group = sharing_group(type(self).__name__, group, needed=is_cut)
        self._shards = group.size if is_cut else 1
        self._is_width_cut = input_is_parallel
        context_rank = 0 if context_group is None else context_group.rank
        self.place = Place(layer, site, context_rank * self._shards + (group.rank if is_cut else 0))

    def forward(self, x: Tensor, key: AnyKey | None) -> Tensor:
        if key is None or not self.p:
            return x
        if key.mode == "fast":
            return key.dropped(x, self.p, self.place)
        # Rows and columns are numbered as in the whole activation, so that the mask does not depend on the layout.
        rows = torch.arange(x.shape[0], device=x.device)
        columns = torch.arange(x.shape[-1], device=x.device)
        shard = key.shard(self.place) % self._shards
        width = x.shape[-1]
        if self._is_width_cut:
            columns += shard * width
            width *= self._shards
        else:
            rows += shard * x.shape[0]
        if key.places_S is not None:
            rows = key.places_S[rows]
        keep = key.keep(rows, width, self.p, self.place, columns)
        return apply_mask(x, keep, self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}, {self.place}"


def apply_mask(x: Tensor, keep: Tensor, p: float) -> Tensor:
    """Apply a dropout mask: `x · keep / (1 - p)`. The mask, one byte an element, is kept for the backward pass."""
    # 1 / (1 - p) would be infinite, and its product with a mask of zeros NaN.
    if p == 1.0:
        return x * 0.0
    return x * keep * (1.0 / (1.0 - p))
