"""How a rank ends: what it says, with which exit code, and with its parent; and where ranks write."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shardwise.base.terminal import take_any_character
from shardwise.launch import rank_process as process
from shardwise.launch.environment import ERROR_FILE, HEARTBEATS, PARENT_PID
from shardwise.launch.first_failure import Failure, read_first_failure, stop_record
from shardwise.launch.rank_output import output_restored
from shardwise.launch.stop_requests import NOTICE, training_mark
from tests.monitor_runs import Start, write_run

SCRIPT = """
import os, signal, sys
from pathlib import Path
from shardwise.base.errors import ConfigError, RunError, StoppedError
from shardwise.launch import stop_requests as stopping
from shardwise.launch.environment import joined
from shardwise.launch.rank_process import as_rank

def run():
{body}

path = Path(sys.argv[1])
with as_rank(joined(), path) as ending:
    run()
sys.exit(ending.code)
"""
COMMAND_INSIDE = """
import json, os, subprocess, sys, types
from pathlib import Path
from shardwise.cli import main

def run(config, path, recipe):
    inside = subprocess.run([sys.executable, "-m", "shardwise", "stop", "nowhere"], capture_output=True, text=True)
    place = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    (path / "inside.json").write_text(json.dumps([inside.returncode, inside.stderr, place]))

sys.modules["shardwise.train.run"] = types.SimpleNamespace(run=run)
sys.exit(main())
"""
PLACE = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
STOPPED = "stopping.install(); os.kill(os.getpid(), signal.{name}); raise StoppedError(stopping.requested(path))"
SENTENCES = [
    ("pass", 0, ""),
    ("raise RunError('loss is nan at step 3')", 1, "loss is nan at step 3"),
    ("raise ConfigError(['a', 'b'])", 2, "2 errors\n- a\n- b"),
    ("1 / 0", 1, "rank {rank} failed: ZeroDivisionError: division by zero\ntraceback: {log}"),
    ("os.kill(os.getpid(), signal.SIGINT)", 75, "the run was stopped by Ctrl-C (SIGINT); no checkpoint was saved"),
]


def train(body: str, path: Path, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    code = SCRIPT.replace("{body}", f"    {body}")
    return rank_process(["-c", code, str(path)], variables)


def rank_process(arguments: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A Python with these variables alone, and the package that is tested."""
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), **variables}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("body", "code", "text"), SENTENCES, ids=[body for body, _, _ in SENTENCES])
def test_alone(body: str, code: int, text: str, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "rank-0000.log"
    result = train(body, tmp_path, {})
    shown = text.format(rank=0, log=log)
    assert (result.returncode, result.stdout, result.stderr) == (code, "", f"shardwise: {shown}\n" if shown else "")
    if "traceback" in text:
        assert "in run\n" in log.read_text()


@pytest.mark.parametrize("variables", [{}, {**PLACE, "RANK": "0"}], ids=["alone", "torchrun"])
def test_the_failure_of_a_run_that_has_begun_is_a_block_and_recorded(variables: dict[str, str], tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [Start(0, 25, None)])
    step = "{'event': 'step', 'step': 26, 'time': now()}"
    record = f"from shardwise.runs.folder import JsonLines, now; JsonLines(path / 'metrics.jsonl').write({step}); "
    result = train(f"{record} raise RunError('step 27: the loss (nan) must be finite')", run, variables)
    assert result.returncode == 1
    assert result.stderr == "FAILED at step 27: the loss (nan) must be finite.\n6 steps since checkpoint 20 are lost\n"
    assert json.loads((run / "failure.json").read_text())["checkpoint"] == 20


def test_a_run_that_the_user_ends_at_once_has_not_failed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [Start(0, 25, None)])
    result = train("os.kill(os.getpid(), signal.SIGINT)", run, {})
    assert result.returncode == 75
    told = "shardwise: the run was stopped by Ctrl-C (SIGINT); its newest checkpoint is of step 20\n"
    assert result.stderr == told
    assert not (run / "failure.json").exists()


