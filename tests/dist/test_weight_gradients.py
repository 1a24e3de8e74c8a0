"""Products of weights: gradients that they add to buckets by themselves, and layers that communicate behind them."""

import itertools
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from shardwise.distributed.mesh import Group
from shardwise.layers import matmul
from shardwise.layers.execution import Execution, made_with
from shardwise.layers.linear import ColumnParallelLinear, RowParallelLinear, row_parallel_sum, weights_of
from shardwise.layers.matmul import PIECES
from shardwise.optim.buckets import Bucket
from shardwise.verify.canonical_values import canonical_gradients
from tests.dist.checkpoints import make_trainer
from tests.dist.dense import check, error, fill, mesh, random, results, run
from tests.dist.training import Sections, cases, make_config, named
from tests.sweeps import few


def trained(sections: dict[str, Any], adds: bool) -> tuple[int, list[int], dict[str, Tensor], list[float]]:
    """Products that were added by themselves, buckets in the order of their reductions, gradients, and losses."""
    torch._dynamo.reset()
    trainer = make_trainer(make_config(precision={"mode": "mixed"}, **sections))
    if adds:
        in_place = not trainer.config.splits_backward
        matmul.let_products_add(weights_of(trainer.model), in_place=in_place)
    order = []
    start_reduction = Bucket.start_reduction

    def noted(bucket: Bucket) -> None:
        order.append(trainer.optimizer.buckets.index(bucket))
        start_reduction(bucket)

    micro_batches = trainer.feed.at(0)
    add_product_ = matmul.add_product_
    with (
        patch.object(Bucket, "start_reduction", noted),
        patch.object(matmul, "add_product_", side_effect=add_product_) as added,
    ):
        trainer.passes.run(micro_batches, step=1)
        reduced_in_backward = list(order)
    gradients = canonical_gradients(trainer.model, trainer.optimizer)
    trainer.optimizer.zero_grad()
    return added.call_count, reduced_in_backward, gradients, [trainer.step().loss for _ in range(2)]


@pytest.mark.parametrize(("world", "sections"), named("weight gradients", "zbv", "overlap"))
def test_gradients_and_their_order_are_those_of_autograd(world: int, sections: Sections, ranks: Any) -> None:
    added, plain = (ranks(world).run(trained, sections, adds) for adds in (True, False))
    for found, wanted in zip(added, plain, strict=True):
        assert found[0] > 0
        assert wanted[0] == 0
        assert found[1] == wanted[1]
        assert found[1], "reductions begin in the backward pass"
        for name, gradient in wanted[2].items():
            assert torch.equal(found[2][name], gradient), name
        assert found[3] == wanted[3]


def added_in_memory_of_buckets() -> tuple[int, int]:
    """Products that compiled code adds in a step, and those of them that it adds in the memory of a bucket."""
    torch._dynamo.reset()
    config = make_config(precision={"mode": "mixed"}, compile={"enabled": True})
    trainer = make_trainer(config)
    matmul.let_products_add(weights_of(trainer.model))
    storages = {bucket.gradients.untyped_storage().data_ptr() for bucket in trainer.optimizer.buckets}
    places: list[bool] = []

    def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
        places.append(total.untyped_storage().data_ptr() in storages)

    with patch.object(matmul, "add_product_", add_product_):
        trainer.step()
    return len(places), sum(places)


@pytest.mark.slow
def test_compiled_code_copies_no_gradient(ranks: Any) -> None:
    """The compiler describes an operator that changes its argument by one that returns a new tensor, at first."""
    (found,) = ranks(1).run(added_in_memory_of_buckets)
    assert found == (32, 32)


def exact(sections: dict[str, Any]) -> dict[str, Tensor]:
    """Gradients of one step whose products are not rounded to bfloat16, as on a device that `adds_products`."""

    def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
        total.add_(a.float() @ b.float())

    with patch.object(matmul, "add_product_", add_product_):
        return trained(sections, True)[2]


ROUNDED = cases("rounded gradients")


@pytest.mark.parametrize(("sections", "plain"), few(ROUNDED, ROUNDED[2]))
def test_all_layouts_round_products_alike(sections: dict[str, Any], plain: dict[str, Any], ranks: Any) -> None:
    """A rounding to bfloat16 anywhere would be 2^-9 of an element."""
    (wanted, *_) = ranks(2 if "parallel" in plain else 1).run(exact, plain)
    for found in ranks(2).run(exact, sections):
        for name, gradient in found.items():
            assert float((gradient - wanted[name]).norm() / wanted[name].norm()) < 1e-5, name


S, B, INPUTS, INNER = 20, 3, 12, 16
"""At TP 4 a rank has five rows, which are no multiple of the pieces."""
PIECEWISE = Execution(overlap="pieces")


