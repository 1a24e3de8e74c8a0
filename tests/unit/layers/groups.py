"""Groups without processes, to ask what any rank of any layout would hold."""

from shardwise.distributed.mesh import Group


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
