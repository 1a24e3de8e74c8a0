"""Bytes that a step of the optimizer moves through memory, by the tensors that its kernels take and give."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import LAMB, Muon, ZeroRedundancyOptimizer
from shardwise.config import PrecisionConfig
from shardwise.config.optimizer import OptimizerConfig
from shardwise_plan.update_bytes import update_bytes

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


def bytes_of_a_step(
    wrapped: type[torch.optim.Optimizer], *, compares: bool = False, **options: Any
) -> dict[str, float]:
    """By operator: bytes that a step moves for each element of a matrix."""
    dtype = options.pop("dtype", torch.bfloat16)
    weight = nn.Parameter(torch.randn(128, ELEMENTS // 128).to(dtype))
    optimizer = ZeroRedundancyOptimizer([weight], wrapped, lr=1e-2, max_norm=1e-3, **options)
    optimizer.compares_values = compares
    for _ in range(2):
        weight.square().sum().backward()
        with MovedBytes() as counted:
            optimizer.step()
    return {name: size / ELEMENTS for name, size in counted.moved.items() if size}


def test_bytes_of_a_step_in_mixed_precision_and_of_a_rank() -> None:
    """AdamW 28 and the scaled gradient 4, the norm of the gradient 4, its zeroing 4, and the rounded weights 6."""
    for compares, most in [(False, 46), (True, 58)]:
        moved = bytes_of_a_step(torch.optim.AdamW, compares=compares, gradient_dtype=torch.float32, fused=True)
        assert sum(moved.values()) == most, moved

    def charged(**cut: Any) -> float:
        precision = PrecisionConfig(mode="mixed").resolved(accelerator=True)
        return update_bytes(OptimizerConfig(lr=1e-2), precision, elements=ELEMENTS, matrices=0, **cut) / ELEMENTS

    assert charged(ranks=4, frees_gradients=False) == 42 / 4 + 4
    assert charged(ranks=4, frees_gradients=True) == 46 / 4


PRODUCTS = {"aten::mm", "aten::addmm", "aten::empty"}
"""Operators of Muon's iteration, whose time the planner computes apart, and memory that nothing moves."""
MIXED = {"gradient_dtype": torch.float32}
CASES: dict[str, tuple[str, dict[str, Any], type[torch.optim.Optimizer], dict[str, Any]]] = {
    "mixed": ("adamw", {"mode": "mixed"}, torch.optim.AdamW, {**MIXED, "fused": True}),
    "bfloat16 gradients": ("adamw", {"mode": "mixed", "gradient": "bfloat16"}, torch.optim.AdamW, {"fused": True}),
    "float32": ("adamw", {"mode": "float32"}, torch.optim.AdamW, {"dtype": torch.float32, "fused": True}),
    "bfloat16": (
        *("adamw", {"mode": "bfloat16", "rounding": "nearest"}, torch.optim.AdamW),
        {"optimizer_dtype": torch.bfloat16, "fused": True},
    ),
    "LAMB": ("lamb", {"mode": "mixed"}, LAMB, {**MIXED, "weight_decay": 0.01}),
    "Muon": ("muon", {"mode": "mixed"}, Muon, MIXED),
}


@pytest.mark.parametrize("case", CASES)
def test_the_planner_charges_the_bytes_that_are_moved(case: str) -> None:
    name, keys, wrapped, options = CASES[case]
    moved = bytes_of_a_step(wrapped, **options)
    settings, precision = OptimizerConfig(name=name, lr=1e-2), PrecisionConfig(**keys).resolved(accelerator=False)
    sizes = {"elements": ELEMENTS, "matrices": ELEMENTS if name == "muon" else 0}
    charged = update_bytes(settings, precision, **sizes, ranks=1, frees_gradients=False)
    assert charged / ELEMENTS == sum(size for operator, size in moved.items() if operator not in PRODUCTS), moved
