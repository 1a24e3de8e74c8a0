"""Ranks of several machines may have other software or another configuration: they refuse to train together."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from shardwise.base.errors import ConfigError
from shardwise.config import load_config
from shardwise.distributed.collectives import raise_on_all_ranks
from shardwise.distributed.mesh import Group, Mesh
from shardwise.train import rank_agreement


def compared(overrides: dict[int, list[str]], torches: dict[int, str]) -> list[str]:
    rank = Group.world().rank
    config = load_config("llama2-tiny", overrides.get(rank, []))
    found = {**rank_agreement.package_versions(), **({"torch": torches[rank]} if rank in torches else {})}
    with mock.patch.object(rank_agreement, "package_versions", return_value=found):
        try:
            rank_agreement.require_same_on_ranks(config.model_dump(mode="json"), Mesh())
        except ConfigError as error:
            return error.problems
    return []


def test_what_differs_is_told_on_every_rank_with_the_ranks(ranks: Any) -> None:
    found = ranks(4).run(compared, {3: ["train.seed=7"]}, {2: "9.9", 3: "9.9"})
    (torch_, seed) = found[0]
    assert torch_.startswith("torch must be the same on all ranks: 2.")
    assert torch_.endswith(" on rank 0, and 9.9 on ranks 2 and 3")
    assert seed == "train.seed must be the same on all ranks: 1234 on rank 0, and 7 on rank 3"
    assert all(of_rank == found[0] for of_rank in found)
    assert ranks(2).run(compared, {}, {}) == [[], []]


def of_folders(*folders: str | None) -> list[str]:
    folder = folders[Group.world().rank]
    try:
        settings = load_config("llama2-tiny").model_dump(mode="json")
        rank_agreement.require_same_on_ranks(settings, Mesh(), None if folder is None else Path(folder))
    except ConfigError as error:
        return error.problems
    return []


def of_run_dirs(*folders: str | None) -> list[str]:
    folder = folders[Group.world().rank]
    try:
        rank_agreement.require_same_run_dir(None if folder is None else Path(folder), 60.0)
    except ConfigError as error:
        return error.problems
    return []


def test_ranks_share_one_folder(ranks: Any) -> None:
    found = ranks(4).run(of_folders, "runs/0", "runs/1", None, "runs/1/")
    wanted = "the run's folder must be the same on all ranks: runs/0 on rank 0, and runs/1 on ranks 1 and 3"
    assert found == [[wanted]] * 4
    assert ranks(2).run(of_folders, "runs/a", str(Path("runs/a").absolute())) == [[], []]


@pytest.mark.parametrize(("first", "second"), [("runs/a", None), ("runs/a", "runs/b")])
def test_every_rank_is_given_one_run_dir_or_none(first: str | None, second: str | None, ranks: Any) -> None:
    """Else the rank that finds a finished run returns, and the others wait for it."""
    here = [None if folder is None else str(Path(folder).absolute()) for folder in (first, second)]
    wanted = f"run_dir must be the same on all ranks: {here[0]} on rank 0, and {here[1]} on rank 1"
    assert ranks(2).run(of_run_dirs, first, second) == [[wanted]] * 2
    assert ranks(2).run(of_run_dirs, first, here[0]) == [[], []]


def agreed(problems: dict[int, list[str]]) -> list[str]:
    world = Mesh().world
    try:
        raise_on_all_ranks(problems.get(world.rank, []), world)
    except ConfigError as error:
        return error.problems
    return []


def test_a_problem_of_one_rank_is_raised_on_all(ranks: Any) -> None:
    assert ranks(2).run(agreed, {1: ["the disk is full"]}) == [["the disk is full"]] * 2
