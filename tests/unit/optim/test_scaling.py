"""A `torch.amp.GradScaler` in one process: it does with the optimizer what it does with the wrapped class."""

import pytest
import torch
from torch import nn

from shardwise import ZeroRedundancyOptimizer
from tests.unit.optim.net import Net, batch, make

FLAWED = {1, 4}
"""Steps whose gradient is not finite."""


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)


def flaw(model: Net, step: int) -> None:
    if step in FLAWED:
        assert model.second.bias.grad is not None
        model.second.bias.grad[3] = float("inf")


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_skips_and_scales_as_with_the_wrapped_class(max_norm: float | None) -> None:
    plain, ours = make(), make()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    optimizer = ZeroRedundancyOptimizer(ours.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, max_norm=max_norm)
    scalers = scaler(), scaler()
    for step in range(8):
        for model, chosen, each in ((plain, reference, scalers[0]), (ours, optimizer, scalers[1])):
            each.scale(model(batch(step))).backward()
            flaw(model, step)
            if chosen is reference and max_norm is not None:
                each.unscale_(reference)
                nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
            each.step(chosen)
            each.update()
            chosen.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=1e-7)


def test_a_scaler_that_is_off_changes_nothing() -> None:
    model = make()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD)
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale(model(batch(0))).backward()
    off.step(optimizer)
    off.update()
    model(batch(1)).backward()
    optimizer.step()


def test_unscaling_or_clipping_before_the_scalers_step_is_refused() -> None:
    """The first would see one rank's gradients alone, the second would clip scaled ones."""
    for before, message in (
        (
            lambda each, optimizer: each.unscale_(optimizer),
            r"scaler\.unscale_\(optimizer\) looked for inf in one rank's gradients .*: leave it out",
        ),
        (
            lambda each, optimizer: optimizer.clip_grad_norm_(1.0),
            r"clipped the gradients of a scaled loss: leave it out",
        ),
    ):
        model = make()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD)
        each = scaler()
        each.scale(model(batch(0))).backward()
        before(each, optimizer)
        with pytest.raises(RuntimeError, match=message):
            each.step(optimizer)
