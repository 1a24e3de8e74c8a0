"""What the tests run on ranks with the strict device. Imported by ranks; the test process never loads the device."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.testing import RankPool
from tests.dist import cells
from tests.strict import device


def prepare() -> None:
    """Register the device in a rank, and let the tests' functions use it."""
    os.environ["TEST_DEVICE"] = "strict"
    device.load()


def prepare_unlike_cuda() -> None:
    """Likewise, as an accelerator that is not CUDA."""
    os.environ["STRICT_CUDA_LIKE"] = "0"
    prepare()


def losses(cell: cells.Cell, steps: int) -> list[float]:
    return cells.measure(cell, steps).losses


@dataclass(frozen=True)
class OnDevice:
    """Ranks whose functions make all tensors on the device, as a user's program does, and return tensors of the host.

    Takes the place of CPU ranks in tests of programs that name no device.
    """

    pool: RankPool

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self.pool.run(_on_device, function, *args)


def _on_device(function: Callable[..., Any], *args: Any) -> Any:
    torch.set_default_device(torch.device("strict", torch.accelerator.current_device_index()))
    try:
        return _to_host(function(*args))
    finally:
        torch.set_default_device(None)


def _to_host(found: Any) -> Any:
    if isinstance(found, Tensor):
        return found.detach().cpu()
    if isinstance(found, dict):
        return {key: _to_host(value) for key, value in found.items()}
    return type(found)(map(_to_host, found)) if isinstance(found, list | tuple) else found
