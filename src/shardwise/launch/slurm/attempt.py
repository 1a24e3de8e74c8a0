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
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.base.errors import listing
from shardwise.launch import heartbeat
from shardwise.launch.first_failure import Failure, root_cause, signal_name
from shardwise.launch.node import BEAT_SECONDS, Attempt, free_port

_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.2, 5.0
_GRACE_SECONDS = 5.0
"""In which the other nodes tell how they ended, once one has failed: the cause may be theirs."""
_END_SECONDS = 10.0
"""In which the launchers end once they are told to; a machine that does not answer cannot."""
_LINE_BYTES = 2**24


@dataclass
class _Member:
    """What is known of one node. `heard`: when it last told something, in seconds in which this process ran."""

    number: int
    name: str
    writer: asyncio.StreamWriter
    heard: float
    is_connected: bool = True
    is_training: bool = False
    beats: list[heartbeat.Beat] = field(default_factory=list)
    ended: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class AttemptOutcome:
    """How an attempt ended.

    Attributes:
        stopped: the text of ranks that stopped with a checkpoint, as they were asked to.
        failure: why it failed; None where it did not.
        lost: names of the nodes whose launcher did not tell how it ended.
        step: steps done at the end, as far as heartbeats tell.
        until_joined, until_training, after_last_step: seconds, as `restarts.Ending` has them.
        logs: what torch's agents said, by node.
    """

    stopped: str | None
    failure: Failure | None
    lost: tuple[str, ...]
    step: int
    until_joined: float | None
    until_training: float | None
    after_last_step: float
    logs: Mapping[str, str]


