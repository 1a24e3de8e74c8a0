"""Why ranks cannot meet, in a sentence; and where they listen."""

import socket
from datetime import timedelta

import pytest

from shardwise.base.errors import ConfigError, RunError
from shardwise.distributed.rendezvous import listen, meet

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
