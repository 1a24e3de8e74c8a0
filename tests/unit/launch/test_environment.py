"""How a process knows that a launcher started it."""

import pytest

from shardwise.launch.environment import ERROR_FILE, Rank, is_launched, joined, unjoined

PLACE = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}


def test_joined() -> None:
    assert joined(PLACE) == Rank(rank=5, local_rank=1, world=8)


@pytest.mark.parametrize("missing", PLACE)
def test_alone_when_a_variable_is_missing(missing: str) -> None:
    assert joined({name: value for name, value in PLACE.items() if name != missing}) is None
    assert joined({**PLACE, missing: ""}) is None


def test_is_launched() -> None:
    assert is_launched({ERROR_FILE: "/run/error.json"})
    assert not is_launched(PLACE)


def test_processes_of_another_launcher_are_not_taken_for_one_each() -> None:
    torchrun = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    assert unjoined({}) is None
    assert unjoined(torchrun) is None
    assert unjoined({"SLURM_STEP_NUM_TASKS": "1"}) is None
    assert unjoined({**torchrun, "SLURM_STEP_NUM_TASKS": "4"}) is None
    assert "srun started 4 processes" in (unjoined({"SLURM_STEP_NUM_TASKS": "4"}) or "")
    assert "mpirun started 2 processes" in (unjoined({"OMPI_COMM_WORLD_SIZE": "2"}) or "")
    del torchrun["LOCAL_RANK"]
    assert (unjoined(torchrun) or "").startswith("LOCAL_RANK must be set")
