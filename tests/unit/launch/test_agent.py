"""The process that becomes the ranks: forks that are as good as new processes, with one import of torch for all."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.base.errors import LaunchError
from shardwise.launch import agent, local
from shardwise.launch.local import launch
from tests.e2e import processes
from tests.e2e.command import imported_first

PROBE = """
import faulthandler, json, os, random, signal, sys, threading
from pathlib import Path
import numpy, torch
from shardwise.launch.environment import joined
from shardwise.launch.first_failure import report_done
numpy.ones((300, 300)) @ numpy.ones((300, 300))  # its threads begin
facts = {
    "argv": sys.argv, "spec": __spec__.name, "name": __name__, "is main": sys.modules["__main__"].__dict__ is globals(),
    "words": sys.orig_argv, "safe": sys.flags.safe_path, "dev": sys.flags.dev_mode, "fault": faulthandler.is_enabled(),
    "warn": sys.warnoptions, "main thread": threading.current_thread() is threading.main_thread(),
    "threads": [threading.active_count(), len(os.listdir("/proc/self/task")), torch.get_num_threads()],
    "deterministic": torch.are_deterministic_algorithms_enabled(),
    "signals": [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)],
    "stdin": os.fstat(0).st_rdev, "reads": sys.stdin.read(), "cuda": torch.cuda.is_initialized(),
    "collects": __import__("gc").isenabled(),
}
own = {
    "python": random.random(), "torch": torch.rand(1).item(), "seed": torch.initial_seed(),
    "numpy": float(numpy.random.rand()), "parent": os.getppid(), "pid": os.getpid(),
}
if "RANK" in os.environ:
    own["comm"] = Path("/proc/self/comm").read_text().strip()
    names = ("RANK", "LOCAL_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
    own["place"] = [os.environ[name] for name in names]
Path(sys.argv[1], f"facts-{os.environ.get('RANK', 'alone')}").write_text(json.dumps([facts, own]))
if "RANK" in os.environ:
    report_done(joined())
"""
STARTS = """
import os
with open(os.environ["STARTS"], "a") as file:
    file.write("rank\\n" if "RANK" in os.environ else "start\\n")
if "RANK" not in os.environ and os.fork() == 0:
    os._exit(3)
if os.environ.get("FORKS") and "RANK" not in os.environ:
    fork, left = os.fork, [int(os.environ["FORKS"])]
    def limited():
        if left[0] == 0:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        left[0] -= 1
        return fork()
    os.fork = limited
"""
"""A line for each interpreter that starts, and for each rank; a child that is no rank; and a limit on the forks."""


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command that runs a module; `starts` gets a line for each interpreter and rank."""
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook/probe.py").write_text(PROBE)
    for name, value in imported_first(STARTS, tmp_path / "hook").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("STARTS", str(tmp_path / "starts"))
    return [sys.executable, "-P", "-m", "probe", str(tmp_path)]


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux alone")
def test_forks_are_as_good_as_new_processes(probe: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")
    monkeypatch.setenv("PYTHONWARNINGS", "error::FutureWarning")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    launch(probe, 2, tmp_path)
    assert (tmp_path / "starts").read_text().split() == ["start", "rank", "rank"], "one interpreter imports torch"
    subprocess.run(probe, stdin=subprocess.DEVNULL, check=True)
    alone, *ranks = (json.loads((tmp_path / f"facts-{name}").read_text()) for name in ("alone", "0", "1"))
    for number, (facts, own) in enumerate(ranks):
        facts["words"] = [sys.executable, *facts["words"][1:]]
        assert facts == alone[0]
        assert (own["comm"], own["place"]) == (f"rank {number}", [str(number)] * 3 + ["2", "2", "0", "127.0.0.1"])
    own = [fact for _, fact in (alone, *ranks)]
    for source in ("python", "numpy", "torch", "seed", "pid"):
        assert len({facts[source] for facts in own}) == 3, f"{source}: not as after starts of their own"
    assert own[1]["parent"] == own[2]["parent"] != os.getpid()


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux alone")
def test_limits_on_processes_are_one_sentence(
    probe: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORKS", "1")
    told = r"^rank 1 cannot be started: the limit on processes \(`ulimit -u`\) is reached$"
    with pytest.raises(LaunchError, match=told) as error:
        launch(probe, 2, tmp_path)
    assert error.value.exit_code == 1
    assert not any(child.startswith("rank") for child in _children(os.getpid()))

    def refused(*_: object, env: dict[str, str], **__: object) -> None:
        assert env["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2)), "ranks share the cores"
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(local.subprocess, "Popen", refused)
    with pytest.raises(LaunchError, match=r"^the ranks cannot be started or watched: a new process: Resource "):
        launch(probe, 2, tmp_path)


def _children(pid: int) -> Iterator[str]:
    for child in processes.descendants(pid):
        yield Path(f"/proc/{child}/comm").read_text()


def test_an_agent_that_is_killed_or_gets_no_job_ends(probe: list[str], tmp_path: Path) -> None:
    with local.agent_ahead(2) as process:
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(LaunchError, match=r"^the process that starts the ranks was killed by SIGKILL$"):
            launch(probe, 2, tmp_path)
    with local.agent_ahead(2) as first, local.agent_ahead(2) as second:
        assert first is second
    assert first.returncode == -signal.SIGKILL


LAUNCHER = """
import sys, time
from shardwise.launch import local
with local.agent_ahead(2) as agent:
    print(agent.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_launcher_that_is_killed_during_the_import_leaves_no_process() -> None:
    with subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE) as launcher:
        pid = int(launcher.stdout.readline())
        launcher.kill()
        assert processes.wait_for(lambda: not processes.alive(pid), 120)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_an_opened_device_is_seen() -> None:
    threads, files = agent._held()
    with Path("/dev/full").open("w"):
        assert agent._held() == (threads, files + 1)
    assert agent._held() == (threads, files)


def test_where_a_fork_may_differ_ranks_are_new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, files = [1], [2]
    monkeypatch.setattr(agent, "_held", lambda: (threads[0], files[0]))
    monkeypatch.setattr(agent, "has_plugin", lambda: False)

    def imported(name: str) -> None:
        threads.insert(0, 1 + name.endswith("threads"))
        files.insert(0, 2 + name.endswith("devices"))

    monkeypatch.setattr(agent, "imported", imported)
    monkeypatch.setattr(agent.sys, "platform", "linux")
    assert not agent._start_nothing(["json", "a_module_with_threads"]), "the import has started a thread"
    threads[:] = [1]
    assert not agent._start_nothing(["a_module_with_devices"]), "the import has opened a device"
    files[:] = [2]
    assert agent._import_torch()
    for name, module, value in (("has_plugin", agent, lambda: True), ("platform", agent.sys, "darwin")):
        threads[:] = [1]
        with monkeypatch.context() as other:
            other.setattr(module, name, value)
            assert not agent._import_torch(), name
    threads[:] = [2]
    assert not agent._import_torch(), "the environment has started a thread"
