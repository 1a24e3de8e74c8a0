"""Which accelerator a rank uses, and who is told that there is none."""

import os
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from shardwise.base.errors import ConfigError
from shardwise.distributed import devices

_NAMES = ("LOCAL_RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[torch.device]:
    """A machine on which torch sees some accelerators; gives the devices that were touched."""
    touched: list[torch.device] = []
    for name in _NAMES:
        monkeypatch.delenv(name, raising=False)
    found = torch.device("cuda") if request.param else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: request.param)
    monkeypatch.setattr(torch.accelerator, "set_device_index", touched.append)
    monkeypatch.setattr(torch, "empty", lambda size, device: touched.append(device))  # none of this machine's
    return touched


@pytest.mark.parametrize(
    ("machine", "variables", "index"),
    [
        (1, {}, 0),
        (4, {"LOCAL_RANK": "3", "WORLD_SIZE": "8"}, 3),
        (1, {"LOCAL_RANK": "3", "WORLD_SIZE": "8", "CUDA_VISIBLE_DEVICES": "3"}, 0),
    ],
    indirect=["machine"],
)
def test_a_rank_uses_the_accelerator_of_its_own(
    machine: list[torch.device], variables: dict[str, str], index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    device = torch.device("cuda", index)
    assert devices.local_device() == device
    assert not machine, "TorchNeuron's process group must be made before"
    devices.begin_use(device)
    assert machine == [device, device]


@pytest.mark.parametrize("machine", [1], indirect=True)
def test_torchneuron_numbers_devices_by_local_rank(
    machine: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = SimpleNamespace(type="neuron")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: made)
    monkeypatch.setattr(torch, "device", lambda kind, index: (kind, index))
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "3")
    assert devices.local_device() == ("neuron", 3)


@pytest.mark.parametrize(("shown", "left"), [("", ""), ("4-7", "5")])
def test_a_rank_keeps_one_core_of_those_that_all_see(shown: str, left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", shown)
    devices.choose_neuron_core(torch.device("cuda", 1))
    assert os.environ["NEURON_RT_VISIBLE_CORES"] == left
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "4-7")
    with pytest.raises(ConfigError, match=r"VISIBLE_CORES \(4-7\) must name a core .*, and has 4: rank 5 has none"):
        devices.choose_neuron_core(torch.device("cuda", 5))


@pytest.mark.parametrize(
    ("ranks", "has_one"),
    [(range(2), False), (range(4, 8), True), (range(2, 6), False), ((0, 2, 4, 6), False), (range(12), False)],
)
def test_torchneurons_all_to_all_is_for_some_groups(ranks: Sequence[int], has_one: bool) -> None:
    assert devices.has_all_to_all("neuron", ranks) == has_one
    assert devices.has_all_to_all("nccl", ranks)


@pytest.mark.parametrize(
    ("machine", "variables", "says"),
    [
        (4, {"LOCAL_RANK": "4", "WORLD_SIZE": "8"}, r"LOCAL_RANK \(4\) must be less than the number of accelerators"),
        (1, {"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, r"two ranks cannot train on one"),
        (4, {"WORLD_SIZE": "2"}, r"LOCAL_RANK must be set .* it sees 4 accelerators"),
    ],
    indirect=["machine"],
)
def test_a_rank_without_an_accelerator_of_its_own_is_refused(
    machine: list[torch.device], variables: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=says):
        devices.local_device()


@pytest.mark.parametrize("machine", [0], indirect=True)
def test_accelerators_that_torch_cannot_use(machine: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "accelerators", lambda: ("nvidia", 8))
    with pytest.raises(ConfigError, match=r"accelerators \(8 × nvidia\), and finds none"):
        devices.local_device()
    monkeypatch.setattr(devices, "accelerators", lambda: ("cpu", 0))
    assert devices.local_device() == torch.device("cpu")


def test_what_libraries_say_of_a_lost_peer_and_of_a_shared_device() -> None:
    lost = (
        "Application timeout caused pair closure",
        "NCCL error in: ProcessGroupNCCL.cpp:2500, ncclRemoteError: A call failed possibly due to a network error",
        "NCCL communicator was aborted on rank 1.",
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4567",
    )
    for text in lost:
        assert devices.is_lost_connection(RuntimeError(text)), text
        assert not devices.is_shared_device(RuntimeError(text)), text
    shared = RuntimeError("ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 19000")
    assert devices.is_shared_device(shared)
    assert not devices.is_lost_connection(shared)
    assert not devices.is_lost_connection(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
