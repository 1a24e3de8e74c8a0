"""Functions that are called on new ranks: what comes back, also of ranks that fail."""

import pickle
from pathlib import Path

import pytest

from shardwise.verify import rank_calls
from shardwise.verify.rank_calls import RankResults, call_on_ranks


def test_a_result_that_was_cut_short_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "results.pickle"

    def launch(_command: list[str], _nproc: int, _folder: Path) -> None:
        assert not file.exists(), "results of an earlier call are removed"
        file.write_bytes(pickle.dumps(["whole"]) + pickle.dumps(["cut"])[:-1])

    monkeypatch.setattr(rank_calls, "launch", launch)
    for _ in range(2):
        assert call_on_ranks(len, ranks=1, folder=tmp_path) == RankResults([["whole"]], None)