@pytest.mark.parametrize(
    ("body", "variables", "told"),
    [
        ("sys.exit(0)", {}, "sys.exit(0) was called"),
        ("sys.exit('no data')", {}, "sys.exit('no data') was called"),
        ("raise GeneratorExit", PLACE, "GeneratorExit"),
        ("raise SystemExit", PLACE, "sys.exit() was called"),
    ],
)
def test_fault_19_a_rank_that_the_user_ends(body: str, variables: dict[str, str], told: str, tmp_path: Path) -> None:
    error_file = tmp_path / "error.json"
    launched = {**variables, ERROR_FILE: str(error_file), HEARTBEATS: str(tmp_path)} if variables else {}
    result = train(body, tmp_path, launched)
    failure = read_first_failure(error_file)
    text = result.stderr if failure is None else failure.text
    assert result.returncode == 1
    assert f" failed: {told}\ntraceback: " in text
    assert not list(tmp_path.glob("done-*"))


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_alone_and_stopped_with_a_checkpoint(name: str, tmp_path: Path) -> None:
    result = train(STOPPED.format(name=name), tmp_path, {})
    shown = "Ctrl-C (SIGINT)" if name == "SIGINT" else name
    assert (result.returncode, result.stderr) == (75, f"{NOTICE}\nshardwise: {shown}\n")


def test_how_ranks_of_a_job_leave(tmp_path: Path) -> None:
    """torchrun ends the others when the first rank leaves, and a user may be impatient."""
    late = "stopping.ignore = lambda ignore=stopping.ignore: (ignore(), [os.kill(os.getpid(), n) for n in (2, 15, 15)])"
    result = train(f"{late}; {STOPPED.format(name='SIGTERM')}", tmp_path, {**PLACE, "RANK": "0"})
    assert (result.returncode, result.stderr) == (75, "shardwise: SIGTERM\n")
    # Nothing runs after it that could still fail, such as the destructors of process groups; its output is there.
    body = "import atexit; atexit.register(os._exit, 7); print('done')"
    result = train(body, tmp_path, PLACE)
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")
    assert train(body, tmp_path, {}).returncode == 7, "alone it is the user's own process"
    # Not a request to stop: another rank has already said why the run ends.
    (tmp_path / "error.json").write_text('{"rank": 0, "text": "the cause", "exit_code": 1}')
    result = train(STOPPED.format(name="SIGTERM"), tmp_path, {**PLACE, ERROR_FILE: str(tmp_path / "error.json")})
    assert (result.returncode, result.stderr) == (1, "")
    assert not stop_record(tmp_path).exists()


@pytest.mark.parametrize(
    ("variables", "code", "err"),
    [
        ({}, 75, ""),
        ({"RANK": "0"}, 75, "shardwise: SIGTERM\n"),
        ({"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": "2"}, 0, ""),
        ({"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": "3"}, 75, ""),
    ],
    ids=["rank-1", "rank-0", "would-restart", "no-restart-left"],
)
def test_in_a_job_and_stopped(variables: dict[str, str], code: int, err: str, tmp_path: Path) -> None:
    """Rank 0 speaks for all. A rank that torchrun would start again as failed ends well."""
    result = train(STOPPED.format(name="SIGTERM"), tmp_path, {**PLACE, **variables})
    assert (result.returncode, result.stderr) == (code, err)


@pytest.mark.parametrize("rank", [0, 1])
def test_launched_and_stopped(rank: int, tmp_path: Path) -> None:
    variables = {**PLACE, "RANK": str(rank), ERROR_FILE: str(tmp_path / "error.json")}
    result = train(STOPPED.format(name="SIGUSR1"), tmp_path, variables)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", ""), "the launcher tells it"
    assert read_first_failure(tmp_path / "error.json") is None
    assert stop_record(tmp_path).exists() == (rank == 0)
    assert training_mark(tmp_path).exists() == (rank == 0)


