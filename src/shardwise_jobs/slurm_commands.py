"""The commands of SLURM. Their output is read in the formats that are made for programs."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.base.errors import ConfigError, RunError, see

TIMEOUT = 60.0
_REQUEUE_TRIES = 6
_REQUEUE_PAUSE = 10.0  # a controller that restarts, or ends many jobs at once, does not answer for a while
_FIELDS = ("%i", "%T", "%r", "%D", "%N", "%M", "%l", "%P", "%S", "%V", "%k")
MARK = "shardwise:"
"""Beginning of the comment of a job; the run's folder follows."""


@dataclass(frozen=True)
class SlurmJob:
    """A job as SLURM has it."""

    id: str
    state: str  # SLURM's word, such as PENDING or RUNNING
    reason: str  # SLURM's word for the cause of the wait; empty for a job that does not wait
    nodes: int  # number of nodes
    node_list: str  # names of the nodes of a running job
    # elapsed, limit: times as SLURM writes them.
    elapsed: str
    limit: str
    partition: str
    starts: str  # expected start; empty if SLURM does not know it
    submitted: str
    run: str | None  # the run's folder; None for a job that is not one of shardwise's


def require() -> None:
    """Raise ConfigError where SLURM's commands are not on the path."""
    missing = [name for name in ("sbatch", "squeue", "scontrol") if shutil.which(name) is None]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} must be on the PATH: shardwise submits to SLURM from a machine that has its "
            "commands, or by --ssh HOST; `shardwise train` needs no SLURM"
            f"{see('jobs#slurm-not-found')}"
        )


def submit(script: str, options: Sequence[str] = ()) -> str:
    """Submit a batch script; returns the job's number; ConfigError: SLURM refuses it, in its own words."""
    done = _run(["sbatch", "--parsable", *options], script)
    if done.returncode != 0:
        raise ConfigError(f"SLURM refuses the job: {_own_words(done.stderr)}{see('jobs#slurm-refuses')}")
    return done.stdout.strip().partition(";")[0]


def _own_words(said: str) -> str:
    """Join the sentences of a command's error in one line, without `sbatch: error: ` before each.

    A fatal one stands alone: those before it say which function of SLURM met it.
    """
    said = "\n".join(re.findall(r"(?m)^\w+: fatal: .+$", said)) or said
    lines = [re.sub(r"^\w+: (?:error: |fatal: )?", "", line).strip() for line in said.splitlines()]
    return "; ".join(dict.fromkeys(line.rstrip(".") for line in lines if line)) or "it gives no reason"


def jobs(*, user: bool = True, ids: Sequence[str] = (), timeout: float = TIMEOUT) -> list[SlurmJob]:
    """Return the jobs that wait or run: this user's, or those with given numbers. SLURM forgets a job that has ended.

    RunError: SLURM does not answer within `timeout` seconds.
    """
    choice = ["--me"] if user else [f"--jobs={','.join(ids)}"]
    done = _run(["squeue", *choice, "--noheader", f"--format={'|'.join(_FIELDS)}"], timeout=timeout)
    if done.returncode != 0 and "Invalid job id" in done.stderr:
        return []
    if done.returncode != 0:
        raise RunError(f"cannot reach SLURM (squeue: {_own_words(done.stderr)}): run this on a login node")
    return [_job(line) for line in done.stdout.splitlines() if line.count("|") >= len(_FIELDS) - 1]


def _job(line: str) -> SlurmJob:
    fields = line.split("|", len(_FIELDS) - 1)
    number, state, reason, nodes, names, elapsed, limit, partition, starts, submitted, comment = fields
    run = comment.removeprefix(MARK) if comment.startswith(MARK) else None
    starts, reason = ("" if value in ("N/A", "None", "(null)") else value for value in (starts, reason))
    return SlurmJob(number, state, reason, int(nodes), names, elapsed, limit, partition, starts, submitted, run)


def cancel(job: str) -> None:
    """Cancel a job of SLURM. Raises RunError: SLURM cannot."""
    _require_done(_run(["scancel", job]), f"SLURM cannot cancel the job {job}")


def warn(job: str) -> None:
    """Send a job's script SIGUSR1, as before a preemption. Raises RunError: SLURM cannot."""
    _require_done(_run(["scancel", "--signal=USR1", "--batch", job]), f"SLURM cannot send a signal to the job {job}")


def requeue(job: str) -> str | None:
    """Have SLURM end a job and queue it again; returns the reason why it cannot, or None."""
    problem = ""
    for _ in range(_REQUEUE_TRIES):
        try:
            done = _run(["scontrol", "requeue", job])
        except RunError as error:
            problem = str(error)
            continue
        if done.returncode == 0:
            return None
        problem = _own_words(done.stderr or done.stdout)
        time.sleep(_REQUEUE_PAUSE)
    return problem


def start_early(job: str) -> None:
    """Ask for the start of a job that was queued again, which SLURM holds back for two minutes."""
    _run(["scontrol", "update", f"JobId={job}", "StartTime=now"])


def restarts(job: str, timeout: float = TIMEOUT) -> int:
    count = re.search(r"\bRestarts=(\d+)", _run(["scontrol", "show", "job", job, "--oneliner"], timeout=timeout).stdout)
    return int(count[1]) if count else 0


