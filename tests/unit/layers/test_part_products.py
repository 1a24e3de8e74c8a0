"""Products of which a rank computes several parts have the bits of the same parts computed by several ranks."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.distributed.collectives import tree_sum
from shardwise.distributed.mesh import Group
from shardwise.layers.bitwise import part_products
from shardwise.layers.bitwise.functions import activate_by_part, head_products
from shardwise.layers.bitwise.part_products import (
    by_part,
    fold_products,
    input_gradient_of_columns,
    multiply_parts,
    sum_of_products,
    weight_gradient_of_columns,
    weight_gradient_of_rows,
)
from shardwise.layers.bitwise.products import Section, column_products, row_products
from shardwise.layers.loss import linear_cross_entropy
from shardwise.models.blocks import ACTIVATIONS
from tests.dist.dense import random

COUNTS = (2, 4, 8)
SIZES = st.sampled_from([1, 2, 3, 5, 8, 13, 16, 31, 64, 100])
PRODUCTS: dict[str, tuple[Callable[..., Tensor], int | None, int | None, int]] = {
    "rows": (multiply_parts, None, 0, 1),
    "weight gradient of rows": (weight_gradient_of_rows, 1, None, 0),
    "input gradient of columns": (input_gradient_of_columns, None, 1, 1),
    "weight gradient of columns": (weight_gradient_of_columns, None, 1, 1),
}
"""Functions of two matrices; the dim along which each is cut into parts, and that along which the results lie."""


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """Set the number of threads until the end of the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def two_threads(set_threads: Callable[[int], None]) -> None:
    set_threads(2)


def bits_equal(found: Tensor, wanted: Tensor) -> bool:
    return found.shape == wanted.shape and torch.equal(found, wanted)


def parts_of(x: Tensor, count: int, dim: int | None) -> list[Tensor]:
    """Return the parts of a tensor as tensors of their own, or the tensor for each part."""
    return [x] * count if dim is None else [torch.empty_like(part).copy_(part) for part in x.chunk(count, dim)]


def shape_of(product: str, tokens: int, inner: int, width: int, count: int) -> tuple[tuple[int, int], tuple[int, int]]:
    wide = count * width
    shapes = {
        "rows": ((tokens, inner), (wide, inner)),
        "weight gradient of rows": ((tokens, wide), (tokens, inner)),
        "input gradient of columns": ((tokens, inner), (inner, wide)),
        "weight gradient of columns": ((tokens, inner), (tokens, wide)),
    }
    return shapes[product]


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("product", PRODUCTS)
@given(tokens=SIZES, inner=SIZES, width=SIZES, count=st.sampled_from(COUNTS), seed=st.integers(0, 9))
@settings(deadline=None, max_examples=10, derandomize=True)
def test_a_product_has_the_bits_of_its_parts(
    product: str, dtype: torch.dtype, tokens: int, inner: int, width: int, count: int, seed: int
) -> None:
    function, first_dim, second_dim, result_dim = PRODUCTS[product]
    first, second = (
        random(seed + number, *shape).to(dtype)
        for number, shape in enumerate(shape_of(product, tokens, inner, width, count))
    )
    bias = (None,) if product == "rows" else ()
    pairs = zip(parts_of(first, count, first_dim), parts_of(second, count, second_dim), strict=True)
    wanted = torch.cat([function(a, b, *bias, 1) for a, b in pairs], result_dim)
    assert bits_equal(function(first, second, *bias, count), wanted)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@given(SIZES, SIZES, st.lists(SIZES, min_size=1, max_size=3), st.sampled_from(COUNTS), st.integers(0, 9))
@example(3, 1, [3], 2, 0)  # three results, which another form may give by chance
@settings(deadline=None, max_examples=10, derandomize=True)
def test_a_sum_of_products_has_the_bits_of_the_tree(
    dtype: torch.dtype, tokens: int, outputs: int, widths: list[int], count: int, seed: int
) -> None:
    xs = [random(seed, tokens, count * width).to(dtype) for width in widths]
    weights = [random(seed + 1, outputs, count * width).to(dtype) for width in widths]
    found = sum_of_products([by_part(x, count) for x in xs], [by_part(weight, count) for weight in weights], count)
    operands = zip(*(parts_of(tensor, count, 1) for tensor in (*xs, *weights)), strict=True)
    terms = []
    for part in operands:
        own = [tensor.unsqueeze(0) for tensor in part]
        terms.append(sum_of_products(own[: len(xs)], own[len(xs) :], 1))
    assert bits_equal(found, tree_sum(torch.stack(terms)))


Form = Callable[[int, Tensor], Tensor]
UNEQUAL: dict[str, tuple[Form, Form, Tensor]] = {
    "another order": (lambda _, x: x.sum(0), lambda _, x: x.double().sum(0).float(), random(0, 1000, 8)),
    # The first of the random numbers that both get is above -1.
    "seldom another": (lambda _, x: x.clone(), lambda _, x: torch.where(x < -1, x - 1, x), torch.tensor([-2.0])),
    # In bfloat16 two orders differ in few elements: a trial on random numbers would miss them.
    "bfloat16": (lambda count, x: x * count, lambda *_: pytest.fail("it was tried"), torch.ones(2, 3).bfloat16()),
}


