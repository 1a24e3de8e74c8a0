"""Copies of the state in the memory of two nodes of two ranks, which are folders of one disk here."""

import errno
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from shardwise.config import Config, check_layout
from shardwise.distributed import collectives
from shardwise.estimates.memory import node_memory_of_copies
from shardwise.train.memory_copies import MemoryCopies, _CopyFiles, _CopyPart, _is_of_history, _newest_complete_step
from tests.dist.checkpoints import PLACE, State, canonical_state, make_trainer
from tests.dist.test_checkpoint import config_of, differences

RUN = "3f2a"
Starts = tuple[int, ...] | None
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP 2, ZeRO off": {"tensor": 2, "zero": 0},
    "PP 2, mixed, ZeRO-3": {"parallel": {"pipeline": 2}, "mode": "mixed", "zero": 3},
}


@dataclass
class Seen:
    """Of rank 0: losses of the steps, the state at the copy, what was restored, and why no copies are kept."""

    losses: list[float]
    state: State
    step: int | None
    received: int
    problem: str | None
    node_bytes: int


def train(
    config: Config,
    memory: Path,
    before: int,
    after: int,
    damage: str | None = None,
    began: Starts = None,
    run: str = RUN,
    data: str = "f",
) -> Seen:
    """Restore if there is something, train `before` steps with a copy after each one, damage, and train on.

    `began` is by default that of a run's first start where copies are made, and of its second one elsewhere.
    """
    trainer = make_trainer(config)
    world = trainer.mesh.world
    os.environ.update(LOCAL_WORLD_SIZE="2", SLURMD_NODENAME=f"n{world.rank // 2}")
    starts = ((0,) if before == 0 else ()) if began is None else began
    described = {"layout": {"ranks": 4}, "data": {"fingerprint": data}}
    copies = MemoryCopies(run, described, trainer, memory, starts)
    loaded = copies.restore(0)
    if loaded is not None:
        trainer.progress.step, trainer.progress.position = loaded[0].step, loaded[0].position
    losses = []
    for _ in range(before):
        losses.append(trainer.step().loss)
        place = {"samples": trainer.progress.samples, "position": trainer.progress.position, "tokens": 0}
        copies.copy(trainer.progress.step, {**PLACE, **place, "losses": losses})
    state = canonical_state(trainer)
    losses += [trainer.step().loss for _ in range(after)]
    collectives.barrier(world)
    if damage is not None and world.rank == 0:
        for path in memory.glob(damage):
            path.write_bytes(path.read_bytes()[:-3] + b"xyz")
    step, received = (None, 0) if loaded is None else (loaded[0].step, loaded[1])
    return Seen(losses, state, step, received, copies.problem, copies.node_bytes)


def folder(memory: Path, node: int) -> Path:
    return memory / f"shardwise-{os.getuid()}-{RUN}-n{node}"


@pytest.mark.parametrize("layout", [pytest.param("TP 2, ZeRO off", marks=pytest.mark.slow), "PP 2, mixed, ZeRO-3"])
def test_the_run_goes_on_from_memory_to_the_bit(layout: str, tmp_path: Path, ranks: Any) -> None:
    config = config_of(**LAYOUTS[layout])
    everywhere = ranks(4).run(train, config, tmp_path, 3, 2)
    first = everywhere[0]
    assert first.step is None
    expected = node_memory_of_copies(config, check_layout(config, 4), 2)
    assert max(one.node_bytes for one in everywhere) == expected, "as `submit` tells it"
    assert len(list(folder(tmp_path, 0).iterdir())) == 8, "two steps of two ranks and of two others"
    again = ranks(4).run(train, config, tmp_path, 0, 2)[0]
    assert (again.step, again.received) == (3, 0)
    assert again.losses == first.losses[3:], "bit by bit"
    assert not differences(again.state, first.state)


def test_a_lost_node_gets_its_parts_from_the_other_one(tmp_path: Path, ranks: Any) -> None:
    config = config_of(tensor=2)
    first = ranks(4).run(train, config, tmp_path, 3, 2)[0]
    for path in folder(tmp_path, 1).glob("rank-*"):
        path.unlink()
    again = ranks(4).run(train, config, tmp_path, 0, 2)[0]
    assert (again.step, again.received, again.losses) == (3, 2, first.losses[3:])
    for part in ("rank-0002-step-00000003", "rank-0003-step-00000003"):
        assert (folder(tmp_path, 1) / part).exists()
    for node in range(2):
        for path in folder(tmp_path, node).iterdir():
            path.unlink()
    assert ranks(4).run(train, config, tmp_path, 0, 0)[0].step is None, "nobody has it"


