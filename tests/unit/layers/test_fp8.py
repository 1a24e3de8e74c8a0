"""Products in fp8: scales, rounding, and the products of the rounded numbers."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardwise.distributed.mesh import Group
from shardwise.layers import fp8
from shardwise.layers.bitwise.products import Section, column_products, row_products
from shardwise.layers.fp8 import GRADIENT, OPERAND, Scaling, fp8_linear, rounded
from shardwise.layers.matmul import add_without_cast, graph_gradients, let_products_add

FORMATS = {OPERAND: (3, -6), GRADIENT: (2, -14)}
"""Bits of the mantissa, and the exponent of the smallest normal number."""
SCALING = Scaling(Group(), cuts_outputs=True)


def scale_of(x: Tensor, dtype: torch.dtype) -> float:
    (scale,) = fp8._scales([x], [], dtype)
    return float(scale)


def by_hand(value: float, dtype: torch.dtype) -> float:
    """The nearest number of a format; of two, the one whose mantissa is even."""
    bits, least = FORMATS[dtype]
    exponent = max(math.frexp(value)[1] - 1, least)
    step = 2.0 ** (exponent - bits)
    return round(value / step) * step


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("largest", [1e-30, 0.4375, 448.0, 449.0, 57344.0, 6e4])
def test_a_scale_is_the_least_power_of_two_that_fits(largest: float, dtype: torch.dtype) -> None:
    scale = scale_of(torch.tensor([0.1 * largest, -largest]), dtype)
    assert math.frexp(scale)[0] == 0.5, "a power of two"
    assert scale / 2 < torch.tensor(largest).item() / torch.finfo(dtype).max <= scale


@pytest.mark.parametrize("dtype", FORMATS)
def test_numbers_are_rounded_to_the_nearest_of_the_format(dtype: torch.dtype) -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1)) * torch.logspace(-7, 2, 4096)
    scale = scale_of(x, dtype)
    found = rounded(x, torch.tensor(scale), dtype)
    assert found.tolist() == [scale * by_hand(value / scale, dtype) for value in x.tolist()]


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = {"x": (8, 4, 32), "weight": (48, 32), "bias": (48,), "dy": (8, 4, 48)}
    x, weight, bias, dy = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes.values())
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), 1e-4 * dy


def in_float64(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to fp8, with one dim for tokens."""
    return rounded(x.detach(), torch.tensor(scale_of(x, dtype)), dtype).double().flatten(0, -2)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2.0**-8)])
def test_products_are_those_of_the_rounded_numbers(dtype: torch.dtype, tolerance: float) -> None:
    x, weight, bias, dy = operands(dtype)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        y = fp8_linear(x, weight, bias, SCALING)
    y.backward(dy)
    x8, weight8, dy8 = in_float64(x, OPERAND), in_float64(weight, OPERAND), in_float64(dy, GRADIENT)
    wanted = {"y": x8 @ weight8.T + bias.detach().double(), "dx": dy8 @ weight8, "dw": dy8.T @ x8}
    found = {"y": y.flatten(0, 1), "dx": x.grad.flatten(0, 1), "dw": weight.grad}
    for name, exact in wanted.items():
        assert found[name].dtype == dtype
        error = (found[name].double() - exact).abs().max() / exact.abs().max()
        assert error <= tolerance, f"{name} is off by {float(error):.1e}"
    assert torch.equal(bias.grad, dy.flatten(0, 1).sum(0)), "gradients of biases are not rounded to fp8"
    assert [tensor.dtype for tensor in kept if tensor.numel() == x.numel()] == [OPERAND], "x is kept in one byte"


@pytest.mark.parametrize(
    ("place", "value"), [("x", math.inf), ("weight", math.nan), ("dy", -math.inf), ("dy", math.nan)]
)
def test_what_is_not_finite_stays_so(place: str, value: float) -> None:
    """Where a step's gradients are checked, they must tell of it."""
    x, weight, bias, dy = operands(torch.bfloat16)
    {"x": x, "weight": weight, "dy": dy}[place].data.view(-1)[5] = value
    y = fp8_linear(x, weight, bias, SCALING)
    y.backward(dy)
    assert y.isfinite().all() == (place == "dy")
    finite = [gradient.isfinite().all() for gradient in (x.grad, weight.grad)]
    assert not any(finite) if place == "dy" else not all(finite)


@pytest.mark.parametrize("cuts_outputs", [True, False], ids=["column", "row"])
def test_products_by_parts_are_those_of_the_same_rounded_numbers(cuts_outputs: bool) -> None:
    """`train.bitwise` multiplies in the dtype of the weights."""
    group = Group(grain=4)
    scaling = Scaling(group, cuts_outputs=cuts_outputs)

    def by_parts(x: Tensor, weight: Tensor) -> Tensor:
        if cuts_outputs:
            return column_products(x, weight, None, [Section(len(weight))], group, scaling)[0]
        return row_products([(x, weight)], group, scaling)

    results = []
    for multiply in (by_parts, lambda x, weight: fp8_linear(x, weight, None, SCALING)):
        x, weight, _, dy = operands(torch.float32)
        y = multiply(x, weight)
        y.backward(dy)
        results.append((y.detach(), x.grad, weight.grad))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max()))


def summed(multiply: Callable[..., Tensor], *, in_graph: bool) -> Tensor:
    """The float32 gradient of a bfloat16 weight after two micro-batches, on a device whose products add."""
    x, weight, _, dy = operands(torch.bfloat16)
    let_products_add([weight])
    add_without_cast([weight])
    total = torch.zeros(weight.shape)
    for factor in (1, 3):
        weight.grad = None if in_graph else total
        with graph_gradients([(weight, total)] if in_graph else []):
            multiply((factor * x).detach().requires_grad_(), weight, None, SCALING).backward(dy)
    return total


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch itself
def test_weight_gradients_in_graphs_are_summed_in_float32() -> None:
    wanted = summed(fp8_linear, in_graph=False)
    assert not torch.equal(wanted, wanted.bfloat16().float())
    traced = torch.compile(fp8_linear, backend="aot_eager", fullgraph=True)
    assert torch.equal(summed(traced, in_graph=True), wanted)
