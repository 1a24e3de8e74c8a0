"""Lets the ranks of a job meet, and limits how long a rank waits for other ranks.

Rank 0 listens at MASTER_ADDR and MASTER_PORT, and the others connect to it. Where they cannot, torch waits for the time
limit and then says a page of C++; here it is a sentence. Where all ranks are on one machine, nothing of theirs listens
on its other network interfaces.

The limit of a wait is `launch.timeout` seconds, of those in which the rank's process ran. gloo and torch's store
measure by a clock that goes on while a process is stopped, as by SIGSTOP or `scontrol suspend`. If all ranks of a job
are stopped for longer than their limit, each of them finds the others late as soon as it goes on. So they get a limit
that is never reached, and a thread here closes the connections of a rank that has waited for too long: what waits there
then raises an error. gloo's wait for a connection that it makes hears nothing of it: there the thread ends the process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import psutil
import torch
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]  # stubs leave the class out

from shardwise.base import files, units
from shardwise.base.errors import ConfigError, RunError, see

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
    """A socket that listens: on the loopback interface where the address is one of it, else on all interfaces."""
    loopback = _LOOPBACK.get(address)
    if loopback is not None:
        family = socket.AF_INET6 if ":" in loopback else socket.AF_INET
        return socket.create_server((loopback, port), family=family)
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=is_dual)


def _keep_gloo_on_loopback() -> None:
    """Have gloo listen on the loopback interface, unless the user names another one."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == "127.0.0.1" for entry in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            return


def _open_store(address: str, port: int, world: int, timeout: timedelta) -> TCPStore:
    """Listen for the other ranks until all have come."""
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
                    f"within {timeout.total_seconds():g} s (launch.timeout): {files.reason_of(error)}"
                    f"{see('runs#first-node-not-reached')}"
                ) from None
            time.sleep(_RETRY_SECONDS)


NEVER = timedelta(days=365)
"""The limit of gloo and the store where this module measures."""
_TICK_SECONDS = 1.0
_DEAF_SECONDS = 5.0
"""Seconds after which a wait has not noticed that the connections were closed."""
_THREAD_NAME = "wait-limit"
_PACKAGE = Path(__file__).parent.parent
_WAITING_CODE = (
    str(Path(torch.__file__).parent),
    str(_PACKAGE / "distributed/collectives.py"),
    str(_PACKAGE / "distributed/mesh.py"),
    str(_PACKAGE / "pipeline"),
)
"""Files and folders with the code that calls what waits for other ranks; all else, such as reading files, has no limit.
"""


class Watch:
    """Measures how long each thread of this process has waited for other ranks, up to a limit in seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ran = 0.0
        # By thread: its processor time when it was first seen waiting, and the value of `_ran` then.
        self._since: dict[int, tuple[int, float]] = {}

    def is_over(self, passed: float, waiting: Mapping[int, int]) -> bool:
        """Return whether a thread has reached the limit.

        Args:
            passed: seconds since the last call, of those in which the process ran.
            waiting: the threads that may wait, each with its processor time in milliseconds: one that grows shows that
                the thread works.
        """
        self._ran += passed
        since = {}
        for thread, used in waiting.items():
            earlier = self._since.get(thread)
            # The thread has begun to wait, or has worked in between.
            if earlier is None or earlier[0] != used:
                earlier = (used, self._ran)
            since[thread] = earlier
        self._since = since
        return any(self._ran - began >= self._seconds for _, began in since.values())


def start_watch(seconds: float) -> bool:
    """Watch this process from here on, in a thread; False where the system does not tell what threads do.

    A thread that has waited for the limit finds its connections closed. If it waits on, the process ends.
    """
    if not Path("/proc/self/schedstat").exists():
        return False
    threading.Thread(target=_run, args=(seconds,), name=_THREAD_NAME, daemon=True).start()
    return True


def _run(seconds: float) -> None:
    watch = Watch(seconds)
    tick = min(_TICK_SECONDS, seconds / 10)
    while True:
        began = time.monotonic()
        time.sleep(tick)
        # A longer pause means that the process was stopped.
        waiting = _waiting()
        if watch.is_over(min(time.monotonic() - began, 2 * tick), waiting):
            break
    close_connections()
    time.sleep(_DEAF_SECONDS)
    if waiting.items() & _waiting().items():
        rank = os.environ.get("RANK", "0")
        os.write(2, f"rank {rank} waited for another rank for {seconds:g} s (launch.timeout), and ends\n".encode())
        os._exit(1)


def _waiting() -> dict[int, int]:
    """The threads that call something which may wait for other ranks, each with its processor time in milliseconds."""
    # Not the frames: one of them is of this function, so that with them all threads' tensors would be cyclic garbage.
    files = {ident: frame.f_code.co_filename for ident, frame in sys._current_frames().items()}
    waiting = {}
    for thread in threading.enumerate():
        if files.get(thread.ident or 0, "").startswith(_WAITING_CODE):
            # Python keeps the number that the main thread had before a fork.
            number = os.getpid() if thread is threading.main_thread() else thread.native_id or 0
            # The thread may have just ended.
            with contextlib.suppress(OSError):
                nanoseconds = Path(f"/proc/self/task/{number}/schedstat").read_text().split()[0]
                waiting[number] = int(nanoseconds) // 1_000_000
    return waiting


def close_connections() -> None:
    """Shut down the TCP connections of this process, whoever has opened them."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(descriptor.name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                # This fails for a socket that only listens, which is left open.
                connection.getpeername()
                connection.shutdown(socket.SHUT_RDWR)
