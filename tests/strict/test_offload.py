"""Optimizer state in the host's memory: the same training, in less memory of the device, and saved all the same."""

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import ZeroRedundancyOptimizer
from shardwise.config import Config, check_layout
from shardwise.estimates.memory import expected_memory, offloaded_bytes
from shardwise.optim.lamb import LAMB
from shardwise.optim.state_hash import StateSums
from shardwise.train.step_meters import state_bytes_by_kind
from tests.dist.checkpoints import load, make_trainer, save, step_folder
from tests.dist.training import Sections, make_config, named
from tests.rank_pool import Pools
from tests.sweeps import few

STEPS = 4
OFTEN = ((2, 1, torch.bfloat16), (2, 3, torch.bfloat16))
WIDTH = 40
"""No multiple of a bucket's alignment: there are gaps between parameters, and fresh memory there is NaN."""


class Blocks(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, device="strict", dtype=dtype) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def own_loop(stage: int, dtype: torch.dtype, offload: bool) -> tuple[list[float], list[torch.Tensor], list[float]]:
    """Losses, parameters at the end, and the norms of the parameters, of a loop with all that a user may do between."""
    torch.manual_seed(3)
    model = Blocks(dtype)
    options = {"lr": 0.02, "max_norm": 0.5, "stage": stage, "offload": offload, "bucket_mib": 0.005}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, model=model, **options)
    assert all(bucket.on_host == offload for bucket in optimizer.buckets)
    assert all((bucket.master.device.type == "cpu") == offload for bucket in optimizer.buckets)
    losses, norms = [], []
    for step in range(2 * STEPS):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).to("strict", dtype)
        loss = (model(x) - 0.1).float().square().mean()
        loss.backward()
        norms.append(optimizer.norms()[1].item())
        if step == 1:
            optimizer.clip_grad_norm_(0.01)
        optimizer.step()
        losses.append(loss.item())
        if step == 2:
            with optimizer.gathered(), torch.no_grad():
                for p in model.parameters():
                    p.clamp_(-0.1, 0.1)
        if step == STEPS:
            state = copy.deepcopy(optimizer.state_dict())
        if step == STEPS + 1:
            optimizer.load_state_dict(state)
    with optimizer.gathered():
        return losses, [p.detach().cpu() for p in model.parameters()], norms


@pytest.mark.parametrize(
    ("world", "stage", "dtype"),
    few([(1, 0, torch.float32), (2, 1, torch.bfloat16), (2, 2, torch.float32), (2, 3, torch.bfloat16)], *OFTEN),
)
def test_the_host_computes_the_same_updates(world: int, stage: int, dtype: torch.dtype, strict: Pools) -> None:
    """With the same kernels to the bit. The norm of parameters is that of the rounded ones, off by 2^-9 at most."""
    for plain, offloaded in zip(
        strict(world).run(own_loop, stage, dtype, False), strict(world).run(own_loop, stage, dtype, True), strict=True
    ):
        assert offloaded[0] == plain[0]
        assert offloaded[2] == pytest.approx(plain[2], rel=1e-6 if dtype == torch.float32 else 2**-9)
        for a, b in zip(offloaded[1], plain[1], strict=True):
            assert torch.equal(a, b)


def train_and_resume(config: Config, root: str) -> tuple[list[float], list[float], Any, Any]:
    """Losses of a training and of one that goes on from the middle, and the sums of both states at the end."""
    trainer = make_trainer(config)
    losses = [trainer.step().loss for _ in range(STEPS)]
    assert save(trainer, root)[0].problem is None
    losses += [trainer.step().loss for _ in range(STEPS)]
    resumed = make_trainer(config)
    load(resumed, step_folder(root, STEPS))
    again = [resumed.step().loss for _ in range(STEPS)]
    sums = [StateSums(each.model, each.optimizer, each.mesh).measure() for each in (trainer, resumed)]
    return losses, again, *sums


@pytest.mark.parametrize(("world", "sections"), named("offload", "ZeRO-3, mixed"))
def test_a_training_is_saved_and_goes_on_alike(world: int, sections: Sections, strict: Pools, tmp_path: Path) -> None:
    config = make_config(**sections)
    offloaded = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"offload": True})})
    plain = strict(world).run(train_and_resume, config, str(tmp_path / "plain"))
    for (losses, *_), (found, again, sums, resumed_sums) in zip(
        plain, strict(world).run(train_and_resume, offloaded, str(tmp_path / "offloaded")), strict=True
    ):
        assert found == pytest.approx(losses, rel=1e-6 if config.precision.mode == "float32" else 1e-4)
        assert again == found[STEPS:]
        assert sums == resumed_sums


def bytes_of_training(config: Config) -> tuple[int, int, int]:
    """Bytes of the device at the peak of a step, and after it; bytes of masters and states on the host."""
    gc.collect()
    before = torch.accelerator.memory_allocated()
    trainer = make_trainer(config)
    trainer.step()
    torch.accelerator.reset_peak_memory_stats()
    trainer.step()
    states = [value for state in trainer.optimizer.inner.state.values() for value in state.values() if value.dim()]
    masters = [bucket.master for bucket in trainer.optimizer.buckets]
    assert all(master.is_pinned() for master in masters if master.device.type == "cpu")
    on_host = sum(tensor.nbytes for tensor in (*masters, *states) if tensor.device.type == "cpu")
    kinds = state_bytes_by_kind(trainer.model, trainer.optimizer)
    assert (kinds["optimizer"] == 0) == (on_host > 0), f"the log counts {kinds}"
    peak, held = torch.accelerator.max_memory_allocated(), torch.accelerator.memory_allocated()
    return peak - before, held - before, on_host


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_the_estimate_knows_what_is_on_the_host(zero: int, strict: Pools) -> None:
    config = make_config(precision={"mode": "mixed"}, optimizer={"zero": zero})
    offloaded = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"offload": True})})
    plain_peak, plain_held, none = strict(2).run(bytes_of_training, config)[0]
    peak, held, on_host = strict(2).run(bytes_of_training, offloaded)[0]
    layout = check_layout(config, 2)
    expected, expected_plain = (expected_memory(each, layout, True) for each in (offloaded, config))
    assert none == 0
    assert plain_held - held == pytest.approx(on_host, abs=4096)
    assert on_host <= offloaded_bytes(offloaded, layout, True) <= 3 * on_host, "pinned memory comes in powers of two"
    assert expected.optimizer == 0
    assert plain_peak - peak == pytest.approx(expected_plain.total - expected.total, rel=0.02), (peak, plain_peak)


def refusals() -> list[str]:
    model = Blocks(torch.bfloat16)
    texts = []
    for wrapped, options in (
        (LAMB, {}),
        (torch.optim.AdamW, {"rounding": "stochastic", "optimizer_dtype": torch.bfloat16}),
    ):
        with pytest.raises(ValueError, match="offload") as error:
            ZeroRedundancyOptimizer(model.parameters(), wrapped, offload=True, **options)
        texts.append(str(error.value))
    return texts


def test_what_the_host_cannot_update_is_refused(strict: Pools) -> None:
    lamb, rounding = strict(1).run(refusals)[0]
    assert "LAMB, which needs whole tensors" in lamb
    assert "random bits" in rounding
