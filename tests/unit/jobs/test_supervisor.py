"""What the supervisor of a job makes of the endings of its attempts; the attempts are played."""

import asyncio
import errno
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.base.errors import LaunchError, StoppedError, see
from shardwise.cli import main
from shardwise.config import load_config
from shardwise.launch import stop_requests
from shardwise.launch.first_failure import Failure
from shardwise.runs.folder import RunLock
from shardwise_jobs import slurm_commands, supervisor
from shardwise_jobs.attempt import AttemptOutcome
from shardwise_jobs.cli import supervise
from shardwise_jobs.restarts import history, record
from shardwise_jobs.slurm_commands import Allocation
from shardwise_jobs.supervisor import Supervisor
from tests.command_line import CommandLine
from tests.monitor_runs import Start, write_run
from tests.unit.jobs.test_jobs import CRASH

DONE = AttemptOutcome(None, None, (), 9, 1.0, 2.0, 0.1, {})
KILLED = Failure(3, "rank 3 was killed by SIGKILL", 1)
FAILED = replace(DONE, failure=KILLED)
ABSENT = replace(FAILED, failure=Failure(0, "the launchers did not start", 1), until_joined=None, until_training=None)
SAVED = replace(DONE, stopped="the run was stopped by SIGUSR1 after step 9")


