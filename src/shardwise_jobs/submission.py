"""The checks before a job is submitted, the text that the user reads of it, and the record of submitted jobs."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from shardwise.base import units
from shardwise.base.errors import ConfigError, listing, see
from shardwise.base.files import write_atomic
from shardwise.base.redaction import hosts_alone, redacted
from shardwise.config import Config, Layout, check_layout
from shardwise.config.launch import LaunchConfig
from shardwise.estimates.memory import RESERVED, expected_memory, neediest_rank, node_memory_of_copies
from shardwise.estimates.memory_choice import fitted_to_memory, too_large_text
from shardwise.runs.folder import JsonLines, RunDirectory, RunLock, git_state
from shardwise.runs.json_records import record_instances
from shardwise_jobs import slurm_commands
from shardwise_jobs.script import _REPLACED, JobPlan, in_one_line, operand

RECIPE = "recipe.yaml"
SCRIPT = "job.sh"
_JOBS = "jobs.jsonl"
_SHOWN_COUNTS = 8
_GIGABYTES = {"h100": 80, "h200": 141, "b200": 180, "gh200": 96, "l4": 24, "l40s": 48, "a10": 24, "t4": 16}
"""SLURM's type of an accelerator → its memory in GB; types that were sold with several sizes are left out."""


@dataclass(frozen=True)
class Submitted:
    """The record of a submitted job."""

    id: str
    kind: str  # "train" or "compile"
    time: str
    # Commit of the folder of the submission, with `+` if files differ from it; None outside of a repository.
    commit: str | None


def record(run_path: Path, job: str, kind: str) -> None:
    """Note in a run's folder that a job was submitted for it."""
    facts = Submitted(job, kind, datetime.now(UTC).isoformat(timespec="seconds"), _commit_text())
    with JsonLines(run_path / _JOBS) as file:
        file.write(asdict(facts))


def submitted(run_path: Path) -> list[Submitted]:
    """Read the jobs that were submitted for a run, in their order."""
    return record_instances(Submitted, run_path / _JOBS)


def _commit_text() -> str | None:
    state = git_state(Path.cwd())
    return None if state is None else f"{state['commit'][:12]}{'+' if state['modified'] else ''}"


def reserved(launch: LaunchConfig) -> str | None:
    """Return the resources that SLURM reserves on each node: `launch.gres`, else all accelerators of the partition's.

    A job that asks for no GPU sees none, though it has the node for itself.
    """
    if launch.gres is not None or not slurm_commands.answers():
        return launch.gres
    return slurm_commands.accelerators_per_node(launch.partition)


def check_node_counts(
    config: Config, nodes: tuple[int, int], ranks: int, with_batch: Callable[[Config, int], Config]
) -> tuple[Layout, list[str]]:
    """Check the numbers of nodes of a job before it is submitted; returns the layout on the most nodes, and notes.

    ConfigError: the layout fills no number of the nodes, or none up to the fewest.
    """
    fewest, most = nodes
    refused: dict[int, ConfigError] = {}
    layouts: dict[int, Layout] = {}
    for count in range(most, 0, -1):
        try:
            layouts[count] = check_layout(with_batch(config, count * ranks), count * ranks)
        except ConfigError as error:
            refused[count] = error
        # At the fewest nodes a job may use a part of them, which is a number below the range.
        if count <= fewest and (count in layouts or fewest == most):
            break
    if max(layouts, default=0) < fewest or min(layouts) > fewest:
        raise refused[fewest]
    if not refused:
        return layouts[most], []
    usable = listing(sorted(layouts), most=_SHOWN_COUNTS)
    note = f"the layout fills {usable} nodes; of another number from {fewest} to {most} a part is used"
    return layouts[max(layouts)], [note]


