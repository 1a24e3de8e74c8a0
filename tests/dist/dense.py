"""One mesh a process for the tests of sharded code, and parameters filled from, or compared with, canonical tensors."""

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.distributed import collectives
from shardwise.distributed.mesh import Mesh
from shardwise.distributed.placement import placements


@functools.cache
def mesh(
    tensor: int, pipeline: int = 1, grains: tuple[tuple[str, int], ...] = (), context: int = 1, expert: int = 1
) -> Mesh:
    """Made once a process: each new one costs threads that gloo keeps, and hundreds of them slow everything down.

    On the CPU, but for ranks that were told to use this machine's accelerator (TEST_DEVICE).
    """
    device = "cpu" if os.environ.get("TEST_DEVICE", "cpu") == "cpu" else None
    return Mesh(tensor=tensor, pipeline=pipeline, context=context, expert=expert, device=device, grains=dict(grains))


def run(ranks: Any, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(*args)` on `size` ranks; a single one is this process."""
    return [function(*args)] if size == 1 else list(ranks(size).run(function, *args))


def each(function: Callable[..., dict[str, float]], cases: Iterable[tuple[Any, ...]]) -> dict[str, float]:
    """The errors that a function finds in each case: the ranks are called once for all of them."""
    return {f"{case}: {what}": value for case in cases for what, value in function(*case).items()}


def results(function: Callable[..., Any], cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """What a function returns in each case, likewise."""
    return [function(*case) for case in cases]


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same numbers on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def fill(module: nn.Module, seed: int = 0, scale: float = 0.3) -> dict[str, Tensor]:
    """Give a sharded module random canonical weights, biases and norms (around 1) too, and return them whole."""
    canonical: dict[str, Tensor] = {}
    for _, parameter, record in placements(module):
        for piece in record.pieces:
            name = piece.name
            norm = len(piece.shape) == 1 and name.endswith(".weight")
            canonical[name] = random(seed + sum(name.encode()), *piece.shape) * scale + float(norm)
            with torch.no_grad():
                piece.of(parameter).copy_(canonical[name][piece.box.slices])
    return canonical


def leaves(canonical: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone().requires_grad_() for name, tensor in canonical.items()}


def error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to the largest wanted value."""
    assert found.shape == wanted.shape, f"shape {tuple(found.shape)}, wanted {tuple(wanted.shape)}"
    if not wanted.numel():
        return 0.0
    return float((found - wanted).detach().abs().max() / wanted.detach().abs().max().clamp_min(1e-6))


def gradient_errors(module: nn.Module, wanted: dict[str, Tensor]) -> dict[str, float]:
    """By canonical name: this rank's boxes of the gradient, summed where the placement says partial, against `wanted`.

    Padding must have no gradient at all, and is reported as `<parameter> padding`.
    """
    errors: dict[str, float] = {}
    for path, parameter, record in placements(module):
        assert parameter.grad is not None, f"{path} received no gradient"
        padding = torch.ones(parameter.shape, dtype=torch.bool)
        for piece in record.pieces:
            padding[piece.local.slices] = False
            gradient = piece.of(parameter.grad).clone()
            if piece.partial:
                collectives.all_reduce_(gradient, piece.copies)
            whole = wanted[piece.name].grad
            errors[f"gradient of {piece.name}"] = error(gradient, whole[piece.box.slices])
        errors[f"{path} padding"] = float(parameter.grad[padding].abs().sum())
    return errors


def check(outcomes: Sequence[dict[str, float]], tolerance: float = 2e-6) -> None:
    """No error of any rank is larger than the tolerance; the message names the worst of each rank."""
    assert outcomes
    assert all(outcomes), "a rank compared nothing"
    problems = [
        f"rank {rank}: {what} is off by {value:.2e}"
        for rank, errors in enumerate(outcomes)
        for what, value in errors.items()
        if not value <= tolerance
    ]
    assert not problems, "\n".join(problems)
