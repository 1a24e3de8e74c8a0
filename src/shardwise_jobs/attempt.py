"""One attempt at a job: a launcher on each node, watched until all of them have ended.

The launchers of the nodes are one step of `srun`. Each connects to this process and tells how its ranks do
(`launch/node.py`). The first failure, a launcher that is lost, or a request ends the attempt on all nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.base.errors import listing
from shardwise.launch import heartbeat
from shardwise.launch.first_failure import Failure, root_cause
from shardwise.launch.node import BEAT_SECONDS, LauncherFacts
from shardwise.launch.stop_requests import signal_name

_POLL_SECONDS = 0.2
_LONGEST_POLL_SECONDS = 5.0  # longer pauses between two polls are a stop of this process, and no silence of the nodes
_GRACE_SECONDS = 5.0  # seconds in which the other nodes report their ends, once one has failed: the cause may be theirs
_END_SECONDS = 10.0  # seconds in which the launchers end once they are told to; a machine that does not answer cannot
_LINE_BYTES = 2**24  # longest message: the heartbeats of a node's ranks, and 4,000 characters of a log


@dataclass
class _NodeLauncher:
    """The launcher of one node."""

    number: int
    name: str
    writer: asyncio.StreamWriter
    heard: float  # time of its last message, in seconds in which this process ran
    is_connected: bool = True
    is_training: bool = False
    beats: list[heartbeat.Beat] = field(default_factory=list)
    ended: Mapping[str, Any] | None = None  # last message, with the end of the ranks; None before it


@dataclass(frozen=True)
class AttemptOutcome:
    """The end of an attempt at a job."""

    stopped: str | None  # text of ranks that stopped with a checkpoint, as they were asked to; None if they did not
    failure: Failure | None  # cause of the failure; None without one
    lost: tuple[str, ...]  # names of the nodes whose launcher did not report its end
    step: int  # steps done at the end, as far as heartbeats tell
    # until_joined, until_training, after_last_step: seconds, as in `restarts.AttemptEnding`.
    until_joined: float | None
    until_training: float | None
    after_last_step: float
    logs: Mapping[str, str]  # texts of torch's agents, by node


@dataclass(eq=False)
class AttemptWatch:
    """One attempt at a job, which `run` starts and watches."""

    address: str  # address by which the other nodes reach this one
    nodes: int
    ranks_per_node: int
    logs: Path  # folder of the ranks' logs
    id: str  # id of the attempt
    silence: float  # seconds without a message after which a node is lost
    heard: Callable[[str], None]  # function that is called with the name of a signal that a node's launcher has got

    def __post_init__(self) -> None:
        # A launcher of an earlier attempt may still live. It knows another secret, and is not heard.
        self._secret = secrets.token_hex(16)
        self._launchers: dict[int, _NodeLauncher] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._ending: str | None = None
        # The times of the begin and of the last step.
        self._began = self._stepped = time.monotonic()
        # Seconds in which this process ran, without those for which the job was suspended.
        self._ran = 0.0
        self._until_joined: float | None = None
        self._until_training: float | None = None
        self._step = 0

    @property
    def is_training(self) -> bool:
        """True once a rank takes steps, so that a stop waits for a checkpoint."""
        return any(launcher.is_training for launcher in self._launchers.values())

    def end(self, why: str) -> None:
        """End the attempt on all nodes at once."""
        self._ending = self._ending or why

    async def run(self, program: Callable[[LauncherFacts], Sequence[str]]) -> AttemptOutcome:
        """Start the launchers and return when all have ended.

        Args:
            program: function that returns the command that starts a launcher on each node.
        """
        server = await asyncio.start_server(self._serve, self.address, 0, limit=_LINE_BYTES)
        control = server.sockets[0].getsockname()[1]
        port = _free_port(self.address)
        attempt = LauncherFacts(self.address, port, control, self.id, self.nodes, self._secret, self.silence)
        environment = {**os.environ, **attempt.variables()}
        process = await asyncio.create_subprocess_exec(
            *program(attempt), env=environment, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        try:
            problem = await self._watch(process)
            # Taken before the launchers are told to end: later messages follow from that.
            launchers = self._launchers.values()
            lost = [launcher for launcher in launchers if launcher.ended is None and not launcher.is_connected]
            ends = {launcher.name: launcher.ended for launcher in launchers if launcher.ended is not None}
        finally:
            for launcher in self._launchers.values():
                with contextlib.suppress(OSError, RuntimeError):
                    launcher.writer.write(b'{"kind": "end"}\n')
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _END_SECONDS)
            if process.returncode is None:
                process.kill()
                await process.wait()
            server.close()
            for serving in self._serving:
                serving.cancel()
            await asyncio.gather(*self._serving, return_exceptions=True)
        # Where all are gone at once, no node is lost: srun, or the request to end, has ended them.
        if problem is not None and len(lost) == self.nodes:
            lost = []
        return self._outcome(ends, {launcher.name: self._ranks(launcher) for launcher in lost}, problem)

    async def _watch(self, process: asyncio.subprocess.Process) -> str | None:
        """Wait for the end; returns a problem that no launcher reports, or None."""
        deadline: float | None = None
        before = time.monotonic()
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            now = time.monotonic()
            launchers = self._launchers.values()
            # The whole job may have been stopped in between, as by `scontrol suspend`.
            self._ran += min(now - before, _LONGEST_POLL_SECONDS)
            before = now
            for launcher in launchers:
                if launcher.ended is None and launcher.is_connected and self._ran - launcher.heard > self.silence:
                    launcher.is_connected = False
            if len(launchers) == self.nodes and all(launcher.ended is not None for launcher in launchers):
                return None
            if self._ending is not None:
                return self._ending
            if process.returncode is not None:
                code = process.returncode
                ending = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"
                return f"srun {ending}{self._absent()}"
            failed = any(
                launcher.ended["code"] != 0 if launcher.ended else not launcher.is_connected for launcher in launchers
            )
            if failed:
                deadline = deadline or now + _GRACE_SECONDS
            elif len(launchers) < self.nodes and self._ran > self.silence:
                return f"the launchers of the nodes did not start within {self.silence:.0f} s{self._absent()}"
            over = sum(launcher.ended is not None or not launcher.is_connected for launcher in launchers)
            # If all connections broke without a report, srun itself may have failed: wait for its exit code.
            is_reported = over == self.nodes and any(launcher.ended is not None for launcher in launchers)
            if deadline is not None and (now > deadline or is_reported):
                return None

    def _absent(self) -> str:
        absent = [number for number in range(self.nodes) if number not in self._launchers]
        names = f"; of {self.nodes} nodes, the launcher of number {listing(absent, most=5)} has not joined"
        return names if absent and len(absent) < self.nodes else ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read the messages of one launcher."""
        launcher: _NodeLauncher | None = None
        beat: asyncio.Task[None] | None = None
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            joined = json.loads(await asyncio.wait_for(reader.readline(), self.silence))
            if joined.get("kind") != "joined" or not secrets.compare_digest(str(joined.get("secret")), self._secret):
                # Another program has connected, or a launcher of an earlier attempt.
                return
            launcher = _NodeLauncher(int(joined["node"]), str(joined["name"]), writer, self._ran)
            self._launchers[launcher.number] = launcher
            if len(self._launchers) == self.nodes:
                self._until_joined = time.monotonic() - self._began
            beat = asyncio.create_task(self._beat(launcher))
            while line := await reader.readline():
                launcher.heard = self._ran
                self._hear(launcher, json.loads(line))
        except (OSError, ValueError, TimeoutError, AttributeError, KeyError, TypeError):
            # The message of another program, or a lost connection, of which `_watch` decides.
            pass
        except asyncio.CancelledError:
            # The attempt is over. Python 3.11 would print a traceback for a connection whose task was cancelled.
            pass
        finally:
            if launcher is not None:
                launcher.is_connected = False
            if beat is not None:
                beat.cancel()
            writer.close()

    async def _beat(self, launcher: _NodeLauncher) -> None:
        """Show a launcher every second that this process lives."""
        with contextlib.suppress(OSError):
            while launcher.is_connected:
                launcher.writer.write(b'{"kind": "beat"}\n')
                await launcher.writer.drain()
                await asyncio.sleep(BEAT_SECONDS)

    def _hear(self, launcher: _NodeLauncher, message: Mapping[str, Any]) -> None:
        if "beats" in message:
            launcher.beats = [heartbeat.from_plain(beat) for beat in message["beats"]]
        if message["kind"] == "beat":
            launcher.is_training = bool(message["training"])
            if launcher.is_training and self._until_training is None:
                self._until_training = time.monotonic() - self._began
            step = max((beat.step for beat in launcher.beats), default=0)
            if step > self._step:
                self._step = step
                self._stepped = time.monotonic()
        elif message["kind"] == "signal":
            self.heard(message["name"])
        elif message["kind"] == "ended":
            launcher.ended = message

    def _outcome(
        self, ends: Mapping[str, Mapping[str, Any]], lost: Mapping[str, range], problem: str | None
    ) -> AttemptOutcome:
        launchers = [self._launchers[number] for number in sorted(self._launchers)]
        beats = [beat for launcher in launchers for beat in launcher.beats]
        stopped = next((end["stopped"] for end in ends.values() if end.get("stopped")), None)
        failure = None
        is_done = len(ends) == self.nodes and all(end["code"] == 0 for end in ends.values())
        if stopped is None and not is_done:
            failure = self._failure(ends, beats, lost, problem)
        logs = {}
        for launcher in launchers:
            if launcher.ended and launcher.ended.get("log"):
                logs[launcher.name] = launcher.ended["log"]
        return AttemptOutcome(
            stopped=stopped,
            failure=failure,
            lost=tuple(lost),
            step=max((beat.step for beat in beats), default=0),
            until_joined=self._until_joined,
            until_training=self._until_training,
            after_last_step=time.monotonic() - self._stepped,
            logs=logs,
        )

    def _ranks(self, launcher: _NodeLauncher) -> range:
        return range(launcher.number * self.ranks_per_node, (launcher.number + 1) * self.ranks_per_node)

    def _failure(
        self,
        ends: Mapping[str, Mapping[str, Any]],
        beats: Sequence[heartbeat.Beat],
        lost: Mapping[str, range],
        problem: str | None,
    ) -> Failure:
        """Choose the cause among the reports of all nodes: most of them follow from it.

        In this order: a rank that failed by itself; a node that does not answer; an agent that was killed; a rank that
        was killed, or for which the others waited; the problem of `srun`.
        """
        reports = [Failure(**end["reported"]) for end in ends.values() if end.get("reported")]
        reported = min(reports, key=lambda report: report.waited, default=None)
        exit_codes: dict[int, int] = {}
        for end in ends.values():
            exit_codes |= {int(rank): code for rank, code in end.get("exit_codes", {}).items()}
        if reported is None or reported.waited:
            missing = heartbeat.missing(beats, lost) if lost else None
            if missing is not None:
                return Failure(min(min(ranks) for ranks in lost.values()), missing, 1)
            killed = [name for name, end in ends.items() if end["code"] < 0 and not end.get("reported")]
            # Of a killed rank the agent ends by itself, so a rank's death by a signal comes before the agent's.
            if killed and not any(code < 0 for code in exit_codes.values()):
                by = signal_name(-ends[killed[0]]["code"])
                return Failure(0, f"the agent that starts the ranks of node {killed[0]} was killed by {by}", 1)
        failure = root_cause(reported, exit_codes, self.logs, lambda: heartbeat.missing(beats))
        failed = listing(f"logs/launcher-{name}.log" for name, end in ends.items() if end["code"])
        return failure or Failure(0, problem or f"a launcher failed; its log is in {failed}", 1)


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port
