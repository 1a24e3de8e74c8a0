"""Weight gradients that products add to the buckets by themselves: the same gradients, ready in the same order."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardwise.layers import matmul
from shardwise.layers.linear import weights_of
from shardwise.optim.buckets import Bucket
from shardwise.verify.canonical_values import canonical_gradients
from tests.dist.checkpoints import make_trainer
from tests.dist.training import make_config
from tests.sweeps import few

BLOCKS = {"model": {"num_hidden_layers": 4}}
COMPILED = {"compile": {"enabled": True, "backend": "aot_eager"}}
PIPELINE = {"parallel": {"pipeline": 2, "schedule": "1f1b"}, "optimizer": {"zero": 0}}
ZBV = {**BLOCKS, "parallel": {"pipeline": 2, "schedule": "zbv"}, "optimizer": {"zero": 0}}


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


OVERLAP = {"parallel": {"tensor": 2, "sequence": True, "tensor_overlap": "pieces"}}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "recompute": (1, {"train": {"recompute": "full"}}),
    "TP 2": (2, {"parallel": {"tensor": 2, "sequence": True}}),
    "PP 2": (2, PIPELINE),
    "zbv": (2, ZBV),
    "ZeRO-2": (2, {"optimizer": {"zero": 2}}),
    "ZeRO-3 once a step": (2, {"optimizer": {"zero": 3, "reduce": "step"}}),
    "overlap": (2, OVERLAP),
    "compiled, PP 2, recompute": (2, COMPILED | PIPELINE | {"train": {"recompute": "full"}}),
    "compiled, selective recompute": (1, COMPILED | {"train": {"recompute": "selective"}}),
}


@pytest.mark.parametrize("case", few(CASES, "zbv", "overlap"))
def test_gradients_and_their_order_are_those_of_autograd(case: str, ranks: Any) -> None:
    world, sections = CASES[case]
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


ROUNDED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (ZBV, BLOCKS),
    ({"optimizer": {"zero": 2}}, {}),
    ({"optimizer": {"zero": 3}}, {}),
    (OVERLAP, {"parallel": {"tensor": 2, "sequence": True}}),
]


@pytest.mark.parametrize(("sections", "plain"), few(ROUNDED, ROUNDED[2]))
def test_all_layouts_round_products_alike(sections: dict[str, Any], plain: dict[str, Any], ranks: Any) -> None:
    """A rounding to bfloat16 anywhere would be 2^-9 of an element."""
    (wanted, *_) = ranks(2 if "parallel" in plain else 1).run(exact, plain)
    for found in ranks(2).run(exact, sections):
        for name, gradient in found.items():
            assert float((gradient - wanted[name]).norm() / wanted[name].norm()) < 1e-5, name
