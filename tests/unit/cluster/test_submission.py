from pathlib import Path

import pytest

from shardwise.cluster import slurm
from shardwise.cluster.submission import check_counts, check_run_folder, ranks_per_node, reserved
from shardwise.config import Config, load_config
from shardwise.errors import ConfigError


def config(*overrides: str) -> Config:
    return load_config("llama2-tiny", overrides)


def as_it_is(one: Config, _world: int) -> Config:
    return one


def test_a_job_asks_for_the_gpus_of_the_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "gpus_per_node", lambda partition: {"gpu": 8, None: 0}[partition])
    monkeypatch.setattr("shutil.which", lambda name: name)
    assert reserved(config()) is None
    assert reserved(config("launch.partition=gpu")) == "gpu:8"
    assert reserved(config("launch.partition=gpu", "launch.gres=gpu:4")) == "gpu:4"
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert reserved(config("launch.partition=gpu")) is None, "where SLURM is not at hand nothing is known"


def test_ranks_are_those_that_are_given_else_gpus_else_a_copy_of_the_model() -> None:
    assert ranks_per_node(config("launch.ranks_per_node=3"), (2, 2), "gpu:8") == 3
    assert ranks_per_node(config(), (2, 2), "gpu:h100:8") == 8
    assert ranks_per_node(config("parallel.tensor=4"), (2, 2), None) == 2
    with pytest.raises(ConfigError, match=r"launch\.ranks_per_node must be set: .*\(2 ranks\) cannot be cut into 3"):
        ranks_per_node(config("parallel.tensor=2"), (3, 3), None)


def test_numbers_of_nodes_that_the_layout_does_not_fill_are_told() -> None:
    layout, notes = check_counts(config("train.global_batch=8", "train.micro_batch=2"), (1, 3), 2, as_it_is)
    assert layout.world == 4
    assert notes == ["of 1 to 3 nodes the layout fills 1 and 2; of others a part is used"]
    with pytest.raises(ConfigError, match=r"train\.global_batch \(8\) must be a multiple"):
        check_counts(config("train.global_batch=8"), (3, 3), 1, as_it_is)


def test_a_folder_whose_log_slurm_could_not_write_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must be without '%' and '\\\\': SLURM replaces them"):
        check_run_folder(tmp_path / "50%\\x", config())
    check_run_folder(tmp_path / "a #b", config())
