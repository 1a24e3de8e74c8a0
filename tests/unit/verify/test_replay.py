"""Which configuration a replay has, and what of two records it compares. Whole replays: tests/e2e/test_audit.py."""

from pathlib import Path

import pytest

from shardwise.base.errors import ConfigError
from shardwise.base.parsing import dump_yaml
from shardwise.config import load_config
from shardwise.runs.folder import RunDirectory
from shardwise.runs.state_records import RecordedHash, StateRecords
from shardwise.verify.replay import ReplayedStretch, compare_replay, hash_difference, read_replay_config


def test_what_a_replay_refuses_and_compares(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.write_config(dump_yaml(load_config("llama2-tiny", ["train.bitwise=true"]).recorded()))
    with pytest.raises(ConfigError) as caught:
        read_replay_config(run, ["parallel.grain=2", "train.seed=9", "parallel.tensor=2"])
    assert sorted(caught.value.problems) == [
        "parallel.grain (2) must be 4, as in the run that is replayed: leave it out",
        "train.seed (9) must be 1234, as in the run that is replayed: leave it out",
    ]
    _, changed = read_replay_config(run, ["parallel.tensor=2"])
    assert changed.parallel.tensor == 2
    state = RecordedHash("0" * 16, {})
    recorded = StateRecords({1: 4.0, 2: 3.0}, {1: 1.0, 2: 1.5}, {1: state, 2: state})
    replayed = StateRecords({1: 4.0}, {1: 1.0}, {1: state})
    assert compare_replay(recorded, recorded, ReplayedStretch(0, 2)).step is None
    comparison = compare_replay(recorded, replayed, ReplayedStretch(0, 2))
    assert comparison.step == 2
    assert comparison.differences == (
        "loss 3.0 in the run, None in the replay",
        "gradient norm 1.5 in the run, None in the replay",
        "state after it: no hash in the replay",
    )
    recorded = RecordedHash("one", {"model/a": "00000000", "model/b": "11111111"})
    assert hash_difference(recorded, recorded) is None
    other = RecordedHash("two", {"model/a": "00000000", "model/b": "22222222"})
    assert hash_difference(recorded, other) == "1 of 2 tensors (model/b)"
    assert hash_difference(recorded, RecordedHash("six", recorded.tensors)) == "the place in the data or the seed"
