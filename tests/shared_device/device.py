"""Lets ranks share this machine's accelerator, whose own library of collectives wants a device for each rank.

`pytest --device shared` has it in the ranks of tests/dist: their collectives go over gloo, through the host's memory.
The numerics and kernels of training are those of the accelerator; its collective library is not tested.
"""

import functools
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.strict import build

HERE = Path(__file__).parent
NAME = "shared_library"
SOURCES = (HERE / "collectives.cpp",)


def use_everywhere() -> None:
    """Build the library, and let every Python that this process starts load it; not this process itself."""
    device = torch.accelerator.current_accelerator(check_available=True)
    assert device is not None, "torch finds no accelerator to share"
    build.library(NAME, SOURCES)
    folders = [str(HERE.parents[1]), str(HERE / "entry"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    os.environ["TEST_DEVICE"] = device.type
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"  # a rank whose launcher shows it one device takes that device


def load() -> None:
    """Give the accelerator's collectives to gloo, in this process."""
    kind = os.environ["TEST_DEVICE"]
    _library()
    dist.Backend.register_backend("sharedccl", _make_backend, extended_api=True, devices=[kind])
    dist.Backend.default_device_backend_map[kind] = "sharedccl"


@functools.cache
def _library() -> Any:
    return build.loaded(NAME, SOURCES)


def _make_backend(options: Any, _: Any) -> Any:
    """A communicator of one group."""
    gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)
    return _library().make_backend(gloo)
