"""What the tests run on ranks with the strict device. Imported by ranks; the test process never loads the device."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.dist import cells
from tests.rank_pool import RankPool
from tests.strict import device


def prepare() -> None:
    """Register the device in a rank, and let the tests' functions use it."""
    os.environ["TEST_DEVICE"] = "strict"
    device.load()


def prepare_unlike_cuda() -> None:
    """Likewise, as an accelerator that is not CUDA."""
    os.environ["STRICT_CUDA_LIKE"] = "0"
    prepare()


def prepare_like_neuron() -> None:
    """Likewise, as TorchNeuron's devices."""
    os.environ["STRICT_NEURON_LIKE"] = "1"
    prepare()


def losses(cell: cells.Cell, steps: int) -> list[float]:
    return cells.measure(cell, steps).losses


def default_device(default: bool = True) -> AbstractContextManager[object]:
    """Inside, this rank's device is torch's default, as after `torch.set_default_device`; not if `default` is false."""
    return torch.device("strict", torch.accelerator.current_device_index()) if default else nullcontext()


@dataclass(frozen=True)
class OnDevice:
    """Ranks in whose functions the device is torch's default, and which return tensors of the host.

    Takes the place of CPU ranks in tests of programs that name no device.
    """

    pool: RankPool

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self.pool.run(_on_device, function, *args)


def _on_device(function: Callable[..., Any], *args: Any) -> Any:
    with default_device():
        return _to_host(function(*args))


def _to_host(found: Any) -> Any:
    if isinstance(found, Tensor):
        return found.detach().cpu()
    if isinstance(found, dict):
        return {key: _to_host(value) for key, value in found.items()}
    return type(found)(map(_to_host, found)) if isinstance(found, list | tuple) else found
