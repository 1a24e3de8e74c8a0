"""Bytes that are read and written to add the gradients of weights to those of earlier micro-batches."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.distributed import devices
from shardwise.layers import loss, matmul
from shardwise.optim.muon import block_matrices
from tests.dist.checkpoints import make_trainer
from tests.dist.training import make_config
from tests.rank_pool import RankPool

PRODUCTS = ("mm", "addmm", "bmm")
"""They also read weights, to make the gradients of inputs."""


class GradientBytes(TorchDispatchMode):
    """Counts bytes of tensors of these sizes in all operators but products."""

    def __init__(self, sizes: set[int]) -> None:
        super().__init__()
        self._sizes = sizes
        self.total = 0

    def add(self, *tensors: Any) -> None:
        self.total += sum(t.nbytes for t in tensors if isinstance(t, Tensor) and t.numel() in self._sizes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        results = func._schema.returns
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in results)
        if not is_view and func.overloadpacket.__name__ not in PRODUCTS:
            self.add(*tree_leaves((args, kwargs, out)))
        return out


@contextmanager
def products_that_add(counted: GradientBytes) -> Iterator[None]:
    """Stand in for a device that adds a product to a float32 sum by one kernel, which reads and writes the sum."""

    def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
        counted.add(total, total)

    with (
        mock.patch.object(devices, "adds_products", return_value=True),
        mock.patch.object(matmul, "add_product_", add_product_),
        mock.patch.object(loss, "add_product_", add_product_),
    ):
        yield


def bytes_of_accumulation(adds: bool) -> float:
    """Bytes a parameter of the blocks' matrices, of one micro-batch that is not the first of its step."""
    config = make_config(precision={"mode": "mixed"}, train={"micro_batch": 1, "global_batch": 2})
    counted = GradientBytes(set())
    backward = Tensor.backward
    passes = []

    def counting(total: Tensor) -> None:
        passes.append(total)
        counted.total = 0
        with counted if len(passes) == 2 else nullcontext():
            backward(total)

    with products_that_add(counted) if adds else mock.patch.object(Tensor, "backward", backward):
        trainer = make_trainer(config)
        matrices = block_matrices(trainer.model)
        counted._sizes |= {p.numel() for p in matrices}
        with mock.patch.object(Tensor, "backward", counting):
            trainer.step()
    assert len(passes) == 2
    return counted.total / sum(p.numel() for p in matrices)


@pytest.mark.parametrize(("adds", "wanted"), [(False, 10.0), (True, 8.0)], ids=["autograd adds", "products add"])
def test_bytes_of_accumulation(adds: bool, wanted: float, strict: Callable[..., RankPool]) -> None:
    (found,) = strict(1).run(bytes_of_accumulation, adds)
    assert math.isclose(found, wanted)
