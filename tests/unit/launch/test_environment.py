"""How a process knows that a launcher started it."""

import pytest

from shardwise.launch.environment import ERROR_FILE, Rank, is_launched, joined

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
