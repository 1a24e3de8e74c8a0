"""Tests in several processes at once: `--workers N`.

To import all tests takes longer than to run most of them. So one process collects them, and forks the workers, which
take one share of the tests after the other: a file, or files that share something that is dear to make.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import pytest


@dataclass
class Worker:
    """A process, and the tests of its shares that have not ended."""

    process: BaseProcess
    connection: Connection
    under_way: deque[int] = field(default_factory=deque)


class Workers:
    """Runs the collected tests in `number` forks of this process.

    `batch_per_rank` names the share of a test; shares are taken in the order of their first tests.
    """

    def __init__(self, number: int, share_of: Callable[[str], str]) -> None:
        self.number = number
        self._share_of = share_of
        self._workers: list[Worker] = []
        self._waiting: deque[list[int]] = deque()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.config.option.collectonly or session.testsfailed:
            return None
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all of them
        shares: dict[str, list[int]] = {}
        for index, item in enumerate(session.items):
            shares.setdefault(self._share_of(item.nodeid), []).append(index)
        self._waiting.extend(shares.values())
        try:
            for _ in range(min(self.number, len(shares))):
                self._start(session)
            while self._workers:
                self._hear(session)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        finally:
            for worker in self._workers:
                # A test may hear the signal itself: its worker then ends as it asks for more.
                worker.connection.close()
                if worker.process.is_alive():
                    os.kill(worker.process.pid or 0, signal.SIGINT)
            for worker in self._workers:
                worker.process.join()
        return True

    def _start(self, session: pytest.Session) -> None:
        connection, its_end = multiprocessing.Pipe()
        # A fork that kept these would not hear that this process has ended.
        not_its = [connection, *(worker.connection for worker in self._workers)]
        process = multiprocessing.get_context("fork").Process(target=_serve, args=(session, its_end, not_its))
        process.start()
        its_end.close()
        worker = Worker(process, connection)
        self._workers.append(worker)
        self._give(worker)

    def _give(self, worker: Worker) -> None:
        """Send the next share, or none; a worker that has just ended is heard next."""
        share = self._waiting.popleft() if self._waiting else []
        worker.under_way += share
        with contextlib.suppress(BrokenPipeError):
            worker.connection.send(share)

    def _hear(self, session: pytest.Session) -> None:
        """Answer those who ask for tests, and report those that ended."""
        # A second: the end of a worker is not heard where what it started lives on.
        ready = wait([worker.connection for worker in self._workers], timeout=1.0)
        for worker in [
            worker for worker in self._workers if worker.connection in ready or not worker.process.is_alive()
        ]:
            try:
                message = worker.connection.recv() if worker.connection.poll() else b""
            except (EOFError, ConnectionResetError):
                message = b""
            if message == b"":
                self._end(worker, session)
            elif message is None:
                self._give(worker)
            elif isinstance(message, tuple):
                pytest.exit(*message)
            else:
                self._report(worker, session, message)

    def _report(self, worker: Worker, session: pytest.Session, reports: Sequence[Any]) -> None:
        worker.under_way.popleft()
        hook = session.config.hook
        for data in reports:
            hook.pytest_runtest_logreport(report=hook.pytest_report_from_serializable(config=session.config, data=data))

    def _end(self, worker: Worker, session: pytest.Session) -> None:
        """Wait for a worker that has ended; the test that ended it has failed, and another worker takes the rest."""
        self._workers.remove(worker)
        worker.process.join()
        if worker.process.exitcode and not worker.under_way:
            raise RuntimeError(f"a worker ended between two tests, with exit code {worker.process.exitcode}")
        if worker.under_way:
            item = session.items[worker.under_way[0]]
            said = f"the worker ended in this test, with exit code {worker.process.exitcode}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", said, "call")
            data = session.config.hook.pytest_report_to_serializable(config=session.config, report=report)
            self._report(worker, session, [data])
            if worker.under_way:
                self._waiting.appendleft(list(worker.under_way))
            self._start(session)


class _Terminal:
    """Where pytest-timeout writes what threads do, and nobody else anything."""

    def __init__(self, terminal: Any) -> None:
        self._tw = terminal._tw


class _Reports:
    """Reports of the test under way."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._reports: list[Any] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def taken(self) -> list[Any]:
        reports, self._reports = self._reports, []
        return reports


def _interrupt(_number: int, _frame: object) -> None:
    """End once: a terminal tells all processes, and the one that collected tells its workers again."""
    signal.signal(signal.SIGINT, lambda *_: None)
    raise KeyboardInterrupt


def _serve(session: pytest.Session, connection: Connection, not_its: Sequence[Connection]) -> None:
    """Be a worker; `not_its` are ends of pipes that it has by its fork alone."""
    for end in not_its:
        end.close()
    signal.signal(signal.SIGINT, _interrupt)
    atexit._clear()  # what the process that collects has to do at its end
    manager = session.config.pluginmanager
    terminal = manager.unregister(name="terminalreporter")
    manager.register(_Terminal(terminal), "terminalreporter")
    capture = manager.getplugin("capturemanager")
    assert capture is not None
    capture.stop_global_capturing()
    capture.start_global_capturing()  # into files of its own
    capture.suspend_global_capture()
    reports = _Reports(session.config)
    manager.register(reports)
    try:
        for index, following in _in_turn(connection):
            session.items[index].ihook.pytest_runtest_protocol(
                item=session.items[index], nextitem=None if following is None else session.items[following]
            )
            connection.send(reports.taken())
    except pytest.exit.Exception as ended:
        connection.send((ended.msg, ended.returncode))
        session._setupstate.teardown_exact(None)
    except (KeyboardInterrupt, EOFError, ConnectionError):  # the last two: of the process that collected
        session._setupstate.teardown_exact(None)
    finally:
        atexit._run_exitfuncs()


def _in_turn(connection: Connection) -> Iterator[tuple[int, int | None]]:
    """Each test of the shares, and the test that follows it: what both use is kept until then."""

    share = connection.recv()
    while share:
        yield from itertools.pairwise(share)
        last = share[-1]
        connection.send(None)
        share = connection.recv()
        yield last, share[0] if share else None
