"""Each layer, small; a group and other options are given by keyword."""

from collections.abc import Callable
from functools import partial

from torch import nn

from shardwise.distributed.mesh import Group
from shardwise.layers.embedding import ParallelEmbedding, ParallelLMHead, ReplicatedEmbedding
from shardwise.layers.linear import (
    ColumnParallelLinear,
    GQAQKVColumnParallelLinear,
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from shardwise.layers.norm import LayerNorm, QueryKeyNorm, RMSNorm

MAKERS: dict[type, Callable[..., nn.Module]] = {
    ColumnParallelLinear: partial(ColumnParallelLinear, 8, 8),
    MergedColumnParallelLinear: partial(MergedColumnParallelLinear, 8, (8, 8), names=("a", "b")),
    GQAQKVColumnParallelLinear: partial(GQAQKVColumnParallelLinear, 8, (8, 4), head_dim=2),
    RowParallelLinear: partial(RowParallelLinear, 8, 8),
    RMSNorm: partial(RMSNorm, 8),
    LayerNorm: partial(LayerNorm, 8),
    QueryKeyNorm: partial(QueryKeyNorm, (8, 4), 1e-5, head_dim=2, over="all_heads", names=("q", "k")),
    ParallelEmbedding: partial(ParallelEmbedding, 8, 4),
    ReplicatedEmbedding: partial(ReplicatedEmbedding, 8, 4),
    ParallelLMHead: partial(ParallelLMHead, 8, 8),
}


def pretend_group(rank: int, size: int) -> Group:
    """What rank `rank` of `size` would see; its subgroups are pretended too. It cannot communicate."""
    group = _Pretended(name="tp")
    group.rank, group.size, group.ranks = rank, size, tuple(range(size))
    return group


class _Pretended(Group):
    def split(self, size: int) -> Group:
        if size not in self._subgroups:
            part = _Pretended(name=f"{self.name}/{size}")
            first = self.rank // size * size
            part.rank, part.size, part.ranks = self.rank - first, size, self.ranks[first : first + size]
            self._subgroups[size] = part
        return self._subgroups[size]
