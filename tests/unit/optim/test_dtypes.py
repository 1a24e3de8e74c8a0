"""Masters, gradients and state in another dtype than the parameters'."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from shardwise.optim.buckets import Bucket
from tests.unit.optim.net import PLAIN, batch, make, sharded, train


def test_mixed_precision_is_adamw_on_masters() -> None:
    """Gradients add up in float32, the update is on float32 masters, the bfloat16 parameters are their roundings."""
    model = make().bfloat16()
    trained = [p for p in model.parameters() if p.requires_grad and p.numel()]
    masters = [p.detach().float().clone() for p in trained]
    reference = torch.optim.AdamW([m.requires_grad_() for m in masters], lr=0.01)
    optimizer = sharded(model, lr=0.01, gradient_dtype=torch.float32, **PLAIN)
    for step in range(5):
        sums = [torch.zeros_like(m) for m in masters]
        for micro in range(4):
            loss = model(batch(10 * step + micro))
            for total, gradient in zip(sums, torch.autograd.grad(loss, trained, retain_graph=True), strict=True):
                total += gradient.float()
            loss.backward()
        for master, total, p in zip(masters, sums, trained, strict=True):
            assert p.grad.dtype == torch.float32
            assert torch.equal(p.grad, total)
            master.grad = total
        reference.step()
        optimizer.step()
        assert all(torch.equal(p, m.bfloat16()) for p, m in zip(trained, masters, strict=True))


@pytest.mark.parametrize("how", ["load_state_dict", "data"])
def test_new_weights_reach_the_masters(how: str) -> None:
    model, other = make().bfloat16(), make(seed=1).bfloat16()
    optimizer = sharded(model, torch.optim.SGD, lr=1e-6)
    train(model, optimizer, 2)
    masters = [b.master.detach().clone() for b in optimizer.buckets]
    kept = copy.deepcopy(model.state_dict())
    for state in (other.state_dict(), kept):
        if how == "load_state_dict":
            model.load_state_dict(state)
        else:
            for name, p in model.named_parameters():
                p.data.copy_(state[name])
        optimizer.norms()
        optimizer.zero_grad()
        for bucket in optimizer.buckets:
            assert torch.equal(bucket.master.detach().bfloat16(), bucket.values)
    # Weights that were swapped out and in again, as an evaluation of averages does: what they hold beyond bfloat16 is
    # gone with the first swap, which only a snapshot of the optimizer keeps.
    optimizer.load_state_dict({**optimizer.state_dict(), "masters": masters})
    model.load_state_dict(kept)
    optimizer.norms()
    assert all(torch.equal(b.master, m) for b, m in zip(optimizer.buckets, masters, strict=True))


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
def test_versions_alone_tell_what_was_written(
    grad_mode: Callable[[], AbstractContextManager[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without comparisons a step reads no parameter to find that nobody changed one."""
    model = make().bfloat16()
    optimizer = sharded(model, torch.optim.SGD, lr=1e-6)
    optimizer.compares_values = False
    train(model, optimizer, 2)
    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "adopt_values", None)
        patch.setattr(Bucket, "differs_from_masters", None)
        train(model, optimizer, 2)
    masters = [b.master.detach().clone() for b in optimizer.buckets]
    with grad_mode():
        model.second.weight.clamp_(-0.01, 0.01)
    optimizer.norms()
    for bucket, before in zip(optimizer.buckets, masters, strict=True):
        assert torch.equal(bucket.master.detach().bfloat16(), bucket.values)
        kept = bucket.values == before.bfloat16()
        assert torch.equal(bucket.master[kept], before[kept]), "what was not changed keeps its lower bits"
    assert not all(torch.equal(b.master, before) for b, before in zip(optimizer.buckets, masters, strict=True))
