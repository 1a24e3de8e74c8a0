"""Processor time of each test and its file, with all processes that it started: `make test ARGS="-p tests.costs"`."""

import os
from collections import Counter
from collections.abc import Generator
from typing import Any

import psutil
import pytest

SHOWN = 40
_OWN = psutil.Process()  # now, as there are tests in which os.getpid tells something else


def processor_seconds() -> float:
    """Of this process, its children that have ended, and the processes that live below it."""
    total = sum(os.times()[:4])
    for process in _OWN.children(recursive=True):
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:  # its parent has what it took
            continue
    return total


class Costs:
    def __init__(self) -> None:
        self.tests = Counter[str]()
        self.collection = self.last = 0.0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collection = self.last = processor_seconds()
        if not hasattr(session.config, "workerinput"):
            self.tests["collection"] = self.collection

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        report.processor_seconds, self.last = -self.last, processor_seconds()
        report.processor_seconds += self.last
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.tests[report.nodeid] += getattr(report, "processor_seconds", 0.0)  # none of a worker that has ended

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["collection"] = self.collection

    def pytest_testnodedown(self, node: Any) -> None:
        self.tests[f"collection by {node.gateway.id}"] = getattr(node, "workeroutput", {}).get("collection", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        files = Counter[str]()
        for test, seconds in self.tests.items():
            files[test.partition("::")[0]] += seconds
        for what, costs in (("tests", self.tests), ("files", files)):
            terminalreporter.section(f"processor seconds of {what}, {costs.total():,.0f} in all")
            for name, seconds in costs.most_common(SHOWN):
                terminalreporter.write_line(f"{seconds:8.2f}  {name}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs())
