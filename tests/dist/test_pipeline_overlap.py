"""Gradients are reduced once a step, and while other stages still work."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.config import Config, Schedule, check_layout
from shardwise.optim.buckets import Bucket
from shardwise.train.build import build_trainer
from tests.dist.dense import mesh as shared_mesh
from tests.dist.training import make_config, make_data

RANKS = 4
PIPELINE = 2
PATIENCE = 30.0
"""Seconds that the first stage's last backward pass waits for the last stage's reductions."""


@dataclass
class Found:
    """Of one step on one rank."""

    stage: int
    buckets: int
    reductions: int = 0
    overlapped: bool = False
    """Of the first stage: the last stage's buckets were all being reduced before its own last backward pass ended."""


def hold_last_backward(
    micro_batches: int, until: Callable[[], None]
) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
    left = micro_batches

    def held(_gradient: Tensor) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            until()

    def hook(_module: nn.Module, _arguments: tuple[Any, ...], out: Tensor) -> None:
        if torch.is_grad_enabled():
            out.register_hook(held)

    return hook


def step(config: Config, folder: Path) -> Found:
    mesh = shared_mesh(1, PIPELINE)
    layout = check_layout(config, mesh.world.size)
    trainer = build_trainer(config, mesh, make_data())
    assert trainer.pipeline is not None
    found = Found(mesh.pp.rank, len(trainer.optimizer.buckets))

    def wait() -> None:
        deadline = time.monotonic() + PATIENCE
        while not found.overlapped and time.monotonic() < deadline:
            found.overlapped = len(list(folder.iterdir())) == RANKS // PIPELINE
            time.sleep(0.005)

    if mesh.pp.rank == 0:
        first = next(iter(trainer.model.children()))
        first.register_forward_hook(hold_last_backward(layout.accumulation(config.train), wait))
    plain = Bucket.start_reduction

    def start(bucket: Bucket) -> None:
        plain(bucket)
        found.reductions += 1
        if mesh.pp.rank == PIPELINE - 1 and found.reductions == found.buckets:
            (folder / str(mesh.world.rank)).touch()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "start_reduction", start)
        trainer.step()
    return found


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_zero_bubble"])
def test_the_last_stage_reduces_while_the_first_still_works(schedule: Schedule, ranks: Any, tmp_path: Path) -> None:
    """The first stage of a rank's stages, where these are several, is done last: its buckets stay to the end."""
    config = make_config(
        model={"num_hidden_layers": 4},
        parallel={"pipeline": PIPELINE, "schedule": schedule},
        train={"micro_batch": 1},
        optimizer={"bucket_mib": 0.02},
    )
    everyone: list[Found] = ranks(RANKS).run(step, config, tmp_path)
    for found in everyone:
        assert found.buckets >= 3
        assert found.reductions == found.buckets, "each bucket is reduced once a step"
        if found.stage == 0:
            assert found.overlapped, "the last stage waits with its reductions until the first stage is done"
