"""The same training on the strict device as on the CPU: dense, sparse, compiled, with switches; its groups of ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.distributed import collectives
from shardwise.distributed.mesh import Group, Mesh
from tests.dist import cells
from tests.dist import test_bits as bits
from tests.dist import test_switches as switches
from tests.dist.cells import Cell, cells_of, small
from tests.dist.test_compiled_training import Cell as CompiledCell
from tests.dist.test_compiled_training import losses
from tests.dist.test_experts import curve, go_on
from tests.dist.training import named
from tests.rank_pool import Pools, RankPool
from tests.strict import ranks
from tests.sweeps import few

STEPS = 3
CELLS = small(*cells_of("cells of the strict device"))
OFTEN = (CELLS[1], CELLS[3], CELLS[4])
MODES: list[dict[str, Any]] = [{}, {"precision": {"mode": "mixed"}}]


def compare(found: list[float], wanted: list[float], tolerance: float = 1e-6) -> None:
    for step, (a, b) in enumerate(zip(found, wanted, strict=True), start=1):
        assert abs(a - b) <= tolerance * abs(b), f"step {step}: loss {a!r} on the strict device, {b!r} on the CPU"


@pytest.mark.parametrize("cell", few(CELLS, *OFTEN), ids=lambda cell: cell.name)
def test_losses_are_those_of_the_cpu(cell: Cell, strict: Pools) -> None:
    found = strict(cell.world).run(ranks.losses, cell, STEPS)[0]
    compare(found, cells.measure(cell.alone, STEPS).losses)


def test_an_accelerator_unlike_cuda_trains_the_same(strict: Pools) -> None:
    cell = CELLS[1]
    compare(strict(2, "other").run(ranks.losses, cell, STEPS)[0], cells.measure(cell.alone, STEPS).losses)


def test_bitwise_layouts_have_the_bits_of_one_device(strict: Pools) -> None:
    (cell,) = small(Cell("llama", tensor=2, sequence=True, mode="mixed", bitwise=True))
    (one,) = strict(1).run(bits.train, cell.alone)
    for rank, found in enumerate(strict(2).run(bits.train, cell)):
        assert (found.losses, found.norms, found.evaluation) == (one.losses, one.norms, one.evaluation), f"rank {rank}"
        for name, weight in found.weights.items():
            assert torch.equal(weight, one.weights[name]), name


def test_mixed_precision_is_near_that_of_the_cpu(strict: Pools) -> None:
    """Another kernel of attention rounds to bfloat16 at other places."""
    (cell,) = small(Cell("llama", tensor=2, sequence=True, mode="mixed"))
    compare(strict(2).run(ranks.losses, cell, STEPS)[0], cells.measure(cell.alone, STEPS).losses, 5e-4)


@pytest.mark.parametrize("keys", named("compiled on the strict device"))
def test_compiled_losses_are_the_cpus(keys: dict[str, Any], strict: Pools, ranks: Callable[[int], RankPool]) -> None:
    """torch has no compiler for it: captured graphs, forward and backward, run operator by operator."""
    cell = CompiledCell(**keys)
    wanted, _ = ranks(2).run(losses, cell, None, 3)[0]
    for found, graphs in strict(2).run(losses, cell, "aot_eager", 3):
        assert found == pytest.approx(wanted, rel=1e-6)
        assert len(graphs) == 2 * cell.units
        assert set(graphs.values()) == {1}


@pytest.mark.parametrize("sections", named("sparse models"))
def test_a_sparse_model_trains_as_on_the_cpu(sections: dict[str, Any], strict: Pools) -> None:
    for records in strict(2).run(go_on, sections, None, 4, None):
        assert [loss for loss, _ in records] == pytest.approx([loss for loss, _ in curve()], rel=1e-5)
        assert [experts.lines for _, experts in records] == [experts.lines for _, experts in curve()]


@pytest.mark.parametrize("sections", [MODES[0], pytest.param(MODES[1], marks=pytest.mark.slow)])
def test_replayed_passes_have_the_bits_of_others(strict: Pools, sections: dict[str, Any]) -> None:
    """A host that read a number, or a tensor that is not an input of the graph, would show."""
    ((is_equal, replays),) = strict(1).run(switches.captured, sections)
    assert is_equal
    assert replays == 6, "three steps of four micro-batches, without the last of each and three calls before"


@pytest.mark.slow
@pytest.mark.parametrize("sections", MODES)
def test_updates_beside_the_backward_pass_have_the_same_bits(strict: Pools, sections: dict[str, Any]) -> None:
    for is_equal, updated in strict(2).run(switches.both, sections, "update_in_backward"):
        assert is_equal
        assert updated > switches.STEPS


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
