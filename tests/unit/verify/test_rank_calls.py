"""Functions that are called on new ranks: what comes back, also of ranks that fail."""

import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.base.errors import RunError
from shardwise.launch.local import LaunchError
from shardwise.verify import rank_calls
from shardwise.verify.rank_calls import RankResults, call_on_ranks
from tests.arch.source import ROOT


def count_until_failure(last: int) -> Iterator[int]:
    yield from range(last)
    raise RunError(f"{last} is not counted")


@pytest.mark.slow
def test_results_before_a_failure_come_back_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)  # a rank imports this module
    results = call_on_ranks(count_until_failure, 2, ranks=1, folder=tmp_path)
    assert results.values == [0, 1]
    with pytest.raises(LaunchError, match="2 is not counted"):
        results.single()


def test_a_result_that_was_cut_short_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "results.pickle"

    def launch(_command: list[str], _nproc: int, _folder: Path) -> None:
        assert not file.exists(), "results of an earlier call are removed"
        file.write_bytes(pickle.dumps(["whole"]) + pickle.dumps(["cut"])[:-1])

    monkeypatch.setattr(rank_calls, "launch", launch)
    for _ in range(2):
        assert call_on_ranks(len, ranks=1, folder=tmp_path) == RankResults([["whole"]], None)
