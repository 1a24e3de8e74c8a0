"""Clipping in one process: by the optimizer's own max_norm, and by the user."""

import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shardwise.optim.exact_sums import NOT_A_NUMBER, atom_elements, atom_squares, exact_sum, joined, limbs, norms
from tests.dist.dense import random
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


def test_a_norm_that_is_not_finite_is_nan_and_an_error_where_asked() -> None:
    model = make()
    optimizer = sharded(model, torch.optim.SGD)
    (model(batch(0)) * float("inf")).backward()
    assert not optimizer.clip_grad_norm_(1.0).isfinite()
    with pytest.raises(RuntimeError, match=r"the gradient norm \((inf|nan)\) of the whole model must be finite"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    for bad in [math.nan, math.inf, 1e160]:
        total = exact_sum(torch.tensor([1.0, bad * bad, 2.0], dtype=torch.float64))
        assert total == NOT_A_NUMBER
        assert joined([5, total, 7]) == NOT_A_NUMBER
        # It is enough that one rank has it, and another norm is not concerned.
        found = norms(limbs([total, 0], CPU) + limbs([1 << 320, 1 << 320], CPU), 1)
        assert math.isnan(found[0])
        assert found[1] == 1.0


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


CPU = torch.device("cpu")
UNIT = Fraction(2) ** -320
FLOATS = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.builds(lambda mantissa, exponent: mantissa * 2.0**exponent, st.integers(1, 2**24 - 1), st.integers(-149, 103)),
    st.just(0.0),
)
"""Elements, of which those near 0 and those of any size are drawn alike."""


def squares(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).square()


@given(st.lists(FLOATS, max_size=50), st.randoms(use_true_random=False), st.integers(1, 7))
@settings(deadline=None, max_examples=60)
def test_neither_order_nor_splits_change_a_sum(values: list[float], generator: Random, size: int) -> None:
    whole = exact_sum(squares(values))
    other = list(values)
    generator.shuffle(other)
    assert joined(exact_sum(part) for part in squares(other).split(size)) == whole
    # Nothing is rounded.
    assert whole * UNIT == sum(Fraction(value) ** 2 for value in values)


@given(st.lists(st.integers(0, 2**600), min_size=1, max_size=4), st.integers(1, 2000))
@settings(deadline=None, max_examples=40)
def test_limbs_of_many_ranks_hold_the_sum(sums: list[int], ranks: int) -> None:
    """Each of `ranks` ranks has an equal part, of which the divisor makes the whole."""
    found = norms(limbs(sums, CPU) * ranks, ranks)
    assert found == [math.sqrt(math.ldexp(float(total), -320)) for total in sums]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("atom", [1, 8, 32])
@given(
    runs=st.lists(st.integers(1, 40), min_size=1, max_size=5), seed=st.integers(0, 99), threads=st.sampled_from([1, 2])
)
@settings(deadline=None, max_examples=20)
def test_squares_without_neighbours(atom: int, dtype: torch.dtype, runs: list[int], seed: int, threads: int) -> None:
    before = torch.get_num_threads()
    values = random(seed, sum(runs) * atom).to(dtype)
    whole = atom_squares(values, atom)
    torch.set_num_threads(threads)
    try:
        parts = [atom_squares(part, atom) for part in values.split([length * atom for length in runs])]
        copies = [atom_squares(part.clone(), atom) for part in values.split([length * atom for length in runs])]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(torch.cat(copies), whole)
    torch.testing.assert_close(whole, values.double().view(-1, atom).square().sum(1), rtol=1e-5, atol=0)


@given(shape=st.lists(st.integers(1, 96), min_size=0, max_size=3), levels=st.integers(0, 5))
@settings(deadline=None, max_examples=100)
def test_no_layout_cuts_an_atom(shape: list[int], levels: int) -> None:
    grain = 2**levels
    atom = atom_elements(shape, grain)
    length = shape[-1] if shape else 1
    assert 32 % atom == 0, "ZeRO cuts at multiples of 32 elements"
    assert length % atom == 0
    for degree in (2**level for level in range(levels + 1)):
        if length % grain == 0:
            assert length // degree % atom == 0, f"tensor parallelism of degree {degree} cuts the last dim"
    if len(shape) == 1 and length % grain:
        assert atom == 1, "padding may cut a vector anywhere"