class AttemptWatch:
    """Starts one attempt and watches it.

    Attributes:
        is_training: whether a rank takes steps, so that a stop waits for a checkpoint.
        heard: called with the name of a signal that a node's launcher has got.
    """

    def __init__(
        self,
        address: str,
        nodes: int,
        ranks_per_node: int,
        logs: Path,
        *,
        id: str,
        silence: float,
        heard: Callable[[str], None],
    ) -> None:
        """Args:
        address: of this node, by which the others reach it.
        logs: the folder of the ranks' logs.
        id: of the attempt.
        silence: seconds without a message after which a node is lost.
        """
        self.heard = heard
        self._address, self._nodes, self._ranks_per_node = address, nodes, ranks_per_node
        self._logs, self._id, self._silence = logs, id, silence
        self._secret = secrets.token_hex(16)
        self._members: dict[int, _Member] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._ending: str | None = None
        self._began = time.monotonic()
        self._ran = 0.0
        self._until_joined: float | None = None
        self._until_training: float | None = None
        self._step, self._stepped = 0, self._began

    @property
    def is_training(self) -> bool:
        return any(member.is_training for member in self._members.values())

    def end(self, why: str) -> None:
        """End the attempt on all nodes at once."""
        self._ending = self._ending or why

    async def run(self, program: Callable[[Attempt], tuple[Sequence[str], Mapping[str, str]]]) -> AttemptOutcome:
        """Start the launchers and return when all have ended.

        Args:
            program: the command that starts a launcher on each node, and its environment.
        """
        server = await asyncio.start_server(self._serve, self._address, 0, limit=_LINE_BYTES)
        control = server.sockets[0].getsockname()[1]
        port = free_port(self._address)
        attempt = Attempt(self._address, port, control, self._id, self._nodes, self._secret, self._silence)
        command, variables = program(attempt)
        environment = {**os.environ, **variables, **attempt.variables()}
        process = await asyncio.create_subprocess_exec(
            *command, env=environment, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        try:
            problem = await self._watch(process)
            lost = [one for one in self._members.values() if one.ended is None and not one.is_connected]
            # What is told from here on follows from the end of the attempt.
            told = {one.name: one.ended for one in self._members.values() if one.ended is not None}
        finally:
            self._tell_end()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _END_SECONDS)
            if process.returncode is None:
                process.kill()
                await process.wait()
            server.close()
            for serving in self._serving:
                serving.cancel()
            await asyncio.gather(*self._serving, return_exceptions=True)
        if problem is not None and len(lost) == self._nodes:
            lost = []
        return self._outcome(told, {one.name: self._ranks(one) for one in lost}, problem)

    async def _watch(self, process: asyncio.subprocess.Process) -> str | None:
        """Wait for the end; returns what is wrong beside what the launchers tell."""
        deadline: float | None = None
        before = time.monotonic()
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            now, members = time.monotonic(), self._members.values()
            # The whole job may have been stopped in between, as by `scontrol suspend`.
            self._ran, before = self._ran + min(now - before, _LONGEST_POLL_SECONDS), now
            for member in members:
                if member.ended is None and member.is_connected and self._ran - member.heard > self._silence:
                    member.is_connected = False
            if len(members) == self._nodes and all(member.ended is not None for member in members):
                return None
            if self._ending is not None:
                return self._ending
            if process.returncode is not None:
                code = process.returncode
                ending = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"
                return f"srun {ending}{self._absent()}"
            failed = any(member.ended["code"] != 0 if member.ended else not member.is_connected for member in members)
            if failed:
                deadline = deadline or now + _GRACE_SECONDS
            elif len(members) < self._nodes and self._ran > self._silence:
                return f"the launchers of the nodes did not start within {self._silence:.0f} s{self._absent()}"
            told = sum(member.ended is not None or not member.is_connected for member in members)
            # Where no launcher is left, srun may be what has failed: it ends soon.
            is_told = told == self._nodes and any(member.ended is not None for member in members)
            if deadline is not None and (now > deadline or is_told):
                return None

    def _absent(self) -> str:
        """Which nodes have not joined."""
        absent = [number for number in range(self._nodes) if number not in self._members]
        names = f"; of {self._nodes} nodes, the launcher of number {listing(absent, most=5)} has not joined"
        return names if absent and len(absent) < self._nodes else ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hear one launcher."""
        member: _Member | None = None
        beat: asyncio.Task[None] | None = None
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            joined = json.loads(await asyncio.wait_for(reader.readline(), self._silence))
            if joined.get("kind") != "joined" or not secrets.compare_digest(str(joined.get("secret")), self._secret):
                return  # another program, or an earlier attempt's
            member = _Member(int(joined["node"]), str(joined["name"]), writer, self._ran)
            self._members[member.number] = member
            if len(self._members) == self._nodes:
                self._until_joined = time.monotonic() - self._began
            beat = asyncio.create_task(self._beat(member))
            while line := await reader.readline():
                member.heard = self._ran
                self._hear(member, json.loads(line))
        except (OSError, ValueError, TimeoutError, AttributeError, KeyError, TypeError):
            pass  # another program's message; or what a lost connection means is decided in `_watch`
        except asyncio.CancelledError:
            pass  # the attempt is over; Python 3.11 prints a traceback for a connection whose task was cancelled
        finally:
            if member is not None:
                member.is_connected = False
            if beat is not None:
                beat.cancel()
            writer.close()

    async def _beat(self, member: _Member) -> None:
        """Show a launcher that this process lives."""
        with contextlib.suppress(OSError):
            while member.is_connected:
                member.writer.write(b'{"kind": "beat"}\n')
                await member.writer.drain()
                await asyncio.sleep(BEAT_SECONDS)

    def _hear(self, member: _Member, message: Mapping[str, Any]) -> None:
        if "beats" in message:
            member.beats = [heartbeat.from_plain(beat) for beat in message["beats"]]
        if message["kind"] == "beat":
            member.is_training = bool(message["training"])
            if member.is_training and self._until_training is None:
                self._until_training = time.monotonic() - self._began
            step = max((beat.step for beat in member.beats), default=0)
            if step > self._step:
                self._step, self._stepped = step, time.monotonic()
        elif message["kind"] == "signal":
            self.heard(message["name"])
        elif message["kind"] == "ended":
            member.ended = message

    def _tell_end(self) -> None:
        for member in self._members.values():
            with contextlib.suppress(OSError, RuntimeError):
                member.writer.write(b'{"kind": "end"}\n')

    def _outcome(
        self, told: Mapping[str, Mapping[str, Any]], lost: Mapping[str, range], problem: str | None
    ) -> AttemptOutcome:
        members = [self._members[number] for number in sorted(self._members)]
        beats = [beat for member in members for beat in member.beats]
        stopped = next((one["stopped"] for one in told.values() if one.get("stopped")), None)
        failure = None
        is_whole = len(told) == self._nodes and all(one["code"] == 0 for one in told.values())
        if stopped is None and not is_whole:
            failure = self._failure(told, beats, lost, problem)
        return AttemptOutcome(
            stopped=stopped,
            failure=failure,
            lost=tuple(lost),
            step=max((beat.step for beat in beats), default=0),
            until_joined=self._until_joined,
            until_training=self._until_training,
            after_last_step=time.monotonic() - self._stepped,
            logs={member.name: member.ended["log"] for member in members if member.ended and member.ended.get("log")},
        )

    def _ranks(self, member: _Member) -> range:
        return range(member.number * self._ranks_per_node, (member.number + 1) * self._ranks_per_node)

    def _failure(
        self,
        told: Mapping[str, Mapping[str, Any]],
        beats: Sequence[heartbeat.Beat],
        lost: Mapping[str, range],
        problem: str | None,
    ) -> Failure:
        """The cause, before what followed from it."""
        reports = [Failure(**one["reported"]) for one in told.values() if one.get("reported")]
        reported = min(reports, key=lambda one: one.waited, default=None)
        exit_codes = {int(rank): code for one in told.values() for rank, code in one.get("exit_codes", {}).items()}
        if reported is None or reported.waited:
            missing = heartbeat.missing(beats, lost) if lost else None
            if missing is not None:
                return Failure(min(min(ranks) for ranks in lost.values()), missing, 1)
            killed = [name for name, one in told.items() if one["code"] < 0 and not one.get("reported")]
            if killed and not any(code < 0 for code in exit_codes.values()):
                by = signal_name(-told[killed[0]]["code"])
                return Failure(0, f"the agent that starts the ranks of node {killed[0]} was killed by {by}", 1)
        failure = root_cause(reported, exit_codes, self._logs, lambda: heartbeat.missing(beats))
        failed = listing(f"logs/launcher-{name}.log" for name, one in told.items() if one["code"])
        return failure or Failure(0, problem or f"a launcher failed; its log is in {failed}", 1)
