"""A `torch.amp.GradScaler` in one process: it does with the optimizer what it does with the wrapped class."""

import pytest
import torch
from torch import nn

from tests.unit.optim.net import Net, Pair, batch, make, sharded

FLAWED = {1, 4}
"""Steps whose gradient is not finite."""


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)


def flaw(model: Net, step: int) -> None:
    if step in FLAWED:
        model.second.bias.grad[3] = float("inf")


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_skips_and_scales_as_with_the_wrapped_class(max_norm: float | None) -> None:
    pair = Pair(torch.optim.SGD, {"max_norm": max_norm}, lr=0.1, momentum=0.9)
    scalers = scaler(), scaler()
    for step in range(8):
        for (model, chosen), each in zip(pair.both, scalers, strict=True):
            each.scale(model(batch(step))).backward()
            flaw(model, step)
            if chosen is pair.reference and max_norm is not None:
                each.unscale_(chosen)
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            each.step(chosen)
            each.update()
            chosen.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    pair.assert_close()


def test_unscaling_or_clipping_before_the_scalers_step_is_refused() -> None:
    """The first would see one rank's gradients alone, the second would clip scaled ones."""
    looked = r"scaler\.unscale_\(optimizer\) looked for inf in one rank's gradients .*: leave it out"
    for before, message in (
        (lambda each, optimizer: each.unscale_(optimizer), looked),
        (lambda _, optimizer: optimizer.clip_grad_norm_(1.0), "clipped the gradients of a scaled loss: leave it out"),
    ):
        model, each = make(), scaler()
        optimizer = sharded(model, torch.optim.SGD)
        each.scale(model(batch(0))).backward()
        before(each, optimizer)
        with pytest.raises(RuntimeError, match=message):
            each.step(optimizer)
