"""Runs that are stopped: a checkpoint is saved, exit code 75 says so, and the same command goes on."""

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest

from tests.e2e import processes
from tests.e2e.command import (
    ALONE,
    UNDER_TORCHRUN,
    Outcome,
    Process,
    environment,
    metrics,
    miniature,
    outcome,
    shardwise,
    start,
    within,
)
from tests.loopback_hooks import SECRET, serve

LONG = ("train.steps=1000000", "train.eval_every=0", "--run-dir", "run")
NOTICE = "stopping after the current step, with a checkpoint (Ctrl-C again ends at once)\n"
SECONDS = 240.0
"""Within which a stopped run ends, however busy the machine is."""


def wait_for_a_step(job: Process, run: Path) -> None:
    log = run / "metrics.jsonl"
    if not processes.wait_for(lambda: log.exists() and '"event": "step"' in log.read_text(), 120):
        job.kill()
        raise AssertionError(f"no step within 120 s\n{outcome(job)}")


def training(folder: Path, *arguments: str, program: tuple[str, ...] = ALONE, **variables: str) -> Process:
    """A long job that has taken a step."""
    job = start("train", miniature(folder), *LONG, *arguments, at=folder, program=program, **variables)
    wait_for_a_step(job, folder / "run")
    return job


def stopped_at(ended: Outcome, run: Path, by: str) -> int:
    """The step after which a run stopped, which its message, events and checkpoint agree on."""
    (stop,) = metrics(run, "stop")
    step = int(stop["step"])
    assert stop["reason"] == f"stopped by {by}"
    assert (run / f"checkpoints/step-{step:08d}/manifest.json").exists(), "the checkpoint is not complete"
    steps = [line["step"] for line in metrics(run, "step")]
    assert steps == list(range(1, step + 1)), "no step is lost, none is taken after the checkpoint"
    assert f"stopped by {by} after step {step:,}" in ended.out + ended.err
    assert not (run / "results.json").exists(), "it is not finished"
    return step


def go_on(folder: Path, step: int, *arguments: str) -> None:
    """One more step alone, at another layout; then nothing is left to do."""
    again = ("train", miniature(folder), "train.eval_every=0", f"train.steps={step + 1}", "--run-dir", "run")
    shardwise(*again, *arguments, at=folder).succeeded()
    run = folder / "run"
    (resumed,) = metrics(run, "resume")
    assert resumed["step"] == step
    assert f"train.steps 1000000 → {step + 1}" in resumed["changes"]
    assert [line["step"] for line in metrics(run, "step")] == list(range(1, step + 2))
    assert "steps: 1000000" in (run / "config-0001.yaml").read_text()
    assert (run / "environment-0001.json").exists()
    before = (run / "metrics.jsonl").read_bytes()
    finished = within(*again, *arguments, at=folder).succeeded()
    told = rf"the run in run is finished: {step + 1:,} of {step + 1:,} steps, results in run/results.json; .*\n"
    assert re.fullmatch(told, finished.out)
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("number", "arguments", "name"),
    [
        pytest.param(signal.SIGINT, (), "Ctrl-C (SIGINT)", id="alone", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, ("parallel.tensor=2",), "SIGTERM", id="launched"),
    ],
)
def test_a_stopped_run_goes_on(number: signal.Signals, arguments: tuple[str, ...], name: str, tmp_path: Path) -> None:
    job = training(tmp_path, *arguments)
    job.send_signal(number)
    ended = outcome(job, timeout=SECONDS)
    said = ended.failed(75)
    step = stopped_at(ended, tmp_path / "run", name)
    assert said.startswith(f"{NOTICE}shardwise: the run was stopped by {name} after step {step:,}; ")
    assert said.count("shardwise: ") == 1, "one message for all ranks"
    go_on(tmp_path, step)


