"""`shardwise train` as each task of the user's own `srun` or `mpirun`, on a real SLURM of two nodes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from shardwise.launch.node import LauncherFacts
from shardwise_jobs.attempt import AttemptOutcome, AttemptWatch
from tests.cluster.slurm import Slurm
from tests.e2e import processes
from tests.e2e.command import ALONE, environment, metrics, miniature, outcome, shardwise, start

PAIR = ("srun", "--nodes=2", "--ntasks-per-node=1", *ALONE)
SRUN = ("srun", "--nodes=2", "--ntasks-per-node=2", *ALONE)
FAILING = """\
import os

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.head = nn.Embedding(vocab_size, vocab_size)

    def forward(self, ids_SB, targets_SB):
        if os.environ["RANK"] == "2":
            raise RuntimeError("no such kernel")
        return nn.functional.cross_entropy(self.head(ids_SB).flatten(0, 1), targets_SB.flatten(), reduction="sum")
"""
REST = {
    "train": {"steps": 4, "global_batch": 4, "sequence_length": 16},
    "optimizer": {"lr": 1e-3},
    "data": {"dataset": "tiny"},
    "log": {"sample_tokens": 0, "tensorboard": False},
}
SILENCE = 10.0
HOST = """\
ip netns exec sw{number} env SLURM_NODEID={number} SLURMD_NODENAME=host{number} {command} &
"""
LAYOUT = ("parallel.tensor=2", "log.tensorboard=false", "log.sample_tokens=0")


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in metrics(run, "step")]


@pytest.mark.slow
def test_tasks_train_as_local_ranks_do_and_stop_with_a_checkpoint(slurm: Slurm, tmp_path: Path) -> None:
    recipe, keys = miniature(tmp_path), (*LAYOUT, "train.steps=4000", "train.eval_every=0")
    local = ("train", recipe, *keys, "train.stop_after=4", "--nproc", "4", "--run-dir", "local")
    shardwise(*local, at=tmp_path).succeeded()
    run = tmp_path / "run"
    job = start("train", recipe, *keys, "--run-dir", run, at=tmp_path, program=SRUN, **slurm.variables)
    assert processes.wait_for(lambda: (run / "metrics.jsonl").exists() and len(losses(run)) > 4, 60), "no step"
    (step,) = slurm.command("squeue", "--steps", "--noheader", "--format=%i").split()
    slurm.command("scancel", "--signal=USR1", step)
    ended = outcome(job, 60)
    assert ended.code == 75, ended.err
    assert ended.err.count("the run was stopped by SIGUSR1 after step ") == 1, ended.err
    assert len(list((run / "checkpoints").glob("step-*"))) == 1
    assert losses(run)[:4] == losses(tmp_path / "local"), "bit by bit"


def test_a_file_of_hosts_has_the_address_of_rank_0_set(slurm: Slurm, tmp_path: Path) -> None:
    """Task 0 runs on its first host, and SLURM sorts the list of nodes."""
    (tmp_path / "hosts").write_text("n2\nn1\n")
    program = ("srun", "--ntasks=2", "--distribution=arbitrary", *ALONE)
    variables = {**slurm.variables, "SLURM_HOSTFILE": str(tmp_path / "hosts")}
    ended = shardwise("train", miniature(tmp_path), *LAYOUT, at=tmp_path, program=program, **variables)
    assert ended.code == 2, ended.err
    assert ended.err.count("MASTER_ADDR must be set where a file of hosts (SLURM_DISTRIBUTION=arbitrary)") == 1, (
        ended.err
    )
    assert "may be any of n[1-2]" in ended.err


@pytest.mark.slow
def test_wrong_input_is_told_once_for_all_tasks(slurm: Slurm, tmp_path: Path) -> None:
    ended = shardwise("train", miniature(tmp_path), "parallel.tensor=3", at=tmp_path, program=PAIR, **slurm.variables)
    assert ended.code == 2, ended.err
    assert ended.err.count("must be a multiple of parallel.tensor (3)") == 1, ended.err
    assert "Traceback" not in ended.err
    script = f'{sys.executable} -m shardwise "$@" train.seed=$SLURM_PROCID'
    program = ("srun", "--nodes=2", "--ntasks-per-node=1", "bash", "-c", script, "-")
    ended = shardwise("train", "miniature.yaml", at=tmp_path, program=program, **slurm.variables)
    assert ended.code == 2, ended.err
    assert ended.err.count("train.seed must be the same on all ranks: 0 on rank 0, and 1 on rank 1") == 1, ended.err


@pytest.mark.slow
def test_a_task_that_is_killed_ends_the_step(slurm: Slurm, tmp_path: Path) -> None:
    """srun waits for the others by itself, and they for the one that is gone."""
    keys = (*LAYOUT, "train.steps=4000")
    job = start("train", miniature(tmp_path), *keys, "--run-dir", "run", at=tmp_path, program=SRUN, **slurm.variables)
    run = tmp_path / "run"
    assert processes.wait_for(lambda: (run / "metrics.jsonl").exists() and len(losses(run)) > 1, 60), "no step"
    victim = next(pid for pid, rank in tasks().items() if rank == "3")
    os.kill(victim, signal.SIGKILL)
    ended = outcome(job, 60)
    assert ended.code != 0
    assert re.search("task 3: Killed|tasks 2-3: Killed", ended.err), ended.err
    assert ended.err.count("rank 0 lost the connection to another rank") == 1, ended.err


@pytest.mark.slow
def test_a_task_that_fails_by_itself_says_why(slurm: Slurm, tmp_path: Path) -> None:
    """The output of all ranks but the first goes to their logs."""
    (tmp_path / "mine.py").write_text(FAILING)
    recipe = {"model": {"family": "mine:Model", "vocab_size": 512}, **REST}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    ended = shardwise("train", "recipe.yaml", "--run-dir", "run", at=tmp_path, program=SRUN, **slurm.variables)
    assert ended.code != 0
    assert ended.err.count("rank 2 failed: RuntimeError: no such kernel") == 1, ended.err
    assert "Traceback" not in ended.err


def tasks() -> dict[int, str]:
    """Process → SLURM's number of the task, of those that train."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            variables = dict(
                one.partition(b"=")[::2] for one in (folder / "environ").read_bytes().split(b"\0") if b"=" in one
            )
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if b"SLURM_PROCID" in variables and b"shardwise\0train" in command:
            found[int(folder.name)] = variables[b"SLURM_PROCID"].decode()
    return found


