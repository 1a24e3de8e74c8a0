"""Processes are killed at random moments; each restart goes on from the last complete checkpoint, to the bit."""

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e import processes
from tests.e2e.command import metrics, miniature, outcome, shardwise, start

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")

QUIET = ("log.tensorboard=false", "log.sample_tokens=0", "train.eval_every=0")
SMALL = ("parallel.tensor=2", "checkpoint.every=5")
LARGE = (
    "parallel.tensor=2", "checkpoint.every=3",
    "model.hidden_size=128", "model.intermediate_size=256", "train.global_batch=4",
)  # fmt: skip
VICTIMS = ("rank", "launcher", "all")


def _kill(job_pid: int, victim: str, chance: random.Random) -> str:
    """SIGKILL to a random rank, to the launcher, or to every process of the job, as while no rank is there yet."""
    ranks = list(processes.ranks(job_pid).values())
    victim = "all" if victim == "rank" and not ranks else victim
    everyone = [job_pid, *processes.descendants(job_pid)]
    for pid in {"rank": [chance.choice(ranks or [0])], "launcher": [job_pid], "all": everyone}[victim]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return victim


def _steps(run: Path) -> list[dict[str, float]]:
    """Complete lines of the run so far: the last one may be cut off by a kill."""
    path = run / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [event for line in lines if line and (event := json.loads(line))["event"] == "step"]


def crash_until_done(folder: Path, sizes: tuple[str, ...], kills: int, steps: int, seed: int) -> Counter[str]:
    """Kill and restart a run until it was killed so often, then let it finish; returns what was hit, and when."""
    chance = random.Random(seed)
    hits: Counter[str] = Counter()
    command = ("train", miniature(folder), *QUIET, *sizes, f"train.steps={steps}", "--run-dir", "run")
    run = folder / "run"
    while sum(hits[victim] for victim in VICTIMS) < kills:
        before = len(_steps(run))
        job = start(*command, at=folder)
        if chance.random() < 0.9:  # else at any moment of the start
            processes.wait_for(lambda job=job, before=before: len(_steps(run)) > before or job.poll() is not None, 120)
            time.sleep(chance.uniform(0, 0.5))
        else:
            time.sleep(chance.uniform(0, 6.0))
        everyone = processes.descendants(job.pid)
        is_saving = any(run.glob("checkpoints/.step-*.partial"))
        if job.poll() is None:
            hits[_kill(job.pid, chance.choice(VICTIMS), chance)] += 1
            hits["while a checkpoint was written"] += is_saving
        ended = outcome(job, timeout=120)
        assert "Traceback" not in ended.out + ended.err, ended.err
        assert ended.code != 2, f"a restart must not refuse what a kill left behind:\n{ended.err}"
        assert processes.wait_for(lambda e=everyone: not any(map(processes.alive, e)), 20), "a rank outlives the job"
        if ended.code == 0:
            break
    shardwise(*command, at=folder, timeout=3600).succeeded()
    return hits


def check(folder: Path, sizes: tuple[str, ...], kills: int, steps: int, seed: int) -> Counter[str]:
    """The curve and the final weights of a run that was killed again and again are those of one that was not."""
    whole = folder / "whole"
    whole.mkdir()
    command = ("train", miniature(whole), *QUIET, *sizes, f"train.steps={steps}", "--run-dir", "run")
    shardwise(*command, at=whole, timeout=3600).succeeded()
    wanted = {event["step"]: event["loss"] for event in metrics(whole / "run", "step")}
    hits = crash_until_done(folder, sizes, kills, steps, seed)
    found = _steps(folder / "run")
    assert {event["step"] for event in found} == set(wanted), "steps are missing"
    wrong = [event for event in found if event["loss"] != wanted[event["step"]]]
    assert not wrong, f"losses after a restart differ from those of the uninterrupted run: {wrong[:3]}"
    last = f"run/checkpoints/step-{steps:08d}/model.safetensors"
    assert (folder / last).read_bytes() == (whole / last).read_bytes(), "the final weights differ"
    return hits


def test_a_kill(tmp_path: Path) -> None:
    check(tmp_path, SMALL, kills=1, steps=8, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_hundred_kills(tmp_path: Path) -> None:
    hits = check(tmp_path, LARGE, kills=100, steps=1500, seed=1)
    print(dict(hits))
    assert sum(hits[victim] for victim in VICTIMS) == 100, f"the run ended before: {hits}"
    assert hits["while a checkpoint was written"] > 5, f"no kill hit a save: {hits}"
