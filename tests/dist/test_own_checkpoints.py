"""Checkpoints of a loop of the user's own over real ranks: what calls leave behind, and problems of one rank."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.distributed_c10d import _world

import shardwise
from shardwise.base.errors import ConfigError, RunError
from shardwise.distributed import collectives
from tests.dist.dense import mesh as shared_mesh
from tests.dist.own_models import Mixed
from tests.dist.test_drift import flip


def parts() -> tuple[nn.Module, shardwise.ZeroRedundancyOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    return model, shardwise.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)


def groups_after_saves(folder: str, gives_mesh: bool) -> list[int]:
    """The number of process groups after saves 2 and 5, each followed by a load."""
    model, optimizer = parts()
    mesh, found = shared_mesh(1) if gives_mesh else None, []
    for step in range(1, 6):
        shardwise.save_checkpoint(folder, model, optimizer, step=step, mesh=mesh)
        assert shardwise.load_checkpoint(folder, model, optimizer, mesh=mesh) == step
        found.append(len(_world.pg_map))
    return [found[1], found[4]]


@pytest.mark.parametrize("gives_mesh", [False, True])
def test_saves_make_no_further_process_groups(gives_mesh: bool, ranks: Any, tmp_path: Path) -> None:
    """A group stays, with its sockets, until the process ends: a long loop would run out of file descriptors."""
    for after_2, after_5 in ranks(2).run(groups_after_saves, str(tmp_path), gives_mesh):
        assert after_2 == after_5


def refused(folder: str, taken: str) -> list[str]:
    """What each call says whose folder or argument is wrong on one rank alone."""
    mesh, (model, optimizer), (other, _), said = shared_mesh(1), parts(), parts(), []
    is_first = mesh.world.rank == 0
    step: Any = 1 if is_first else None
    calls = (
        lambda: shardwise.save_checkpoint(taken, model, optimizer, step=1, mesh=mesh),
        lambda: shardwise.save_checkpoint(folder, model, optimizer, step=step, mesh=mesh),
        lambda: shardwise.load_checkpoint(folder, other if is_first else model, optimizer, mesh=mesh),
    )
    for call in calls:
        try:
            call()
        except shardwise.ShardwiseError as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append("no error")
    return said


def test_a_problem_of_one_rank_is_raised_on_all(ranks: Any, tmp_path: Path) -> None:
    """Else the others would wait for it until the collective gives up."""
    taken = tmp_path / "taken"
    taken.touch()
    one, other = ranks(2).run(refused, str(tmp_path / "saved"), str(taken), timeout=30.0)
    assert one == other
    assert one[0] == f"StoreError: {taken} cannot be made: File exists"
    assert one[1].startswith("ConfigError: step (None) must be")
    assert one[2].startswith("ConfigError: the optimizer must hold the model's parameters: it lacks 0.weight")
    assert not (tmp_path / "saved").exists()


def mixed(tensor: int, options: dict[str, Any]) -> tuple[Mixed, shardwise.ZeroRedundancyOptimizer]:
    mesh = shared_mesh(tensor)
    model = Mixed(group=mesh.tp)
    return model, shardwise.ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.NAdam, lr=0.01, mesh=mesh, **options
    )


def trained(tensor: int, load: str | None, save: str, options: dict[str, Any]) -> tuple[list[float], list[str]]:
    """Losses and gradient norms of three steps, begun with another seed on each rank; and what was warned of."""
    mesh, found = shared_mesh(tensor), list[float]()
    torch.manual_seed(mesh.world.rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, optimizer = mixed(tensor, options)
    start = 0 if load is None else shardwise.load_checkpoint(load, model, optimizer, mesh=mesh)
    for step in range(start, start + 3):
        ids = torch.randint(33, (6, 4), generator=torch.Generator().manual_seed(step))
        loss = model(ids[:, mesh.dp.rank :: mesh.dp.size])
        loss.backward()
        norm, _ = optimizer.norms()
        optimizer.step()
        found += [float(collectives.all_reduce_(loss.detach().clone(), mesh.dp)) / mesh.dp.size, float(norm)]
    shardwise.save_checkpoint(save, model, optimizer, step=start + 3, mesh=mesh)
    return found, [str(warning.message) for warning in caught]


@pytest.mark.parametrize(("world", "options"), [(2, {}), (4, {"stage": 0})])
def test_a_model_of_torch_resumes_anywhere(world: int, options: dict[str, Any], ranks: Any, tmp_path: Path) -> None:
    """They are whole on every tensor-parallel rank: saved and counted once, begun with the first rank's values."""
    one, cut, last = (str(tmp_path / name) for name in ("one", "cut", "last"))
    first, said = trained(1, None, one, {})
    assert not said
    second, _ = trained(1, one, last, {})
    for rank, (found, said) in enumerate(ranks(world).run(trained, 2, None, cut, options)):
        assert found == pytest.approx(first, rel=1e-5)
        assert len(said) == (rank == 0)
        if said:
            assert "and they began with other values on other ranks: embedding.weight, frozen.weight and" in said[0]
    assert trained(1, cut, last, {})[0] == pytest.approx(second, rel=1e-5)
    for found, _ in ranks(world).run(trained, 2, one, last, options):
        assert found == pytest.approx(second, rel=1e-5)


