"""Groups of ranks on accelerators: those like CUDA, and those whose communicators cannot be split."""

import pytest
import torch
import torch.distributed as dist

from shardwise.distributed import collectives
from shardwise.distributed.mesh import Group, Mesh
from tests.rank_pool import Pools


def make_groups() -> tuple[float, tuple[int, ...], float]:
    """With a world that is bound to this rank's device, as `mesh.join` and torch's own advice have it."""
    rank = dist.get_rank()
    dist.group.WORLD.bound_device_id = torch.device("strict", rank)
    mesh = Mesh(tensor=2)
    host = mesh.host_group("test")
    alone = ()
    for turn in range(2):  # both make one: since torch 2.14 the names of later groups depend on the number
        if rank == turn:
            alone = Group.world().pick((rank,), "alone").ranks
        on_host = collectives.all_reduce_(torch.ones(2), host).sum().item()
    summed = collectives.all_reduce_(torch.ones(2, device=mesh.device), mesh.tp).sum().item()
    dist.group.WORLD.bound_device_id = None
    return on_host, alone, summed


@pytest.mark.parametrize("like", ["cuda", "other"])
def test_groups_of_a_bound_world(like: str, strict: Pools) -> None:
    """The world's communicator is not split: a group of some ranks is made by these alone, one on the host by all."""
    assert strict(2, like).run(make_groups, timeout=30) == [(4.0, (rank,), 4.0) for rank in range(2)]
