"""One attempt at a job, with launchers that are threads of the test."""

import asyncio
import errno
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.base.errors import see
from shardwise.launch.first_failure import Failure
from shardwise.launch.node import LauncherConnection, LauncherFacts, Node, launch_on_node
from shardwise_jobs import attempt as attempts
from shardwise_jobs.attempt import AttemptOutcome, AttemptWatch

Launcher = Callable[[LauncherFacts, int], None]


def joined(number: int, attempt: LauncherFacts, **last: Any) -> None:
    """A launcher that joins, and tells how it ended."""
    with LauncherConnection(Node(attempt, number, f"n{number}"), lambda: {"training": False, "beats": []}) as control:
        if last:
            control.tell("ended", **last)
        while control.ended is None:
            time.sleep(0.01)


def watched(
    tmp_path: Path, launcher: Launcher, program: tuple[str, ...] = ("sleep", "60"), **options: Any
) -> AttemptOutcome:
    """The outcome of an attempt on two nodes of two ranks."""
    heard: list[str] = []
    options = {"id": "7.0.0", "silence": 60.0, "heard": heard.append, **options}
    watch = AttemptWatch("127.0.0.1", 2, 2, tmp_path, **options)
    threads: list[threading.Thread] = []

    def start(attempt: LauncherFacts) -> tuple[str, ...]:
        threads.extend(threading.Thread(target=launcher, args=(attempt, number)) for number in range(2))
        for thread in threads:
            thread.start()
        return program

    outcome = asyncio.run(watch.run(start))
    for thread in threads:
        thread.join()
    return outcome


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`srun` is a program that does not end with the launchers. No traceback of asyncio's reaches a job's log."""
    monkeypatch.setattr(attempts, "_END_SECONDS", 0.1)
    monkeypatch.setattr(attempts, "_GRACE_SECONDS", 0.3)
    errors = list[logging.LogRecord]()
    handler = logging.Handler(logging.ERROR)
    monkeypatch.setattr(handler, "emit", errors.append)
    monkeypatch.setattr(logging.root, "handlers", [*logging.root.handlers, handler])
    yield
    assert not [record.getMessage() for record in errors]


def test_launchers_end_well_or_are_named_with_their_log(tmp_path: Path) -> None:
    outcome = watched(tmp_path, lambda attempt, number: joined(number, attempt, code=0))
    assert (outcome.failure, outcome.lost, outcome.stopped) == (None, (), None)
    assert outcome.until_joined is not None
    stop = watched(tmp_path, lambda attempt, number: joined(number, attempt, code=0, stopped=["saved", None][number]))
    assert (stop.failure, stop.stopped) == (None, "saved")
    outcome = watched(tmp_path, lambda attempt, number: joined(number, attempt, code=number, log=["", "text"][number]))
    assert outcome.failure == Failure(0, "a launcher failed; its log is in logs/launcher-n1.log", 1)
    assert outcome.logs == {"n1": "text"}


def test_the_cause_is_told_before_what_followed_from_it_on_another_node(tmp_path: Path) -> None:
    """Of a killed rank, and of a killed agent, whose own ranks are not told of."""
    lost = {"rank": 2, "text": "rank 2 lost the connection to another rank", "exit_code": 1, "waited": True}
    killed = f"rank 3 was killed (SIGKILL; usually out of memory){see('training#killed-rank')}"
    agent = "the agent that starts the ranks of node n0 was killed by SIGKILL"
    first = [{"code": 1, "reported": lost | {"rank": 0}}, {"code": 1, "exit_codes": {"3": -9}}]
    second = [{"code": -9}, {"code": 1, "reported": lost, "exit_codes": {"2": 1, "3": 1}}]
    for ends, failure in ((first, Failure(3, killed, 1)), (second, Failure(0, agent, 1))):
        outcome = watched(tmp_path, lambda attempt, number, ends=ends: joined(number, attempt, **ends[number]))
        assert outcome.failure == failure
        assert outcome.lost == ()


def test_a_lost_node_and_one_that_cannot_prepare(tmp_path: Path) -> None:
    def launcher(attempt: LauncherFacts, number: int) -> None:
        if number == 0:
            joined(number, attempt)
        else:
            with LauncherConnection(Node(attempt, 1, "n1"), lambda: {"training": False, "beats": []}):
                time.sleep(0.2)

    outcome = watched(tmp_path, launcher)
    assert outcome.failure == Failure(2, "node n1 (ranks 2-3) does not answer", 1)
    assert outcome.lost == ("n1",)

    def prepare() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def launcher(attempt: LauncherFacts, number: int) -> None:
        if number == 0:
            joined(number, attempt)
        else:
            assert launch_on_node(Node(attempt, 1, "n1"), [], 2, {}, prepare) == 1

    outcome = watched(tmp_path, launcher)
    text = "node n1 cannot start its ranks: OSError: [Errno 28] No space left on device; see logs/launcher-n1.log"
    assert outcome.failure == Failure(2, text, 1)
    assert outcome.lost == ()
    assert "in prepare" in outcome.logs["n1"]


def test_strangers_are_not_heard_and_absent_nodes_are_told(tmp_path: Path) -> None:
    """As one of an earlier attempt, or another program that found the port."""

    def launcher(attempt: LauncherFacts, number: int) -> None:
        stranger = LauncherFacts(**{**vars(attempt), "secret": "of another attempt"})
        with socket.create_connection((attempt.address, attempt.control)) as other:
            other.sendall((b"GET / HTTP/1.1\r\n\r\n", b"[1]\n")[number])
        joined(1 - number, stranger, code=1)
        joined(number, attempt, code=0)

    assert watched(tmp_path, launcher).failure is None

    def launcher(attempt: LauncherFacts, number: int) -> None:
        if number == 0:
            joined(number, attempt)

    ended = watched(tmp_path, launcher, program=("sh", "-c", "sleep 0.5; exit 3"))
    assert ended.failure.text == "srun ended with exit code 3; of 2 nodes, the launcher of number 1 has not joined"
    killed = watched(tmp_path, launcher, program=("sh", "-c", "sleep 0.5; kill -9 $$"))
    assert killed.failure.text.startswith("srun was killed by SIGKILL; of 2 nodes")
    silent = watched(tmp_path, launcher, silence=1.5)
    assert silent.failure.text.startswith("the launchers of the nodes did not start within 2 s; of 2 nodes, the ")