def check_run_folder(run_path: Path) -> None:
    """Refuse a folder in which a run is under way, or in whose path SLURM replaces characters, by a ConfigError."""
    directory = RunDirectory(run_path)
    directory.require_folder()
    replaced = {sign for sign in in_one_line("--run-dir", str(run_path)) if sign in _REPLACED}
    if replaced:
        signs = listing(repr(sign) for sign in sorted(replaced))
        raise ConfigError(f"--run-dir ({run_path}) must be without {signs}: SLURM replaces them in the path of the log")
    if RunLock.is_held(run_path):
        holder = RunLock.holder(run_path) or {}
        who = f" (process {holder['pid']} on {holder['host']})" if holder else ""
        raise ConfigError(
            f"--run-dir ({run_path}) is in use by another run{who}: stop it, or choose another folder"
            f"{see('runs#run-folder-in-use')}"
        )
    waiting = {job.id for job in submitted(run_path)}
    present = slurm_commands.jobs() if waiting and shutil.which("squeue") else []
    for job in (job for job in present if job.id in waiting):
        raise ConfigError(
            f"--run-dir ({run_path}) is that of job {job.id} ({job.state.lower()}): end it by `shardwise stop "
            f"{run_path}`, or choose another folder"
        )


def check_disk(run_path: Path, needed: int) -> None:
    """Refuse a job's folder that cannot be written, or whose disk lacks the `needed` bytes, by a ConfigError."""
    existing = next(folder for folder in (run_path, *run_path.parents) if folder.exists())
    if not os.access(existing, os.W_OK):
        raise ConfigError(
            f"--run-dir ({run_path}) must be in a folder that can be written: {existing} cannot"
            f"{see('runs#folder-not-writable')}"
        )
    RunDirectory(existing).require_room(needed)


def rows(job: JobPlan, layout: Layout, notes: Sequence[str], accelerator: bool | None = None) -> list[tuple[str, str]]:
    """Return the lines that the user reads before the job is submitted.

    Args:
        accelerator: True if each rank has an accelerator; None to decide by `gres`.
    """
    launch = job.config.launch
    is_cpu_assumed = accelerator is None and not slurm_commands.devices_of(job.gres or "")
    if accelerator is None:
        accelerator = not is_cpu_assumed
    memory = _memory_of_rank(job.config, layout, accelerator)
    device = _device_memory(job.gres)
    shown = "unknown: the model is your own" if memory is None else f"{units.size(memory)} per rank"
    if memory is not None and device is not None:
        shown += f", of {units.size(device)} on its device"
    if memory is not None and is_cpu_assumed:
        shown += " on CPUs; --device h100:8 sizes it for GPUs"
    partition = f", partition {launch.partition}" if launch.partition else ""
    lines = [
        ("run", str(job.run_path)),
        ("nodes", f"{job.where}{partition}"),
        ("layout", layout.product()),
        ("memory", shown),
        *_copies(job, layout, accelerator),
        ("time", _node_hours(job)),
        ("restarts", f"at most {launch.max_restarts} without a newer checkpoint (launch.max_restarts)"),
    ]
    if job.ranks_per_node % layout.tensor:
        text = f"parallel.tensor ({layout.tensor}) does not divide the ranks of a node ({job.ranks_per_node})"
        lines.append(("warning", f"{text}: tensor parallelism crosses nodes in each layer, which is slow"))
    commit = _commit_text()
    if commit is not None:
        modified = "; files differ from it, and the job runs what they are when it starts" if commit[-1] == "+" else ""
        lines.append(("commit", f"{commit.rstrip('+')}{modified}"))
    fewest, most = job.nodes
    if fewest != most:
        lines.append(("batch", "the same at each number of nodes; the DP degree follows the nodes that SLURM gives"))
    return [*lines, *(("note", note) for note in (*notes, *_cluster_notes()))]


def check_memory(config: Config, layout: Layout, gres: str | None) -> None:
    """Refuse a job's layout that needs more memory than the device that `gres` names has, by a ConfigError."""
    device = _device_memory(gres)
    if device is not None:
        usable = device * (1 - RESERVED)
        config = fitted_to_memory(config, layout, usable, accelerator=True, device=f"launch.gres ({gres})")
    memory = _memory_of_rank(config, layout, accelerator=True)
    if device is not None and memory is not None and memory > device:
        raise ConfigError(too_large_text(memory, device, "the device of launch.gres"))