class Unmade(nn.Module):
    """A module that is none yet: messages look for names in all modules of the process."""

    def __init__(self) -> None:
        pass


def with_other_gradients(at: int) -> tuple[int, str]:
    """The steps that were done, and what was said, where the ranks see other tokens from step `at` on."""
    torch.manual_seed(0)
    model, optimizer = mixed(2, {})
    rank = shared_mesh(2).world.rank
    unmade = Unmade()
    for step in range(3):
        model(torch.arange(4).view(4, 1) + (rank if step >= at else 0)).backward()
        try:
            optimizer.step()
        except ConfigError as error:
            return step, str(error)
    del unmade
    return 3, ""


@pytest.mark.parametrize("at", [0, 1])
def test_other_gradients_of_a_whole_parameter_are_refused(at: int, ranks: Any) -> None:
    """As under sequence parallelism, where each rank has a part of them: the copies would drift apart."""
    (done, said), other = ranks(2).run(with_other_gradients, at)
    assert (done, said) == other
    assert done == at
    assert said.startswith(
        "each tensor-parallel rank holds these parameters whole and must get the same gradient, but the ranks' "
    )
    assert "norm.weight" in said


def with_rounded_gradients(folder: str) -> str:
    """A save after steps in which the second rank's kernels round otherwise."""
    mesh = shared_mesh(2)
    torch.manual_seed(0)
    model, optimizer = mixed(2, {})
    for p in model.norm.parameters():
        p.register_hook(lambda gradient: gradient * (1 + 1e-5 * mesh.tp.rank))
    for _ in range(3):
        model(torch.arange(4).view(4, 1)).backward()
        optimizer.step()
    return shardwise.save_checkpoint(folder, model, optimizer, step=3, mesh=mesh)


def test_copies_stay_equal_where_kernels_round_otherwise(ranks: Any, tmp_path: Path) -> None:
    """Else no checkpoint could be saved, which compares the copies bit for bit."""
    assert ranks(2).run(with_rounded_gradients, str(tmp_path)) == [str(tmp_path / "step-00000003")] * 2


def drifted(folder: str) -> list[str]:
    mesh, said = shared_mesh(2), list[str]()
    torch.manual_seed(0)
    model, optimizer = mixed(2, {})
    other = shared_mesh(1)
    for changed, given in ((model.frozen.bias, mesh), (model.late.weight, mesh), (None, other)):
        if changed is not None and mesh.world.rank == 1:
            flip(changed, 3, 2)
        try:
            shardwise.save_checkpoint(folder, model, optimizer, step=1, mesh=given)
        except (RunError, ConfigError) as error:
            said.append(str(error))
        if changed is not None and mesh.world.rank == 1:
            flip(changed, 3, 2)
    return said


def test_a_save_compares_the_copies_and_the_mesh(ranks: Any, tmp_path: Path) -> None:
    one, other = ranks(2).run(drifted, str(tmp_path / "saved"))
    assert one == other
    assert "parameters have drifted apart: frozen.bias on ranks [1] differs from rank 0" in one[0]
    assert "parameters have drifted apart: late.weight on ranks [1] differs from rank 0" in one[1]
    assert "the data-parallel ranks of the optimizer (0) must be those of mesh (0 and 1)" in one[2]
    assert not (tmp_path / "saved").exists()


def stages_of_one_name(folder: str) -> str:
    mesh = shared_mesh(1, 2)
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = shardwise.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, mesh=mesh)
    with pytest.raises(ConfigError) as caught:
        shardwise.save_checkpoint(folder, model, optimizer, step=1, mesh=mesh)
    return str(caught.value)


def test_stages_with_one_name_for_two_parameters_are_refused(ranks: Any, tmp_path: Path) -> None:
    """Only those of the first stage would be saved."""
    for said in ranks(2).run(stages_of_one_name, str(tmp_path)):
        assert said.startswith("pipeline stages must name their parameters differently, and several have 0.weight and")