class Job:
    """Supervises attempts that end in given ways.

    Attributes:
        told: what the user read.
        requeued: how often SLURM was asked to queue the job again.
        ids: of the attempts.
        command: that starts the launchers.
    """

    def __init__(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.told, self.requeued, self.ids = run, list[str](), 0, list[str]()
        self._patch, self.command = monkeypatch, list[str]()
        (run / "logs").mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(supervisor, "first_node_address", lambda name: name)
        monkeypatch.setattr(supervisor, "_PAUSE_SECONDS", 0)
        monkeypatch.setattr(supervisor, "BEAT_SECONDS", 0)
        monkeypatch.setattr(slurm_commands, "requeue", self._requeue)
        monkeypatch.setattr(slurm_commands, "binds_nothing", lambda: True)

    def _requeue(self, _job: str) -> None:
        self.requeued += 1

    def supervise(self, *outcomes: AttemptOutcome | int | None, ends: float | None = None, **options: Any) -> None:
        """Each attempt ends so; a number: after this signal. None: it goes on until it is ended."""
        job, left = self, list(outcomes)

        class AttemptWatch:
            is_training = True

            def __init__(self, *_arguments: object, id: str, heard: Callable[[str], None], **_options: object) -> None:
                job.ids.append(id)
                self.ended: str | None = None

            def end(self, why: str) -> None:
                self.ended = why

            async def run(self, program: Callable[[object], list[str]]) -> AttemptOutcome:
                job.command = program(None)
                while isinstance(number := left.pop(0), int):
                    os.kill(os.getpid(), number)
                    await asyncio.sleep(0.01)
                while number is None and self.ended is None:
                    await asyncio.sleep(0.01)
                return number or replace(FAILED, failure=Failure(0, self.ended or "", 1))

        self._patch.setattr(supervisor, "AttemptWatch", AttemptWatch)
        launch = load_config("llama2-tiny", ["launch.max_restarts=3"]).launch
        place = Allocation("7", options.pop("requeues", 0), options.pop("nodes", 2), "n1", ends)
        Supervisor(launch, self.run, place, 2, 2, ["train"], self.told.append, **options).run()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(tmp_path / "run", monkeypatch)


def how(job: Job) -> list[str]:
    return [ending.how for ending in history(job.run)]


def test_a_failure_is_followed_by_an_attempt_in_place(job: Job) -> None:
    job.supervise(FAILED, DONE)
    assert (how(job), job.requeued, job.ids) == (["failed", "finished"], 0, ["7.0.0", "7.0.1"])


def test_of_a_part_of_the_nodes_the_first_is_one(job: Job) -> None:
    job.supervise(DONE)
    assert "--relative=0" not in job.command
    job.supervise(DONE, nodes=3)
    assert {"--relative=0", "--nodes=2", "--ntasks=2"} < set(job.command)


def test_launchers_that_do_not_start_have_the_job_queued_again(job: Job) -> None:
    """A machine is gone, and SLURM notices it minutes later: attempts in place would fail alike, and end the job."""
    with pytest.raises(StoppedError, match=r"the launchers did not start; .*\nSLURM queues the job again"):
        job.supervise(replace(FAILED, lost=("n2",)), ABSENT)
    assert (how(job), job.requeued) == (["lost node", "failed"], 1)
    with pytest.raises(LaunchError, match="the same failure came twice"):
        job.supervise(ABSENT, requeues=1)


def test_a_warning_after_the_last_step_queues_nothing_again(job: Job) -> None:
    job.supervise(signal.SIGUSR1, DONE)
    assert (how(job), job.requeued) == (["finished"], 0)


def test_a_run_that_the_user_stops_is_not_queued_again_by_a_warning(job: Job) -> None:
    stop_requests.request(job.run, "`shardwise stop`")
    with pytest.raises(StoppedError):
        job.supervise(signal.SIGUSR1, SAVED)
    assert (how(job), job.requeued) == (["stopped"], 0)
    assert json.loads((job.run / stop_requests.STOP_FILE).read_text())["by"] == "`shardwise stop`"


@pytest.mark.parametrize(("seconds", "what"), [(60, "time limit"), (86_400, "preempted"), (None, "preempted")])
def test_a_warning_queues_the_job_again(job: Job, seconds: int | None, what: str) -> None:
    with pytest.raises(StoppedError, match="after step 9\nSLURM queues the job again"):
        job.supervise(signal.SIGUSR1, SAVED, ends=None if seconds is None else time.time() + seconds)
    assert (how(job), job.requeued) == ([what], 1)


def test_a_run_that_does_not_save_in_time_is_queued_again_before_the_limit(job: Job) -> None:
    with pytest.raises(StoppedError, match=r"did not save in time .*launch\.warning_seconds=300"):
        job.supervise(signal.SIGUSR1, None, ends=time.time() + 0.5)
    assert (how(job), job.requeued) == (["time limit"], 1)


def test_sigterm_leaves_it_to_slurm(job: Job) -> None:
    told = r"the job was stopped by SIGTERM \(rank 3 was killed by SIGKILL\); no checkpoint was saved"
    with pytest.raises(StoppedError, match=told):
        job.supervise(signal.SIGTERM, FAILED)
    assert (how(job), job.requeued) == (["ended by SLURM"], 0)


def test_a_supervisor_that_was_killed_is_counted_as_a_crash(job: Job) -> None:
    job.supervise(DONE, killed_by=9)
    assert "the supervisor of the job was killed by SIGKILL" in job.told[0]
    assert (how(job), job.ids) == (["failed", "finished"], ["7.0.1"])
    with pytest.raises(LaunchError, match="the same failure came twice at step 0"):
        job.supervise(killed_by=9)


def test_the_failure_that_ends_the_job_is_a_block_and_recorded(job: Job) -> None:
    write_run(job.run, [Start(0, 25, None)], first=time.time())
    (job.run / "job.sh").touch()
    with pytest.raises(LaunchError) as raised:
        job.supervise(replace(FAILED, step=25), replace(FAILED, step=25))
    assert str(raised.value).splitlines() == [
        f"FAILED at step 25: {KILLED.text}.",
        "5 steps since checkpoint 20 are lost",
        f"resume: sbatch {job.run / 'job.sh'}",
        "the job is not started again: the same failure came twice at step 25 "
        f"{see('jobs#same-failure-twice').strip()}",
    ]
    assert json.loads((job.run / "failure.json").read_text())["rank"] == KILLED.rank
    assert "FAILED" not in job.told[0], "it goes on"


def test_targets_are_told_of_each_restart_and_of_the_end(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, str, int | None]] = []
    monkeypatch.setattr(
        supervisor.notices, "send", lambda event, _run, why, code=None, **_: told.append((event, why, code))
    )
    saved = "no checkpoint was saved"
    job.supervise(FAILED, DONE)
    restart = ("restart", f"{KILLED.text}; {saved}; restart 1 of 3 (launch.max_restarts)", 1)
    assert told == [restart, ("end", "finished", 0)]
    told.clear()
    with pytest.raises(StoppedError):
        job.supervise(signal.SIGUSR1, SAVED, requeues=1)
    assert told == [("restart", f"{SAVED.stopped}; what SLURM ends is not counted", 75)]
    told.clear()
    stop_requests.clear(job.run)
    monkeypatch.setattr(slurm_commands, "requeue", lambda _: "it does not answer")
    with pytest.raises(StoppedError):
        job.supervise(signal.SIGUSR1, SAVED, requeues=3)
    lost, asked, end = told
    assert lost[:2] == ("restart", f"a machine was lost, or the job was preempted without a warning; {saved}")
    assert (asked[0], end[0], end[2]) == ("restart", "end", 75)
    assert "SLURM does not queue it again: it does not answer" in end[1]
    told.clear()
    wrong = replace(FAILED, failure=Failure(0, "data.path (x) must be there", 2))
    with pytest.raises(LaunchError):
        job.supervise(wrong, requeues=3)
    assert told == [("failure", "data.path (x) must be there", 2)], "also where no run has begun"


