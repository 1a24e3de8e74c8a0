"""Which configuration a replay has, and what of two records it compares. Whole replays: tests/e2e/test_audit.py."""

from pathlib import Path

import pytest

from shardwise.base.errors import ConfigError
from shardwise.config import dump_yaml, load_config
from shardwise.runs.folder import RunDirectory
from shardwise.verify.replay import read_config


def test_what_the_bits_follow_from_is_refused_by_name(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.write_config(dump_yaml(load_config("llama2-tiny", ["train.bitwise=true"]).recorded()))
    with pytest.raises(ConfigError) as caught:
        read_config(run, ["parallel.grain=2", "train.seed=9", "parallel.tensor=2"])
    assert sorted(caught.value.problems) == [
        "parallel.grain (2) must be 4, as in the run that is replayed: leave it out",
        "train.seed (9) must be 1234, as in the run that is replayed: leave it out",
    ]
    _, changed = read_config(run, ["parallel.tensor=2"])
    assert changed.parallel.tensor == 2
