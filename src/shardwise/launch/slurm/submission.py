"""What is checked before a job is submitted, and what the user reads of it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from shardwise.base import units
from shardwise.base.errors import ConfigError, listing, see
from shardwise.base.files import read_plain, write_atomic
from shardwise.base.hardware import device_memory
from shardwise.base.redaction import redacted
from shardwise.base.run_records import instance, record_of
from shardwise.config import Config, Layout, check_layout
from shardwise.launch.slurm import commands
from shardwise.launch.slurm.script import JobPlan, in_one_line, operand, shell
from shardwise.planner.memory import checkpoint_bytes, expected_memory, memory_copies_bytes, neediest_rank
from shardwise.runs.folder import JsonLines, RunDirectory, RunLock, git_state

_JOBS = "jobs.jsonl"
_SHOWN_COUNTS = 8
_REPLACED = '%\\"'


@dataclass(frozen=True)
class Submitted:
    """A job that was submitted.

    Attributes:
        kind: "train" or "compile".
        commit: of the folder that it was submitted from, `+` where files differ from it; None outside of a repository.
    """

    id: str
    kind: str
    time: str
    commit: str | None


def record(run_path: Path, job: str, kind: str) -> None:
    """Note in a run's folder that a job was submitted for it."""
    facts = Submitted(job, kind, datetime.now(UTC).isoformat(timespec="seconds"), commit_text())
    with JsonLines(run_path / _JOBS) as file:
        file.write(asdict(facts))


def submitted(run_path: Path) -> list[Submitted]:
    """The jobs that were submitted for a run, in their order."""
    found = []
    with contextlib.suppress(OSError):
        for line in read_plain(run_path / _JOBS).splitlines():
            with contextlib.suppress(ValueError):  # a crash cut the line short
                found.append(instance(Submitted, record_of(line)))
    return found


def commit_text() -> str | None:
    state = git_state(Path.cwd())
    return None if state is None else f"{state['commit'][:12]}{'+' if state['modified'] else ''}"


def reserved(config: Config) -> str | None:
    """What SLURM reserves on each node: `launch.gres`, else all GPUs of the partition's nodes.

    A job that asks for none sees none, though it has the node for itself.
    """
    launch = config.launch
    if launch.gres is not None or shutil.which("sinfo") is None:
        return launch.gres
    gpus = commands.gpus_per_node(launch.partition)
    return f"gpu:{gpus}" if gpus else None


def ranks_per_node(config: Config, nodes: tuple[int, int], gres: str | None) -> int:
    """The ranks on each node, of which SLURM reserves `gres`.

    Raises:
        ConfigError: nothing tells them.
    """
    launch, model_ranks = config.launch, config.parallel.ranks
    if launch.ranks_per_node is not None:
        return launch.ranks_per_node
    gpus = commands.gpus_of(gres or "")
    if gpus:
        return gpus
    fewest, _ = nodes
    if model_ranks % fewest:
        raise ConfigError(
            f"launch.ranks_per_node must be set: the partition has no GPUs, and one copy of the model "
            f"({model_ranks} ranks) cannot be cut into {fewest} equal parts, one for each node"
            f"{see('jobs#ranks-of-a-node')}"
        )
    return model_ranks // fewest


def check_counts(
    config: Config, nodes: tuple[int, int], ranks: int, with_batch: Callable[[Config, int], Config]
) -> tuple[Layout, list[str]]:
    """The layout on the most nodes; and notes on numbers of nodes that cannot be filled.

    Raises:
        ConfigError: neither the fewest nor the most nodes can be filled; with every reason.
    """
    fewest, most = nodes
    refused: dict[int, ConfigError] = {}
    layouts: dict[int, Layout] = {}
    for count in range(fewest, most + 1):
        try:
            layouts[count] = check_layout(with_batch(config, count * ranks), count * ranks)
        except ConfigError as error:
            refused[count] = error
    if fewest in refused:
        raise refused[fewest]
    if not refused:
        return layouts[most], []
    good = listing(layouts, most=_SHOWN_COUNTS)
    return layouts[max(layouts)], [f"of {fewest} to {most} nodes the layout fills {good}; of others a part is used"]


def check_run_folder(run_path: Path, config: Config) -> None:
    """Raises ConfigError where a run is under way in the folder, or its disk lacks room for a checkpoint."""
    directory = RunDirectory(run_path)
    directory.require_folder()
    if found := {c for c in in_one_line("--run-dir", str(run_path)) if c in _REPLACED}:
        signs = listing(repr(c) for c in sorted(found))
        raise ConfigError(f"--run-dir ({run_path}) must be without {signs}: SLURM replaces them in the path of the log")
    if RunLock.is_held(run_path):
        holder = RunLock.holder(run_path) or {}
        who = f" (process {holder['pid']} on {holder['host']})" if holder else ""
        raise ConfigError(
            f"--run-dir ({run_path}) is in use by another run{who}: stop it, or choose another folder"
            f"{see('runs#run-folder-in-use')}"
        )
    waiting = {job.id for job in submitted(run_path)}
    for job in commands.jobs() if waiting and shutil.which("squeue") else []:
        if job.id in waiting:
            raise ConfigError(
                f"--run-dir ({run_path}) is that of job {job.id} ({job.state.lower()}): end it by `shardwise stop "
                f"{run_path}`, or choose another folder"
            )
    existing = run_path if run_path.is_dir() else _existing_parent(run_path)
    if not os.access(existing, os.W_OK):
        raise ConfigError(
            f"--run-dir ({run_path}) must be in a folder that can be written: {existing} cannot"
            f"{see('runs#folder-not-writable')}"
        )
    needed = checkpoint_bytes(config, accelerator=True)
    if needed is not None and config.checkpoint.path is None:
        RunDirectory(existing).require_room(needed)


