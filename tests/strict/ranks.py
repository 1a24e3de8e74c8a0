"""What the tests run on ranks with the strict device. Imported by ranks; the test process never loads the device."""

from __future__ import annotations

import os

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
