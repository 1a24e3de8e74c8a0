import subprocess
import time
from collections.abc import Sequence

import pytest

from shardwise.base.errors import ConfigError, RunError
from shardwise_jobs import slurm_commands
from shardwise_jobs.slurm_commands import _own_words, allocation, devices_of


def test_devices_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for resources, devices in (
        ("gpu:8", 8),
        ("gpu:h100:8", 8),
        ("gpu", 1),
        ("gpu:h100:4(S:0-1),gpu:a100:2", 6),
        ("shard:8,gpu:2(IDX:0,1)", 2),
        ("neuron:16", 64),
        ("neuron:trn2:16(S:0-1)", 64),
        ("neuron:trn1:16", 32),
        ("(null)", 0),
        ("nic:2", 0),
    ):
        assert devices_of(resources) == devices
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    assert (devices_of("neuron:trn2:16"), devices_of("neuron:trn1:16")) == (128, 32)


def test_words_and_jobs_of_slurm_are_read() -> None:
    said = "sbatch: error: invalid partition specified: none\nsbatch: error: Batch job submission failed: Invalid qos\n"
    assert _own_words(said) == "invalid partition specified: none; Batch job submission failed: Invalid qos"
    assert _own_words("") == "it gives no reason"
    fatal = "squeue: fatal: Could not establish a configuration source\n"
    said = f"squeue: error: fetch_config: DNS SRV lookup failed\n{fatal}"
    assert _own_words(said) == "Could not establish a configuration source"
    line = "7|PENDING|Resources|2||0:00|1-00:00:00|gpu|N/A|2026-11-23T16:00:00|shardwise:/runs/a|b, c"
    job = slurm_commands._job(line)
    assert (job.id, job.state, job.reason, job.nodes, job.starts) == ("7", "PENDING", "Resources", 2, "")
    assert job.run == "/runs/a|b, c"
    assert slurm_commands._job(line.replace("shardwise:", "my ")).run is None
    for limit, seconds in (
        ("01:30:00", 5400),
        ("90:00", 5400),
        ("2-00:00:00", 172_800),
        ("1-12", 129_600),
        ("1-12:30", 131_400),
    ):
        assert slurm_commands.seconds(limit) == seconds


def answers(monkeypatch: pytest.MonkeyPatch, *said: str | None) -> list[Sequence[str]]:
    """Have SLURM's commands print these in turn, None: not answer; returns where the commands are put."""
    asked: list[Sequence[str]] = []

    def run(command: Sequence[str], **_options: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        text = said[len(asked) - 1]
        if text is None:
            raise subprocess.TimeoutExpired(command, 60)
        return subprocess.CompletedProcess(command, 1 if "error" in text else 0, stdout=text, stderr=text)

    monkeypatch.setattr(subprocess, "run", run)
    return asked


def test_slurm_fails_or_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_commands, "_REQUEUE_PAUSE", 0)
    asked = answers(monkeypatch, None, "slurm_requeue error: Unable to contact slurm controller", "")
    assert slurm_commands.requeue("7") is None
    assert len(asked) == 3
    answers(monkeypatch, *["scontrol: error: Job is pending"] * 6)
    assert slurm_commands.requeue("7") == "Job is pending"
    answers(monkeypatch, *["slurm: error: Unable to contact slurm controller"] * 2)
    with pytest.raises(RunError, match=r"cannot reach SLURM \(squeue: Unable to contact slurm controller\)"):
        slurm_commands.jobs()
    with pytest.raises(RunError, match="SLURM cannot cancel the job 7: Unable to contact slurm controller"):
        slurm_commands.cancel("7")
    answers(monkeypatch, None, None)
    assert not slurm_commands.binds_nothing()
    assert slurm_commands._end_of_time_limit("7") is None


def test_an_allocation_and_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it a time limit would be taken for a preemption, which is not counted."""
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    asked = answers(monkeypatch, "1-00:10:00\n", "UNLIMITED\n")
    ends = allocation(variables).ends
    assert ends == pytest.approx(time.time() + 87_000, abs=60)
    assert "--jobs=7" in asked[0]
    assert allocation(variables).ends is None
    monkeypatch.setattr(slurm_commands, "_end_of_time_limit", lambda _job: None)
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "n[2-4]"}
    here = allocation({**variables, "SLURM_RESTART_COUNT": "2", "SLURM_JOB_END_TIME": "1000"})
    assert (here.job, here.requeues, here.nodes, here.first, here.ends) == ("7", 2, 3, "n2", 1000.0)
    assert allocation(variables).requeues == 0
    with pytest.raises(ConfigError, match="SLURM_JOB_ID must be set"):
        allocation({})
