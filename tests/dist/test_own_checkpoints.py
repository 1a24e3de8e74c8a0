"""Checkpoints of a loop of the user's own over real ranks: what calls leave behind, and problems of one rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.distributed_c10d import _world

import shardwise
from shardwise.checkpoint.save import Saver
from shardwise.mesh import Group
from shardwise.storage.root import Root
from shardwise.testing import RankPool
from tests.dist.checkpoints import PLACE
from tests.dist.dense import mesh as shared_mesh


def parts() -> tuple[nn.Module, shardwise.ZeroRedundancyOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    return model, shardwise.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)


# ---- what calls leave behind


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
    pool: RankPool = ranks(2)
    for after_2, after_5 in pool.run(groups_after_saves, str(tmp_path), gives_mesh):
        assert after_2 == after_5


# ---- problems of one rank


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
    pool: RankPool = ranks(2)
    one, other = pool.run(refused, str(tmp_path / "saved"), str(taken), timeout=30.0)
    assert one == other
    assert one[0] == f"StoreError: {taken} cannot be made: File exists"
    assert one[1].startswith("ConfigError: step (None) must be")
    assert one[2].startswith("ConfigError: the optimizer must hold the model's parameters: it lacks 0.weight")
    assert not (tmp_path / "saved").exists()


def test_a_saver_refuses_a_step_before_its_thread_begins(tmp_path: Path) -> None:
    """In the thread nobody would hear of it, and the save would have no result."""
    mesh, (model, optimizer) = shared_mesh(1), parts()
    saver = Saver(Root.of(tmp_path), model, optimizer, None, mesh, Group(), described={})
    with pytest.raises(TypeError):
        saver.save(None, PLACE)  # type: ignore[arg-type]
    saver.wait()
    assert saver.finished() == []