class Block(nn.Module):
    """Two column-parallel layers of one input, and one sum of two row-parallel layers."""

    def __init__(self, group: Group, sequence: bool) -> None:
        super().__init__()
        options: Any = {"sequence_parallel_enabled": sequence, "seed": 1, "group": group}
        self.into = nn.ModuleList(
            ColumnParallelLinear(INPUTS, INNER, i == 0, False, name=f"in{i}", **options) for i in range(2)
        )
        self.out = nn.ModuleList(
            RowParallelLinear(INNER, INPUTS, i == 0, True, name=f"out{i}", **options) for i in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        first, second = (layer(x) for layer in self.into)
        return row_parallel_sum((self.out[0], torch.tanh(first)), (self.out[1], torch.tanh(second * first)))  # type: ignore[arg-type]


def _use_symmetric_memory_of_cpu() -> None:
    """Give torch's CUDA operators the plain collectives that torch has for their shapes, on the CPU."""
    import torch.distributed._symmetric_memory as symmetric

    if not _LIBRARIES:
        library = torch.library.Library("symm_mem", "IMPL")
        library.impl("fused_all_gather_matmul", symmetric._fused_all_gather_matmul_fallback, "CPU")
        library.impl("fused_matmul_reduce_scatter", symmetric._fused_matmul_reduce_scatter_fallback, "CPU")
        _LIBRARIES.append(library)


_LIBRARIES: list[torch.library.Library] = []


def both(
    tp: int, sequence: bool, how: Any, rows: int, frozen: bool, regathers: bool = False
) -> tuple[dict[str, float], dict[str, int]]:
    """Errors against the plain layers, or with `regathers` against layers that do not, and how many more collectives
    there are."""
    if how == "symmetric_memory":
        _use_symmetric_memory_of_cpu()
    group = mesh(tp).tp
    with made_with(Execution(overlap=how if regathers else None)):
        plain = Block(group, sequence)
    with made_with(Execution(overlap=how, regathers=regathers)):
        other = Block(group, sequence)
    fill(plain)
    other.load_state_dict(plain.state_dict())
    x = random(group.rank if sequence else 1, rows // tp if sequence else rows, B, INPUTS)
    pull = random(5 + group.rank if sequence else 5, *x.shape)
    found, calls = [], []
    for block in (plain, other):
        if frozen:
            block.into[0].requires_grad_(False)
        group.meter.reset()
        mine = x.clone().requires_grad_(not frozen)
        y = block(mine)
        (y * pull).sum().backward()
        gradients = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
        found.append({"output": y.detach(), "input": mine.grad} | gradients)
        calls.append(dict(group.meter.calls))
    assert found[0].keys() == found[1].keys()
    errors = {
        name: error(found[1][name], wanted)  # type: ignore[arg-type]
        for name, wanted in found[0].items()
        if wanted is not None
    }
    assert all((found[1][name] is None) == (wanted is None) for name, wanted in found[0].items())
    return errors, {kind: calls[1][kind] - count for kind, count in calls[0].items()}


@pytest.mark.parametrize("tp", [2, 4])
def test_outputs_and_gradients_are_those_of_the_plain_layers(tp: int, ranks: Any) -> None:
    ways = ((True, "pieces"), (False, "pieces"), (True, "symmetric_memory"))
    # One row on each rank is one piece.
    cases = [(tp, *way, rows, frozen) for way in ways for rows in (S, tp) for frozen in (False, True)]
    everyone = run(ranks, tp, results, both, cases)
    for case, *found in zip(cases, *everyone, strict=True):
        check([errors for errors, _ in found])
        _, sequence, how, rows, _ = case
        count = min(PIECES, rows // tp if sequence else rows) if how == "pieces" else 1
        # Pieces are one sum of outputs, and with sequence parallelism the gathers of two inputs and one gradient.
        wanted = {"all_gather": 3 * (count - 1), "reduce_scatter": count - 1} if sequence else {"all_reduce": count - 1}
        assert found[0][1] == wanted, f"{case} makes {found[0][1]} more collectives than the plain layers"


def test_inputs_that_are_gathered_again_change_no_bit(ranks: Any) -> None:
    cases = list(itertools.product([2], [True], (None, "pieces"), (S, 2), (False, True), [True]))
    for found in run(ranks, 2, results, both, cases):
        for (_, _, how, rows, frozen, _), (errors, more) in zip(cases, found, strict=True):
            assert set(errors.values()) == {0.0}, errors
            # Gathers of two inputs, or of one if the other layer's weight is not trained.
            pieces = 1 if how is None else min(PIECES, rows // 2)
            wanted = {"all_gather": pieces * (1 if frozen else 2), "reduce_scatter": 0}
            assert more == {kind: wanted[kind] for kind in more}


def refused(tp: int) -> str:
    with made_with(PIECEWISE):
        layer = ColumnParallelLinear(INPUTS, INNER, name="in", seed=1, group=mesh(tp).tp, gather_output=False)
    x = random(1, S, B, INPUTS).requires_grad_()
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    try:
        dx.sum().backward()
    except RuntimeError as refusal:
        return str(refusal)
    return "accepted"


def test_gradients_of_gradients_are_refused_and_not_wrong(ranks: Any) -> None:
    for text in run(ranks, 2, refused, 2):
        assert "once_differentiable" in text


def under_autocast(tp: int) -> list[str]:
    with made_with(PIECEWISE):
        layer = RowParallelLinear(INNER, INPUTS, False, True, name="out", seed=1, group=mesh(tp).tp)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(random(1, S, B, INNER // tp).requires_grad_())
    y.sum().backward()
    return [str(y.dtype), str(layer.weight.grad.dtype)]


def test_under_autocast_layers_compute_as_ever(ranks: Any) -> None:
    assert run(ranks, 2, under_autocast, 2) == [["torch.bfloat16", "torch.float32"]] * 2
