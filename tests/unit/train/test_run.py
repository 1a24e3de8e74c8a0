"""As what an error ends a run, and what its ranks agree on."""

import json
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardwise.base.errors import ConfigError, DataError, LostPeerError, RunError
from shardwise.checkpoint.storage.root import Root
from shardwise.config import Layout, load_config
from shardwise.config.hugging_face import to_hugging_face
from shardwise.distributed.mesh import Mesh
from shardwise.train.run import _explained, _report_weights, _with_one_batch, run
from shardwise.train.step_record import Progress
from tests.dist.training import make_config


def ends(error: Exception, progress: Progress) -> Exception:
    """What a run raises that meets `error`."""
    with pytest.raises(Exception) as caught, _explained(make_config(), Layout(1), Mesh(device="cpu"), progress):  # noqa: PT011
        raise error
    return caught.value


@pytest.mark.parametrize(("step", "code"), [(20, 2), (21, 1)], ids=["before a step", "after a step"])
def test_bad_values_that_are_met_after_a_step_fail_the_run(step: int, code: int) -> None:
    """Exit code 2 says that no step was taken: it is for what a run meets before, one that went on too."""
    found = ends(DataError("a.jsonl: line 7 is not JSON"), Progress(step=step, before=20))
    assert isinstance(found, RunError if code == 1 else ConfigError)
    assert found.exit_code == code
    assert str(found) == "a.jsonl: line 7 is not JSON"


def test_what_a_library_says_of_a_lost_rank_is_a_sentence() -> None:
    found = ends(RuntimeError("[…gloo/transport/tcp/pair.cc:537] … GLHF!"), Progress(phase="forward and backward"))
    assert isinstance(found, LostPeerError)
    text = "rank 0 lost the connection to another rank during forward and backward"
    assert str(found) == f"{text} (`shardwise explain lost-connection`)"


def test_fault_07_a_run_says_what_it_changes_beside_loaded_weights(tmp_path: Path) -> None:
    config = load_config("llama3-tiny", ["model.rope_theta=5e6"])
    (tmp_path / "config.json").write_text(json.dumps(to_hugging_face(load_config("llama3-tiny").model)))
    here: Any = SimpleNamespace(
        config=config,
        weights=Root.of(tmp_path),
        data=SimpleNamespace(tokenizer_path=None),
        folder=SimpleNamespace(changes=("train.steps 1 → 2",)),
        mesh=SimpleNamespace(world=SimpleNamespace(rank=0)),
    )
    changed = f"model.rope_theta (5000000.0) replaces that of {tmp_path}/config.json (500000.0), with the same weights"
    told: list[tuple[str, ...]] = []
    reporter: Any = SimpleNamespace(changed=told.append, message=lambda _: None)
    _report_weights(here, reporter)
    here.mesh.world.rank = 1
    _report_weights(here, reporter)
    assert told == [("train.steps 1 → 2", changed), ("train.steps 1 → 2",)]


def test_all_ranks_have_the_batch_of_rank_0_and_give_up_after_the_keys_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another machine than the run's folder, a resumed run's number is not known."""
    monkeypatch.setattr("shardwise.distributed.collectives.broadcast_object", lambda value, group: 12)
    mesh = Mesh(device="cpu")
    named = load_config("llama2-tiny", ["train.global_batch=4 per 1 ranks"])
    assert _with_one_batch(named, mesh).train.global_batch == 12
    assert _with_one_batch(load_config("llama2-tiny"), mesh).train.global_batch == 8
    join = mock.Mock(side_effect=InterruptedError)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("shardwise.distributed.devices.local_device", lambda: torch.device("cpu"))
    monkeypatch.setattr("shardwise.distributed.rendezvous.meet", lambda *_: None)
    monkeypatch.setattr("shardwise.distributed.wait_limit.start_wait_limit", lambda _: False)
    monkeypatch.setattr(dist, "init_process_group", join)
    with pytest.raises(InterruptedError):
        run(make_config(launch={"timeout": 7.5}), None, "tiny")
    assert join.call_args.kwargs["timeout"] == timedelta(seconds=7.5)
