"""The start of a job's supervisor."""

import shutil
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from shardwise.base.errors import StoppedError
from shardwise.cli import main
from shardwise.launch import stop_requests
from shardwise.runs.folder import RunLock
from shardwise_jobs.cli import supervise
from tests.command_line import CommandLine

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


def test_a_folder_that_stays_in_use_is_told(lock: ExitStack, monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    monkeypatch.setattr(supervise, "_LOCK_TRIES", 1)
    monkeypatch.setattr(supervise, "_LOCK_PAUSE", 0)
    with lock:
        assert "--run-dir (run) is in use by another run" in cli.refused(*COMMAND)


def test_a_folder_that_is_gone_is_told(lock: ExitStack, cli: CommandLine) -> None:
    lock.close()
    shutil.rmtree("run")
    assert "--run-dir (run) is gone, with all that this job has trained" in cli.refused(*COMMAND)
