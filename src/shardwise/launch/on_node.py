"""The launcher of one node of a job: starts the node's ranks and tells the job's supervisor how they do."""

from __future__ import annotations

import subprocess
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from shardwise.errors import RunError, ShardwiseError
from shardwise.launch import guard, heartbeat, stopping
from shardwise.launch.failure import Failure, error_text, signal_name
from shardwise.launch.local import run_ranks
from shardwise.launch.node import Control, Node, interface_variables
from shardwise.redaction import redacted

_POLL_SECONDS = 0.1
_LOG_CHARACTERS = 4000


def launch_on_node(
    node: Node, command: Sequence[str], nproc: int, variables: MutableMapping[str, str], prepare: Callable[[], None]
) -> int:
    """Run `command` on the `nproc` ranks of this node; the supervisor says for all nodes how the attempt ended.

    Args:
        variables: the environment, which the ranks inherit; network interfaces are added.
        prepare: what is to be done on each node before its ranks start.

    Returns:
        the exit code of this node's launcher.

    Raises:
        RunError: the supervisor cannot be reached.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        logs, beats = Path(folder), Path(folder) / "beats"
        beats.mkdir()

        def beat() -> dict[str, Any]:
            ranks = [heartbeat.plain(one) for one in heartbeat.read(beats, node.name)]
            return {"training": stopping.training_mark(logs).exists(), "beats": ranks}

        with Control(node, beat) as control:
            stopping.handle_signals(lambda number, _: control.tell("signal", name=signal_name(number)))
            try:
                prepare()
            except Exception as error:  # noqa: BLE001  the supervisor would take this node for lost
                failure = _failure(error, node, nproc)
                log = "" if isinstance(error, ShardwiseError) else redacted(traceback.format_exc())
                control.tell("ended", code=failure.exit_code, reported=asdict(failure), log=log)
                return failure.exit_code
            if node.attempt.nodes > 1:
                variables.update(interface_variables(node.attempt.address, variables))
            first = node.number * nproc
            ended = run_ranks(command, nproc, logs, lambda agent: _end_with(control, agent), beats, first)
            path = logs / "launcher.log"
            control.tell(
                "ended",
                code=ended.code,
                stopped=ended.stopped,
                reported=None if ended.reported is None else asdict(ended.reported),
                exit_codes=dict(ended.exit_codes),
                beats=[heartbeat.plain(replace(one, host=node.name)) for one in ended.beats],
                log=path.read_text(errors="replace")[-_LOG_CHARACTERS:] if path.exists() else "",
            )
            return ended.code


def _failure(error: Exception, node: Node, nproc: int) -> Failure:
    """What the user reads of an error before the ranks start."""
    rank = node.number * nproc
    if isinstance(error, ShardwiseError):
        return Failure(rank, redacted(error_text(error)), error.exit_code)
    text = f"node {node.name} cannot start its ranks: {type(error).__name__}: {error}"
    return Failure(rank, f"{redacted(text)}; see logs/launcher-{node.name}.log", RunError.exit_code)


def _end_with(control: Control, agent: subprocess.Popen[bytes]) -> None:
    """Kill the agent and its ranks when the supervisor ends the attempt, or is gone."""

    def watch() -> None:
        while agent.poll() is None:
            if control.ended is not None:
                guard.kill_with_children(agent)
                return
            time.sleep(_POLL_SECONDS)

    threading.Thread(target=watch, name="end of the attempt", daemon=True).start()
