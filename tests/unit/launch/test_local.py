"""The launcher with small commands as ranks: what is shown, how fast, and what is left behind."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.base.errors import LaunchError
from shardwise.launch import local
from shardwise.launch.environment import (
    ERROR_FILE,
    HEARTBEATS,
    PARENT_PID,
    Rank,
    is_launched,
    joined,
    keep_own,
    unjoined,
)
from shardwise.launch.first_failure import report_done
from shardwise.launch.local import launch
from shardwise.launch.stop_requests import NOTICE
from tests.e2e import processes
from tests.e2e.command import Process, outcome, start
from tests.e2e.processes import alive
from tests.rows import rows_of
from tests.sweeps import few

RANK = """
import os, signal, sys, time
from pathlib import Path
from shardwise.launch import rank_process as guard
from shardwise.launch.environment import joined
from shardwise.launch.first_failure import Failure, report_done, report_first_failure
guard.die_with_parent()
rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
(folder / f"pid-{rank}").write_text(str(os.getpid()))
"""
LAUNCHER = """
import sys
from pathlib import Path
from shardwise.base.errors import ShardwiseError
from shardwise.launch import local
local._GRACE_SECONDS = float(sys.argv[1])  # to ranks once one has failed
try:
    local.launch(sys.argv[3:], 2, Path(sys.argv[2]))
except ShardwiseError as error:
    sys.exit(f"{error.exit_code}: {error}")
"""
TORCH_WAITS = 30.0
"""Seconds that torch would give to the other ranks where one has failed."""
HANG = "while True: time.sleep(0.1)"


def command(folder: Path, body: str) -> list[str]:
    script = folder / "rank.py"
    script.write_text(RANK + body)
    return [sys.executable, str(script), str(folder)]


def begin(folder: Path, ranks: list[str], grace: float = 1.0) -> Process:
    """The launcher in a process of its own; `grace`: seconds that it gives to ranks once one has failed."""
    (folder / "launcher.py").write_text(LAUNCHER)
    return start(str(grace), folder, *ranks, at=folder, program=(sys.executable, str(folder / "launcher.py")))


def failure(folder: Path, ranks: list[str], grace: float = 60.0) -> str:
    """Exit code and text of the error that the launcher raises, which shows nothing else."""
    ended = outcome(begin(folder, ranks, grace))
    assert (ended.code, ended.out) == (1, "")
    return ended.err


def wait_for(condition: Callable[[], bool]) -> bool:
    return processes.wait_for(condition, 120)


def pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in folder.glob("pid-*") if path.read_text()]


def test_the_first_error_is_shown_and_ends_the_others(tmp_path: Path) -> None:
    body = f"""
if rank == 1:
    report_first_failure(Failure(1, "rank 1: the cause", 2))
    (folder / "failed").write_text(str(time.time()))
    sys.exit(2)
while not (folder / "failed").exists(): time.sleep(0.02)
report_first_failure(Failure(0, "rank 0: a consequence", 1))
{HANG}
"""
    assert failure(tmp_path, command(tmp_path, body)) == "2: rank 1: the cause\n"
    assert time.time() - float((tmp_path / "failed").read_text()) < TORCH_WAITS
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_a_killed_rank_is_named_before_what_followed_from_it(tmp_path: Path) -> None:
    body = """
