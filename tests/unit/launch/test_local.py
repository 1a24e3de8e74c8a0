"""The launcher with small commands as ranks: what is shown, how fast, and what is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.launch import local
from shardwise.launch.local import LaunchError, launch
from shardwise.launch.stopping import NOTICE

RANK = """
import os, signal, sys, time
from pathlib import Path
from shardwise.launch import guard
from shardwise.launch.failure import report_failure
guard.die_with_parent()
rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
(folder / f"pid-{rank}").write_text(str(os.getpid()))
"""
LAUNCHER = """
import sys
from pathlib import Path
from shardwise.errors import ShardwiseError
from shardwise.launch import local
local._GRACE_SECONDS = 1.0  # to ranks once one has failed
try:
    local.launch([sys.executable, sys.argv[1], sys.argv[2]], 2, Path(sys.argv[2]))
except ShardwiseError as error:
    sys.exit(f"{error.exit_code}: {error}")
"""
HANG = "while True: time.sleep(0.1)"


def command(folder: Path, body: str) -> list[str]:
    script = folder / "rank.py"
    script.write_text(RANK + body)
    return [sys.executable, str(script), str(folder)]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in folder.glob("pid-*") if path.read_text()]


def test_ranks_know_their_places_and_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    body = """
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "EXTRA")
(folder / f"out-{rank}").write_text(" ".join(os.environ[name] for name in names))
assert os.environ["MASTER_ADDR"] and os.environ["MASTER_PORT"]
"""
    launch(command(tmp_path, body), 2, tmp_path, variables={"EXTRA": "yes"})
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert [(tmp_path / f"out-{rank}").read_text() for rank in (0, 1)] == [
        f"{rank} {rank} 2 {threads} yes" for rank in (0, 1)
    ]
    assert list((tmp_path / "logs").iterdir()) == []


def test_the_first_error_is_shown_and_ends_the_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = f"""
if rank == 1:
    report_failure(1, "rank 1: the cause", 2)
    (folder / "failed").write_text(str(time.time()))
    sys.exit(2)
while not (folder / "failed").exists(): time.sleep(0.02)
report_failure(0, "rank 0: a consequence")
{HANG}
"""
    with pytest.raises(LaunchError, match=r"^rank 1: the cause$") as caught:
        launch(command(tmp_path, body), 2, tmp_path)
    assert time.time() - float((tmp_path / "failed").read_text()) < 5
    assert caught.value.exit_code == 2
    assert not any(alive(pid) for pid in pids(tmp_path))
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == ""


def test_a_killed_rank_is_named_before_what_followed_from_it(tmp_path: Path) -> None:
    body = """
(folder / "logs" / f"rank-{rank:04d}.log").touch()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while not (folder / "pid-1").exists(): time.sleep(0.02)
time.sleep(0.05)
report_failure(0, "connection closed by peer")
sys.exit(1)
"""
    with pytest.raises(LaunchError) as caught:
        launch(command(tmp_path, body), 2, tmp_path)
    log = tmp_path / "logs" / "rank-0001.log"
    assert str(caught.value) == f"rank 1 was killed by SIGKILL (often: out of memory); its log: {log}"
    assert caught.value.exit_code == 1


def test_a_rank_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_GRACE_SECONDS", 1.0)
    body = f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(folder / f"ready-{{rank}}").touch()
while len(list(folder.glob("ready-*"))) < 2: time.sleep(0.02)
if rank == 0:
    (folder / "failed").write_text(str(time.time()))
    report_failure(0, "rank 0: the cause")
    sys.exit(1)
{HANG}
"""
    with pytest.raises(LaunchError, match=r"^rank 0: the cause$"):
        launch(command(tmp_path, body), 2, tmp_path)
    assert time.time() - float((tmp_path / "failed").read_text()) < 10
    assert wait_for(lambda: not any(alive(pid) for pid in pids(tmp_path)), 2)


