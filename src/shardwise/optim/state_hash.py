"""Sums of a model's weights and of its optimizer's states, from which the hash of a training's state is made.

Each rank adds up the elements that it would save (`state_slices`), so that copies count once, and one all-reduce adds
up the ranks' sums. The arithmetic is that of `state_digest.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from shardwise.distributed import collectives, devices
from shardwise.distributed.mesh import Mesh
from shardwise.optim.buckets import Bucket
from shardwise.optim.gradient_norms import chunk_elements
from shardwise.optim.state import MASTER, StateSlice, state_slices, state_tensors
from shardwise.optim.state_digest import LOW_FACTOR, TensorSums, dimension_factors
from shardwise.optim.zero import ZeroRedundancyOptimizer

WEIGHT = "model"
"""State's name for weights that have no separate masters, as checkpoints have it."""
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_Keys: TypeAlias = list[tuple[str, str]]  # state and canonical name of each sum


class StateSums:
    """Sums of a model's tensors and of its optimizer's state, for the state's hash. A frozen parameter has none."""

    def __init__(self, model: nn.Module, optimizer: ZeroRedundancyOptimizer, mesh: Mesh) -> None:
        self._optimizer = optimizer
        self._mesh = mesh
        # Sums are of 64-bit integers.
        self._device = mesh.device if devices.has_wide_integers(mesh.device) else torch.device("cpu")
        # Ranks with copies of a piece leave it to the first.
        self._slices = [part for part in state_slices(model, optimizer) if part.piece.copies.rank == 0]
        self._keys: dict[bool, _Keys] = {}
        self._factors: dict[tuple[int, int], Tensor] = {}

    @torch.no_grad()
    def measure(self) -> TensorSums:
        """Return the sums, the same on every rank. Collective: one all-reduce over the world."""
        self._optimizer.gathers.wait()
        flats = self._flat_tensors()
        # The wrapped optimizer makes its state in the first step: this is the same on every rank.
        has_stepped = self._optimizer.steps > 0
        if has_stepped not in self._keys:
            local = {(state, part.piece.name) for part in self._slices for state in flats[part.bucket]}
            self._keys[has_stepped] = sorted(collectives.union(sorted(local), self._mesh.world))
        keys = self._keys[has_stepped]
        numbers = {key: number for number, key in enumerate(keys)}
        targets: list[int] = []
        values: list[Tensor] = []
        for part in self._slices:
            for states in _by_width(flats[part.bucket]):
                targets += [numbers[state, part.piece.name] for state in states]
                values.append(self._sums(part, list(states.values())))
        sums = torch.zeros(len(keys), dtype=torch.int64, device=self._device)
        if values:
            sums.index_add_(0, devices.to_device(torch.tensor(targets), sums.device), torch.cat(values))
        collectives.all_reduce_(sums, self._mesh.world)
        by_state: dict[str, dict[str, int]] = {}
        for (state, name), number in zip(keys, sums.tolist(), strict=True):
            by_state.setdefault(state, {})[name] = number % 2**64
        return by_state

    def _flat_tensors(self) -> dict[Bucket, dict[str, Tensor]]:
        """The state of each bucket with its weights, which are the masters where these are separate."""
        flats: dict[Bucket, dict[str, Tensor]] = {bucket: {} for bucket in self._optimizer.buckets}
        for state, by_bucket in state_tensors(self._optimizer).items():
            for bucket, flat in by_bucket.items():
                flats[bucket][state] = flat
        for bucket, by_state in flats.items():
            if MASTER not in by_state:
                by_state[WEIGHT] = bucket.master.detach()
        return flats

    def _sums(self, part: StateSlice, flats: Sequence[Tensor]) -> Tensor:
        """The sums over a slice of several flat tensors, a chunk at a time along the slowest dimension."""
        order = part.order
        last = len(order) - 1
        sizes = [part.box.size[dim] for dim in order] or [1]
        views = [flat[part.start : part.start + part.box.numel].view(sizes) for flat in flats]
        by_dimension = [self._factors_of(last - dim, part.piece.shape[dim])[part.box.slices[dim]] for dim in order] or [
            torch.ones(1, dtype=torch.int64, device=self._device)
        ]
        rows = max(1, chunk_elements(part.bucket) // (len(flats) * math.prod(sizes[1:])))
        sums: Tensor | int = 0
        for start in range(0, sizes[0], rows):
            bits = torch.stack([view[start : start + rows] for view in views])
            if bits.device.type != self._device.type:
                bits = devices.to_device(bits, self._device) if part.bucket.on_host else bits.cpu()
            x = _integers(bits)
            for factor in (*by_dimension[:0:-1], by_dimension[0][start : start + rows]):
                x = x.mul_(factor).sum(dim=-1)
            sums = x + sums
        assert isinstance(sums, Tensor)
        return sums

    def _factors_of(self, dim: int, count: int) -> Tensor:
        if (dim, count) not in self._factors:
            signed = torch.from_numpy(dimension_factors(dim, count).view("<i8"))
            self._factors[dim, count] = signed.to(self._device)
        return self._factors[dim, count]


def _by_width(flats: Mapping[str, Tensor]) -> Iterable[dict[str, Tensor]]:
    """Tensors of several states in groups of equally wide elements: a group is added up together."""
    groups: dict[int, dict[str, Tensor]] = {}
    for state, flat in flats.items():
        groups.setdefault(flat.itemsize, {})[state] = flat.view(_SIGNED[flat.itemsize])
    return groups.values()


def _integers(bits: Tensor) -> Tensor:
    """A copy of integers with 64 bits, of which sums are made; of 8 bytes, both halves count."""
    if bits.dtype != torch.int64:
        return bits.long()
    return (bits >> 32) + (bits & 0xFFFF_FFFF) * LOW_FACTOR