def test_processes_of_mpirun_train(tmp_path: Path) -> None:
    if shutil.which("mpirun") is None and not os.environ.get("CI"):
        pytest.skip("there is no mpirun (Debian: apt-get install openmpi-bin)")
    mpirun = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, "-m", "shardwise")
    done = shardwise("train", miniature(tmp_path), *LAYOUT, "--run-dir", "run", at=tmp_path, program=mpirun)
    done.succeeded()
    assert done.out.count("TP 2 × PP 1 × DP 1 = 2 ranks") == 1
    assert len(losses(tmp_path / "run")) == 4


@pytest.mark.slow
def test_two_jobs_of_mpich_on_one_machine(tmp_path: Path) -> None:
    """Its mpiexec names no job, and waits for the other ranks where one has failed."""
    if shutil.which("mpiexec.mpich") is None and not os.environ.get("CI"):
        pytest.skip("there is no mpiexec.mpich (Debian: apt-get install mpich)")
    mpiexec = ("mpiexec.mpich", "-n", "2", *ALONE)
    recipe = miniature(tmp_path)
    other = start("train", recipe, *LAYOUT, "--run-dir", "other", at=tmp_path, program=mpiexec)
    shardwise("train", recipe, *LAYOUT, "--run-dir", "run", at=tmp_path, program=mpiexec).succeeded()
    ended = outcome(other, 60)
    assert ended.code == 0, ended.err
    assert losses(tmp_path / "run") == losses(tmp_path / "other"), "bit by bit"
    refused = shardwise("train", recipe, "parallel.tensor=3", at=tmp_path, program=mpiexec)
    assert refused.code == 2
    assert refused.err.count("must be a multiple of parallel.tensor (3)") == 1, refused.err


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a link between them; gives their addresses."""
    if shutil.which("ip") is None or os.getuid() != 0:
        assert not os.environ.get("CI"), "CI must run the tests with network namespaces"
        pytest.skip("network namespaces need root and the program ip (Debian: iproute2)")
    addresses = ("10.99.7.1", "10.99.7.2")
    try:
        for number, address in enumerate(addresses):
            ip("netns", "add", f"sw{number}")
            if number == 0:
                ip("link", "add", "swlink0", "netns", "sw0", "type", "veth", "peer", "name", "swlink1")
            else:
                ip("link", "set", "swlink1", "netns", "sw1")
            ip("-n", f"sw{number}", "addr", "add", f"{address}/24", "dev", f"swlink{number}")
            for device in (f"swlink{number}", "lo"):
                ip("-n", f"sw{number}", "link", "set", device, "up")
        yield addresses
    finally:
        for number in range(2):
            subprocess.run(["ip", "netns", "del", f"sw{number}"], check=False, capture_output=True)


SUPERVISE = """\
import asyncio, json, sys
from pathlib import Path
from tests.cluster.test_tasks import attempt
outcome = asyncio.run(attempt(sys.argv[1], sys.argv[2:]))
print(outcome.failure.text if outcome.failure else "none", outcome.lost, sep="\\n")
"""


async def attempt(address: str, command: Sequence[str]) -> AttemptOutcome:
    """One attempt on the two hosts, in the current folder."""

    def program(_attempt: LauncherFacts) -> list[str]:
        quoted = " ".join(command)
        return ["bash", "-c", "".join(HOST.format(number=n, command=quoted) for n in range(2)) + "wait"]

    watch = AttemptWatch(address, 2, 1, Path("run/logs"), id="1.0.0", silence=SILENCE, heard=lambda _: None)
    return await watch.run(program)


@pytest.mark.slow
def test_a_cut_link_ends_the_attempt_in_time_and_names_the_host(hosts: tuple[str, str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    keys = ("train.steps=100000", "train.eval_every=0", f"launch.timeout={SILENCE}", "log.tensorboard=false")
    train = [sys.executable, "-m", "shardwise", "train", str(miniature(tmp_path)), *keys]
    train += ["--nproc", "1", "--run-dir", str(run)]
    supervise = ["ip", "netns", "exec", "sw0", sys.executable, "-c", SUPERVISE, hosts[0], *train]
    root = str(Path(__file__).parents[2])
    variables = environment(PYTHONPATH=os.pathsep.join((os.environ.get("PYTHONPATH", ""), root)))
    job = subprocess.Popen(supervise, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while not (run / "metrics.jsonl").exists() or len(metrics(run, "step")) < 5:
            assert time.monotonic() < deadline, "no step"
            time.sleep(0.1)
        ip("-n", "sw1", "link", "set", "swlink1", "down")
        cut = time.monotonic()
        out, _ = job.communicate(timeout=120)
        seconds = time.monotonic() - cut
    finally:
        job.kill()
    # What ends first: rank 0 is told to, or its own wait of the same length.
    assert re.search(r"node host1 \(rank 1\) does not answer; rank 0 (waited in|lost the connection)", out), out
    assert "('host1',)" in out
    # The time-out, 5 s, and the end of the launchers, one of which cannot be told to end.
    assert seconds < SILENCE + 5 + 10, seconds
    print(f"named after {seconds:.1f} s at a time-out of {SILENCE:.0f} s")
