"""Gradients are reduced once a step, and while other stages still work."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.config import Config, check_layout
from shardwise.optim.buckets import Bucket
from shardwise.train.build import build_trainer
from tests.dist.dense import mesh as shared_mesh
from tests.dist.training import make_config, make_data

PATIENCE = 30.0
"""Seconds that the first stage's last backward pass waits for the last stage's reductions."""


def step(config: Config, folder: Path) -> tuple[int, int, bool]:
    """The buckets of a rank and their reductions in a step.

    And if all of the last stage's began before the first stage's last backward pass ended, on the first stage.
    """
    mesh = shared_mesh(1, 2)
    trainer = build_trainer(config, mesh, make_data())
    buckets, reductions, overlapped = len(trainer.optimizer.buckets), 0, mesh.pp.rank == 1
    left = check_layout(config, mesh.world.size).accumulation(config.train)

    def hold_last(_gradient: Tensor) -> None:
        nonlocal left, overlapped
        left -= 1
        deadline = time.monotonic() + PATIENCE
        while left == 0 and not overlapped and time.monotonic() < deadline:
            overlapped = len(list(folder.iterdir())) == 2
            time.sleep(0.005)

    def hook(_module: nn.Module, _arguments: tuple[Any, ...], out: Tensor) -> None:
        if torch.is_grad_enabled():
            out.register_hook(hold_last)

    if mesh.pp.rank == 0:
        next(iter(trainer.model.children())).register_forward_hook(hook)
    start_reduction = Bucket.start_reduction

    def start(bucket: Bucket) -> None:
        nonlocal reductions
        start_reduction(bucket)
        reductions += 1
        if mesh.pp.rank == 1 and reductions == buckets:
            (folder / str(mesh.world.rank)).touch()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "start_reduction", start)
        trainer.step()
    return buckets, reductions, overlapped


def test_the_last_stage_reduces_while_the_first_still_works(ranks: Any, tmp_path: Path) -> None:
    parallel = {"pipeline": 2, "schedule": "1f1b"}
    model, train, optimizer = {"num_hidden_layers": 4}, {"micro_batch": 1}, {"bucket_mib": 0.02}
    config = make_config(model=model, parallel=parallel, train=train, optimizer=optimizer)
    for buckets, reductions, overlapped in ranks(4).run(step, config, tmp_path):
        assert buckets >= 3
        assert reductions == buckets, "each bucket is reduced once a step"
        assert overlapped, "the last stage waits with its reductions until the first stage is done"
