"""Which accelerator a rank uses, where ranks meet, how long they wait, and who is told that it cannot be."""

import gc
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from shardwise.base.errors import ConfigError, RunError
from shardwise.distributed import devices, wait_limit
from shardwise.distributed.rendezvous import listen, meet
from shardwise.distributed.wait_limit import WaitLimit, close_connections

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


SHORT = timedelta(seconds=0.1)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """The MASTER_PORT of this process, which is free."""
    with listen("127.0.0.1") as free:
        number: int = free.getsockname()[1]
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(number), "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return number


@pytest.mark.parametrize("rank", [0, 1])
def test_fault_14_an_address_that_resolves_nowhere(rank: int, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "no such host")
    told = r"MASTER_ADDR \(no such host\) must be the address of rank 0's machine, and on"
    with pytest.raises(ConfigError, match=told):
        meet(rank, 2, SHORT)


@pytest.mark.parametrize("address", ["127.0.0.1", socket.gethostname()])
def test_fault_14_a_port_in_use_is_refused(address: str, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", address)
    told = (
        rf"MASTER_PORT \({port}\) must be a free port of rank 0's machine, and .*: Address already in use; set another"
    )
    with socket.create_server(("", port)), pytest.raises(ConfigError, match=told):
        meet(0, 2, SHORT)


def test_fault_14_ranks_that_do_not_come_and_ranks_that_are_placed(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    where = rf"127\.0\.0\.1:{port} \(MASTER_ADDR and MASTER_PORT\)"
    with pytest.raises(RunError, match=rf"rank 1 must reach rank 0 at {where}, and could not within 0.1 s .*refused"):
        meet(1, 2, SHORT)
    told = rf"rank 0 waited at {where} for 2 other ranks, and WORLD_SIZE \(3\) ranks did not"
    with pytest.raises(RunError, match=told):
        meet(0, 3, SHORT)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert meet(0, 2, SHORT) is None


@pytest.mark.parametrize(
    ("address", "where"), [("localhost", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("10.0.0.1", "::"), ("host", "::")]
)
def test_fault_23_the_store_of_one_machine_listens_on_the_loopback_interface(address: str, where: str) -> None:
    with listen(address) as listener:
        assert listener.getsockname()[0] in (where, where.replace("::", "0.0.0.0"))


def test_fault_23_a_wait_is_over_after_its_seconds_of_running_time() -> None:
    watch = WaitLimit(3.0)
    assert [watch.is_over(1.0, {7: 5}) for _ in range(4)] == [False, False, False, True]
    for second in [{7: 6}, {}, {8: 5}]:
        watch = WaitLimit(2.0)
        seen = [{7: 5}, {7: 5}, second, second, {7: 9}]
        assert not any(watch.is_over(1.0, waiting) for waiting in seen)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_fault_23_time_in_which_the_process_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on by 100 s in each pause of a tenth of the limit."""
    times = iter(range(0, 10**6, 100))
    monkeypatch.setattr(wait_limit.time, "monotonic", lambda: float(next(times)))
    monkeypatch.setattr(wait_limit.time, "sleep", lambda _: None)
    monkeypatch.setattr(wait_limit, "_waiting", lambda: {1: 1})
    monkeypatch.setattr(wait_limit, "close_connections", lambda: None)
    monkeypatch.setattr(wait_limit.os, "_exit", lambda _: None)
    wait_limit._run(6.0)
    assert next(times) // 200 == 6, "six pauses of at most 1.2 s each"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_fault_23_what_waits_on_a_connection_goes_on_when_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all that this process has opened only these two are looked at."""
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    accepted, _ = server.accept()
    with server, client, accepted:
        ours = [wait_limit.Path(f"/proc/self/fd/{one.fileno()}") for one in (server, client)]
        monkeypatch.setattr(wait_limit.Path, "iterdir", lambda _: iter(ours))
        heard: list[bytes] = []
        waiting = threading.Thread(target=lambda: heard.append(client.recv(1)))
        waiting.start()
        close_connections()
        waiting.join(30)
        assert heard == [b""]
        socket.create_connection(server.getsockname()).close()


def test_a_watch_keeps_nothing_of_the_threads_that_it_looks_at() -> None:
    """A frame of the function that looks would keep itself, and with it the frames and tensors of all threads."""

    def looked_at() -> weakref.ref[torch.Tensor]:
        value = torch.zeros(1)
        wait_limit._waiting()
        return weakref.ref(value)

    gc.disable()
    try:
        assert looked_at()() is None
    finally:
        gc.enable()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_wait_that_hears_nothing_of_closed_connections_ends_the_process() -> None:
    """So does gloo's wait for a connection to a rank that was killed while the ranks made a group."""
    code = """
import torch
from shardwise.distributed import wait_limit
wait_limit._DEAF_SECONDS = 0.2
wait_limit.start_wait_limit(0.2)
torch.futures.Future().wait()
"""
    environment = {**os.environ, "RANK": "3"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    said = "rank 3 waited for another rank for 0.2 s (launch.timeout), and ends\n"
    assert (ended.returncode, ended.stderr) == (1, said)
