"""Runs that fail: the user reads one cause, soon, and nothing goes on running."""

import contextlib
import json
import os
import random
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from shardwise.config import recipe_text
from tests.e2e import processes
from tests.e2e.command import (
    ALONE,
    UNDER_TORCHRUN,
    Process,
    environment,
    imported_first,
    json_lines,
    metrics,
    miniature,
    outcome,
    shardwise,
    start,
    within,
)

LONG = ("train.steps=1000000", "train.eval_every=0", "parallel.tensor=2", "--run-dir", "run")
SECONDS = 240.0
"""A failure ends a job at once, however busy the machine; collectives would time out after 600 s."""


def started(folder: Path, *arguments: str) -> Process:
    """A long job of two ranks that has taken a step."""
    job = start("train", miniature(folder), *LONG, *arguments, at=folder)
    steps = folder / "run/ranks/rank-0001.jsonl"
    if not processes.wait_for(lambda: steps.exists() and '"step"' in steps.read_text(), 120):
        job.kill()
        raise AssertionError(f"no step within 120 s\n{outcome(job)}")
    return job


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_a_killed_rank_ends_the_job_and_is_named(tmp_path: Path) -> None:
    job = started(tmp_path, "log.notify=[tee told.json]")
    ranks = processes.ranks(job.pid)
    assert set(ranks) == {0, 1}
    os.kill(ranks[1], signal.SIGKILL)
    err = outcome(job, timeout=SECONDS).failed(1)
    keys = r"train.steps=1000000 train.eval_every=0 parallel.tensor=2 'log.notify=\[tee told.json\]'"
    command = rf"shardwise train \S+ {keys} --run-dir run"
    assert re.fullmatch(
        r"FAILED at step [\d,]+: rank 1 was killed \(SIGKILL; usually out of memory\)\.\n"
        r"log: run/logs/rank-0001\.log\n"
        r"(all [\d,]+ steps are lost|the only step is lost): checkpoint\.every_minutes was 30\n"
        rf"resume: {command}\n"
        r"see: shardwise explain killed-rank\n",
        err,
    ), err
    told = json.loads((tmp_path / "told.json").read_text())
    assert (told["event"], told["run"], told["exit_code"]) == ("failure", "run", 1)
    assert told["reason"].startswith("rank 1 was killed (SIGKILL")
    assert f"FAILED at step {told['step']:,}: " in err
    top = within("top", "run", "--once", at=tmp_path).succeeded().out
    assert err in top, f"`top` shows another text:\n{top}"
    assert not processes.alive(ranks[0]), "the other rank goes on without the killed one"
    recorded = (tmp_path / "run/metrics.jsonl").read_text()
    assert "gloo" not in recorded, "`shardwise stop` would show the user what a library says"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_a_stopped_rank_is_named_with_what_the_others_waited_for(tmp_path: Path) -> None:
    """As one whose machine swaps, or that a debugger holds: its connections stay open."""
    job = started(tmp_path, "launch.timeout=6.5")
    ranks = processes.ranks(job.pid)
    os.kill(ranks[1], signal.SIGSTOP)
    err = outcome(job, timeout=SECONDS).failed(1)
    who = rf"rank 1 \(node .+, cpu, pipeline stage 0, process {ranks[1]}\)"
    doing = r"[a-z ]+(of step [\d,]+)?"
    told = rf"{who} does not answer since \d+ s: it last was in {doing}; rank 0 waited in {doing}"
    assert re.match(rf"FAILED at step [\d,]+: {told}\.\n", err), err
    assert not any(map(processes.alive, ranks.values())), "a rank goes on"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_a_rank_that_dies_in_a_pipeline_is_named_with_what_another_waited_for(tmp_path: Path) -> None:
    job = started(tmp_path, "parallel.tensor=1", "parallel.pipeline=2", "--nproc", "2")
    ranks = processes.ranks(job.pid)
    os.kill(ranks[1], signal.SIGKILL)
    err = outcome(job, timeout=SECONDS).failed(1)
    assert re.match(r"FAILED at step [\d,]+: rank 1 was killed \(SIGKILL;", err), err
    # It waits for a message, between two of them for the other stage, or for what the step sums up.
    message = r"the gradient of x of micro-batch \d+ from stage 1 \(rank 1\)|another stage to take what was sent"
    waited = rf"^rank 0 waited for ({message}), and lost the connection$"
    assert re.search(waited, err, re.MULTILINE) or "rank 0" not in err, err
    assert not processes.alive(ranks[0]), "the other rank goes on without the killed one"


FAILING_RANK = """
import os
if os.environ.get("RANK") == "1":
    from shardwise.train.trainer import Trainer
    step = Trainer.step
    def fail_at_3(self, *further):
        if self.progress.step == 2:
            raise RuntimeError("the disk of rank 1 is on fire")
        return step(self, *further)
    Trainer.step = fail_at_3
"""


