"""Clipping in one process: by the optimizer's own max_norm, and by the user."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from tests.unit.optim.net import PLAIN, Net, Pair, batch, make, set_to_none, sharded


@pytest.mark.parametrize("max_norm", [1e-2, 1e3])
def test_clips_as_torch_does(max_norm: float) -> None:
    pair = Pair(torch.optim.SGD, {"max_norm": max_norm}, lr=0.1)
    for step in range(5):
        pair.backward(step)
        wanted = torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), max_norm)
        gradient_norm, parameter_norm = pair.optimizer.norms()
        assert float(gradient_norm) == pytest.approx(float(wanted), rel=1e-6)
        trained = [p for p in pair.plain.parameters() if p.requires_grad]
        assert float(parameter_norm) == pytest.approx(float(nn.utils.get_total_norm(trained)), rel=1e-6)
        pair.step()
    pair.assert_close()


@pytest.mark.parametrize("max_norm", [1e-2, 1e3])
@pytest.mark.parametrize("wrapped", [torch.optim.AdamW, torch.optim.SGD])
def test_a_fused_kernel_clips_as_it_reads(
    wrapped: type[torch.optim.Optimizer], max_norm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a pass over the gradients. It divides, where the pass multiplies: the results differ by rounding."""
    fused, plain = make(), make()
    of_fused = sharded(fused, wrapped, max_norm=max_norm, lr=1e-2, fused=True)
    of_plain = sharded(plain, wrapped, max_norm=max_norm, lr=1e-2, fused=False)
    for step in range(5):
        for model in (fused, plain):
            model(batch(step)).backward()
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "mul_", None)
            of_fused.step()
        of_plain.step()
    torch.testing.assert_close([*fused.parameters()], [*plain.parameters()], rtol=2e-5, atol=1e-7)
    assert not hasattr(of_fused.inner, "grad_scale")


def clip_by_torch(parameters: Iterable[nn.Parameter], *norms: float) -> list[float]:
    found = list(parameters)
    return [float(nn.utils.clip_grad_norm_(found, norm)) for norm in norms]


@pytest.mark.parametrize("norms", [[3.0, 0.02], [1e3]])
def test_clips_by_hand_as_torch_does_and_not_a_second_time(norms: list[float]) -> None:
    """Gradients included. The optimizer's own max_norm is back in the next step."""
    pair = Pair(torch.optim.SGD, {"max_norm": 1e-3}, lr=0.1)
    for step in range(3):
        pair.backward(step)
        wanted = clip_by_torch(pair.plain.parameters(), *norms)
        found = [float(pair.optimizer.clip_grad_norm_(norm)) for norm in norms]
        assert found == pytest.approx(wanted, rel=1e-6)
        for p, q in zip(pair.ours.parameters(), pair.plain.parameters(), strict=True):
            if q.grad is not None and q.numel():
                torch.testing.assert_close(p.grad, q.grad, rtol=2e-6, atol=1e-7)
        pair.step()
    pair.assert_close()
    pair.ours(batch(0)).backward()
    before = [p.detach().clone() for p in pair.ours.parameters()]
    pair.optimizer.step()
    moved = [p.detach() - q for p, q in zip(pair.ours.parameters(), before, strict=True)]
    assert float(nn.utils.get_total_norm(moved)) == pytest.approx(0.1 * 1e-3, rel=1e-2)


def test_a_norm_that_is_not_finite_is_an_error_where_asked() -> None:
    model = make()
    optimizer = sharded(model, torch.optim.SGD)
    (model(batch(0)) * float("inf")).backward()
    assert not optimizer.clip_grad_norm_(1.0).isfinite()
    with pytest.raises(RuntimeError, match=r"the gradient norm \((inf|nan)\) of the whole model must be finite"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)


def clip(model: Net) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


@pytest.mark.parametrize(("change", "what"), [(clip, "changed"), (set_to_none, "replaced")])
def test_gradients_that_change_after_their_reduction_are_refused(change: Callable[[Net], None], what: str) -> None:
    """Each rank would use others: with overlap a part of them is summed already."""
    match = (
        rf"gradients were {what} after their reduction .* began: clip them by optimizer\.clip_grad_norm_\(max_norm\)"
    )
    model = make()
    optimizer = sharded(model, **PLAIN)
    with optimizer.accumulate(last=True):
        model(batch(0)).backward()
    for is_reduced in (False, True):
        if is_reduced:
            model(batch(0)).backward()
            optimizer.norms()
        change(model)
        with pytest.raises(RuntimeError, match=match):
            optimizer.step()
        optimizer.zero_grad()
    model(batch(0)).backward()
    change(model)
    optimizer.step()
