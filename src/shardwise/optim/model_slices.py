"""The slices of the model that a rank owns, as an optimizer sees them that needs whole tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from shardwise.distributed.mesh import Group, Mesh
from shardwise.distributed.placement import Pieces
from shardwise.optim.buckets import Bucket
from shardwise.optim.gradient_norms import CanonicalNorms


@dataclass(frozen=True)
class ModelSlices:
    """The slices that this rank owns, and the ranks that own the others.

    Attributes:
        groups: buckets of each parameter group.
        pieces: pieces of canonical tensors that each parameter holds.
        device: device of the model.
        data: data-parallel ranks.
        mesh: ranks that together hold the model; None: the data-parallel ranks.
        exact, fixed: arguments of `CanonicalNorms`.
    """

    groups: list[list[Bucket]]
    pieces: Pieces
    device: torch.device
    data: Group
    mesh: Mesh | None
    exact: bool
    fixed: bool

    @property
    def world(self) -> Group:
        """The ranks that together hold the model."""
        return self.data if self.mesh is None else self.mesh.world

    @property
    def stage(self) -> Group:
        """The ranks that together hold what this rank's pipeline stages have."""
        return self.data if self.mesh is None else self.mesh.stage

    @property
    def tensor(self) -> Group:
        """The tensor-parallel ranks."""
        return Group() if self.mesh is None else self.mesh.tp

    @cached_property
    def norms(self) -> CanonicalNorms:
        """L2 norms of the canonical tensors. The first use is collective over the world."""
        return CanonicalNorms(
            self.groups, self.pieces, self.device, self.world, self.tensor, exact=self.exact, fixed=self.fixed
        )
