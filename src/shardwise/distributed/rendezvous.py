"""Lets the ranks of a job meet.

Rank 0 listens at MASTER_ADDR and MASTER_PORT, and the others connect to it. Where they cannot, torch waits for the time
limit and then says a page of C++; here it is a sentence. Where all ranks are on one machine, nothing of theirs listens
on its other network interfaces.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta

import psutil
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]  # stubs leave the class out

from shardwise.base import files, units
from shardwise.base.errors import ConfigError, RunError, see

_LOOPBACK = {"localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1", "::1": "::1"}
"""Names that mean this machine on each machine, as its own name does not, each with the address to listen at."""
_RETRY_SECONDS = 0.2


def meet(rank: int, world: int, timeout: timedelta) -> TCPStore | None:
    """Wait until the ranks of a job can reach one another, at rank 0's address.

    Returns:
        the store that they share; None where the launcher of the ranks has opened it, to which torch connects them.

    Raises:
        ConfigError: MASTER_ADDR does not resolve; rank 0 cannot listen at MASTER_PORT.
        RunError: not all ranks came in time.
    """
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    try:
        socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"MASTER_ADDR ({address}) must be the address of rank 0's machine, and on {socket.gethostname()} it does "
            f"not resolve: {files.reason_of(error)}{see('runs#first-node-not-found')}"
        ) from None
    if address in _LOOPBACK:
        _keep_gloo_on_loopback()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    if rank == 0:
        return _open_store(address, port, world, timeout)
    _await_store(address, port, rank, timeout)
    return TCPStore(address, port, world, False, timeout)


def listen(address: str, port: int = 0) -> socket.socket:
    """Open a socket at which ranks meet: on the loopback interface where the address is one of it, else on all."""
    loopback = _LOOPBACK.get(address)
    if loopback is not None:
        family = socket.AF_INET6 if ":" in loopback else socket.AF_INET
        return socket.create_server((loopback, port), family=family)
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=is_dual)


def _keep_gloo_on_loopback() -> None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == "127.0.0.1" for entry in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            return


def _open_store(address: str, port: int, world: int, timeout: timedelta) -> TCPStore:
    try:
        listener = listen(address, port)
    except OSError as error:
        raise ConfigError(
            f"MASTER_PORT ({port}) must be a free port of rank 0's machine, and rank 0 cannot listen at it: "
            f"{files.reason_of(error).partition(' (')[0]}; set another one on all ranks, or end the program that uses "
            "it"
        ) from None
    try:
        return TCPStore(address, port, world, True, timeout, multi_tenant=True, master_listen_fd=listener.detach())
    except DistError as error:
        raise RunError(
            f"rank 0 waited at {address}:{port} (MASTER_ADDR and MASTER_PORT) for "
            f"{units.counted(world - 1, 'other rank')}, and WORLD_SIZE ({world}) ranks did not come within "
            f"{timeout.total_seconds():g} s (launch.timeout)"
        ) from error


def _await_store(address: str, port: int, rank: int, timeout: timedelta) -> None:
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            socket.create_connection((address, port), timeout.total_seconds()).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RunError(
                    f"rank {rank} must reach rank 0 at {address}:{port} (MASTER_ADDR and MASTER_PORT), and could not "
                    f"within {timeout.total_seconds():g} s (launch.timeout): {files.reason_of(error)}"
                    f"{see('runs#first-node-not-reached')}"
                ) from None
            time.sleep(_RETRY_SECONDS)