def _memory_of_rank(config: Config, layout: Layout, accelerator: bool) -> int | None:
    rank = neediest_rank(config, layout, accelerator)
    memory = expected_memory(config, layout, accelerator, pipeline_rank=rank)
    return None if memory is None else memory.total


def _device_memory(gres: str | None) -> int | None:
    """Return the bytes of the device that SLURM's resources name, such as gpu:h100:8; None if they name none."""
    kind = (gres or "").split(":")
    gigabytes = _GIGABYTES.get(kind[1].lower()) if len(kind) == 3 else None
    return None if gigabytes is None else gigabytes * 10**9


def _copies(job: JobPlan, layout: Layout, accelerator: bool) -> list[tuple[str, str]]:
    keys = job.config.checkpoint
    every = keys.every if keys.memory_every is None else keys.memory_every
    taken = node_memory_of_copies(job.config, layout, job.ranks_per_node, accelerator)
    if taken is None:
        return []
    if not every:
        advice = "set checkpoint.memory_every=100 to resume from a copy in the nodes' memory, made every 100 steps"
        return [("resumes", f"after a failure from the newest checkpoint on the disk; {advice}")]
    copy = f"a copy in the nodes' memory, made every {every:,} steps ({units.size(taken)} of each node)"
    bound = f"if that is more than {keys.memory_share:.0%} of a node (checkpoint.memory_share), from the disk"
    return [("resumes", f"after a failure from {copy}; {bound}")]


def check_time_limit(limit: str | None, warning: int) -> None:
    """Refuse a time limit of which SLURM would warn the job, `warning` seconds before, as it starts: a ConfigError."""
    if limit is not None and warning >= (seconds := slurm_commands.seconds(limit)):
        raise ConfigError(
            f"launch.warning_seconds ({warning}) must be less than launch.time ({limit}, {seconds:,} s): SLURM would "
            "warn the job as it starts"
            f"{see('jobs#warning-before-the-limit')}"
        )


def _node_hours(job: JobPlan) -> str:
    limit = job.config.launch.time
    if limit is None:
        return "the partition's limit (launch.time=null)"
    hours = slurm_commands.seconds(limit) / 3600
    return f"{limit} for each start, at most {job.nodes[1] * hours:,.1f} node-hours a start"


def _cluster_notes() -> list[str]:
    configuration = slurm_commands.configuration() if shutil.which("scontrol") else ""
    preempts = any(
        line.startswith("PreemptMode") and not line.rstrip().endswith("OFF") for line in configuration.splitlines()
    )
    if preempts and "preempt_send_user_signal" not in configuration:
        return [
            "this cluster preempts jobs, and its SlurmctldParameters lack preempt_send_user_signal: a preempted job "
            "gets SIGTERM and must save within the partition's GraceTime, else it goes on from its last checkpoint"
        ]
    return []


def ssh_command(host: str, arguments: Sequence[str], directory: Path) -> list[str]:
    """Return the command that submits from another machine: the same one there, in the same folder.

    ConfigError: the host, or the user before its `@`, would be an option of ssh.
    """
    for part in host.split("@"):
        operand("--ssh", part)
    remote_command = f"{shlex.join(['cd', '--', str(directory)])} && {shlex.join(['shardwise', 'submit', *arguments])}"
    return ["ssh", "-t", "--", host, remote_command]


def write_inputs(job: JobPlan, script: str, recipe: str) -> Path:
    """Put the recipe and the script into the run's folder; returns the path of the script.

    The job may wait for days, and start again: it must not depend on whether the user edits the recipe meanwhile.
    """
    folder = RunDirectory(job.run_path).create().path
    # A URL may have a secret, which the job needs, and nobody else may read. YAML has many ways to write one.
    has_secret = any(hosts_alone(redacted(target)) != target for target in job.config.log.notify)
    for name, text in ((RECIPE, recipe), (SCRIPT, script)):
        mode = 0o600 if has_secret or redacted(text) != text else 0o666
        write_atomic(folder / name, text.encode(errors="surrogateescape"), mode=mode)
    return folder / SCRIPT
