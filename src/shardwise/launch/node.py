"""One node of a job of several: what its launcher knows of the job, and its connection to the job's supervisor.

The supervisor (`cluster/supervisor.py`) runs on the job's first node and starts one launcher on each node. A launcher
tells it, over one TCP connection, that it is there, how its ranks are doing every second, and how they ended; the
supervisor tells the launchers to end. Messages are lines of JSON. A shared file system would show the same too late: a
network file system may hide for half a minute what another machine has written.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shardwise.errors import RunError, see
from shardwise.launch.environment import NODE
from shardwise.parsing import json_value

BEAT_SECONDS = 1.0
_JOIN_SECONDS = 60.0


@dataclass(frozen=True)
class Attempt:
    """What the launchers of one attempt at a job share.

    Attributes:
        address: of the first node, where rank 0 and the supervisor are.
        port: free there, for the ranks to meet.
        control: the supervisor's port there.
        id: of this attempt: no process of an earlier one can meet its ranks.
        nodes: the number of launchers.
        secret: which a launcher shows to the supervisor.
        silence: seconds without a message after which one of the two takes the other for lost.
    """

    address: str
    port: int
    control: int
    id: str
    nodes: int
    secret: str
    silence: float

    def variables(self) -> dict[str, str]:
        """The environment of the launchers."""
        return {NODE: json.dumps(asdict(self))}


@dataclass(frozen=True)
class Node:
    """The node of this launcher.

    Attributes:
        number: among the nodes of the attempt, in the order of SLURM's list.
        name: SLURM's, or the host's.
    """

    attempt: Attempt
    number: int
    name: str

    @property
    def own_address(self) -> str:
        """The address by which the first node is reached from here."""
        return _route(self.attempt.address)


def this_node(variables: Mapping[str, str] = os.environ) -> Node:
    """The node whose launcher, or whose launcher's child, this process is."""
    number = int(variables.get("SLURM_NODEID", "0"))
    return Node(Attempt(**json_value(variables[NODE])), number, variables.get("SLURMD_NODENAME") or platform.node())


def interface_variables(address: str, variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The network interface of the route to `address`, for gloo and NCCL where the user names none.

    Without it gloo takes the interface that this host's name resolves to, which on Debian is the loopback one.
    """
    import psutil

    own = _route(address)
    names = [name for name, found in psutil.net_if_addrs().items() if any(one.address == own for one in found)]
    wanted = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {variable: names[0] for variable in wanted if names and variable not in variables}


def free_port(address: str = "") -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


class Control:
    """A launcher's connection to the supervisor. A context manager.

    Attributes:
        ended: the supervisor has told this launcher to end, or is lost; why, or None.
    """

    def __init__(self, node: Node, beat: Callable[[], Mapping[str, Any]]) -> None:
        """Args: beat: what to tell every second."""
        self.ended: str | None = None
        self._node, self._beat = node, beat
        self._lock, self._leaving = threading.Lock(), threading.Event()

    def __enter__(self) -> Control:
        attempt = self._node.attempt
        try:
            self._socket = socket.create_connection((attempt.address, attempt.control), _JOIN_SECONDS)
        except OSError as error:
            place = f"{attempt.address}:{attempt.control}"
            raise RunError(
                f"node {self._node.name} must reach the job's first node at {place}: {error}"
                f"{see('runs#first-node-not-reached')}"
            ) from None
        self._socket.settimeout(attempt.silence)
        self.tell("joined", secret=attempt.secret, node=self._node.number, name=self._node.name)
        for work in (self._tell_beats, self._listen):
            threading.Thread(target=work, daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._leaving.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def tell(self, kind: str, **facts: Any) -> None:
        """Send one message; a lost connection is noticed by `_listen`."""
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(f"{json.dumps({'kind': kind, **facts})}\n".encode())

    def _tell_beats(self) -> None:
        while not self._leaving.wait(BEAT_SECONDS):
            self.tell("beat", **self._beat())

    def _listen(self) -> None:
        silent, text = 0.0, b""
        try:
            while silent < self._node.attempt.silence:
                began = time.monotonic()
                if not select.select([self._socket], [], [], BEAT_SECONDS)[0]:
                    silent += min(time.monotonic() - began, 2 * BEAT_SECONDS)  # this process may have been stopped
                    continue
                told, silent = self._socket.recv(4096), 0.0
                if not told:
                    self.ended = "the supervisor is gone"
                    return
                *lines, text = (text + told).split(b"\n")
                if any(json_value(line)["kind"] == "end" for line in lines):
                    self.ended = "the supervisor has ended the attempt"
                    return
        except (OSError, ValueError):
            pass  # closed, by the end of this launcher or by the other side
        self.ended = "the supervisor does not answer"


def _route(address: str) -> str:
    """This host's own address on the way to another one; nothing is sent."""
    family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        own: str = probe.getsockname()[0]
        return own
