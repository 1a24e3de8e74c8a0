"""Collectives on real ranks: values, gradients against a dense formulation, bytes counted, groups."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from shardwise.base.errors import ArgumentError
from shardwise.distributed import collectives as comm
from shardwise.distributed.mesh import Group, Mesh
from tests.dist.dense import check, each, error, mesh, random, run

SIZES = (1, 2, 4)
DOUBLE = torch.float64
Dense = Callable[[list[Tensor]], list[Tensor]]


def integers(seed: int, *shape: int) -> Tensor:
    """Whole numbers in float32: their sums are exact in any order."""
    return torch.randint(-50, 50, shape, generator=torch.Generator().manual_seed(seed)).float()


def collectives(size: int, columns: int) -> dict[str, float]:
    group = mesh(size).tp
    everyone = [integers(rank, 4 * size, columns) for rank in range(size)]
    mine, total = everyone[group.rank], torch.stack(everyone).sum(0)
    part = slice(group.rank * 4, group.rank * 4 + 4)
    reduced, largest = mine.clone(), mine.clone()
    assert comm.all_reduce_(reduced, group) is reduced, "all_reduce_ works in place"
    comm.all_reduce_(largest, group, op="max")
    sent = mine.clone()
    comm.broadcast_(sent, group, source=size - 1)
    out = torch.empty(4 * size, columns)
    comm.all_gather(total[part], group, out=out) if size > 1 else out.copy_(total)
    in_place = torch.full((4 * size, columns), float("nan"))
    in_place[part] = total[part]
    comm.all_gather(in_place[part], group, out=in_place)
    before = mine.clone()
    errors = {
        "all_reduce sum": error(reduced, total),
        "all_reduce max": error(largest, torch.stack(everyone).amax(0)),
        "broadcast": error(sent, everyone[-1]),
        "all_gather": error(comm.all_gather(total[part], group), total),
        "all_gather of a strided tensor": error(comm.all_gather(total[part].t().contiguous().t(), group), total),
        "all_gather into out": error(out, total),
        "all_gather of out's own slice": error(in_place, total),
        "reduce_scatter": error(comm.reduce_scatter(mine, group), total[part]),
        "reduce_scatter of a strided tensor": error(comm.reduce_scatter(mine.t().contiguous().t(), group), total[part]),
    }
    assert torch.equal(mine, before), "reduce_scatter changed its input"
    assert comm.all_gather_objects({"rank": group.rank}, group) == [{"rank": rank} for rank in range(size)]
    comm.barrier(group)
    return errors


def pending(size: int, columns: int) -> dict[str, float]:
    """The collectives that overlap with computation."""
    group = mesh(size).tp
    everyone = [integers(rank, 4 * size, columns) for rank in range(size)]
    mine, total = everyone[group.rank], torch.stack(everyone).sum(0)
    part = slice(group.rank * 4, group.rank * 4 + 4)
    reduced, gathered = mine.clone(), torch.empty(4 * size, columns)
    gathered[part] = total[part]
    errors = {"all_reduce": error(comm.all_reduce_async(reduced, group).wait(), total)}
    errors["all_gather"] = error(comm.all_gather_async(gathered[part], group, out=gathered).wait(), total)
    for overlap in (True, False):
        whole, out = mine.clone(), torch.empty(4, columns) if size > 1 else mine.clone()
        started = comm.reduce_scatter_async(whole, group, out=out, overlap=overlap)
        errors[f"reduce_scatter overlap={overlap}"] = error(started.wait(), total[part])
        assert torch.equal(started.wait(), total[part]), "waiting again changed the result"
        own = whole.clone()
        result = comm.reduce_scatter_async(own, group, out=own[part], overlap=overlap).wait()
        errors[f"reduce_scatter into its own slice overlap={overlap}"] = error(result, total[part])
    return errors


@pytest.mark.parametrize("body", [collectives, pending])
@pytest.mark.parametrize("size", SIZES)
def test_collectives(size: int, body: Callable[[int, int], dict[str, float]], ranks: Any) -> None:
    """A small tensor is sent to all ranks at once, and a large one by a ring."""
    check(run(ranks, size, each, body, [(size, 3), (size, 6000)]), 0.0)


def sums_in_tree(size: int) -> tuple[bool, bool]:
    """Whether a sum has the same bits as those of its parts, which are small: at once, and behind other work."""
    group = mesh(size, grains=(("tp", size),)).tp
    x = random(group.rank, 40_001)
    at_once, behind, parts = x.clone(), x.clone(), x.clone()
    comm.all_reduce_(at_once, group)
    comm.all_reduce_async(behind, group).wait()
    for part in parts.split(1000):
        comm.all_reduce_(part, group)
    return torch.equal(at_once, parts), torch.equal(behind, parts)


def test_a_sum_in_the_order_of_the_tree_does_not_depend_on_the_length(ranks: Any) -> None:
    assert run(ranks, 4, sums_in_tree, 4) == [(True, True)] * 4


def both_scatters(size: int) -> tuple[bool, float]:
    group = mesh(size).tp
    assert group.scatter_by_all_to_all, "on gloo the all-to-all is the faster one"
    whole, exact = random(group.rank, 8 * size, 5), integers(group.rank, 8 * size, 5)
    ours, exact_ours = comm.reduce_scatter(whole, group), comm.reduce_scatter(exact, group)
    group.scatter_by_all_to_all = False
    native, exact_native = comm.reduce_scatter(whole, group), comm.reduce_scatter(exact, group)
    group.scatter_by_all_to_all = True
    return torch.equal(exact_ours, exact_native), error(ours, native)


@pytest.mark.parametrize("size", [2, 4])
def test_reduce_scatter_by_all_to_all_equals_the_native_one(size: int, ranks: Any) -> None:
    for rank, (exact, difference) in enumerate(run(ranks, size, both_scatters, size)):
        assert exact, f"rank {rank}: sums of whole numbers differ"
        assert difference < 1e-6, f"rank {rank}: off by {difference:.1e}"


def scatter_after_a_bare_start(rendezvous: str) -> tuple[bool, bool]:
    """Whether there is an accelerator, and whether a group of the CPU has the faster reduce-scatter."""
    dist.init_process_group(init_method=f"file://{rendezvous}", rank=0, world_size=1)
    return torch.accelerator.is_available(), Group(dist.group.WORLD).scatter_by_all_to_all


def test_a_world_without_a_named_backend_has_the_faster_reduce_scatter_on_the_cpu(tmp_path: Path) -> None:
    with torch.multiprocessing.get_context("forkserver").Pool(1) as pool:
        has_accelerator, is_faster = pool.apply(scatter_after_a_bare_start, (str(tmp_path / "rendezvous"),))
    assert is_faster != has_accelerator, "after init_process_group() without a backend"


def test_at_size_one_every_collective_is_the_identity() -> None:
    alone, x = Group(), torch.randn(4, 6, requires_grad=True)
    for function in (comm.all_reduce_, comm.all_gather, comm.reduce_scatter, comm.broadcast_):
        assert function(x, alone) is x, f"{function.__name__} copies at size 1"
    for name in WHOLE_TO_PARTS:
        assert getattr(comm, name)(x, alone) is x, f"{name} copies at size 1"
    assert comm.all_reduce_async(x, alone).wait() is x
    assert comm.all_gather_async(x, alone, out=x).wait() is x
    assert comm.reduce_scatter_async(x, alone, out=x).wait() is x
    assert comm.all_gather_objects("x", alone) == ["x"]
    comm.barrier(alone)
    assert not alone.meter.bytes, "an identity puts no bytes on the wire"


def halves(x: Tensor, size: int, dim: int) -> list[Tensor]:
    return list(x.chunk(size, dim))


# name: (inputs are equal on all ranks, outputs are used alike by all ranks, the dense formulation)
WHOLE_TO_PARTS: dict[str, tuple[bool, bool, Dense]] = {
    "copy_to_group": (True, False, lambda xs: xs),
    "reduce_from_group": (False, True, lambda xs: [torch.stack(xs).sum(0)] * len(xs)),
    "gather_sequence": (False, False, lambda xs: [torch.cat(xs)] * len(xs)),
    "scatter_sum_sequence": (False, False, lambda xs: halves(torch.stack(xs).sum(0), len(xs), 0)),
    "split_sequence": (True, False, lambda xs: halves(xs[0], len(xs), 0)),
    "gather_last": (False, True, lambda xs: [torch.cat(xs, -1)] * len(xs)),
    "split_last": (True, False, lambda xs: halves(xs[0], len(xs), -1)),
}


def gradient(size: int, name: str) -> dict[str, float]:
    group = mesh(size).tp
    replicated, alike, dense = WHOLE_TO_PARTS[name]
    xs = [random(0 if replicated else rank, 2 * size, 3, 2 * size, dtype=DOUBLE) for rank in range(size)]
    inputs = [x.clone().requires_grad_() for x in xs]
    inputs = inputs[:1] * size if replicated else inputs
    outputs = dense(inputs)
    pulls = [random(100 + rank, *y.shape, dtype=DOUBLE).requires_grad_() for rank, y in enumerate(outputs)]
    # Used alike by all ranks: one use, one loss. Else each rank's use is a term of the loss.
    pulls = pulls[:1] * size if alike else pulls
    terms = [(y * pull).sum() for y, pull in zip(outputs, pulls, strict=True)]
    loss = terms[0] if alike else torch.stack(terms).sum()
    uses = [random(200 + rank, *x.shape, dtype=DOUBLE) for rank, x in enumerate(xs)][: 1 if replicated else size]
    wanted = torch.autograd.grad(loss, inputs[: len(uses)], create_graph=True)
    twice_wanted = torch.autograd.grad(wanted, pulls[: 1 if alike else size], uses)
    x = xs[group.rank].clone().requires_grad_()
    y = getattr(comm, name)(x, group)
    pull = pulls[group.rank].detach().clone().requires_grad_()
    (found,) = torch.autograd.grad(y, x, pull, create_graph=True)
    (twice,) = torch.autograd.grad(found, pull, uses[0 if replicated else group.rank])
    assert torch.equal(x, xs[group.rank]), f"{name} changed its input"
    assert torch.equal(pull, pulls[group.rank]), f"{name} changed the incoming gradient in place"
    assert y.is_contiguous()
    return {
        "value": error(y, outputs[group.rank]),
        "gradient": error(found, wanted[0 if replicated else group.rank]),
        "gradient of the gradient": error(twice, twice_wanted[0 if alike else group.rank]),
    }


@pytest.mark.parametrize("size", [2, 4])
def test_gradients_and_their_gradients_are_those_of_the_dense_formulation(size: int, ranks: Any) -> None:
    check(run(ranks, size, each, gradient, [(size, name) for name in WHOLE_TO_PARTS]), 1e-14)


def test_every_function_with_a_gradient_is_tested() -> None:
    functions = {name for name, value in vars(comm).items() if callable(value) and value.__module__ == comm.__name__}
    differentiable = {n for n in functions if n.endswith(("_group", "_sequence", "_last")) and not n.startswith("_")}
    assert differentiable == set(WHOLE_TO_PARTS)


def split_groups() -> dict[str, Any]:
    world = Mesh(tensor=4, device="cpu").tp
    pair = world.split(2)
    mine = torch.tensor([float(world.rank)])
    comm.all_reduce_(mine, pair)
    assert world.split(2) is pair, "a subgroup is made once"
    assert world.split(4) is world
    alone = world.split(1)
    assert (alone.size, alone.rank, alone.ranks) == (1, 0, (0,))
    assert list(world.meters) == ["tp", "tp/2", "tp/1"]
    assert world.meters["tp/2"] is pair.meter
    assert pair.meter.bytes == {"all_reduce": 4}
    assert repr(pair) == f"Group(tp/2 {world.rank % 2}/2)"
    return {"ranks": pair.ranks, "rank": pair.rank, "sum": float(mine)}


def test_a_group_splits_into_runs_of_neighbours(ranks: Any) -> None:
    outcomes = run(ranks, 4, split_groups)
    assert [outcome["ranks"] for outcome in outcomes] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [outcome["rank"] for outcome in outcomes] == [0, 1, 0, 1]
    assert [outcome["sum"] for outcome in outcomes] == [1, 1, 5, 5]


def from_process_group() -> None:
    group, again = Group.of(dist.group.WORLD), Group.of(dist.group.WORLD)
    assert group is again, "layers that are given the same process group share its subgroups and meters"
    assert group.split(2) is again.split(2)
    assert Group.of(group) is group
    assert Group.of(None) is not Group.of(None)
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    axis = Group.of(whole["tp"])
    assert axis is Group.of(whole.get_group("tp")), "one axis of a DeviceMesh is its process group"
    assert axis.ranks == ((0, 1) if dist.get_rank() < 2 else (2, 3))
    with pytest.raises(ArgumentError, match="must be the ranks of one axis: pass those of a Mesh"):
        Group.of(whole)


def test_a_process_group_has_one_group(ranks: Any) -> None:
    ranks(4).run(from_process_group)


def sum_of_torch() -> float:
    """The sum of 1 over the one data-parallel rank, by torch's own collective."""
    one = torch.ones(1)
    dist.all_reduce(one, group=Mesh(tensor=4, device="cpu").dp.process_group)
    return one.item()


def test_fault_03_a_group_of_one_rank_has_a_process_group(ranks: Any) -> None:
    """torch takes None for all ranks: a loss that is averaged over data parallelism would be summed over the world."""
    assert ranks(4).run(sum_of_torch) == [1.0] * 4
