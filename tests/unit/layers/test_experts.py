"""Experts on one rank: the choice, the sum, its gradients, and rows that are missing or all at one place."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import ZeroRedundancyOptimizer
from shardwise.config.routing import Routing
from shardwise.distributed.mesh import Group
from shardwise.layers.balance import Balance
from shardwise.layers.execution import Execution, made_with
from shardwise.layers.expert_rows import Journey
from shardwise.layers.experts import Experts, _grouped_sum, choose, sum_of_experts

T, H, WIDTH, N, K = 24, 8, 6, 4, 2


def plain_sum(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The formula, token by token."""
    rows = []
    for token in range(len(x)):
        terms = []
        for weight, expert in zip(weights[token], experts[token].tolist(), strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            terms.append(weight * (down[expert] @ (F.silu(gate) * up)))
        rows.append(torch.stack(terms).sum(0))
    return torch.stack(rows)


def inputs(experts: Tensor, width: int = WIDTH, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Tokens, their weights, and the matrices of the experts."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(len(experts), H), tuple(experts.shape), (N, 2 * width, H), (N, H, width)]
    return [torch.randn(shape, generator=generator, dtype=dtype, requires_grad=True) for shape in shapes]


CHOICES = {
    "all are used": torch.stack([torch.randperm(N)[:K] for _ in range(T)]).sort(dim=1).values,
    "one is idle": torch.stack([torch.tensor([0, 2 + number % 2]) for number in range(T)]),
    "all tokens at one expert": torch.full((T, 1), 3),
    "one token": torch.tensor([[1, 2]]),
}


@pytest.mark.parametrize("case", CHOICES)
def test_the_sum_and_its_gradients_are_those_of_the_formula(case: str) -> None:
    experts = CHOICES[case]
    x, weights, gate_up, down = inputs(experts)
    y = sum_of_experts(x, weights, experts, gate_up, down)
    wanted = plain_sum(x, weights, experts, gate_up, down)
    torch.testing.assert_close(y, wanted)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=y.dtype)
    found = torch.autograd.grad(y, (x, weights, gate_up, down), dy)
    for gradient, same in zip(found, torch.autograd.grad(wanted, (x, weights, gate_up, down), dy), strict=True):
        torch.testing.assert_close(gradient, same)
    idle = sorted({*range(N)} - {*experts.flatten().tolist()})
    assert not found[2][idle].any()
    assert not found[3][idle].any()


def test_the_way_to_experts_and_back_says_that_it_has_no_second_derivative() -> None:
    """Without a word, what gradients of gradients have of it would be left out."""
    for way in ["there", "back"]:
        experts = CHOICES["all are used"]
        journey = Journey.of(experts, torch.bincount(experts.flatten(), minlength=N), Group(), once=True)
        x = torch.randn(T, H, requires_grad=True)
        y = journey.tokens_there(x) if way == "there" else journey.sums_back(x[:, None])
        scale = torch.ones((), requires_grad=True)
        (dx,) = torch.autograd.grad((y * scale).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            (dx * x).sum().backward()


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no grouped products")
@pytest.mark.parametrize("case", CHOICES)
def test_grouped_products_compute_the_same(case: str) -> None:
    """What an accelerator does; widths are multiples of 16 bytes."""
    experts = CHOICES[case]
    given = inputs(experts, width=4, dtype=torch.float32)
    x, weights, *matrices = given
    dy = torch.randn(len(experts), H)
    found = _grouped_sum(x, weights, experts, *matrices)
    wanted = sum_of_experts(x, weights, experts, *matrices)
    gradients = torch.autograd.grad(found, given, dy), torch.autograd.grad(wanted, given, dy)
    for gradient, same in zip((found, *gradients[0]), (wanted, *gradients[1]), strict=True):
        # Another library adds in another order, and terms of other signs are larger than their sum.
        assert (gradient - same).abs().max() <= 2e-6 * same.abs().max()


def test_what_the_router_chooses() -> None:
    """And those of the groups with the best two scores: here the second has the best expert, the first the pair."""
    scores = torch.tensor([[0.5, 1.0, 1.0, 1.0], [0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.5, 0.5]])
    assert choose(Routing(N, 2), scores).tolist() == [[1, 2], [0, 1], [0, 2]]
    routing = Routing(6, 2, groups=3, chosen_groups=1)
    assert choose(routing, torch.tensor([[0.6, 0.5, 0.9, 0.0, 0.1, 0.1]])).tolist() == [[0, 1]]
    experts = layer(Routing(N, 1, scores="sigmoid", normalized=False, has_bias=True))
    assert not experts.router.bias.requires_grad
    x = torch.randn(T, H)
    scores = torch.sigmoid(x @ experts.router.weight.t())
    with torch.no_grad():
        experts.router.bias[2] = 10.0
    weights, chosen, *_ = experts.router(x)
    assert chosen.flatten().tolist() == [2] * T
    torch.testing.assert_close(weights[:, 0], scores[:, 2])
    # Two experts whose logits are equal in bfloat16.
    experts = layer(Routing(2, 1), dtype=torch.bfloat16)
    with torch.no_grad():
        experts.router.weight.zero_()
        experts.router.weight[:, 0] = torch.tensor([1.0, 1.0])
        experts.router.weight[1, 1] = 2.0**-9
    x = torch.zeros(1, H, dtype=torch.bfloat16)
    x[0, :2] = 1.0
    assert experts.router(x)[1].item() == 1


def layer(routing: Routing, **options: Any) -> Experts:
    return Experts(H, WIDTH, routing, group=Group(), seed=1, name="mlp", **options)


def balanced(scaler: torch.amp.GradScaler | None) -> Experts:
    with made_with(Execution(balance=Balance(batch=0.5, z=0.1, samples=1, length=T, experts=N, scaler=scaler))):
        return layer(Routing(N, K))


def test_a_scaler_scales_the_gradients_of_objectives_as_those_of_the_loss() -> None:
    x = torch.randn(T, 1, H, generator=torch.Generator().manual_seed(0))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    plain, scaled = balanced(None), balanced(scaler)
    plain(x).square().mean().backward()
    scaler.scale(scaled(x).square().mean()).backward()
    for found, wanted in zip(scaled.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.grad, 2.0**10 * wanted.grad)
    optimizer = ZeroRedundancyOptimizer(scaled.parameters(), torch.optim.SGD, lr=0.1)
    before = scaled.router.weight.detach().clone()
    scaler.step(optimizer)
    torch.testing.assert_close(scaled.router.weight, before - 0.1 * plain.router.weight.grad)
