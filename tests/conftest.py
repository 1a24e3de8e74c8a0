"""Pools of real ranks, which all tests of a session share, and the order of the tests."""

from __future__ import annotations

import gc
import math
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.command_line import CommandLine
from tests.screens import Log, Screen, shown_on
from tests.workers import Workers

if TYPE_CHECKING:
    from tests.rank_pool import RankPool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="run the tests in so many processes (tests/workers.py)")
    parser.addoption(
        "--device",
        default="cpu",
        help="type of the device of ranks and commands: cpu, strict or neuron-like (tests/strict), cuda, …; shared: "
        "all ranks of tests/dist on this machine's accelerator (tests/shared_device)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Let ranks and commands use the device that was asked for, and undo what `nohup` does to the tests.

    `nohup`, or `&` in a script, has processes inherit that a signal is ignored.

    Workers and their commands share the CPUs: more threads than one each would wait for each other by spinning, which
    takes a seventh of the processor time of tests/unit.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    device = config.getoption("--device")
    if device == "neuron-like":
        os.environ["STRICT_NEURON_LIKE"] = "1"
        device = config.option.device = "strict"
    if os.environ.get("STRICT_NEURON_LIKE", "0") != "0":
        config.pluginmanager.register(Refusals(), "refusals")
    if device == "strict":
        from tests.strict import build  # torch, which most tests do without

        build.use_everywhere()
    elif device == "shared":
        from tests.shared_device import device as shared_device

        shared_device.use_everywhere()
    elif device != "cpu":
        os.environ["TEST_DEVICE"] = device
    if number := config.getoption("--workers"):
        config.pluginmanager.register(Workers(number, _share), "workers")
    for signal_, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(signal_) is signal.SIG_IGN:
            signal.signal(signal_, handler)


# Where the environment forbids bytecode, the asserts of all tests would be rewritten in every run: for 5 s.
sys.dont_write_bytecode = False

# Nothing here loses power, and a busy disk takes milliseconds for each of thousands of files.
os.fsync = lambda _file: None


_LONGEST_FIRST = ("dist", "golden", "cluster", "e2e", "fake")


_POOLED = ("dist", "golden")
"""Folders whose tests share pools of ranks."""


def _share(nodeid: str) -> str:
    """What one worker has at once: a file, or several that share what is dear to make.

    Only one worker starts the pools of ranks. One has all tests of the strict device, too, as others would wait while
    it is built, all of SLURM, all that parse the whole project, and all of the commands, which share a server, a
    trained run and an object store.
    """
    folder = _folder(nodeid)
    if folder in _POOLED:
        return "ranks"
    return folder if folder in ("arch", "cluster", "e2e", "strict") else nodeid.partition("::")[0]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Draw the cells of sweeps where slow tests are asked for: each worker would draw them for seconds.

    `pytest.mark.sweep(names, draw)` marks a slow test whose parameters `draw` returns.
    """
    for mark in metafunc.definition.iter_markers("sweep"):
        names, draw = mark.args
        found = [] if metafunc.config.option.markexpr == "not slow" else draw()
        metafunc.parametrize(names, found, ids=lambda one: getattr(one, "name", one))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The folders that take longest come first, so that no worker is left with one of their files at the end."""
    folders = [*_LONGEST_FIRST, *sorted({_folder(item.nodeid) for item in items})]
    items.sort(key=lambda item: (folders.index(_folder(item.nodeid)), item.path))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while all tests are imported, nor look for it among what they have imported ever after.

    And seldom among the rest, as most of it is what tests import: by default this takes a twelfth of their time.
    """
    gc.disable()
    result = yield
    gc.enable()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    return result


class Refusals:
    """What TorchNeuron cannot do is refused in one sentence: a test that ends with it has passed, and is counted."""

    sentence = re.compile(
        r"parallel\.(?:pipeline \(\d+\)|context_keys \(ring\)) needs messages from rank to rank, which the library "
        r"of this device \(strict\) does not send: [^;\n]+; set parallel\.(?:pipeline=1|context_keys=gather), or "
        "install a release of it that does"
    )

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, object, object]:
        try:
            return (yield)
        except (AssertionError, pytest.fail.Exception) as error:
            if (found := self.sentence.search(str(error))) is None:
                raise
            pyfuncitem.user_properties.append(("refused", found[0]))
            return True

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        reports = terminalreporter.stats.get("passed", [])
        sentences = Counter(text for report in reports for name, text in report.user_properties if name == "refused")
        for text, count in sentences.most_common():
            terminalreporter.line(f"{count} of {len(reports)} passed as they were refused: {text}")


def _folder(nodeid: str) -> str:
    """Of tests/, that the test is in."""
    return nodeid.split("/")[1]


def device_count(device: str) -> float:
    """How many ranks can have a device of this type."""
    if device in ("cpu", "shared", "strict"):
        return int(os.environ["STRICT_DEVICES"]) if device == "strict" else math.inf
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != device:
        pytest.exit(f"--device {device}: torch finds {found.type if found else 'no accelerator'}", 4)
    return torch.accelerator.device_count()


_pools: dict[int, RankPool] = {}


LONG = 200
"""Elements, or lines, from which on pytest compares two values for minutes where the variable CI is set."""


def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    """Explain that long lists or texts are not equal by the first place at which they differ."""
    rows = [value.splitlines() if isinstance(value, str) else value for value in (left, right)]
    first, second = rows
    if op != "==" or not (isinstance(first, list | tuple) and isinstance(second, list | tuple)):
        return None
    if max(len(first), len(second)) < LONG:
        return None
    place = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    shown = [f"{value[place]!r}" if place < len(value) else "nothing" for value in (first, second)]
    return [f"{len(first)} and {len(second)} elements, which differ first at {place}:", *shown]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the ranks after the last test of the folders that share them.

    Idle ranks take half a CPU from the tests that follow: every process group of gloo has a thread that polls.
    """
    if _folder(item.nodeid) in _POOLED and (nextitem is None or _folder(nextitem.nodeid) not in _POOLED):
        _close_pools()


def _close_pools() -> None:
    for pool in _pools.values():
        pool.close()


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    yield from shown_on(Screen(), monkeypatch)


@pytest.fixture(params=[Screen, Log])
def shown(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    yield from shown_on(request.param(), monkeypatch)


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config) -> Iterator[Callable[[int], RankPool]]:
    from tests.rank_pool import RankPool  # torch, which most tests do without

    device = pytestconfig.getoption("--device")

    def pool(size: int) -> RankPool:
        if size > (count := device_count(device)):
            pytest.skip(f"needs {size} devices of type {device}, and there are {count}")
        return _pools.setdefault(size, RankPool(size, device_type=device))

    yield pool
    _close_pools()