def _existing_parent(path: Path) -> Path:
    return next(parent for parent in path.parents if parent.exists())


def rows(job: JobPlan, layout: Layout, notes: Sequence[str], accelerator: bool | None = None) -> list[tuple[str, str]]:
    """What the user reads before the job is submitted; `accelerator`: whether its ranks have one (None: by `gres`)."""
    launch, fewest = job.config.launch, job.nodes[0]
    if accelerator is None:
        accelerator = commands.gpus_of(job.gres or "") > 0
    rank = neediest_rank(job.config, layout, accelerator)
    memory = expected_memory(job.config, layout, accelerator, pipeline_rank=rank)
    found = [
        ("run", str(job.run_path)),
        ("nodes", f"{job.where}{f', partition {launch.partition}' if launch.partition else ''}"),
        ("layout", f"TP {layout.tensor} × PP {layout.pipeline} × DP {layout.data} = {layout.world} ranks"),
        ("memory", "unknown: the model is your own" if memory is None else _memory(job, memory.total)),
        *_copies(job, layout, accelerator),
        ("time", _node_hours(job)),
        ("restarts", f"at most {launch.max_restarts} without a newer checkpoint (launch.max_restarts)"),
    ]
    if job.ranks_per_node % layout.tensor:
        text = f"parallel.tensor ({layout.tensor}) does not divide the ranks of a node ({job.ranks_per_node})"
        found.append(("warning", f"{text}: tensor parallelism crosses nodes in each layer, which is slow"))
    commit = commit_text()
    if commit is not None:
        modified = "; files differ from it, and the job runs what they are when it starts" if commit[-1] == "+" else ""
        found.append(("commit", f"{commit.rstrip('+')}{modified}"))
    if fewest != job.nodes[1]:
        found.append(("batch", "the same at each number of nodes; the DP degree follows the nodes that SLURM gives"))
    return [*found, *(("note", note) for note in (*notes, *_cluster_notes()))]


def _memory(job: JobPlan, total: int) -> str:
    text = f"{units.size(total)} expected on each rank, beside Python and torch"
    kind = (job.gres or "").split(":")
    device = device_memory(kind[1]) if len(kind) == 3 else None
    if device is None:
        return text
    if total > device:
        raise ConfigError(
            f"the memory expected on each rank ({units.size(total)}) must be at most that of the device of launch.gres "
            f"({units.size(device)}): raise parallel.tensor or parallel.pipeline, lower train.micro_batch, or set "
            "train.recompute=full"
            f"{see('runs#model-does-not-fit')}"
        )
    return f"{text}, of {units.size(device)}"


def _copies(job: JobPlan, layout: Layout, accelerator: bool) -> list[tuple[str, str]]:
    """What copies of the state take of each node's memory, where some are made."""
    keys = job.config.checkpoint
    every = keys.every if keys.memory_every is None else keys.memory_every
    taken = memory_copies_bytes(job.config, layout, job.ranks_per_node, accelerator)
    if not every or taken is None:
        return []
    bound = f"none are made where this is more than {keys.memory_share:.0%} of it (checkpoint.memory_share)"
    return [("copies", f"every {every:,} steps, {units.size(taken)} of each node's memory; {bound}")]


def _node_hours(job: JobPlan) -> str:
    limit, most = job.config.launch.time, job.nodes[1]
    if limit is None:
        return "the partition's limit (launch.time=null)"
    warning, seconds = job.config.launch.warning_seconds, commands.seconds(limit)
    if warning >= seconds:
        raise ConfigError(
            f"launch.warning_seconds ({warning}) must be less than launch.time ({limit}, {seconds:,} s): SLURM would "
            "warn the job as it starts"
            f"{see('jobs#warning-before-the-limit')}"
        )
    hours = seconds / 3600
    return f"{limit} for each start, {most * hours:,.1f} node-hours"


def _cluster_notes() -> list[str]:
    """What of the cluster's configuration costs steps."""
    said = commands.configuration() if shutil.which("scontrol") else ""
    preempts = any(line.startswith("PreemptMode") and not line.rstrip().endswith("OFF") for line in said.splitlines())
    if preempts and "preempt_send_user_signal" not in said:
        return [
            "this cluster preempts jobs, and its SlurmctldParameters lack preempt_send_user_signal: a preempted job "
            "gets SIGTERM and must save within the partition's GraceTime, else it goes on from its last checkpoint"
        ]
    return []


def ssh_command(host: str, arguments: Sequence[str], directory: Path) -> list[str]:
    """The command that submits from another machine: the same one there, in the same folder.

    Raises:
        ConfigError: the host, or the user before its `@`, would be an option of ssh.
    """
    for part in host.split("@"):
        operand("--ssh", part)
    inner = f"{shell(['cd', '--', str(directory)])} && {shell(['shardwise', 'submit', *arguments])}"
    return ["ssh", "-t", "--", host, inner]


def write_inputs(job: JobPlan, script: str, recipe: str) -> Path:
    """Put the recipe and the script into the run's folder; returns the path of the script.

    The job may wait for days, and start again: it must not depend on whether the user edits the recipe meanwhile.
    """
    folder = RunDirectory(job.run_path).create().path
    for name, text in (("recipe.yaml", recipe), ("job.sh", script)):
        # A URL may have a secret, which the job needs, and nobody else may read.
        mode = 0o666 if redacted(text) == text else 0o600
        write_atomic(folder / name, text.encode(errors="surrogateescape"), mode=mode)
    return folder / "job.sh"
