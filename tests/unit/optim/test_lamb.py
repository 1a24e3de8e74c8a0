"""LAMB against the paper's formulas, alone and through the wrapper, in one process."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import LAMB, Mesh, ZeroRedundancyOptimizer
from shardwise.config import load_config
from shardwise.train.build import _optimizer_class
from tests.unit.optim.net import PLAIN, batch, decaying_groups, make, sharded, train


def wrap(parameters: Any, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(parameters, LAMB, **PLAIN, **options)


class Reference:
    """Algorithm 2 of arXiv:1904.00962 in float64, tensor by tensor, with ratios of at most `most`."""

    def __init__(
        self, param_groups: list[dict[str, Any]], lr: float, eps: float = 1e-6, most: float = math.inf
    ) -> None:
        self.most = most
        self.tensors = [(p, group["weight_decay"]) for group in param_groups for p in group["params"]]
        self.lr, self.eps, self.t = lr, eps, 0
        self.m = [torch.zeros_like(p, dtype=torch.float64) for p, _ in self.tensors]
        self.v = [torch.zeros_like(p, dtype=torch.float64) for p, _ in self.tensors]
        self.ratios: list[float] = []

    @torch.no_grad()
    def step(self) -> None:
        self.t += 1
        self.ratios = []
        for i, (p, decay) in enumerate(self.tensors):
            w, g = p.double(), p.grad.double()
            self.m[i] = 0.9 * self.m[i] + 0.1 * g
            self.v[i] = 0.999 * self.v[i] + 0.001 * g**2
            r = (self.m[i] / (1 - 0.9**self.t)) / ((self.v[i] / (1 - 0.999**self.t)).sqrt() + self.eps)
            u = r + decay * w
            ratio = float(w.norm() / u.norm()) if decay else 1.0
            self.ratios.append(ratio)
            p.copy_(w - self.lr * min(ratio, self.most) * u)

    def zero_grad(self) -> None:
        for p, _ in self.tensors:
            p.grad = None


def assert_close(found: nn.Module, wanted: nn.Module, tolerance: float) -> None:
    for (name, p), q in zip(found.named_parameters(), wanted.parameters(), strict=True):
        if q.numel():
            error = float((p.detach() - q.detach()).norm() / q.detach().norm())
            assert error <= tolerance, f"{name} is off by {error:.1e} of its norm"


def train_both(
    plain: nn.Module, reference: Reference, ours: nn.Module, optimizer: Any, steps: int, max_norm: float | None = None
) -> Iterator[list[float]]:
    """The reference's ratios of each step, with gradients of `plain` that are clipped before."""
    for step in range(steps):
        for model, chosen in ((plain, reference), (ours, optimizer)):
            chosen.zero_grad()
            model(batch(step)).backward()
            if max_norm is not None and chosen is reference:
                torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
            chosen.step()
        yield reference.ratios


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_alone_it_is_the_papers_algorithm(dtype: torch.dtype, tolerance: float) -> None:
    plain, ours = make().to(dtype), make().to(dtype)
    reference = Reference(decaying_groups(plain), lr=0.05)
    first, *_ = train_both(plain, reference, ours, LAMB(decaying_groups(ours), lr=0.05), 20)
    assert min(first) < 0.6, "no ratio is far from 1, so the test shows little"
    assert_close(ours, plain, tolerance)


@pytest.mark.parametrize(("bucket_mib", "max_norm"), [(1e-5, None), (1e-3, 0.05), (1000.0, 0.05)])
def test_through_the_wrapper_it_is_the_same(bucket_mib: float, max_norm: float | None) -> None:
    """Each tensor has its own ratio in flat slices of many; gradients are clipped before."""
    plain, ours = make(), make()
    clipping = PLAIN if max_norm is None else {"max_norm": max_norm}
    optimizer = ZeroRedundancyOptimizer(decaying_groups(ours), LAMB, lr=0.05, bucket_mib=bucket_mib, **clipping)
    list(train_both(plain, Reference(decaying_groups(plain), lr=0.05), ours, optimizer, 20, max_norm))
    assert_close(ours, plain, 5e-6)


@pytest.mark.parametrize("wrapped", [False, True])
def test_fault_05_clipped_ratios_are_at_most_one(wrapped: bool) -> None:
    """Ratios below 1 stay as they are."""
    plain, ours = make(), make()
    for model in (plain, ours):
        model.first.weight.data.mul_(100.0)
    reference = Reference(decaying_groups(plain), lr=0.05, most=1.0)
    optimizer = (wrap if wrapped else LAMB)(decaying_groups(ours), lr=0.05, trust_clip=True)
    seen = [ratio for ratios in train_both(plain, reference, ours, optimizer, 3) for ratio in ratios]
    assert max(seen) > 2.0
    assert min(seen) < 0.6
    assert_close(ours, plain, 5e-6)


def test_without_decay_it_is_adam_and_the_key_reaches_the_optimizer() -> None:
    plain = make()
    train(plain, torch.optim.Adam(plain.parameters(), lr=0.01, eps=1e-6))
    for build in (LAMB, wrap):
        ours = make()
        train(ours, build(ours.parameters(), lr=0.01, weight_decay=0.0))
        assert_close(ours, plain, 1e-6)
    for clipped in (False, True):
        config = load_config("bert-tiny", ["optimizer.name=lamb", f"optimizer.trust_clip={clipped}"])
        chosen, options = _optimizer_class(config.hooks, config.optimizer, Mesh(device="cpu"))
        optimizer = chosen(make().parameters(), **options)
        assert (type(optimizer), optimizer.trust_clip) == (LAMB, clipped)


@pytest.mark.parametrize("build", [LAMB, wrap])
def test_ratio_is_one_where_a_norm_is_zero(build: Any) -> None:
    """A weight that starts at 0 would never leave it; a direction of 0 would divide by 0."""
    zero, still = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))
    optimizer = build([zero, still], lr=0.1, weight_decay=0.1)
    zero.grad = torch.tensor([1.0, -2.0, 0.5])
    still.grad = torch.zeros(2)
    optimizer.step()
    torch.testing.assert_close(zero, torch.tensor([-0.1, 0.1, -0.1]), rtol=1e-5, atol=0)
    assert torch.equal(still, torch.zeros(2))


# ---- what it refuses


class Bounded(LAMB):
    """φ bounds the weight's norm, as some do."""

    def trust_ratio(self, weight_norm: Tensor, direction_norm: Tensor) -> Tensor:
        return super().trust_ratio(weight_norm.clamp(max=0.5), direction_norm)


class OwnStep(LAMB):
    """What this does with a whole parameter nobody can know."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()


def test_sparse_gradients_and_other_steps_are_refused() -> None:
    model = nn.Embedding(11, 4, sparse=True)
    model(batch(0)).square().sum().backward()
    with pytest.raises(RuntimeError, match="LAMB takes dense and real gradients: make embeddings with sparse=False"):
        LAMB(model.parameters()).step()
    plain, ours, unbounded = make(), make(), make()
    train(plain, Bounded(plain.parameters(), lr=0.05))
    train(ours, sharded(ours, Bounded, lr=0.05, **PLAIN))
    train(unbounded, LAMB(unbounded.parameters(), lr=0.05))
    assert_close(ours, plain, 2e-6)
    assert not torch.allclose(unbounded.first.weight, plain.first.weight, rtol=1e-2)
    OwnStep(make().parameters())
    with pytest.raises(ValueError, match=r"OwnStep cannot be sharded.*or be shardwise.LAMB"):
        sharded(make(), OwnStep)
