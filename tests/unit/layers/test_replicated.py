"""Gradients of replicated parameters: one sum over the ranks for each forward pass."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

from shardwise.distributed.mesh import Group
from shardwise.layers.bitwise import replicated
from shardwise.layers.bitwise.replicated import ReplicatedParameters, SequenceParts, part_views
from shardwise.layers.norm import LayerNorm
from tests.unit.layers.makers import pretend_group

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


def two_ranks() -> Group:
    """Return a group of two ranks, whose sums `sums` replaces."""
    group = pretend_group(0, 2)
    group.grain = 2 * PARTS
    return group


def layer(x: Tensor, weight: Tensor, ranks: Group) -> Tensor:
    """Multiply each part of x by the weight."""
    views = part_views(weight, PARTS, ranks)
    return torch.cat([part * view for part, view in zip(x.chunk(PARTS), views, strict=True)])


def layers(x: Tensor, weights: Sequence[Tensor], ranks: Group, parameters: ReplicatedParameters) -> Tensor:
    """A forward pass through a layer for each weight."""
    with parameters.forward_pass():
        for weight in weights:
            x = layer(x, weight, ranks)
    return x


def test_all_gradients_are_summed_at_once_after_the_first_pass(sums: list[int]) -> None:
    ranks = two_ranks()
    weights = [nn.Parameter(torch.randn(3)) for _ in range(4)]
    frozen = nn.Parameter(torch.randn(3), requires_grad=False)
    parameters = ReplicatedParameters()
    gradients = []
    for _ in range(2):
        y = layers(torch.ones(4, 3), (*weights, frozen), ranks, parameters)
        gradients.append(torch.autograd.grad(y.sum(), weights))
    assert sums == [3, 3, 3, 3, 12]
    whole = torch.ones(4, 3)
    for weight in (*weights, frozen):
        whole = whole * weight
    expected = torch.autograd.grad(whole.sum(), weights)
    for first, second, right in zip(*gradients, expected, strict=True):
        torch.testing.assert_close(first, right)
        assert torch.equal(first, second)


@pytest.mark.parametrize("grain", [1, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_without_communication_gradients_come_layer_by_layer(grain: int, sequence_parallel: bool) -> None:
    """Reductions over data-parallel ranks start, and ZeRO-3 releases blocks, while the backward pass runs."""
    group = Group(grain=grain)
    norms = [
        LayerNorm(3, group=group, sequence_parallel_enabled=sequence_parallel, seed=0, name=f"norm{number}")
        for number in range(3)
    ]
    weights = [nn.Parameter(torch.randn(3)) for _ in range(3)]
    arrived: list[str] = []
    for number, (norm, weight) in enumerate(zip(norms, weights, strict=True)):
        norm.weight.register_post_accumulate_grad_hook(lambda _, name=f"norm {number}": arrived.append(name))
        weight.register_post_accumulate_grad_hook(lambda _, name=f"weight {number}": arrived.append(name))
    parameters = ReplicatedParameters()
    for _ in range(2):
        arrived.clear()
        x = torch.randn(4, 3)
        with parameters.forward_pass():
            for norm, weight in zip(norms, weights, strict=True):
                x = norm(x) * weight
        x.sum().backward()
        assert arrived == ["weight 2", "norm 2", "weight 1", "norm 1", "weight 0", "norm 0"]


def test_layers_that_share_a_parameter_add_its_parts_first(sums: list[int]) -> None:
    """The first pass must not have other bits than the next ones: a resumed run begins with it."""
    weight = nn.Parameter(torch.randn(3))
    x = torch.randn(4, 3)
    gradients = []
    for ranks in (two_ranks(), Group(grain=PARTS)):
        parameters = ReplicatedParameters()
        for _ in range(2):
            y = layers(x, (weight, weight), ranks, parameters)
            gradients += torch.autograd.grad(y.sum(), [weight])
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
    # Size 1: nothing to communicate, though this test's sum over ranks is called.
    assert sums == [3] * len(gradients)


class _TwoLayers(nn.Module):
    """Two matrices, of which a function uses one, and a bias that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(3, 3))
        self.scale = nn.Parameter(torch.randn(3))
        self.second = nn.Parameter(torch.randn(3, 3))
        self.bias = nn.Parameter(torch.randn(3), requires_grad=False)

    def before(self, x: Tensor) -> Tensor:
        return x * self.scale @ self.first + self.bias

    def behind(self, x: Tensor) -> Tensor:
        return x @ self.second


@pytest.mark.parametrize(("most", "expected"), [(12, [9, 12]), (11, [9, 9, 3])])
def test_gradients_of_parts_are_summed_in_few_collectives(
    most: int, expected: list[int], sums: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicated, "GRADIENTS_AT_ONCE", most)
    module = _TwoLayers()
    x = torch.randn(4, 3)
    parts = SequenceParts(module, two_ranks())
    parts.joined(module.behind, parts.joined(module.before, x)).sum().backward()
    gradients = [module.first.grad, module.scale.grad, module.second.grad]
    assert sums == expected
    whole = module.behind(module.before(x)).sum()
    for gradient, right in zip(gradients, torch.autograd.grad(whole, [*module.parameters()][:3]), strict=True):
        torch.testing.assert_close(gradient, right)
    assert module.bias.grad is None