def start(tmp_path: Path) -> subprocess.Popen[str]:
    script = command(tmp_path, HANG)[1]
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, script, str(tmp_path)], stderr=subprocess.PIPE, text=True
    )
    assert wait_for(lambda: len(pids(tmp_path)) == 2)
    return launcher


def test_a_killed_launcher_leaves_no_rank(tmp_path: Path) -> None:
    launcher = start(tmp_path)
    launcher.kill()
    launcher.communicate(timeout=20)
    assert wait_for(lambda: not any(alive(pid) for pid in pids(tmp_path)), 3)


@pytest.mark.parametrize(
    ("number", "name"),
    [(signal.SIGINT, "Ctrl-C (SIGINT)"), pytest.param(signal.SIGTERM, "SIGTERM", marks=pytest.mark.slow)],
    ids=["int", "term"],
)
def test_a_stopped_launcher_says_so_in_one_sentence(tmp_path: Path, number: signal.Signals, name: str) -> None:
    launcher = start(tmp_path)
    launcher.send_signal(number)
    _, error = launcher.communicate(timeout=20)
    assert error == f"1: the run was stopped by {name}\n"
    assert launcher.returncode == 1
    assert wait_for(lambda: not any(alive(pid) for pid in pids(tmp_path)), 3)


TRAINS = """
from shardwise.launch import stopping
from shardwise.launch.failure import report_stop
stopping.install()
while not (by := stopping.requested(folder)): time.sleep(0.05)
{ending}
"""
SAVES = """
time.sleep(3)
if rank == 1: (folder / "pid-1").unlink()
report_stop(rank, f"stopped by {by}, with a checkpoint")
os._exit(0)
"""


def training(tmp_path: Path, ending: str) -> subprocess.Popen[str]:
    script = command(tmp_path, TRAINS.format(ending=ending))[1]
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, script, str(tmp_path)], stderr=subprocess.PIPE, text=True
    )
    assert wait_for((tmp_path / "logs/training").exists, 60)
    return launcher


@pytest.mark.parametrize(
    "name", ["SIGTERM", *(pytest.param(name, marks=pytest.mark.slow) for name in ("SIGINT", "SIGUSR1", "SIGHUP"))]
)
def test_a_signal_waits_for_the_checkpoint_of_a_run_that_trains(tmp_path: Path, name: str) -> None:
    """Longer than the grace of a run that failed, and though everyone gets the signal, as from SLURM."""
    launcher = training(tmp_path, SAVES)
    number = signal.Signals[name]
    agent = int(Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()[0])
    for pid in (launcher.pid, agent, *(pids(tmp_path) if number != signal.SIGHUP else ())):
        os.kill(pid, number)
    _, error = launcher.communicate(timeout=60)
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
    _, error = launcher.communicate(timeout=20)
    assert error == f"{NOTICE}\n1: the run was stopped by SIGTERM\n"
    assert wait_for(lambda: not any(alive(pid) for pid in pids(tmp_path)), 3)


def test_a_save_that_fails_is_a_failure_and_ends_soon(tmp_path: Path) -> None:
    ending = f"""
if rank == 1:
    report_failure(1, "the checkpoint could not be written")
    os._exit(1)
{HANG}
"""
    launcher = training(tmp_path, ending)
    launcher.send_signal(signal.SIGTERM)
    _, error = launcher.communicate(timeout=30)
    assert error == f"{NOTICE}\n1: the checkpoint could not be written\n"
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_a_launcher_that_cannot_start_its_ranks_names_the_log(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"ended with exit code 1; its log: .*launcher.log$"):
        launch(["/no/such/program"], 2, tmp_path)
    assert "/no/such/program" in (tmp_path / "logs" / "launcher.log").read_text()


def test_a_launcher_that_is_killed_is_told_with_its_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_wait", lambda agent, _: agent.kill() or agent.wait())
    with pytest.raises(LaunchError, match=r"starts the ranks was killed by SIGKILL; its log: .*launcher\.log$"):
        launch([sys.executable, "-c", "pass"], 1, tmp_path)