def test_a_command_started_inside_a_rank_is_none_of_its_job(tmp_path: Path) -> None:
    """As by a model's own evaluation: it neither fails the healthy training nor waits for other ranks."""
    (tmp_path / "rank.py").write_text(COMMAND_INSIDE)
    error_file = tmp_path / "logs/error.json"
    error_file.parent.mkdir()
    slurm = {"SLURM_STEP_NUM_TASKS": "2", "TORCHELASTIC_MAX_RESTARTS": "1", "TORCHELASTIC_RESTART_COUNT": "0"}
    variables = {**PLACE, **slurm, ERROR_FILE: str(error_file), PARENT_PID: str(os.getpid())}
    command = [str(tmp_path / "rank.py"), "train", "llama2-tiny", "--run-dir", str(tmp_path)]
    rank = rank_process(command, variables)
    assert (rank.returncode, rank.stderr) == (0, ""), "the rank itself is healthy"
    assert read_first_failure(error_file) is None
    inside = json.loads((tmp_path / "inside.json").read_text())
    assert inside[:2] == [2, "shardwise: there is no run nowhere: name its folder\n"]
    assert inside[2] == PLACE, "torch and the model's code find the rank's place"


@pytest.mark.parametrize(("body", "code", "text"), [SENTENCES[0], SENTENCES[3]], ids=["done", "failed"])
def test_launched(body: str, code: int, text: str, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "rank-0001.log"
    error_file = tmp_path / "error.json"
    result = train(body, tmp_path, {**PLACE, ERROR_FILE: str(error_file), HEARTBEATS: str(tmp_path)})
    assert (result.returncode, result.stdout, result.stderr) == (code, "", "")
    shown = text.format(rank=1, log=log)
    assert read_first_failure(error_file) == (Failure(1, shown, code) if code else None)
    assert log.exists()
    assert (tmp_path / "done-0001").exists() == (code == 0)


SECONDS = 120.0
CHILD = (
    "from shardwise.launch import rank_process as guard; guard.die_with_parent(); print('ready', flush=True); input()"
)


def test_a_parent_that_died_before_is_noticed_and_elsewhere_a_thread_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    environment = {**os.environ, PARENT_PID: str(gone.pid)}
    child = subprocess.run([sys.executable, "-c", CHILD], env=environment, timeout=SECONDS)
    assert child.returncode == -signal.SIGKILL
    killed: list[tuple[int, int]] = []
    parents = iter([7, 7, 1])
    monkeypatch.setattr(process, "_PARENT_POLL_SECONDS", 0.0)
    monkeypatch.setattr(process.os, "getppid", lambda: next(parents))
    monkeypatch.setattr(process.os, "kill", lambda *call: killed.append(call))
    watcher = threading.Thread(target=process._end_after, args=(7,))
    watcher.start()
    watcher.join(SECONDS)
    assert killed == [(os.getpid(), signal.SIGKILL)]


REDIRECTS = """
import os, sys
from pathlib import Path
from shardwise.launch.rank_output import redirect
print("before")
redirect(int(sys.argv[1]), Path(sys.argv[2]))
print("printed")
os.write(1, b"native out\\n")
os.write(2, b"native error\\n")
os.kill(os.getpid(), 9)
"""


def run(rank: int, log: Path) -> str:
    command = [sys.executable, "-c", REDIRECTS, str(rank), str(log)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout


def test_all_ranks_but_the_first_write_to_their_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "rank-0001.log"
    assert run(1, log) == "before\n"
    assert run(1, log) == "before\n"
    assert log.read_text() == "printed\nnative out\nnative error\n" * 2
    log = tmp_path / "rank-0000.log"
    assert "native out" in run(0, log)
    assert not log.exists()


def test_fault_15_a_training_of_a_program_prints_any_character(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "out").open("w", encoding="ascii") as file:
        monkeypatch.setattr(sys, "stdout", file)
        with output_restored():
            take_any_character()
            print("TP 2 × PP 2")
        with pytest.raises(UnicodeEncodeError):
            print("×")
        file.truncate()
    assert (tmp_path / "out").read_text(encoding="ascii") == "TP 2 ? PP 2\n"