(folder / "logs" / f"rank-{rank:04d}.log").touch()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while not (folder / "pid-1").exists() or not (folder / "pid-1").read_text(): time.sleep(0.02)
killed = Path("/proc", (folder / "pid-1").read_text(), "stat")
while killed.exists() and killed.read_text().rpartition(") ")[2][0] != "Z": time.sleep(0.02)
report_first_failure(Failure(0, "connection closed by peer", 1))
sys.exit(1)
"""
    log = tmp_path / "logs" / "rank-0001.log"
    assert failure(tmp_path, command(tmp_path, body)) == (
        f"1: rank 1 was killed (SIGKILL; usually out of memory) (`shardwise explain killed-rank`)\nlog: {log}\n"
    )


def test_a_signal_to_a_rank_before_its_first_step_is_a_request_to_stop(tmp_path: Path) -> None:
    """Scripts start the same command again after exit code 75; a rank that trains ends with it too."""
    body = f"if rank == 1: os.kill(os.getpid(), signal.SIGUSR1)\n{HANG}"
    assert failure(tmp_path, command(tmp_path, body)) == "75: the run was stopped by SIGUSR1\n"


def test_a_rank_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    body = f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(folder / f"ready-{{rank}}").touch()
while len(list(folder.glob("ready-*"))) < 2: time.sleep(0.02)
if rank == 0:
    (folder / "failed").write_text(str(time.time()))
    report_first_failure(Failure(0, "rank 0: the cause", 1))
    sys.exit(1)
{HANG}
"""
    assert failure(tmp_path, command(tmp_path, body), grace=1.0) == "1: rank 0: the cause\n"
    assert time.time() - float((tmp_path / "failed").read_text()) < TORCH_WAITS
    assert wait_for(lambda: not any(alive(pid) for pid in pids(tmp_path)))


def test_a_killed_launcher_leaves_no_rank_and_one_without_ranks_names_the_log(tmp_path: Path) -> None:
    launcher = begin(tmp_path, command(tmp_path, HANG))
    assert wait_for(lambda: len(pids(tmp_path)) == 2)
    launcher.kill()
    launcher.communicate(timeout=120)
    assert wait_for(lambda: not any(alive(pid) for pid in pids(tmp_path)))
    text = failure(tmp_path, ["/no/such/program"])
    assert re.search(r"ended with exit code 1\nlog: .*launcher.log\n$", text)
    assert "/no/such/program" in (tmp_path / "logs" / "launcher.log").read_text()


TRAINS = """
from shardwise.launch import stop_requests as stopping
from shardwise.launch.first_failure import report_stop
stopping.install()
(folder / f"hears-{{rank}}").touch()
while not (by := stopping.requested(folder)): time.sleep(0.05)
{ending}
"""
SAVES = """
time.sleep(1.5)
if rank == 1: (folder / "pid-1").unlink()
report_stop(rank, f"stopped by {by}, with a checkpoint")
os._exit(0)
"""


def training(tmp_path: Path, ending: str) -> Process:
    launcher = begin(tmp_path, command(tmp_path, TRAINS.format(ending=ending)))
    assert wait_for(lambda: (tmp_path / "logs/training").exists() and len(list(tmp_path.glob("hears-*"))) == 2)
    return launcher


@pytest.mark.parametrize("name", few(["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"], "SIGTERM"))
def test_a_signal_waits_for_the_checkpoint_of_a_run_that_trains(tmp_path: Path, name: str) -> None:
    """Longer than the grace of a run that failed, and though everyone gets the signal, as from SLURM."""
    launcher = training(tmp_path, SAVES)
    number = signal.Signals[name]
    agent = int(Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()[0])
    for pid in (launcher.pid, agent, *(pids(tmp_path) if number != signal.SIGHUP else ())):
        os.kill(pid, number)
    _, error = launcher.communicate(timeout=120)
    shown = "Ctrl-C (SIGINT)" if name == "SIGINT" else name
    assert error == f"{NOTICE}\n75: stopped by {shown}, with a checkpoint\n"
    assert not (tmp_path / "pid-1").exists(), "a rank did not come to its end"
    assert list((tmp_path / "logs").iterdir()) == []


def test_a_second_signal_ends_a_run_at_once(tmp_path: Path) -> None:
    launcher = training(tmp_path, HANG)
    launcher.send_signal(signal.SIGUSR1)
    launcher.send_signal(signal.SIGINT)
    assert wait_for((tmp_path / "stop.json").exists)
    time.sleep(1.2)
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGTERM)
    _, error = launcher.communicate(timeout=120)
    assert error == f"{NOTICE}\n1: the run was stopped by SIGTERM\n"
    assert wait_for(lambda: not any(alive(pid) for pid in pids(tmp_path)))


