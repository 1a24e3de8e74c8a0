"""The launcher of one node of a job: it starts the node's ranks and tells the job's supervisor how they do.

The supervisor (`shardwise_jobs/supervisor.py`) runs on the job's first node and starts one launcher on each node. A
launcher tells it, over one TCP connection, that it is there, how its ranks are doing every second, and how they ended;
the supervisor tells the launchers to end. Messages are lines of JSON. A shared file system would show the same too
late: a network file system may hide for half a minute what another machine has written.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import select
import socket
import subprocess
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.base.errors import RunError, ShardwiseError, counted_text, see
from shardwise.base.redaction import redacted
from shardwise.base.yaml_and_json import json_value
from shardwise.launch import heartbeat, local, stop_requests
from shardwise.launch.environment import NODE
from shardwise.launch.first_failure import Failure
from shardwise.launch.local import run_ranks
from shardwise.launch.stop_requests import signal_name

BEAT_SECONDS = 1.0
_JOIN_SECONDS = 60.0


@dataclass(frozen=True)
class LauncherFacts:
    """The facts that the launcher of a node gets from its job's supervisor."""

    address: str  # address of the first node, where rank 0 and the supervisor are
    port: int  # free port of the first node, at which the ranks meet
    control: int  # the supervisor's port on the first node
    id: str  # id of this attempt: no process of an earlier one can meet its ranks
    nodes: int  # number of launchers
    secret: str  # text that a launcher shows to the supervisor
    silence: float  # seconds without a message after which one of the two takes the other for lost

    def variables(self) -> dict[str, str]:
        """Return the environment variables of the launchers."""
        return {NODE: json.dumps(asdict(self))}


@dataclass(frozen=True)
class Node:
    """The node of this launcher."""

    attempt: LauncherFacts
    number: int  # index among the nodes of the attempt, in the order of SLURM's list
    name: str  # SLURM's name of the node; without one the host's


def this_node() -> Node:
    """Return the node on which this process is the launcher, or a child of the launcher."""
    attempt = LauncherFacts(**json_value(os.environ[NODE]))
    number = int(os.environ.get("SLURM_NODEID", "0"))
    return Node(attempt, number, os.environ.get("SLURMD_NODENAME") or platform.node())


def _interface_variables(address: str, variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Name the network interface of the route to `address`, for gloo and NCCL if the user names none.

    Without it gloo takes the interface that this host's name resolves to, which on Debian is the loopback one.
    """
    import psutil

    source = _source_address(address)
    for interface, addresses in psutil.net_if_addrs().items():
        if any(known.address == source for known in addresses):
            names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
            return {name: interface for name in names if name not in variables}
    return {}


class LauncherConnection:
    """The launcher's end of a node's connection to the supervisor; `ended`: reason for which the launcher must end."""

    def __init__(self, node: Node, beat: Callable[[], Mapping[str, Any]]) -> None:
        """Args: beat: function that returns the facts to send every second."""
        self.ended: str | None = None
        self._node = node
        self._beat = beat
        # Messages come from several threads, and each must be one line.
        self._lock = threading.Lock()
        self._leaving = threading.Event()

    def __enter__(self) -> LauncherConnection:
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
        # Before the threads: the supervisor takes a connection with another first message for a stranger.
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
        silent_seconds = 0.0
        text = b""
        try:
            while silent_seconds < self._node.attempt.silence:
                began = time.monotonic()
                if not select.select([self._socket], [], [], BEAT_SECONDS)[0]:
                    # This process may have been stopped meanwhile: that time says nothing about the supervisor.
                    silent_seconds += min(time.monotonic() - began, 2 * BEAT_SECONDS)
                    continue
                received = self._socket.recv(4096)
                silent_seconds = 0.0
                if not received:
                    self.ended = "the supervisor is gone"
                    return
                *lines, text = (text + received).split(b"\n")
                if any(json_value(line)["kind"] == "end" for line in lines):
                    self.ended = "the supervisor has ended the attempt"
                    return
        except (OSError, ValueError):
            # The socket was closed, by the end of this launcher or by the other side.
            pass
        self.ended = "the supervisor does not answer"


def _source_address(address: str) -> str:
    """Return this host's address on the way to another one: connecting UDP chooses it, and sends nothing."""
    family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        source: str = probe.getsockname()[0]
        return source


_POLL_SECONDS = 0.1
_LOG_CHARACTERS = 4000


def launch_on_node(
    node: Node, command: Sequence[str], nproc: int, variables: MutableMapping[str, str], prepare: Callable[[], None]
) -> int:
    """Run `command` on the `nproc` ranks of this node; the supervisor tells the user how the attempt ended.

    Args:
        variables: environment that the ranks inherit; network interfaces are added.
        prepare: function that is called on each node before its ranks start.

    Returns:
        exit code of this node's launcher.

    Raises:
        RunError: the supervisor cannot be reached.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        logs = Path(folder)
        beats = logs / "beats"
        beats.mkdir()

        def beat() -> dict[str, Any]:
            ranks = [asdict(rank_beat) for rank_beat in heartbeat.read(beats, node.name)]
            return {"training": stop_requests.training_mark(logs).exists(), "beats": ranks}

        with LauncherConnection(node, beat) as control:
            # SLURM signals the launchers too. The supervisor hears the first one and asks all ranks to stop.
            stop_requests.handle_signals(lambda number, _: control.tell("signal", name=signal_name(number)))
            try:
                prepare()
            except Exception as error:  # noqa: BLE001  the supervisor would take this node for lost
                failure = _failure(error, node, nproc)
                log = "" if isinstance(error, ShardwiseError) else redacted(traceback.format_exc())
                control.tell("ended", code=failure.exit_code, reported=asdict(failure), log=log)
                return failure.exit_code
            if node.attempt.nodes > 1:
                variables.update(_interface_variables(node.attempt.address, variables))
            first = node.number * nproc
            ended = run_ranks(command, nproc, logs, lambda agent: _end_with(control, agent), beats, first)
            path = logs / "launcher.log"
            control.tell(
                "ended",
                code=ended.code,
                stopped=ended.stopped,
                reported=None if ended.reported is None else asdict(ended.reported),
                exit_codes=dict(ended.exit_codes),
                beats=[asdict(replace(rank_beat, host=node.name)) for rank_beat in ended.beats],
                log=path.read_text(errors="replace")[-_LOG_CHARACTERS:] if path.exists() else "",
            )
            return ended.code


def _failure(error: Exception, node: Node, nproc: int) -> Failure:
    rank = node.number * nproc
    if isinstance(error, ShardwiseError):
        return Failure(rank, redacted(counted_text(error)), error.exit_code)
    text = f"node {node.name} cannot start its ranks: {type(error).__name__}: {error}"
    return Failure(rank, f"{redacted(text)}; see logs/launcher-{node.name}.log", RunError.exit_code)


def _end_with(control: LauncherConnection, agent: subprocess.Popen[bytes]) -> None:
    """Kill the agent and its ranks when the supervisor ends the attempt, or is gone."""

    def watch() -> None:
        while agent.poll() is None:
            if control.ended is not None:
                local.kill_ranks(agent)
                return
            time.sleep(_POLL_SECONDS)

    threading.Thread(target=watch, name="end of the attempt", daemon=True).start()
