"""The choices of a user of the optimizer: what is cut over the data-parallel ranks, and in which dtypes it computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch
import torch.distributed as dist
from torch import nn

from shardwise.base.errors import ConfigError, listing
from shardwise.config import Frequency, Rounding
from shardwise.config.base_section import divisors, nearest_numbers
from shardwise.distributed.mesh import Group, Mesh
from shardwise.distributed.placement import of_or_whole


@dataclass(frozen=True)
class Sharding:
    """The cut over the data-parallel ranks, and when its parts travel: arguments of `ZeroRedundancyOptimizer`.

    Raises:
        ValueError: one of them is out of its range.
    """

    stage: int = 1
    replicate: int = 1
    reduce: Frequency = "micro_batch"
    gather: Frequency = "micro_batch"
    prefetch: int = 1
    offload: bool = False
    bucket_mib: float | None = None

    def __post_init__(self) -> None:
        frequencies = get_args(Frequency)
        for name, is_valid, range_text in (
            ("replicate", self.replicate >= 1, "at least 1"),
            ("prefetch", self.prefetch >= 0, "at least 0"),
            ("bucket_mib", self.bucket_mib is None or self.bucket_mib > 0, "positive"),
            ("stage", not isinstance(self.stage, bool) and self.stage in range(4), "0, 1, 2 or 3"),
            ("reduce", self.reduce in frequencies, listing(map(repr, frequencies), "or")),
            ("gather", self.gather in frequencies, listing(map(repr, frequencies), "or")),
        ):
            if not is_valid:
                raise ValueError(f"{name} ({getattr(self, name)!r}) must be {range_text}")

    def cut(self, data: Group) -> Cut:
        """Cut over runs of neighbouring data-parallel ranks, `replicate` of them, which hold copies of each other."""
        if self.stage == 0:
            return Cut(self.stage, Group(), data)
        if data.size % self.replicate:
            raise ConfigError(
                f"replicate ({self.replicate}) must divide the number of data-parallel ranks ({data.size}): set it to "
                f"{listing(map(str, nearest_numbers(self.replicate, divisors(data.size))), 'or')}"
            )
        ranks = data.split(data.size // self.replicate)
        place = data.rank % ranks.size
        copies = data.pick(tuple(range(place, data.size, ranks.size)), "copies") if self.replicate > 1 else Group()
        return Cut(self.stage, ranks, copies)


def by_replicas(parameters: Sequence[nn.Parameter], data: Group) -> dict[Group, list[nn.Parameter]]:
    """Sort parameters by the ranks that have the same part of them: they may be fewer than all of `data`."""
    sorted_: dict[Group, list[nn.Parameter]] = {}
    for p in parameters:
        sorted_.setdefault(of_or_whole(p).pieces[0].replicas or data, []).append(p)
    return sorted_


@dataclass(frozen=True)
class Cut:
    """The cut of buckets over the data-parallel ranks, which are `ranks` × `copies`.

    Attributes:
        stage: of ZeRO. 0: nothing is cut; 1: masters and the optimizer's state; 2: gradients too; 3: parameters too.
        ranks: ranks over which each bucket is cut; one rank at stage 0.
        copies: ranks that own the same part of each bucket.
    """

    stage: int
    ranks: Group
    copies: Group


@dataclass(frozen=True)
class OptimizerDtypes:
    """Dtypes of what the optimizer's step keeps and sends, and how results are rounded to them.

    Raises:
        ValueError: numbers cannot be rounded so.
    """

    gradient: torch.dtype | None  # dtype of accumulated gradients; None: the parameter's
    reduce: torch.dtype | None  # dtype of gradients while they are summed over the ranks; None: as accumulated
    optimizer: torch.dtype  # dtype of masters and state
    state: torch.dtype | None = None  # dtype of the state; None: that of masters
    rounding: Rounding = "nearest"  # `stochastic` rounds masters and state to bfloat16 so that their mean is kept
    rounding_seed: int = 0

    def __post_init__(self) -> None:
        if self.rounding not in get_args(Rounding):
            raise ValueError(f"rounding ({self.rounding!r}) must be {listing(map(repr, get_args(Rounding)), 'or')}")
        if self.is_stochastic and self.optimizer != torch.bfloat16:
            raise ValueError(
                f"rounding='stochastic' rounds to bfloat16: optimizer_dtype ({self.optimizer}) must be torch.bfloat16"
            )
        if self.state == self.optimizer:
            object.__setattr__(self, "state", None)
        if self.state is not None and (self.state, self.optimizer) != (torch.bfloat16, torch.float32):
            raise ValueError(
                f"state_dtype ({self.state}) must be torch.bfloat16, with optimizer_dtype torch.float32 "
                f"({self.optimizer} is given), or be left out"
            )

    @property
    def is_stochastic(self) -> bool:
        """True if masters are rounded stochastically, and so is the state."""
        return self.rounding == "stochastic"

    @property
    def rounds_at_random(self) -> bool:
        """True if masters or the state alone are rounded stochastically, which random bits decide."""
        return self.is_stochastic or self.state is not None

    def of_master(self, parameter: torch.dtype) -> torch.dtype:
        """Return the dtype of a parameter's master: float64 stays; ValueError if it or its state would be bfloat16."""
        if parameter != torch.float64:
            return self.optimizer
        if self.is_stochastic:
            raise ValueError("rounding='stochastic' rounds to bfloat16: no parameter may be torch.float64")
        if self.state is not None:
            raise ValueError(f"state_dtype ({self.state}) must be left out with parameters of torch.float64")
        return parameter


@dataclass(frozen=True)
class Ranks:
    """The ranks that the optimizer works with.

    Attributes:
        data: ranks that have the same part of the model.
        mesh: ranks that together hold the model; None: the data-parallel ranks.
    """

    data: Group
    mesh: Mesh | None

    @staticmethod
    def of(group: Group | dist.ProcessGroup | None, mesh: Mesh | None) -> Ranks:
        """Take a group for the data-parallel ranks; None: the mesh's, or the world."""
        if group is not None:
            return Ranks(Group.of(group), mesh)
        return Ranks(mesh.replicas if mesh is not None else Group.world("dp"), mesh)

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