@pytest.mark.parametrize("case", UNEQUAL)
def test_a_form_with_other_bits_is_not_used(case: str) -> None:
    exact, faster, x = UNEQUAL[case]
    assert case == "bfloat16" or not torch.equal(exact(2, x), faster(2, x))
    assert bits_equal(part_products._in_faster_form(faster, exact, 2, x), exact(2, x))


def test_a_form_with_equal_bits_is_used_and_none_is_tried_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def exact(_count: int, x: Tensor) -> Tensor:
        calls.append("exact")
        return x + x

    def faster(_count: int, x: Tensor) -> Tensor:
        calls.append("faster")
        return 2 * x

    calls: list[str] = []
    part_products._in_faster_form(faster, exact, 1, random(0, 8))
    calls.clear()
    part_products._in_faster_form(faster, exact, 1, random(1, 8))
    assert calls == ["faster"]
    # Prompts have any number of tokens: each would cost a trial, and its result is kept.
    results: dict[Any, bool] = {}
    monkeypatch.setattr(part_products, "_has_equal_bits", results)
    group = Group(grain=2)
    weight = random(0, 16, 8).requires_grad_()

    def loss(x: Tensor) -> None:
        targets = torch.zeros(len(x), 1, dtype=torch.long)
        linear_cross_entropy(x.unsqueeze(1), weight, targets, group=group)

    for function in (
        lambda x: column_products(x, weight, None, [Section(16)], group),
        lambda x: row_products([(x, weight.t()[:, :8].reshape(8, 8))], group),
        loss,
    ):
        results.clear()
        with torch.no_grad():
            function(random(1, 5, 8))
        assert not results
        function(random(1, 5, 8))
        tried = len(results)
        assert tried
        with torch.no_grad():
            function(random(1, 6, 8))
        assert len(results) == tried


@given(levels=st.integers(0, 6), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=50)
def test_fold_is_the_tree(levels: int, seed: int) -> None:
    parts = random(seed, 2**levels, 3, 5)
    assert bits_equal(fold_products(part.clone() for part in parts), tree_sum(parts))


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
@pytest.mark.parametrize(("tokens", "width", "threads"), [(16, 43, 1), (1, 7, 1), (1000, 35, 3)])
def test_activations_do_not_depend_on_the_width(
    name: str, tokens: int, width: int, threads: int, set_threads: Callable[[int], None]
) -> None:
    """Torch's threads take a part of a tensor each if it has more than 32,768 elements."""
    set_threads(threads)

    def results(x: Tensor, dy: Tensor, count: int) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        y = activate_by_part(x, ACTIVATIONS[name], count)
        y.backward(dy)
        return y.detach(), x.grad

    x, dy = torch.randn(2, 50 if threads == 1 else 5, tokens, 2 * width).unbind()
    for whole_x, whole_dy in zip(x, dy, strict=True):
        whole = results(whole_x, whole_dy, 2)
        halves = zip(whole_x.chunk(2, -1), whole_dy.chunk(2, -1), strict=True)
        parts = [results(*half, 1) for half in halves]
        for number in range(2):
            assert torch.equal(torch.cat([part[number] for part in parts], -1), whole[number])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grain", [2, 4])
def test_products_of_heads_do_not_depend_on_their_number(grain: int, dtype: torch.dtype) -> None:
    """Torch takes another kernel for other strides, and in bfloat16 where all heads together have few elements."""

    def results(q_SBnd: Tensor, k_SBnd: Tensor, d_scores_BnSS: Tensor, count: int) -> list[Tensor]:
        """The scores, and the gradients of q and k, all with their heads in dim 1."""
        q, k = (x.permute(1, 2, 0, 3).detach().requires_grad_() for x in (q_SBnd, k_SBnd))
        scores = head_products(q, k.transpose(-1, -2), count)
        return [scores.detach(), *torch.autograd.grad(scores, (q, k), d_scores_BnSS.contiguous())]

    for batch in (1, 2) * 25:
        q, k = torch.randn(2, 16, batch, 4, 8).to(dtype).unbind()
        d_scores = torch.randn(batch, 4, 16, 16).to(dtype)
        whole = results(q, k, d_scores, grain)
        halves = zip(q.chunk(2, 2), k.chunk(2, 2), d_scores.chunk(2, 1), strict=True)
        parts = [results(q_half.contiguous(), *half, grain // 2) for q_half, *half in halves]
        for number, tensor in enumerate(whole):
            assert torch.equal(torch.cat([part[number] for part in parts], 1), tensor)


def test_a_product_of_heads_never_sees_the_heads_of_another_part() -> None:
    """Their number and the strides decide the kernel, which shows in the bits of few numbers, and not on every CPU."""

    class Operands(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if operator is torch.ops.aten.bmm.default:
                seen.append([(*x.shape, x.is_contiguous()) for x in args])
            return operator(*args, **kwargs or {})

    seen: list[list[tuple[int, ...]]] = []
    q, k = (random(seed, 16, 2, 8, 5).permute(1, 2, 0, 3).requires_grad_() for seed in (1, 2))
    with Operands():
        head_products(q, k.transpose(-1, -2), 4).sum().backward()
    scores, q_gradient, k_gradient = (
        [shapes] * 4
        for shapes in (
            [(4, 16, 5, True), (4, 5, 16, True)],
            [(4, 16, 16, True), (4, 16, 5, True)],
            [(4, 5, 16, True), (4, 16, 16, True)],
        )
    )
    assert seen == [*scores, *q_gradient, *k_gradient], "batch 2, 8 heads in 4 parts: 4 matrices at once"
