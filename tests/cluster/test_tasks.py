"""`shardwise train` as each task of the user's own `srun` or `mpirun`, on a real SLURM of two nodes."""

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.cluster.slurm import Slurm
from tests.e2e import processes
from tests.e2e.command import ALONE, metrics, miniature, outcome, shardwise, start

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
