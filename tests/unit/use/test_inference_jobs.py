"""What a job of ranks refuses before it reads weights."""

from pathlib import Path

import pytest

from shardwise.base.errors import ConfigError
from shardwise.checkpoint.storage.root import Root
from shardwise.config import load_config
from shardwise.distributed import collectives
from shardwise.distributed.mesh import Mesh
from shardwise_use import inference_jobs


def test_ranks_that_find_several_checkpoints_are_told_to_name_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where each node has a disk of its own, and one of them holds a newer step."""
    monkeypatch.setattr(collectives, "all_gather_objects", lambda mine, _: [mine, "/other/step-00000200"])
    here = tmp_path / "step-00000100"
    with pytest.raises(ConfigError) as caught:
        inference_jobs.load_model(load_config("gpt-tiny"), Root.of(here), Mesh(device="cpu"))
    folders = ", ".join(sorted(["/other/step-00000200", str(here)]))
    assert caught.value.problems == [f"the ranks found several checkpoints ({folders}): name one of them"]