def test_a_run_is_stopped_by_its_folder_while_a_second_one_is_refused(tmp_path: Path) -> None:
    job = training(tmp_path, "parallel.tensor=2")
    run = tmp_path / "run"
    config = (run / "config.yaml").read_bytes()
    err = within("train", miniature(tmp_path), *LONG, "model.hidden_size=64", at=tmp_path).failed(2)
    in_use = rf"shardwise: --run-dir \(run\) is in use by another run \(process {job.pid} on \S+, since \S+\): .*\n"
    assert re.fullmatch(in_use, err)
    assert (run / "config.yaml").read_bytes() == config
    assert not list(run.glob("config-*"))
    asked = within("stop", "--wait", at=tmp_path).succeeded()
    ended = outcome(job, timeout=SECONDS)
    ended.failed(75)
    step = stopped_at(ended, run, "`shardwise stop`")
    assert asked.out.endswith(
        f"ended: stopped by `shardwise stop` after step {step:,}; its newest checkpoint is of step {step:,}\n"
    )
    assert "no run is under way in run: stopped by" in within("stop", "run", at=tmp_path).failed(2)


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
@pytest.mark.slow
def test_inside_torchrun(tmp_path: Path) -> None:
    """Nobody of ours stands between; torchrun itself ends with 1 whatever its ranks ended with."""
    job = training(tmp_path, "parallel.tensor=2", program=UNDER_TORCHRUN)
    run = tmp_path / "run"
    refused = shardwise("train", miniature(tmp_path), *LONG, at=tmp_path).failed(2)
    assert "--run-dir (run) is in use by another run" in refused
    for pid in processes.ranks(job.pid).values():
        os.kill(pid, signal.SIGUSR1)
    ended = outcome(job, timeout=SECONDS)
    assert ended.code != 0
    assert "Signal " not in ended.err, "a rank was ended before it left by itself"
    assert re.search(r"exitcode\s*: 75", ended.err), ended.err
    stopped_at(ended, run, "SIGUSR1")
    assert ended.err.count("shardwise: the run was stopped by") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_before_training_a_signal_ends_at_once(tmp_path: Path) -> None:
    job = start("train", miniature(tmp_path), *LONG, "parallel.tensor=2", at=tmp_path)
    assert processes.wait_for(lambda: len(processes.ranks(job.pid)) == 2, 60)
    everyone = processes.descendants(job.pid)
    job.send_signal(signal.SIGTERM)
    err = outcome(job, timeout=20).failed(75)
    assert err == "shardwise: the run was stopped by SIGTERM; no checkpoint was saved\n"
    assert processes.wait_for(lambda: not any(map(processes.alive, everyone)), 5)


@pytest.mark.slow
def test_a_closed_terminal_stops_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    """What is printed after that goes nowhere, and must not become the error that loses the checkpoint."""
    master, slave = pty.openpty()

    def login() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    streams = {"stdin": slave, "stdout": slave, "stderr": slave, "text": True}
    command = [*ALONE, "train", miniature(tmp_path), *LONG, "parallel.tensor=2"]
    options = {"cwd": tmp_path, "env": environment(), "start_new_session": True, "preexec_fn": login}
    job = subprocess.Popen(command, **streams, **options)
    os.close(slave)
    closed = threading.Event()

    def watch() -> None:
        while not closed.is_set() and os.read(master, 1 << 16):
            pass
        os.close(master)

    watcher = threading.Thread(target=watch)
    watcher.start()
    wait_for_a_step(job, tmp_path / "run")
    closed.set()
    watcher.join(timeout=SECONDS)
    try:
        code = job.wait(SECONDS)
    finally:
        job.kill()
    assert code == 75
    (stop,) = metrics(tmp_path / "run", "stop")
    assert stop["reason"] == "stopped by SIGHUP"
    assert (tmp_path / f"run/checkpoints/step-{stop['step']:08d}/manifest.json").exists()


def test_the_end_is_told_once_and_what_fails_is_a_warning(tmp_path: Path) -> None:
    with serve() as hooks:
        targets = [hooks.address(), hooks.address("404"), "env:CHAT", "tee told.json", "missing-command"]
        targets.append(f"false -d @- https://127.0.0.1:1/a,{SECRET}")
        keys = ("parallel.tensor=2", "train.eval_every=0", "log.sample_tokens=0", f"log.notify={json.dumps(targets)}")
        ended = shardwise("train", miniature(tmp_path), *keys, at=tmp_path, CHAT=hooks.address())
    run = (tmp_path / "runs/latest").resolve()
    assert ended.code == 0
    first, second = hooks.notices
    assert first == second == json.loads((tmp_path / "told.json").read_text())
    last = metrics(run, "step")[-1]
    told = [first[name] for name in ("event", "run", "step", "loss", "reason", "exit_code")]
    assert told == ["end", run.name, 4, last["loss"], "finished", 0]
    warnings = [line for line in ended.complaint.splitlines() if line.startswith("warning: log.notify: ")]
    assert [line.split(": ")[-1] for line in sorted(warnings)] == ["it ended with exit code 1", "Not Found"], ended.err
    missing = "log.notify: missing-command: no program missing-command on the PATH"
    assert [(event["step"], event["text"]) for event in metrics(run, "warning")] == [(0, missing)]
    for path in run.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path
    assert SECRET not in ended.out + ended.err
    dry = within("train", str(run / "config.yaml"), "--dry-run", "--full", at=tmp_path)
    assert dry.code == 0
    assert SECRET not in dry.out
    for text in (
        missing,
        r"log.notify: http://localhost:\d+/\(redacted\): config.yaml keeps no path",
        "log.notify: env:CHAT: the variable must be set",
    ):
        assert re.search(rf"^# warning +{text}", dry.out, re.MULTILINE), dry.out
