"""A collective of a step, or a message, with the bytes that it makes a rank send."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.estimates.rank_workload import RankWorkload

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]


@dataclass(frozen=True)
class Transfer:
    """An estimated collective, or a message to another rank.

    Attributes:
        bytes: size of the whole tensor.
        count: number of times per step; a tensor that is sent in chunks counts once.
    """

    axis: str
    kind: Kind
    ranks: int
    bytes: int
    count: int
    tensor: str

    @property
    def wire_bytes(self) -> float:
        """Bytes that each rank sends per step."""
        if self.kind == "send":
            return float(self.bytes * self.count)
        rounds = 2 if self.kind == "all_reduce" else 1
        return rounds * self.bytes * self.count * (self.ranks - 1) / self.ranks


def tensor_transfer(workload: RankWorkload, kind: Kind, size: int, tensor: str, count: int = 1) -> Transfer:
    return Transfer("tp", kind, workload.layout.tensor, size, count, tensor)


def gather_transfer(workload: RankWorkload, size: int, tensor: str, count: int = 1) -> Transfer:
    """The estimated all-gather where a region of tensor parallelism begins; without sequence parallelism, nothing."""
    return tensor_transfer(workload, "all_gather", size if workload.layout.sequence_parallel else 0, tensor, count)


def sum_transfer(workload: RankWorkload, size: int, tensor: str, count: int = 1) -> Transfer:
    """The estimated sum where a region of tensor parallelism ends; under sequence parallelism each rank gets a part."""
    kind: Kind = "reduce_scatter" if workload.layout.sequence_parallel else "all_reduce"
    return tensor_transfer(workload, kind, size, tensor, count)
