"""Which device a rank takes."""

import os
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from shardwise.base.errors import ConfigError
from shardwise.distributed import devices
from shardwise.distributed.mesh import Mesh
from tests.rank_pool import RankPool
from tests.strict import ranks


def places() -> None:
    with mock.patch.dict(os.environ, LOCAL_RANK="3", WORLD_SIZE="16"):
        assert devices.local_device() == torch.device("strict", 3)
    with (
        mock.patch.dict(os.environ, LOCAL_RANK="9", WORLD_SIZE="16"),
        pytest.raises(ConfigError, match=r"LOCAL_RANK \(9\) must be less than the number of accelerators \(8\)"),
    ):
        devices.local_device()
    with mock.patch.dict(os.environ, WORLD_SIZE="16"):
        del os.environ["LOCAL_RANK"]
        with pytest.raises(ConfigError, match=r"LOCAL_RANK must be set .* it sees 8 accelerators"):
            devices.local_device()
        os.environ["WORLD_SIZE"] = "1"
        assert devices.local_device() == torch.device("strict", 0)
        os.environ["LOCAL_RANK"] = "9"
        os.environ["CUDA_VISIBLE_DEVICES"] = "9"
        with mock.patch.object(torch.accelerator, "device_count", return_value=1):
            assert devices.local_device() == torch.device("strict", 0), "each rank may see one device of its own"
    devices.local_device()


def prepare_hidden() -> None:
    """Register the device in a rank whose launcher shows it one device, while LOCAL_RANK counts the machine's ranks."""
    os.environ.update(STRICT_DEVICES="1", CUDA_VISIBLE_DEVICES=os.environ["LOCAL_RANK"])
    ranks.prepare()


def device_of_a_mesh() -> int:
    return int(Mesh(tensor=2).device.index or 0)


def test_a_mesh_is_on_the_one_device_that_a_rank_sees(strict: Callable[..., RankPool]) -> None:
    strict(1)  # builds the device
    pool = RankPool(2, device_type="strict", prepare=prepare_hidden)
    assert pool.run(device_of_a_mesh) == [0, 0]
    pool.close()


def test_two_ranks_do_not_share_a_device(strict: Callable[..., RankPool]) -> None:
    strict(1).run(places)