def test_a_rank_that_raises_is_heard_and_not_its_peers_time_outs(tmp_path: Path) -> None:
    hook = tmp_path / "hook"
    variables = imported_first(FAILING_RANK, hook)
    failed = shardwise("train", miniature(tmp_path), *LONG, at=tmp_path, timeout=SECONDS, **variables)
    err = failed.failed(1)
    place = f"{hook / 'sitecustomize.py'}, line 8"
    assert err.startswith(
        f"FAILED at step 2: rank 1 failed: RuntimeError: the disk of rank 1 is on fire ({place}).\n"
        "log: run/logs/rank-0001.log\n"
        "all 2 steps are lost: checkpoint.every_minutes was 30\n"
        "resume: shardwise train "
    ), err
    assert "rank 0" not in err, "the user must read the cause alone, not what the other ranks met because of it"
    assert 'raise RuntimeError("the disk of rank 1 is on fire")' in (tmp_path / "run/logs/rank-0001.log").read_text()
    assert len(json_lines(tmp_path / "run/ranks/rank-0001.jsonl")) == 3
    assert not (tmp_path / "run/results.json").exists()
    assert not [*(tmp_path / "run").glob("checkpoints/step-*")], "the weights of a step that failed are no checkpoint"


@pytest.mark.slow
def test_out_of_memory_names_phase_rank_bytes_and_remedies(tmp_path: Path) -> None:
    """1.5 GB are enough for torch and the model; the hidden states of 2^15 sequences are not."""
    samples = 1 << 15
    limit = 1500 << 20
    sizes = (f"train.global_batch={samples}", f"train.micro_batch={samples}", "model.hidden_size=512")
    process = subprocess.Popen(
        [*ALONE, "train", miniature(tmp_path), *sizes, "train.eval_every=0", "--run-dir", "run"],
        cwd=tmp_path,
        env=environment(RAYON_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
    )
    said = outcome(process).failed(1).splitlines()
    told = "rank 0 ran out of memory on cpu during forward and backward, after step 0"
    assert said[0] == f"FAILED before the first step: {told}."
    for kind in ("parameters", "gradients", "optimizer", "activations", "loss", "buffers"):
        assert f" {kind} " in said[2], f"the expected bytes of {kind} are missing: {said[2]}"
    assert said[3].startswith("what would help: ")
    for remedy in (f"train.micro_batch={samples // 2} (", "parallel.tensor=2 on 2 ranks ("):
        assert remedy in said[3]
    assert said[-1] == "see: shardwise explain out-of-memory"
    assert said[-2].startswith("resume: shardwise train ")
    assert len(said) == 8, f"more than the message, its log, the command and the address: {said}"
    assert metrics(tmp_path / "run", "stop")[0]["reason"].startswith("failed: RunError: rank 0 ran out of memory ")


def test_under_torchrun_wrong_input_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    said = shardwise("train", miniature(tmp_path), "data.path=empty.txt", at=tmp_path, program=UNDER_TORCHRUN)
    assert said.code != 0
    assert said.err.count("shardwise: ") == 1, f"the text must appear once, not once a rank:\n{said.err}"
    assert said.err.count("empty.txt holds no text: ") == 1
    # The second: torchrun's own error where the other rank ends just as it is to be killed.
    assert "exitcode  : 2" in said.err or "ProcessLookupError" in said.err, "torchrun must see that the input is wrong"
    assert not (tmp_path / "runs").exists()


def closed_streams(folder: Path, *words: str | Path) -> int:
    """The exit code of a command without standard streams, as a daemon starts programs."""
    command = f"{shlex.join([*ALONE, *map(str, words)])} <&- >&- 2>&-"
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=environment(), timeout=SECONDS, check=False)
    return done.returncode


def test_closed_standard_streams_are_no_fault(tmp_path: Path) -> None:
    """No file takes the number of a stream, and what is printed."""
    assert closed_streams(tmp_path, "recipes", "quickstart", "--write", "mine.yaml") == 0
    assert (tmp_path / "mine.yaml").read_text(encoding="utf-8") == recipe_text("quickstart")


@pytest.mark.slow
def test_ranks_have_the_closed_streams_of_the_launcher(tmp_path: Path) -> None:
    keys = ("train.steps=1", "optimizer.warmup_steps=0", "parallel.tensor=2", "--run-dir", "run")
    assert closed_streams(tmp_path, "train", miniature(tmp_path), *keys) == 0
    assert metrics(tmp_path / "run", "step")


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


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_a_kill(tmp_path: Path) -> None:
    check(tmp_path, SMALL, kills=1, steps=8, seed=0)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
@pytest.mark.timeout(7200)
def test_a_hundred_kills(tmp_path: Path) -> None:
    hits = check(tmp_path, LARGE, kills=100, steps=1500, seed=1)
    print(dict(hits))
    assert sum(hits[victim] for victim in VICTIMS) == 100, f"the run ended before: {hits}"
    assert hits["while a checkpoint was written"] > 5, f"no kill hit a save: {hits}"
