"""How a process knows that a launcher started it."""

import os

import pytest

from shardwise.launch.environment import ERROR_FILE, PARENT_PID, Rank, is_launched, joined, keep_own, unjoined

PLACE = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}


def test_joined() -> None:
    assert joined(PLACE) == Rank(rank=5, local_rank=1, world=8)


@pytest.mark.parametrize("missing", PLACE)
def test_alone_when_a_variable_is_missing(missing: str) -> None:
    assert joined({name: value for name, value in PLACE.items() if name != missing}) is None
    assert joined({**PLACE, missing: ""}) is None


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


def test_a_rank_stays_one(of_a_rank: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: -1)
    before = dict(of_a_rank)
    keep_own(of_a_rank)
    assert of_a_rank == before
    assert joined(of_a_rank) == Rank(rank=5, local_rank=1, world=8)
    assert is_launched(of_a_rank)


def test_a_rank_of_a_job_that_a_rank_started_is_one(of_a_rank: dict[str, str]) -> None:
    """torchrun gives its ranks a meeting point of their own; what reports to the outer launcher is not theirs."""
    of_a_rank |= {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "2"}
    keep_own(of_a_rank)
    assert joined(of_a_rank) == Rank(rank=1, local_rank=1, world=2)
    assert not is_launched(of_a_rank)
    assert PARENT_PID not in of_a_rank


def test_is_launched() -> None:
    assert is_launched({ERROR_FILE: "/run/error.json"})
    assert not is_launched(PLACE)


def test_a_place_that_is_half_given_is_refused() -> None:
    torchrun = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    assert unjoined({}) is None
    assert unjoined(torchrun) is None
    assert unjoined({**torchrun, "RANK": "2"}) == "RANK (2) must be less than WORLD_SIZE (2)"
    assert unjoined({**torchrun, "LOCAL_RANK": "b"}) == "LOCAL_RANK ('b') must be a whole number, as torchrun sets it"
    del torchrun["LOCAL_RANK"]
    assert (unjoined(torchrun) or "").startswith("LOCAL_RANK must be set")


def test_a_rank_that_cannot_find_the_others_is_told_what_to_set() -> None:
    assert unjoined({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}) == (
        "MASTER_PORT must be set beside RANK, LOCAL_RANK and WORLD_SIZE, as torchrun does"
    )
    assert unjoined({"WORLD_SIZE": "1"}) is None


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
def test_fault_14_variables_of_torchrun_that_contradict_one_another_are_refused(
    changed: dict[str, str], told: str
) -> None:
    torchrun = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    assert unjoined({**torchrun, **changed}) == told


def test_fault_14_a_local_rank_alone_is_refused() -> None:
    """Two processes would train in one folder each by itself."""
    assert (unjoined({"LOCAL_RANK": "1"}) or "").startswith("RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be set")
    assert unjoined({"LOCAL_RANK": "0"}) is None