def test_a_target_that_hangs_does_not_delay_the_requeue(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(supervisor.notices, "send", lambda event, *_arguments, **_options: order.append(event))
    monkeypatch.setattr(supervisor.notices, "wait", lambda: order.append("wait"))
    monkeypatch.setattr(slurm_commands, "requeue", lambda _: order.append("requeue"))
    with pytest.raises(StoppedError):
        job.supervise(signal.SIGUSR1, SAVED)
    assert order == ["restart", "requeue", "wait"]


def test_failures_of_an_earlier_job_of_the_run_are_not_counted(job: Job) -> None:
    for step in range(5):
        record(job.run, replace(CRASH, job="6", step=step))
    job.supervise(FAILED, DONE)
    assert "restart 1 of 3" in job.told[0]


def test_a_history_that_cannot_be_written_ends_no_job(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(supervisor, "record", full)
    job.supervise(replace(FAILED, logs={"n1": "text"}), replace(FAILED, step=11), DONE)
    assert any("restart 2 of 3" in text for text in job.told)
    assert f"the end of this start cannot be recorded: {job.run}: No space left on device" in job.told


def test_a_start_without_a_record_was_ended_by_slurm(job: Job) -> None:
    job.supervise(DONE, requeues=2)
    assert how(job) == ["ended by SLURM", "finished"]


COMMAND = ("supervise", "llama2-tiny", "data.dataset=tiny", "--run-dir", "run", "--ranks-per-node", "1")


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ExitStack:
    """A job that has been queued again, while the lock of its start before is still there, until this is closed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    Path("run").mkdir()
    held = ExitStack()
    held.enter_context(RunLock(Path("run")))
    return held


def test_the_lock_of_a_lost_machine_is_awaited(lock: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    class Started(Exception):
        pass

    def supervisor(*_arguments: object) -> None:
        raise Started

    monkeypatch.setattr(supervise.supervisor, "Supervisor", supervisor)
    monkeypatch.setattr(time, "sleep", lambda seconds: lock.close() if seconds == supervise._LOCK_PAUSE else None)
    with pytest.raises(Started):
        main(COMMAND)


def test_a_late_signal_starts_no_other_supervisor(lock: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    class Supervisor:
        def __init__(self, *_arguments: object) -> None:
            pass

        def run(self) -> None:
            raise StoppedError("the run was stopped")

    lock.close()
    monkeypatch.setattr(supervise.supervisor, "Supervisor", Supervisor)
    former = {number: signal.getsignal(number) for number in stop_requests.SIGNALS}
    try:
        assert main(COMMAND) == 75
        assert {signal.getsignal(number) for number in stop_requests.SIGNALS} == {signal.SIG_IGN}
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def test_a_folder_that_stays_in_use_or_is_gone_is_told(
    lock: ExitStack, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    monkeypatch.setattr(supervise, "_LOCK_TRIES", 1)
    monkeypatch.setattr(supervise, "_LOCK_PAUSE", 0)
    with lock:
        assert "--run-dir (run) is in use by another run" in cli.refused(*COMMAND)
    lock.close()
    shutil.rmtree("run")
    assert "--run-dir (run) is gone, with all that this job has trained" in cli.refused(*COMMAND)