def train_where_a_part_does_not_fit(config: Config, memory: Path, before: int) -> Seen:
    """As `train`, with a memory of rank 0's node that is full when it gets the part of another node."""

    def full(files: _CopyFiles, part: _CopyPart, content: Any) -> None:
        if dist.get_rank() == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(files, part, content)

    write = _CopyFiles.write_content
    with mock.patch.object(_CopyFiles, "write_content", full):
        return train(config, memory, before, 0)


@pytest.mark.parametrize("is_link", [True, False])
def test_a_folder_that_is_not_this_users_alone_gets_no_copies(is_link: bool, tmp_path: Path, ranks: Any) -> None:
    there, target = folder(tmp_path, 0), tmp_path / "target"
    target.mkdir(0o700)
    there.symlink_to(target) if is_link else there.mkdir(0o755)
    problem = str(ranks(2).run(train, config_of(), tmp_path, 1, 0)[0].problem)
    assert f"{there} " in problem
    assert ("must be a folder of yours, and no link" if is_link else "must be 0700 or stricter, as ") in problem
    assert not [*target.iterdir(), *there.iterdir()]


def test_a_part_that_does_not_fit_ends_the_copies_and_no_training(tmp_path: Path, ranks: Any) -> None:
    seen = ranks(4).run(train_where_a_part_does_not_fit, config_of(), tmp_path, 3)[0]
    assert len(seen.losses) == 3
    assert seen.problem == f"{folder(tmp_path, 0)}: No space left on device"


def test_parts_of_another_run_start_or_data_and_damaged_ones_count_as_missing(tmp_path: Path, ranks: Any) -> None:
    config = config_of()
    ranks(4).run(train, config, tmp_path, 3, 0, "*/rank-0001-step-00000003")
    again = ranks(4).run(train, config, tmp_path, 0, 0)[0]
    assert (again.step, again.received) == (2, 0), "the step before is whole"
    for node in range(2):
        shutil.copytree(folder(tmp_path, node), tmp_path / f"shardwise-{os.getuid()}-other-n{node}")
    for began, run, data in (((3,), RUN, "f"), (None, "other", "f"), (None, RUN, "g")):
        assert ranks(4).run(train, config, tmp_path, 0, 0, None, began, run, data)[0].step is None


@pytest.mark.slow
def test_steps_that_were_undone_are_not_continued_from(tmp_path: Path, ranks: Any) -> None:
    """A run has copies of steps 2 and 3, goes back to step 1, does one step again, and starts once more."""
    config = config_of()
    ranks(4).run(train, config, tmp_path, 3, 0)
    assert ranks(4).run(train, config, tmp_path, 0, 0, None, (0, 3))[0].step == 3, "it continued from its last step"
    assert ranks(4).run(train, config, tmp_path, 0, 0, None, (0, 1))[0].step is None
    ranks(4).run(train, config, tmp_path, 1, 0, None, (0, 1))
    left = {path.name[-8:] for path in folder(tmp_path, 0).glob("rank-*")}
    assert left == {"00000001"}, "the first copy after a run went back removes those of undone steps"


@pytest.mark.slow
def test_copies_of_another_configuration_or_number_of_ranks_are_left_alone(tmp_path: Path, ranks: Any) -> None:
    config = config_of()
    ranks(4).run(train, config, tmp_path, 2, 0)
    other = replace_section(config, "optimizer", bucket_mib=0.001)
    assert ranks(4).run(train, other, tmp_path, 0, 0)[0].step is None
    assert ranks(2).run(train, config, tmp_path, 0, 0)[0].step is None
    longer = replace_section(replace_section(config, "optimizer", lr=2e-3), "train", stop_after=50)
    assert ranks(4).run(train, longer, tmp_path, 0, 0)[0].step == 2, "as from a checkpoint on the disk"


def test_the_newest_step_with_all_parts_that_no_later_start_undid_is_taken() -> None:
    assert _is_of_history(35, (), (0,))
    assert _is_of_history(35, (), (0, 35))
    assert not _is_of_history(35, (), (0, 10))
    assert not _is_of_history(35, (), (0, 10, 40))
    assert _is_of_history(14, (0,), (0, 10, 14))
    a = {_CopyPart(0, 4), _CopyPart(1, 4), _CopyPart(0, 5)}
    b = {_CopyPart(2, 4), _CopyPart(3, 4), _CopyPart(2, 5), _CopyPart(3, 5)}
    assert _newest_complete_step({"a": a, "b": b}, 4) == 4
    assert _newest_complete_step({"a": a, "b": b | {_CopyPart(1, 5)}}, 4) == 5, (
        "of rank 1 the other node has the newer part"
    )
    assert _newest_complete_step({"a": a}, 4) is None


def replace_section(config: Config, section: str, **keys: Any) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=keys)})