def configuration() -> str:
    """Return the output of `scontrol show config`; empty if SLURM does not answer."""
    with contextlib.suppress(RunError):
        return _run(["scontrol", "show", "config"]).stdout
    return ""


def _end_of_time_limit(job: str) -> float | None:
    """Return the end of a running job's time limit, in seconds since the epoch; None without a limit."""
    with contextlib.suppress(RunError):
        left = _run(["squeue", "--noheader", f"--jobs={job}", "--format=%L"]).stdout.strip()
        return time.time() + seconds(left) if re.fullmatch(r"[\d:-]+", left) else None
    return None


def seconds(text: str) -> int:
    """Read SLURM's D-HH:MM:SS, D-HH:MM, D-HH, HH:MM:SS or MM:SS."""
    days, dash, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    # With days the first part is hours; without, the last one is seconds.
    parts = [*parts, 0, 0][:3] if dash else [0, 0, *parts][-3:]
    hours, minutes, seconds_ = parts
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds_


def binds_nothing() -> bool:
    """Return True if the cluster binds no task to processors; then `srun` warns of options for it."""
    return re.search(r"(?m)^TaskPlugin\s*=\s*(task/none|\(null\))\s*$", configuration()) is not None


def answers() -> bool:
    """Return True if this machine has SLURM's commands, and its controller answers them."""
    return shutil.which("sinfo") is not None and _run(["sinfo", "--noheader", "--format=%P"]).returncode == 0


def accelerators_per_node(partition: str | None) -> str | None:
    """Return the accelerators of the machine with fewest in the partition (None: the default one), such as `gpu:8`."""
    said = _run(["sinfo", "--noheader", "--format=%P|%G", *([f"--partition={partition}"] if partition else [])]).stdout
    rows = [line.split("|", 1) for line in said.splitlines() if "|" in line]
    if partition is None and any(name.endswith("*") for name, _ in rows):
        rows = [row for row in rows if row[0].endswith("*")]
    fewest = min((resources for _, resources in rows), key=devices_of, default="")
    chips = next((kind.partition("(")[0] for kind in _kinds(fewest) if kind.startswith("neuron")), None)
    return chips or (f"gpu:{devices_of(fewest)}" if devices_of(fewest) else None)


def devices_of(resources: str) -> int:
    """Return the number of devices, of which each rank has one, in SLURM's `gpu:h100:8(S:0-1),shard:4`: 8.

    `neuron:16` counts chips of AWS, and their type may stand between. A chip has 4 logical cores, twice as many with
    `NEURON_LOGICAL_NC_CONFIG=1`; one of trn1 has 2 (AWS Neuron, Trn1, Trn2 and Trn3 Architecture).
    """
    joined = os.environ.get("NEURON_LOGICAL_NC_CONFIG", "2") != "1"
    number = 0
    for kind in _kinds(resources):
        if match := re.fullmatch(r"gpu(?::[^:()]*[^:()\d][^:()]*)?(?::(\d+))?(?:\(.*\))?", kind):
            number += int(match[1] or 1)
        elif match := re.fullmatch(r"neuron(?::(trn\d\w*))?(?::(\d+))?(?:\(.*\))?", kind):
            cores = 2 if (match[1] or "").startswith("trn1") else 4 if joined else 8
            number += int(match[2] or 1) * cores
    return number


def _kinds(resources: str) -> list[str]:
    return re.split(r",(?![^(]*\))", resources)


def _require_done(done: subprocess.CompletedProcess[str], problem: str) -> None:
    if done.returncode != 0:
        raise RunError(f"{problem}: {_own_words(done.stderr)}")


def _run(command: Sequence[str], text: str | None = None, timeout: float = TIMEOUT) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            input=text,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            check=False,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"{command[0]} did not answer within {timeout:g} s") from None
    except FileNotFoundError:
        raise ConfigError(f"{command[0]} must be on the PATH: it is a command of SLURM") from None


@dataclass(frozen=True)
class Allocation:
    """The machines that SLURM has given to a submitted job, that of this process."""

    job: str  # number of the job in SLURM
    requeues: int  # number of times that SLURM has started the job again
    nodes: int  # number of nodes
    first: str  # name of the first node
    ends: float | None  # end of the time limit, in seconds since the epoch; None without a limit


def allocation(variables: Mapping[str, str]) -> Allocation:
    """Read which machines SLURM gave this submitted job; ConfigError: this process belongs to no job."""
    from shardwise.launch.external_launchers import first_name

    if "SLURM_JOB_ID" not in variables:
        raise ConfigError("SLURM_JOB_ID must be set: only a job of SLURM is supervised; `shardwise submit` makes one")
    # SLURM 22.05 does not set this variable; `squeue` knows the end there too.
    ends = variables.get("SLURM_JOB_END_TIME", "")
    return Allocation(
        job=variables["SLURM_JOB_ID"],
        requeues=int(variables.get("SLURM_RESTART_COUNT", "0")),
        nodes=int(variables.get("SLURM_JOB_NUM_NODES", "1")),
        first=first_name(variables.get("SLURM_JOB_NODELIST", "")),
        ends=float(ends) if ends.isdecimal() else _end_of_time_limit(variables["SLURM_JOB_ID"]),
    )
