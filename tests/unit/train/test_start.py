"""Starts wait for what one rank prepares; saves, and what a checkpoint says of its place."""

import json
import shutil
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shardwise.base.errors import ConfigError, DataError, LostPeerError, RunError
from shardwise.checkpoint.format.manifest import Manifest
from shardwise.checkpoint.storage.root import Root
from shardwise.config import Layout, load_config
from shardwise.config.hugging_face import to_hugging_face
from shardwise.data.samples.causal import TokenBatches
from shardwise.distributed.mesh import Mesh
from shardwise.train import rank_agreement, start
from shardwise.train.checkpoint_saving import CheckpointSaver
from shardwise.train.run import _explained, _report_weights, run
from shardwise.train.step_record import Progress
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


BATCHES = TokenBatches(np.arange(99), 16, seed=1)


class Saves:
    """In place of a `Saver`."""

    def __init__(self) -> None:
        self.saved: dict[int, Any] = {}

    def save(self, step: int, described: Any) -> None:
        self.saved[step] = described

    def finished(self) -> list[Any]:
        return []


def saved(every: int, stopped_at: int | None = None) -> tuple[dict[int, Any], str | None]:
    """What a run of 5 steps saves, and who stopped it; three batches of 8 were left out before it."""
    config = make_config(checkpoint={"every": every}, train={"steps": 5})
    made: Any = Saves()
    progress, stop = Progress(), None
    feed = SimpleNamespace(batches=BATCHES)
    training: Any = SimpleNamespace(config=config, mesh=Mesh(), progress=progress, feed=feed)
    reporter: Any = None
    checkpoints = CheckpointSaver(training, made, reporter, lambda: "somebody" if progress.step == stopped_at else None)
    for step in range(1, 6):
        progress.step, progress.samples, progress.position = step, 8 * step, 8 * step + 24
        checkpoints.after_step(step == 5)
        stop = checkpoints.stopped_by
        if stop is not None:
            break
    return made.saved, stop


def test_when_a_run_saves_and_what_is_saved_again() -> None:
    """The place in the data is ahead of the samples."""
    found, stop = saved(2)
    assert (list(found), stop) == ([2, 4, 5], None)
    found, _ = saved(0)
    assert list(found) == [5]
    assert (found[5]["samples"], found[5]["position"]) == (40, 64)
    found, stop = saved(0, stopped_at=3)
    assert (list(found), stop) == ([3], "somebody")
    # The losses too, by which a spike is noticed after the next resume.
    made: Any = Saves()
    unused: Any = None
    checkpoints = CheckpointSaver(unused, made, unused, lambda: None)
    progress = {"samples": 40, "position": 64, "tokens": 640, "losses": (2.0, 1.5), "schedule": {}, "rng": {}}
    unknown: dict[str, Any] = {"config": {}, "versions": {}, "created": "", "files": (), "tensors": {}}
    checkpoints.save_again(Manifest(step=5, **progress, layout={}, data={}, optimizer={}, **unknown))  # type: ignore[arg-type]
    assert made.saved == {5: progress}


def ends(error: Exception, progress: Progress) -> Exception:
    """What a run raises that meets `error`."""
    with pytest.raises(Exception) as caught, _explained(make_config(), Layout(1), Mesh(device="cpu"), progress):  # noqa: PT011
        raise error
    return caught.value


@pytest.mark.parametrize(("step", "code"), [(20, 2), (21, 1)], ids=["before a step", "after a step"])
def test_how_values_and_lost_ranks_end_a_run(step: int, code: int) -> None:
    """Exit code 2 says that no step was taken: it is for what a run meets before, one that went on too."""
    found = ends(DataError("a.jsonl: line 7 is not JSON"), Progress(step=step, before=20))
    assert isinstance(found, RunError if code == 1 else ConfigError)
    assert found.exit_code == code
    assert str(found) == "a.jsonl: line 7 is not JSON"
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
    compared = mock.Mock(side_effect=InterruptedError)
    with monkeypatch.context() as patch:
        patch.setattr("shardwise.train.run.require_same_on_ranks", compared)
        for words, batch in ((["train.global_batch=4 per 1 ranks"], 12), ([], 8)):
            with pytest.raises(InterruptedError):
                run(load_config("llama2-tiny", words), None, "tiny")
            assert compared.call_args.args[0]["train"]["global_batch"] == batch
    join = mock.Mock(side_effect=InterruptedError)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("shardwise.distributed.devices.local_device", lambda: torch.device("cpu"))
    monkeypatch.setattr("shardwise.distributed.rendezvous.meet", lambda *_: None)
    monkeypatch.setattr("shardwise.distributed.wait_limit.start_wait_limit", lambda _: False)
    monkeypatch.setattr(dist, "init_process_group", join)
    with pytest.raises(InterruptedError):
        run(make_config(launch={"timeout": 7.5}), None, "tiny")
    assert join.call_args.kwargs["timeout"] == timedelta(seconds=7.5)