def test_a_save_that_fails_is_a_failure_and_ends_soon(tmp_path: Path) -> None:
    ending = f"""
if rank == 1:
    report_first_failure(Failure(1, "the checkpoint could not be written", 1))
    os._exit(1)
{HANG}
"""
    launcher = training(tmp_path, ending)
    launcher.send_signal(signal.SIGTERM)
    _, error = launcher.communicate(timeout=120)
    assert error == f"{NOTICE}\n1: the checkpoint could not be written\n"
    assert not any(alive(pid) for pid in pids(tmp_path))


@pytest.mark.parametrize(("done", "early"), [((), 0), ((0,), 1), ((1,), 0)])
def test_fault_19_a_rank_that_ends_before_its_work_is_done_is_a_failure(
    done: tuple[int, ...], early: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by `os._exit(0)` in code of the user's own: each rank's exit code is 0."""

    def ended(agent: subprocess.Popen[bytes], *_: object) -> int:
        agent.kill()
        agent.wait()
        for rank in done:
            report_done(Rank(rank, rank, 2))
        return 0

    monkeypatch.setattr(local, "_wait", ended)
    monkeypatch.setenv(HEARTBEATS, str(tmp_path))
    monkeypatch.setattr(local.tempfile, "TemporaryDirectory", lambda **_: contextlib.nullcontext(str(tmp_path)))
    (tmp_path / "logs").mkdir()
    (tmp_path / f"logs/rank-{early:04d}.log").touch()
    told = rf"^rank {early} ended with exit code 0 before its work was done: code of your own must not end the process"
    with pytest.raises(LaunchError, match=told):
        launch([sys.executable, "-c", "pass"], 2, tmp_path)
    for rank in (0, 1):
        report_done(Rank(rank, rank, 2))
    launch([sys.executable, "-c", "pass"], 2, tmp_path)


PLACE = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}


def test_a_rank_joins_and_stays_one(of_a_rank: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert joined(PLACE) == Rank(rank=5, local_rank=1, world=8)
    assert joined({**PLACE, "RANK": ""}) is None
    assert not is_launched(PLACE)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    before = dict(of_a_rank)
    keep_own(of_a_rank)
    assert of_a_rank == before
    assert joined(of_a_rank) == Rank(rank=5, local_rank=1, world=8)
    assert is_launched(of_a_rank)


@pytest.fixture
def of_a_rank(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What a process inherits that a rank of another process id started."""
    variables = {
        **PLACE, "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "4", "ROLE_RANK": "5",
        "TORCHELASTIC_ERROR_FILE": "/tmp/error.json", "SLURM_STEP_NUM_TASKS": "2", "HOME": "/home/user",
        ERROR_FILE: "/run/logs/error.json", PARENT_PID: "1",
    }  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        keep_own(variables)
    return variables


def test_a_process_started_by_a_rank_is_none_and_a_rank_of_its_job_is_one(of_a_rank: dict[str, str]) -> None:
    """torchrun gives its ranks a meeting point of their own; what reports to the outer launcher is not theirs."""
    keep_own(other := dict(of_a_rank))
    assert other == {"HOME": "/home/user"}
    of_a_rank |= {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "2"}
    keep_own(of_a_rank)
    assert joined(of_a_rank) == Rank(rank=1, local_rank=1, world=2)
    assert not is_launched(of_a_rank)
    assert PARENT_PID not in of_a_rank


@pytest.mark.parametrize(("changed", "told"), rows_of(__file__))
def test_fault_14_variables_of_torchrun_that_contradict_are_refused(changed: dict[str, str], told: str) -> None:
    torchrun = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    assert unjoined({**torchrun, **changed}) == told
    assert unjoined(torchrun) is None
    assert unjoined({}) is None
    assert (unjoined({"LOCAL_RANK": "1"}) or "").startswith("RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be set")
