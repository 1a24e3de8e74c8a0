"""Ranks of several machines may have other software or another configuration: they refuse to train together."""

from pathlib import Path
from typing import Any
from unittest import mock

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


def of_folders(*folders: str | None) -> tuple[list[str], list[str]]:
    """What a rank says of its run's folder, and of the argument `run_dir`."""
    given = folders[Group.world().rank]
    folder = None if given is None else Path(given)
    settings = load_config("llama2-tiny").model_dump(mode="json")
    said: list[list[str]] = []
    for ask in (
        lambda: rank_agreement.require_same_on_ranks(settings, Mesh(), folder),
        lambda: rank_agreement.require_same_run_dir(folder, 60.0),
    ):
        try:
            ask()
        except ConfigError as error:
            said.append(error.problems)
        else:
            said.append([])
    return said[0], said[1]


def test_ranks_share_one_folder(ranks: Any) -> None:
    """Else the rank that finds a finished run returns, and the others wait for it."""
    here = [str(Path(name).absolute()) for name in ("runs/a", "runs/b")]
    ((folder, run_dir), other) = ranks(2).run(of_folders, "runs/a", "runs/b")
    assert other == (folder, run_dir)
    assert folder == ["the run's folder must be the same on all ranks: runs/a on rank 0, and runs/b on rank 1"]
    assert run_dir == [f"run_dir must be the same on all ranks: {here[0]} on rank 0, and {here[1]} on rank 1"]
    assert ranks(2).run(of_folders, "runs/a", here[0]) == [([], [])] * 2
    ((_, run_dir), _) = ranks(2).run(of_folders, "runs/a", None)
    assert run_dir == [f"run_dir must be the same on all ranks: {here[0]} on rank 0, and None on rank 1"]


def agreed(problems: dict[int, list[str]]) -> list[str]:
    world = Mesh().world
    try:
        raise_on_all_ranks(problems.get(world.rank, []), world)
    except ConfigError as error:
        return error.problems
    return []


def test_a_problem_of_one_rank_is_raised_on_all(ranks: Any) -> None:
    assert ranks(2).run(agreed, {1: ["the disk is full"]}) == [["the disk is full"]] * 2
