"""How the ranks of a job meet: rank 0 listens at MASTER_ADDR and MASTER_PORT, and the others connect to it.

torch says a page of C++, after the time limit, where they cannot; here it is a sentence. Where all ranks are on one
machine, nothing of theirs listens on its other network interfaces.

How long a rank waits for others: `launch.timeout` seconds, of those in which its process ran.

gloo and torch's store measure by a clock that goes on while a process is stopped, as by SIGSTOP or `scontrol suspend`.
If all ranks of a job are stopped for longer than their limit, each of them finds the others late as soon as it goes on.
So they get a limit that is never reached, and a thread here closes the connections of a rank that has waited for too
long: what waits there then raises an error.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import psutil
import torch
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]  # stubs leave the class out

from shardwise.base.errors import ConfigError, RunError, see
from shardwise.base.files import reason_of
from shardwise.base.units import counted

_LOOPBACK = {"localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1", "::1": "::1"}
"""Names that mean this machine on each machine, as its own name does not, each with the address to listen at."""
_RETRY_SECONDS = 0.2


def meet(rank: int, world: int, timeout: timedelta) -> TCPStore | None:
    """Wait until the ranks can reach one another.

    Returns:
        the store that they share; None where the launcher of the ranks has opened it, to which torch connects them.

    Raises:
        ConfigError: MASTER_ADDR does not resolve; rank 0 cannot listen at MASTER_PORT.
        RunError: not all ranks came in time.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"MASTER_ADDR ({address}) must be the address of rank 0's machine, and on {socket.gethostname()} it does "
            f"not resolve: {reason_of(error)}{see('runs#first-node-not-found')}"
        ) from None
    if address in _LOOPBACK:
        _stay_inside()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    if rank == 0:
        return _open_store(address, port, world, timeout)
    _await_store(address, port, rank, timeout)
    return TCPStore(address, port, world, False, timeout)


def listen(address: str, port: int = 0) -> socket.socket:
    """A socket that listens: on the loopback interface where the address is one of it, else on all interfaces."""
    local = _LOOPBACK.get(address)
    if local is not None:
        return socket.create_server((local, port), family=socket.AF_INET6 if ":" in local else socket.AF_INET)
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=is_dual)


def _stay_inside() -> None:
    """Have gloo listen on the loopback interface, unless the user names another one."""
    names = [name for name, found in psutil.net_if_addrs().items() if any(a.address == "127.0.0.1" for a in found)]
    if names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])


def _open_store(address: str, port: int, world: int, timeout: timedelta) -> TCPStore:
    """Listen for the other ranks until all are there."""
    try:
        listener = listen(address, port)
    except OSError as error:
        raise ConfigError(
            f"MASTER_PORT ({port}) must be a free port of rank 0's machine, and rank 0 cannot listen at it: "
            f"{reason_of(error).partition(' (')[0]}; set another one on all ranks, or end the program that uses it"
        ) from None
    try:
        return TCPStore(address, port, world, True, timeout, multi_tenant=True, master_listen_fd=listener.detach())
    except DistError as error:
        raise RunError(
            f"rank 0 waited at {address}:{port} (MASTER_ADDR and MASTER_PORT) for {counted(world - 1, 'other rank')}, "
            f"and WORLD_SIZE ({world}) ranks did not come within {timeout.total_seconds():g} s (launch.timeout)"
        ) from error


def _await_store(address: str, port: int, rank: int, timeout: timedelta) -> None:
    """Wait until rank 0 listens."""
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            socket.create_connection((address, port), timeout.total_seconds()).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RunError(
                    f"rank {rank} must reach rank 0 at {address}:{port} (MASTER_ADDR and MASTER_PORT), and could not "
                    f"within {timeout.total_seconds():g} s (launch.timeout): {reason_of(error)}"
                    f"{see('runs#first-node-not-reached')}"
                ) from None
            time.sleep(_RETRY_SECONDS)


NEVER = timedelta(days=365)
"""The limit of gloo and the store where this module measures."""
_TICK_SECONDS = 1.0
_THREAD = "patience"
_TORCH = str(Path(torch.__file__).parent)
_HERE = Path(__file__).parent.parent
_WAITING = (
    _TORCH,
    str(_HERE / "distributed/collectives.py"),
    str(_HERE / "distributed/mesh.py"),
    str(_HERE / "pipeline"),
)
"""Where the code is that calls what waits for other ranks; all else, such as reading files, has no limit."""


class Watch:
    """Measures how long each thread of this process has waited for other ranks.

    Args:
        seconds: the limit.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ran = 0.0
        self._since: dict[int, tuple[int, float]] = {}

    def is_over(self, passed: float, waiting: Mapping[int, int]) -> bool:
        """Whether a thread has reached the limit.

        Args:
            passed: seconds since the last call, of those in which the process ran.
            waiting: the threads that may wait, each with its processor time in milliseconds: one that grows shows that
                the thread works.
        """
        self._ran += passed
        earlier = self._since
        self._since = {
            thread: earlier[thread] if thread in earlier and earlier[thread][0] == used else (used, self._ran)
            for thread, used in waiting.items()
        }
        return any(self._ran - began >= self._seconds for _, began in self._since.values())


def is_watching() -> bool:
    """Whether this process is watched, so that gloo must not have a limit of its own."""
    return any(thread.name == _THREAD for thread in threading.enumerate())


def start(seconds: float, give_up: Callable[[], None] | None = None) -> bool:
    """Watch this process from here on, in a thread; False where the system does not tell what threads do.

    Args:
        seconds: the limit.
        give_up: what ends a wait; default: `close_connections`.
    """
    if not Path("/proc/self/schedstat").exists():
        return False
    threading.Thread(target=_run, args=(seconds, give_up or close_connections), name=_THREAD, daemon=True).start()
    return True


def _run(seconds: float, give_up: Callable[[], None]) -> None:
    watch, tick = Watch(seconds), min(_TICK_SECONDS, seconds / 10)
    while True:
        began = time.monotonic()
        time.sleep(tick)
        # A longer pause means that the process was stopped.
        if watch.is_over(min(time.monotonic() - began, 2 * tick), _waiting()):
            give_up()
            return


def _waiting() -> dict[int, int]:
    """The threads that call something which may wait for other ranks, each with its processor time in milliseconds."""
    frames, found = sys._current_frames(), {}
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if frame is not None and frame.f_code.co_filename.startswith(_WAITING):
            # Python keeps the number that the main thread had before a fork.
            number = os.getpid() if thread is threading.main_thread() else thread.native_id or 0
            with contextlib.suppress(OSError):  # the thread has just ended
                used = Path(f"/proc/self/task/{number}/schedstat").read_text().split()[0]
                found[number] = int(used) // 1_000_000
    return found


def close_connections() -> None:
    """Shut down the TCP connections of this process, whoever has opened them."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(descriptor.name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                connection.getpeername()  # fails for one that only listens
                connection.shutdown(socket.SHUT_RDWR)
