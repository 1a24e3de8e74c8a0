"""Ranks wait for one that prepares data, however long that takes."""

import json
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.base.errors import ConfigError
from shardwise.checkpoint.storage.root import Root
from shardwise.config import load_config
from shardwise.config.hugging_face import to_hugging_face
from shardwise.distributed.mesh import Mesh
from shardwise.train import rank_agreement, start
from tests.dist.training import make_config

TINY: Any = load_config("llama2-tiny").model
PAIR: Any = SimpleNamespace(size=2)


def test_ranks_ask_one_another_for_ends_failures_and_commits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No collective lasts as long as the work: a time-out of collectives does not bound it."""
    end = threading.Event()
    others, asked = [(True, False), (True, False), (False, False), (False, False)], []

    def exchanged(mine: tuple[bool, bool], group: object) -> list[bool]:
        asked.append(mine)
        if len(asked) == 3:
            end.set()
        return [max(pair) for pair in zip(mine, others[min(len(asked), len(others)) - 1], strict=True)]

    monkeypatch.setattr(rank_agreement.collectives, "reduce_numbers", exchanged)
    assert rank_agreement.while_others_wait(lambda: end.wait(10), PAIR)
    assert asked[:3] == [(True, False)] * 3
    assert asked[-1] == (False, False)
    monkeypatch.setattr(rank_agreement.collectives, "reduce_numbers", lambda mine, group: [mine[0], True])
    assert rank_agreement.while_others_wait(lambda: "done", PAIR) == "done"
    monkeypatch.setattr(start, "resolve_weights", lambda *_, **__: tmp_path / "0123")
    monkeypatch.setattr(start.collectives, "any_rank", lambda is_true, group: True)
    monkeypatch.setattr(start.collectives, "all_gather_objects", lambda mine, group: [mine, "4567" if mine else mine])
    told = r"checkpoint\.load \(acme/tiny\) must be one commit on every machine: set checkpoint\.revision=0123"
    with pytest.raises(ConfigError, match=told):
        start._find_weights(make_config(checkpoint={"load": "acme/tiny"}).checkpoint, None, Mesh(device="cpu"))


def test_fault_09_a_resumed_run_has_what_lies_beside_its_newest_checkpoint(tmp_path: Path) -> None:
    """The file of `model.config` may be gone by then; what the user names anew counts before."""
    saved, model = tmp_path / "step-00000001", tmp_path / "model"
    for folder, end in ((saved, 7), (model, 8)):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**to_hugging_face(TINY), "eos_token_id": [end, 9]}))
        (folder / "generation_config.json").write_text("{}")
    config = load_config("llama2-tiny", [f"model.config={model}"])
    found: Any = SimpleNamespace(candidates=[SimpleNamespace(folder=Root.of(saved))])
    new: Any = SimpleNamespace(candidates=[])
    named = load_config("llama2-tiny", [f"checkpoint.companions={model}"])
    assert start._companions(config, new, None, None, None).ids == {"eos_token_id": [8, 9]}
    assert start._companions(config, found, config.recorded(), None, None).ids == {"eos_token_id": [7, 9]}
    assert start._companions(named, found, config.recorded(), None, None).ids == {"eos_token_id": [8, 9]}
    shutil.rmtree(model)
    assert start._companions(config, found, config.recorded(), None, None).ids == {"eos_token_id": [7, 9]}
    assert start._companions(named, found, named.recorded(), None, None).ids == {"eos_token_id": [7, 9]}
