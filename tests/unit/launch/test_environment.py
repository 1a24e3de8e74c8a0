"""How a process knows that a launcher started it."""

import os

import pytest

from shardwise.launch.environment import ERROR_FILE, PARENT_PID, Rank, is_launched, joined, keep_own, unjoined

PLACE = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}


def test_a_rank_joins_and_stays_one(of_a_rank: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert joined(PLACE) == Rank(rank=5, local_rank=1, world=8)
    assert joined({**PLACE, "RANK": ""}) is None
    assert not is_launched(PLACE)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    before = dict(of_a_rank)
    keep_own(of_a_rank)
    assert of_a_rank == before
    assert joined(of_a_rank) == Rank(rank=5, local_rank=1, world=8)
    assert is_launched(of_a_rank)


@pytest.fixture
def of_a_rank(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What a process inherits that a rank of another process id started."""
    variables = {
        **PLACE, "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "4", "ROLE_RANK": "5",
        "TORCHELASTIC_ERROR_FILE": "/tmp/error.json", "SLURM_STEP_NUM_TASKS": "2", "HOME": "/home/user",
        ERROR_FILE: "/run/logs/error.json", PARENT_PID: "1",
    }  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        keep_own(variables)
    return variables


def test_a_process_started_by_a_rank_is_none(of_a_rank: dict[str, str]) -> None:
    keep_own(of_a_rank)
    assert of_a_rank == {"HOME": "/home/user"}


def test_a_rank_of_a_job_that_a_rank_started_is_one(of_a_rank: dict[str, str]) -> None:
    """torchrun gives its ranks a meeting point of their own; what reports to the outer launcher is not theirs."""
    of_a_rank |= {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "2"}
    keep_own(of_a_rank)
    assert joined(of_a_rank) == Rank(rank=1, local_rank=1, world=2)
    assert not is_launched(of_a_rank)
    assert PARENT_PID not in of_a_rank


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"MASTER_ADDR": ""}, "MASTER_ADDR must be set beside RANK, LOCAL_RANK and WORLD_SIZE, as torchrun does"),
        ({"MASTER_PORT": "a"}, "MASTER_PORT ('a') must be a whole number, as torchrun sets it"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT (65536) must be a port, from 1 to 65535"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK (2) must be less than WORLD_SIZE (2)"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK (1) must be less than LOCAL_WORLD_SIZE (1)"),
        ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE (3) must be at most WORLD_SIZE (2)"),
        ({"WORLD_SIZE": "0"}, "RANK (0) must be less than WORLD_SIZE (0)"),
    ],
)
def test_fault_14_variables_of_torchrun_that_contradict_are_refused(changed: dict[str, str], told: str) -> None:
    torchrun = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    assert unjoined({**torchrun, **changed}) == told
    assert unjoined(torchrun) is None
    assert unjoined({}) is None
    assert (unjoined({"LOCAL_RANK": "1"}) or "").startswith("RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be set")
