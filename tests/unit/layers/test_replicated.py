"""Gradients of replicated parameters: one sum over the ranks for each forward pass."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from shardwise.distributed.mesh import Group
from shardwise.layers import replicated
from shardwise.layers.replicated import ReplicatedParameters, part_views

PARTS = 2


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Elements of each sum over the ranks."""
    elements: list[int] = []

    def all_reduce(tensor: Tensor, _group: Group) -> Tensor:
        elements.append(tensor.numel())
        return tensor

    monkeypatch.setattr(replicated.collectives, "all_reduce_", all_reduce)
    return elements


def layer(x: Tensor, weight: Tensor, ranks: Group) -> Tensor:
    """Multiply each part of x by the weight."""
    views = part_views(weight, PARTS, ranks)
    return torch.cat([part * view for part, view in zip(x.chunk(PARTS), views, strict=True)])


def test_all_gradients_are_summed_at_once_after_the_first_pass(sums: list[int]) -> None:
    ranks = Group(grain=PARTS)
    weights = [nn.Parameter(torch.randn(3)) for _ in range(4)]
    frozen = nn.Parameter(torch.randn(3), requires_grad=False)
    parameters = ReplicatedParameters()
    gradients = []
    for _ in range(2):
        x = torch.ones(4, 3)
        with parameters.forward_pass():
            for weight in (*weights, frozen):
                x = layer(x, weight, ranks)
        gradients.append(torch.autograd.grad(x.sum(), weights))
    assert sums == [3, 3, 3, 3, 12]
    whole = torch.ones(4, 3)
    for weight in (*weights, frozen):
        whole = whole * weight
    expected = torch.autograd.grad(whole.sum(), weights)
    for first, second, right in zip(*gradients, expected, strict=True):
        torch.testing.assert_close(first, right)
        assert torch.equal(first, second)


def test_a_pass_may_use_other_parameters_than_the_last_one(sums: list[int]) -> None:
    ranks = Group(grain=PARTS)
    always, sometimes = (nn.Parameter(torch.randn(3)) for _ in range(2))
    parameters = ReplicatedParameters()
    for weights in ((always, sometimes), (always,), (always, sometimes)):
        x = torch.ones(4, 3)
        with parameters.forward_pass():
            for weight in weights:
                x = layer(x, weight, ranks)
        sums.clear()
        gradients = torch.autograd.grad(x.sum(), weights)
        assert all(gradient.abs().sum() > 0 for gradient in gradients)
    # The one that the last pass did not use has a sum of its own.
    assert sorted(sums) == [3, 3]


def test_several_micro_batches_may_be_under_way(sums: list[int]) -> None:
    ranks = Group(grain=PARTS)
    weight = nn.Parameter(torch.randn(3))
    parameters = ReplicatedParameters()
    outputs = []
    for number in range(3):
        with parameters.forward_pass():
            outputs.append(layer(torch.full((4, 3), float(number)), weight, ranks).sum())
    for number, output in enumerate(outputs):
        (gradient,) = torch.autograd.grad(output, [weight])
        assert torch.equal(gradient, torch.full((3,), 4.0 * number))
    assert sums == [3, 3, 3]


def test_an_evaluation_in_between_changes_nothing(sums: list[int]) -> None:
    ranks = Group(grain=PARTS)
    weights = [nn.Parameter(torch.randn(3)) for _ in range(2)]
    parameters = ReplicatedParameters()
    for is_trained in (True, False, True):
        sums.clear()
        x = torch.ones(4, 3)
        with torch.set_grad_enabled(is_trained), parameters.forward_pass():
            for weight in weights:
                x = layer(x, weight, ranks)
        if is_trained:
            torch.autograd.grad(x.sum(), weights)
    assert sums == [6]
