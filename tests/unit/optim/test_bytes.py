"""Bytes that a step of the optimizer moves through memory, by the tensors that its kernels take and give."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import ZeroRedundancyOptimizer

ELEMENTS = 1 << 14
WRITES_ONLY = {"aten::copy_", "aten::zero_", "aten::fill_"}


class MovedBytes(TorchDispatchMode):
    """Counts the bytes that kernels read and write, of tensors with all elements of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        is_view = any(given.alias_info is not None and not given.alias_info.is_write for given in schema.returns)
        if is_view:
            return result
        total = 0
        taken = {parameter.name: value for parameter, value in zip(schema.arguments, args, strict=False)}
        taken |= kwargs or {}
        for parameter in schema.arguments:
            is_written = parameter.alias_info is not None and parameter.alias_info.is_write
            is_read = not (is_written and (schema.name in WRITES_ONLY or parameter.is_out))
            total += (is_written + is_read) * sum(map(of_all, tensors(taken.get(parameter.name))))
        if not any(parameter.alias_info is not None for parameter in schema.arguments):
            total += sum(map(of_all, tensors(result)))
        self.moved[schema.name] = self.moved.get(schema.name, 0) + total
        return result


def tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from tensors(entry)


def of_all(tensor: Tensor) -> int:
    return tensor.nbytes if tensor.numel() == ELEMENTS else 0


@pytest.mark.parametrize(("compares", "most"), [(False, 46), (True, 58)])
def test_bytes_of_a_step_in_mixed_precision(compares: bool, most: int) -> None:
    """AdamW 28 and the scaled gradient 4, the norm of the gradient 4, its zeroing 4, and the rounded weights 6."""
    weight = nn.Parameter(torch.randn(128, ELEMENTS // 128).bfloat16())
    optimizer = ZeroRedundancyOptimizer(
        [weight], torch.optim.AdamW, lr=1e-2, max_norm=1e-3, gradient_dtype=torch.float32, fused=True
    )
    optimizer.compares_values = compares
    for _ in range(2):
        weight.square().sum().backward()
        with MovedBytes() as counted:
            optimizer.step()
    moved = {name: size / ELEMENTS for name, size in counted.moved.items() if size}
    assert sum(moved.values()) == most, moved
