"""Pools of real ranks, which all tests of a session share, and the order of the tests."""

from __future__ import annotations

import gc
import itertools
import math
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from xdist.scheduler import LoadFileScheduling

from tests.command_line import CommandLine
from tests.screens import Log, Screen, shown_on

if TYPE_CHECKING:
    from tests.rank_pool import RankPool


def pytest_addoption(parser: pytest.Parser) -> None:
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
    if device == "strict" and not config.getoption("numprocesses", None):
        from tests.strict import build  # torch, which most tests do without

        build.use_everywhere()
    elif device == "shared":
        from tests.shared_device import device as shared_device

        shared_device.use_everywhere()
    elif device != "cpu":
        os.environ["TEST_DEVICE"] = device
    if hasattr(config, "workerinput") and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        config.args = _in_turn(config.rootpath / "tests", config.workerinput)
    for signal_, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(signal_) is signal.SIG_IGN:
            signal.signal(signal_, handler)


# Where the environment forbids bytecode, each worker would rewrite the asserts of all tests in every run: for 5 s.
sys.dont_write_bytecode = False

# Nothing here loses power, and a busy disk takes milliseconds for each of thousands of files.
os.fsync = lambda _file: None


def _in_turn(tests: Path, worker: dict[str, Any]) -> list[str]:
    """All parts of the tests: each worker begins with others, whose rewritten asserts its peers then find on disk."""
    found = (*tests.iterdir(), *(tests / "unit").iterdir())
    # The tests with programs of other makers run in environments of their own (scripts/test_interop.sh).
    parts = sorted(part for part in found if part.name not in ("unit", "interop"))
    named = [str(part) for part in parts if part.match("test_*.py") or (part.is_dir() and part.name[0] not in "._")]
    begin = len(named) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    return named[begin:] + named[:begin]


_LONGEST_FIRST = ("dist", "golden", "cluster", "e2e", "fake")
_POOLED = ("dist", "golden")
"""Folders whose tests share pools of ranks."""


class PoolsOnce(LoadFileScheduling):
    """Files by turns in the order of collection, but one worker alone starts the pools of ranks.

    One worker has all tests of the strict device, too, as others would wait while it is built, all of SLURM, all that
    parse the whole project, and all of the commands, which share a server, a trained run and an object store.
    """

    def _split_scope(self, nodeid: str) -> str:
        folder = _folder(nodeid)
        if folder in _POOLED:
            return "ranks"
        return folder if folder in ("arch", "cluster", "e2e", "strict") else super()._split_scope(nodeid)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Draw the cells of sweeps where slow tests are asked for: each worker would draw them for seconds.

    `pytest.mark.sweep(names, draw)` marks a slow test whose parameters `draw` returns.
    """
    for mark in metafunc.definition.iter_markers("sweep"):
        names, draw = mark.args
        found = [] if metafunc.config.option.markexpr == "not slow" else draw()
        metafunc.parametrize(names, found, ids=lambda one: getattr(one, "name", one))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> PoolsOnce:
    config.option.loadscopereorder = False  # files of few tests would be last, and some of these take longest
    return PoolsOnce(config, log)


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
_numbers = itertools.count()
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
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new folder, as pytest's own fixture, which reads the names of all tests' folders to find the next number."""
    name = re.sub(r"\W", "_", request.node.name)[:30]
    return tmp_path_factory.mktemp(f"{name}-{os.getpid()}-{next(_numbers)}", numbered=False)


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
