"""`shardwise submit`, `jobs` and `stop` on a real SLURM of two nodes: what a job survives, and what it tells."""

import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.slurm import Slurm
from tests.cluster.test_tasks import losses
from tests.e2e import processes
from tests.e2e.command import Outcome, metrics, miniature, shardwise, within

PLAIN = ("train.eval_every=0", "log.tensorboard=false", "log.sample_tokens=0")
ONE_EACH = (*PLAIN, "launch.ranks_per_node=1", "--nodes", "2", "-y", "--detach")
KEYS = ("parallel.tensor=2", *PLAIN)
TWO = (*KEYS, "launch.ranks_per_node=2", "--nodes", "2", "-y", "--detach")


class Submission:
    """A job that a test has submitted."""

    def __init__(self, slurm: Slurm, at: Path, *arguments: str) -> None:
        self.slurm, self.at = slurm, at
        told = self.shardwise("submit", miniature(at), *arguments).succeeded().out
        found = re.search(r"^job (\d+); its log: (\S+)$", told, re.MULTILINE)
        assert found is not None, told
        self.id, self.log, self.told = found[1], Path(found[2]), told
        self.run = self.log.parent.parent

    def shardwise(self, *arguments: str | Path) -> Outcome:
        return within(*arguments, at=self.at, **self.slurm.variables)

    def wait(self, condition: Callable[[], bool], seconds: float = 90.0) -> None:
        """Wait, and show the job's log where it does not come true."""
        ok = processes.wait_for(condition, seconds)
        assert ok, self.log.read_text() if self.log.exists() else self.slurm.command("squeue")

    def wait_for_steps(self, more_than: int) -> None:
        file = self.run / "metrics.jsonl"
        self.wait(lambda: file.exists() and (steps(self.run) or [0])[-1] > more_than)

    def wait_for_requeue(self) -> None:
        """Wait until SLURM has queued the job again, and spare the two minutes for which it holds it back."""
        self.wait(lambda: self.state() == "PENDING")
        time.sleep(2)  # a start in the second in which the credentials of the last one were revoked is refused
        self.slurm.command("scontrol", "update", f"JobId={self.id}", "StartTime=now")
        self.wait(lambda: self.state() == "RUNNING")

    def state(self) -> str:
        return self.slurm.command("squeue", "--noheader", f"--jobs={self.id}", "--format=%T").strip()

    def wait_for_end(self) -> None:
        self.wait(lambda: self.id not in self.slurm.command("squeue", "--noheader", "--format=%i").split())

    def kill(self, program: bytes, number: signal.Signals = signal.SIGKILL, rank: int | None = None) -> int:
        """Send a signal to a process of the job; returns its number."""
        victim = self.processes(program, rank)[0]
        os.kill(victim, number)
        return victim

    def processes(self, program: bytes, rank: int | None = None) -> list[int]:
        found = []
        job = f"SLURM_JOB_ID={self.id}".encode()
        cluster = f"SLURM_CONF={self.slurm.variables['SLURM_CONF']}".encode()  # jobs of others have the same numbers
        for folder in Path("/proc").iterdir():
            try:
                variables = (folder / "environ").read_bytes().split(b"\0")
                command = (folder / "cmdline").read_bytes()
                name = (folder / "comm").read_text().strip()
            except OSError:
                continue
            # A rank is a fork of its agent, and has the command line of that.
            is_it = program in command and not name.startswith("rank ") if rank is None else name == f"rank {rank}"
            if cluster in variables and job in variables and is_it:
                found.append(int(folder.name))
        return sorted(found)


def steps(run: Path) -> list[int]:
    return [event["step"] for event in metrics(run, "step")]


def curve(run: Path) -> dict[int, float]:
    """Step → loss; a step that was done again must have the same loss."""
    found: dict[int, float] = {}
    for event in metrics(run, "step"):
        assert found.setdefault(event["step"], event["loss"]) == event["loss"], event["step"]
    return found


