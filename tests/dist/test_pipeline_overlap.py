"""Gradients are reduced once a step, and while other stages still work."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.config import Config, Schedule
from shardwise.optim.buckets import Bucket
from shardwise.pipeline.clock import FORWARD
from shardwise.train.build import build_trainer
from shardwise.train.execution import Pipelined
from tests.dist.dense import mesh as shared_mesh
from tests.dist.training import make_config, make_data

BACKWARD_SECONDS = 0.1


@dataclass
class Found:
    """Of one step on one rank; times are those of the machine's clock."""

    stage: int
    buckets: int
    started: list[float] = field(default_factory=list)
    backward_ended: float = 0.0


def slow_backward(seconds: float) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
    def wait(_gradient: Tensor) -> None:
        time.sleep(seconds)

    def hook(_module: nn.Module, _arguments: tuple[Any, ...], out: Tensor) -> None:
        if torch.is_grad_enabled():
            out.register_hook(wait)

    return hook


def step(config: Config) -> Found:
    mesh = shared_mesh(1, config.parallel.pipeline)
    trainer = build_trainer(config, config.check(mesh.world.size), mesh, make_data())
    assert isinstance(trainer.execution, Pipelined)
    found = Found(mesh.pp.rank, len(trainer.optimizer.buckets))
    if mesh.pp.rank == 0:
        next(iter(trainer.model.children())).register_forward_hook(slow_backward(BACKWARD_SECONDS))
    plain = Bucket.start_reduction

    def start(bucket: Bucket) -> None:
        found.started.append(time.perf_counter())
        plain(bucket)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "start_reduction", start)
        trainer.step()
    spans = trainer.execution.pipeline.clock.spans()
    found.backward_ended = max(span.end for span in spans if span.kind != FORWARD)
    return found


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_zero_bubble"])
def test_the_last_stage_reduces_while_the_first_still_works(schedule: Schedule, ranks: Any) -> None:
    """The first stage of a rank's stages, where these are several, is done last: its buckets stay to the end."""
    config = make_config(
        model={"num_hidden_layers": 4},
        parallel={"pipeline": 2, "schedule": schedule},
        train={"micro_batch": 1},
        optimizer={"bucket_mib": 0.02},
    )
    everyone: list[Found] = ranks(4).run(step, config)
    first = [found for found in everyone if found.stage == 0]
    last = [found for found in everyone if found.stage == 1]
    for found in everyone:
        assert found.buckets >= 3
        assert len(found.started) == found.buckets, "each bucket is reduced once a step"
    cool_down = min(found.backward_ended for found in first)
    for found in last:
        early = sum(start < cool_down - BACKWARD_SECONDS / 2 for start in found.started)
        assert early == found.buckets, f"{early} of {found.buckets} reductions start while the first stage works"