@pytest.fixture(scope="module")
def survivor(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Submission:
    """A job that was interrupted as before a time limit, queued again, and lost a rank, and was stopped.

    Nodes have one rank each, to save time; in the slow tests they have two.
    """
    keys = ("train.steps=4000", "checkpoint.every=5", "log.notify=[tee -a told.json]")
    job = Submission(slurm, tmp_path_factory.mktemp("job"), *keys, *ONE_EACH)
    job.wait_for_steps(5)
    slurm.command("scancel", "--signal=USR1", "--batch", job.id)
    job.wait_for_requeue()
    first = len(steps(job.run))
    job.wait_for_steps(first + 5)
    (job.at / "jobs.txt").write_text(job.shardwise("jobs").succeeded().out)
    job.kill(b"shardwise\0train", rank=1)
    before = steps(job.run)[-1]
    job.wait(lambda: (job.run / "restarts.jsonl").read_text().count("\n") == 2)
    job.wait_for_steps(before + 10)
    job.shardwise("stop", job.run).succeeded()
    job.wait_for_end()
    return job


@pytest.mark.slow
def test_the_curve_is_that_of_a_run_without_interruption(survivor: Submission) -> None:
    losses_ = curve(survivor.run)
    last = max(losses_)
    assert sorted(losses_) == list(range(1, last + 1)), "no step is left out"
    local = survivor.at / "local"
    keys = ("train.steps=4000", f"train.stop_after={last}", *PLAIN)
    shardwise("train", "miniature.yaml", *keys, "--nproc", "2", "--run-dir", local, at=survivor.at).succeeded()
    assert losses(local) == [losses_[step] for step in range(1, last + 1)], "bit by bit"


def test_each_start_is_recorded_and_told_with_its_cause(survivor: Submission) -> None:
    requeued, killed, stopped = map(json.loads, (survivor.run / "restarts.jsonl").read_text().splitlines())
    assert (requeued["how"], killed["how"], stopped["how"]) == ("preempted", "failed", "stopped")
    assert (requeued["requeues"], killed["requeues"], stopped["requeues"]) == (0, 1, 1)
    assert requeued["checkpoint"] == requeued["step"] == killed["first_step"], "a warning costs no step"
    assert killed["rank"] == 1
    assert killed["text"].startswith("rank 1 was killed (SIGKILL"), killed["text"]
    assert killed["step"] - stopped["first_step"] <= 5, "no more than the steps since the last checkpoint"
    log = survivor.log.read_text()
    assert "restart 1 of 100 (launch.max_restarts), in the same allocation" in log
    assert log.count("the run was stopped by `shardwise stop`") == 1
    assert "Traceback" not in log
    told = json.loads(f"[{(survivor.at / 'told.json').read_text().replace('}{', '},{')}]")
    assert [(notice["event"], notice["exit_code"]) for notice in told] == [("restart", 75), ("restart", 1), ("end", 75)]
    requeued, killed, stopped = told
    assert "queue" not in requeued["reason"].partition(";")[0]
    assert killed["reason"].startswith("rank 1 was killed (SIGKILL")
    assert "stopped by `shardwise stop`" in stopped["reason"]
    assert {notice["run"] for notice in told} == {survivor.run.name}
    listed = (survivor.at / "jobs.txt").read_text()
    assert re.search(
        rf"^{survivor.id} +running +\d+ +[\d.]+ +\d\.\d{{4}} .* 2 +runs/miniature-", listed, re.MULTILINE
    ), listed
    shown = survivor.shardwise("jobs", "show", survivor.id).succeeded().out
    assert re.search(r"^state +stopped$", shown, re.MULTILINE), shown
    assert re.search(r"^start 2 .*failed: rank 1 was killed \(SIGKILL", shown, re.MULTILINE), shown
    for part in ("goodput", "  lost steps", "  detection", "  restart", "  load", "  first step"):
        assert re.search(rf"^{part} +\d", shown, re.MULTILINE), shown
    assert survivor.shardwise("jobs", "log", survivor.id).succeeded().out.strip() == survivor.log.read_text().strip()
    wrong = survivor.shardwise("jobs", "show", "0").failed(2)
    assert f"there is no job 0 of shardwise: known are {survivor.id}" in wrong


def test_a_job_that_waits_is_listed_with_the_reason_and_cancelled(slurm: Slurm, tmp_path: Path) -> None:
    job = Submission(slurm, tmp_path, *TWO, "launch.sbatch=[--hold]")
    assert re.search(rf"^{job.id} +queued \(JobHeldUser\)", job.shardwise("jobs").succeeded().out, re.MULTILINE)
    assert re.search(
        rf"^{job.run.name} +queued \(JobHeldUser\), job {job.id}$", job.shardwise("ls").succeeded().out, re.M
    )
    again = job.shardwise("submit", "miniature.yaml", *TWO, "--run-dir", job.run).failed(2)
    assert f"is that of job {job.id} (pending): end it by `shardwise stop" in again
    assert job.shardwise("stop", job.run).succeeded().out.startswith(f"job {job.id}, which waited in SLURM's queue, is")
    assert job.id not in slurm.command("squeue", "--noheader", "--format=%i").split()
    assert re.search(rf"^{job.id} +cancelled ", job.shardwise("jobs").succeeded().out, re.MULTILINE)
    assert job.run.name not in job.shardwise("ls").succeeded().out


def test_what_cannot_run_is_refused_and_leaves_nothing(slurm: Slurm, tmp_path: Path) -> None:
    recipe = miniature(tmp_path)

    def refused(*arguments: str) -> str:
        return within("submit", recipe, *arguments, at=tmp_path, **slurm.variables).failed(2)

    assert "SLURM refuses the job: invalid partition specified: none" in refused(*TWO, "--partition", "none")
    assert "launch.ranks_per_node must be set" in refused("-y", "--nodes", "2")
    assert "-y must be given where no terminal can ask" in refused("--nodes", "1")
    token = ("-y", "--nodes", "2", "launch.environment={MY_TOKEN: x}")
    assert "launch.environment.MY_TOKEN must be set in your shell" in refused(*token)
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_random_kills_of_ranks_launchers_supervisors_nodes_are_survived(slurm: Slurm, tmp_path: Path) -> None:
    """Each costs one step at most, and the curve is that of a run without any."""
    saving = ("checkpoint.every=20", "checkpoint.memory_every=1")
    job, draw = Submission(slurm, tmp_path, "train.steps=4000", *saving, *TWO), random.Random(19)
    done = 0
    for kill in range(20):
        job.wait_for_steps(done + draw.randint(5, 15))
        if kill in (6, 13):
            slurm.fail_node("n2")
            job.wait(lambda: job.state() == "PENDING", 120)
            slurm.start_node("n2")
            job.wait_for_requeue()
        else:
            programs = [b"shardwise\0train", b"shardwise.launch.agent", b"--nproc\x002\0", b"shardwise\0supervise"]
            program = draw.choice(programs)
            job.kill(program, rank=draw.randrange(4) if program == b"shardwise\0train" else None)
        done = steps(job.run)[-1]
        print(f"kill {kill + 1} at step {done}")
    job.wait_for_steps(done + 5)
    job.shardwise("stop", job.run).succeeded()
    job.wait_for_end()
    print(job.shardwise("jobs", "show", job.id).succeeded().out)
    losses_ = curve(job.run)
    last = max(losses_)
    assert len(steps(job.run)) - last <= 20, "no kill costs more than one step"
    keys = ("train.steps=4000", f"train.stop_after={last}", *KEYS)
    shardwise("train", "miniature.yaml", *keys, "--nproc", "4", "--run-dir", "local", at=tmp_path).succeeded()
    assert losses(tmp_path / "local") == [losses_[step] for step in range(1, last + 1)], "bit by bit"


@pytest.mark.slow
def test_the_job_goes_on_with_fewer_and_with_more_nodes(slurm: Slurm, tmp_path: Path) -> None:
    keys = ("train.steps=4000", "train.eval_every=0", "log.tensorboard=false", "log.sample_tokens=0")
    elastic = ("train.micro_batch=1", "launch.ranks_per_node=2", "--nodes", "1-2", "-y", "--detach")
    job = Submission(slurm, tmp_path, *keys, *elastic)
    for state in ("DRAIN", "RESUME", None):
        job.wait_for_steps((steps(job.run) if (job.run / "metrics.jsonl").exists() else [0])[-1] + 8)
        if state is not None:
            slurm.command("scontrol", "update", "NodeName=n2", f"State={state}", "Reason=test")
            slurm.command("scancel", "--signal=USR1", "--batch", job.id)
            job.wait_for_requeue()
    job.shardwise("stop", job.run).succeeded()
    job.wait_for_end()
    assert [event["layout"]["data"] for event in metrics(job.run, "start")] == [4, 2, 4]
    losses_, samples = curve(job.run), [event["samples"] for event in metrics(job.run, "step")]
    last = max(losses_)
    assert samples == [8 * step for step in range(1, last + 1)], "the global batches are the same"
    alone = ("train.micro_batch=1", f"train.stop_after={last}", *keys)
    shardwise("train", "miniature.yaml", *alone, "--nproc", "4", "--run-dir", "local", at=tmp_path).succeeded()
    assert losses(tmp_path / "local") == pytest.approx([losses_[step] for step in range(1, last + 1)], rel=1e-5)


@pytest.mark.slow
def test_a_preemption_is_rehearsed_from_another_machine(slurm: Slurm, tmp_path: Path) -> None:
    """`--ssh` runs the same command there, in the folder that is named; here `ssh` is a program that stays here."""
    there, fake = tmp_path / "there", tmp_path / "bin"
    there.mkdir()
    fake.mkdir()
    (fake / "shardwise").write_text(f'#!/bin/sh\nexec {sys.executable} -m shardwise "$@"\n')
    (fake / "ssh").write_text('#!/bin/sh\n[ "$1 $2 $3" = "-t -- login" ] || exit 9\nexec sh -c "$4"\n')
    for program in fake.iterdir():
        program.chmod(0o755)
    miniature(there)
    path = f"{fake}{os.pathsep}{os.environ['PATH']}"
    rehearsal = ("--rehearse-preemption", "--ssh", f"login:{there}")
    job = ("submit", "miniature.yaml", "train.steps=4000", *TWO[:-1], *rehearsal)
    told = shardwise(*job, at=tmp_path, PATH=path, **slurm.variables).succeeded().out
    assert re.search(r"^it saved step (\d+) and was queued again$", told, re.MULTILINE), told
    assert re.search(r"^it resumed after step \d+: a preemption costs this run no step", told, re.MULTILINE), told
    assert list((there / "runs").glob("miniature-*"))


@pytest.mark.slow
def test_graphs_are_compiled_by_a_job_before_the_training(slurm: Slurm, tmp_path: Path) -> None:
    """The training refuses to compile by itself."""
    cache = ("compile.enabled=true", f"compile.cache_dir={tmp_path}/graphs", "compile.require_cached=true")
    layout = ("parallel.tensor=2", "train.eval_every=0", "log.sample_tokens=0", "--nodes", "1", "-y", "--detach")
    job = Submission(slurm, tmp_path, *cache, *layout, "--precompile")
    assert re.search(r"^job \d+ compiles all graphs first; its log: ", job.told, re.MULTILINE), job.told
    job.wait_for_end()
    assert (job.run / "results.json").exists(), [path.read_text() for path in (job.run / "logs").glob("*.log")]
    listed = job.shardwise("jobs").succeeded().out
    assert re.search(rf"^{int(job.id) - 1} +ended, compile", listed, re.MULTILINE), listed
